//! Sixteen f32 lanes on three instruction sets, bit for bit the same.
//!
//! Every operation is one IEEE operation a lane; [`Lanes::sum`] adds lanes in one fixed tree: lane i with
//! lane i + 8, then i + 4, i + 2, i + 1.

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// How many lanes there are.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 numbers.
///
/// Every method may be called only in a function compiled with the features of the implementing type;
/// pointers are valid for sixteen elements and need no alignment.
pub(crate) trait Lanes: Copy {
    /// All lanes zero.
    unsafe fn zero() -> Self;
    /// All lanes the same.
    unsafe fn splat(number: f32) -> Self;
    /// Sixteen f32.
    unsafe fn load(from: *const f32) -> Self;
    /// Sixteen bf16, widened.
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// Sixteen f16, widened.
    unsafe fn load_f16(from: *const f16) -> Self;
    /// Writes sixteen f32.
    unsafe fn store(self, to: *mut f32);
    /// `self * factor`.
    unsafe fn mul(self, factor: Self) -> Self;
    /// `self * factor + term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The sum over lanes in the fixed tree.
    unsafe fn sum(self) -> f32;
    /// Four sums at once, the same bits as four times [`Lanes::sum`].
    unsafe fn sum4(four: [Self; 4]) -> [f32; 4];
}

/// A number as weights are stored.
pub(crate) trait Stored: Copy + Send + Sync + 'static {
    /// Zero, which pads tails.
    const ZERO: Self;

    /// Sixteen of them as f32, exactly.
    ///
    /// # Safety
    /// As [`Lanes`].
    unsafe fn load<V: Lanes>(from: *const Self) -> V;

    /// The first `count` (below sixteen) of them as f32, the other lanes zero.
    ///
    /// # Safety
    /// As [`Lanes`], but `from` is valid for `count` elements only.
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(from: *const Self, count: usize) -> V {
        debug_assert!(count < LANES, "{count} elements are no tail");
        let mut padded = [Self::ZERO; LANES];
        // SAFETY: `from` holds `count` elements and `padded` is longer; the load reads all of `padded`.
        unsafe {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count);
            Self::load::<V>(padded.as_ptr())
        }
    }
}

impl Stored for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }
}

impl Stored for bf16 {
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from) }
    }
}

impl Stored for f16 {
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }
}

/// Writes the first `count` (at most sixteen) lanes.
///
/// # Safety
/// As [`Lanes`], but `to` is valid for `count` elements only.
#[inline(always)]
pub(crate) unsafe fn store_first<V: Lanes>(lanes: V, to: *mut f32, count: usize) {
    debug_assert!(count <= LANES, "there are no {count} lanes");
    let mut all = [0.0; LANES];
    // SAFETY: `all` has sixteen elements, `to` holds `count`.
    unsafe {
        lanes.store(all.as_mut_ptr());
        std::ptr::copy_nonoverlapping(all.as_ptr(), to, count);
    }
}
