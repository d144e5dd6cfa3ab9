//! Portable lanes. `f32::mul_add` rounds once everywhere, in hardware or in software.

use half::{bf16, f16};

use super::{LANES, Lanes};

#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

impl Lanes for Scalar {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; LANES])
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        Self([number; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise: sixteen elements, any alignment.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller's promise: sixteen elements, any alignment.
        let stored = unsafe { from.cast::<[bf16; LANES]>().read_unaligned() };
        Self(stored.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller's promise: sixteen elements, any alignment.
        let stored = unsafe { from.cast::<[f16; LANES]>().read_unaligned() };
        Self(stored.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise: sixteen elements, any alignment.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i]))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], term.0[i])))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }
    #[inline(always)]
    unsafe fn sum4(four: [Self; 4]) -> [f32; 4] {
        // SAFETY: no feature is needed.
        four.map(|lanes| unsafe { lanes.sum() })
    }
}
