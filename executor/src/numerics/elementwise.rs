//! Element-wise functions without the platform's mathematics library: polynomials of fused multiply-adds,
//! the same bits wherever they run.

use super::lanes::{LANES, Lanes, Stored};
use crate::backend::HeadShape;

/// Adding and taking away 1.5 x 2^23 rounds to the nearest integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts: products of the first with integers up to 2^9 are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x within 2 units in the last place; 0 below -104, infinite above 88.73.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-110.0, 89.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let whole = shifted - ROUND;
    let rest = whole.mul_add(-LN2_LOW, whole.mul_add(-LN2_HIGH, x));
    // e^r = 1 + r + r^2 P(r) for |r| <= ln 2 / 2, coefficients of the Cephes library.
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
        p = rest.mul_add(p, coefficient);
    }
    let p = rest.mul_add(rest * p, rest) + 1.0;
    // 2^power in two factors, so that results below the smallest normal number round only once.
    let half = power >> 1;
    let factor = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
    p * factor(half) * factor(power - half)
}

/// x / (1 + e^-x).
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 1 / sqrt(x): both operations are rounded correctly by IEEE.
#[inline(always)]
pub(crate) fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

super::kernel! {
    /// `gate = silu(gate) * up`.
    silu_mul(gate: &mut [f32], up: &[f32]) = plain silu_mul
}

#[inline(always)]
fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

super::kernel! {
    /// `x += y`.
    add(x: &mut [f32], y: &[f32]) = plain add
}

#[inline(always)]
fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

super::kernel! {
    /// Rotates heads, rotate-half form; row `p` of `table` holds cosines, then sines.
    rope(x: &mut [f32], shape: HeadShape, positions: &[u32], table: &[f32]) = plain rope
}

#[inline(always)]
fn rope(x: &mut [f32], shape: HeadShape, positions: &[u32], table: &[f32]) {
    let (dim, half) = (shape.head_dim, shape.head_dim / 2);
    for (token, position) in positions.iter().enumerate() {
        let (cosines, sines) = table[*position as usize * dim..][..dim].split_at(half);
        let row = &mut x[token * shape.heads * dim..][..shape.heads * dim];
        for head in row.chunks_exact_mut(dim) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (first[i], second[i]);
                first[i] = (-b).mul_add(sines[i], a * cosines[i]);
                second[i] = a.mul_add(sines[i], b * cosines[i]);
            }
        }
    }
}

/// Operands of a norm over `m` rows as wide as `gain`.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) m: usize,
    pub(crate) gain: &'a [f32],
    pub(crate) epsilon: f32,
    pub(crate) out: &'a mut [f32],
}

super::kernel! {
    /// `out = x * rsqrt(mean(x^2) + epsilon) * gain`, the sum of squares in dot-product order.
    rms_norm(args: RmsNorm<'_>) = lanes rms_norm
}

#[inline(always)]
unsafe fn rms_norm<V: Lanes, const MR: usize, const NR: usize>(args: RmsNorm<'_>) {
    let width = args.gain.len();
    for token in 0..args.m {
        let row = &args.x[token * width..][..width];
        // SAFETY: the caller's features; the row is `width` elements long.
        let [[squares]] = unsafe { super::gemm::dots::<V, f32, 1, 1>([row.as_ptr()], [row.as_ptr()], width) };
        let factor = rsqrt(squares / width as f32 + args.epsilon);
        let out = &mut args.out[token * width..][..width];
        for ((out, x), gain) in out.iter_mut().zip(row).zip(args.gain) {
            *out = x * factor * gain;
        }
    }
}

/// e^(x - shift) of a tile in place; -infinity gives zero.
#[inline(always)]
pub(super) fn exp_minus(tile: &mut [f32], shift: f32) {
    for x in tile {
        *x = exp(*x - shift);
    }
}

/// The sum of a slice whose length is a multiple of the lanes, in dot-product order.
///
/// # Safety
/// Features as [`Lanes`].
#[inline(always)]
pub(super) unsafe fn sum<V: Lanes>(numbers: &[f32]) -> f32 {
    // SAFETY: the caller's features; every chunk has sixteen elements.
    unsafe {
        let mut sum = V::zero();
        for chunk in numbers.chunks_exact(LANES) {
            let lanes: V = <f32 as Stored>::load(chunk.as_ptr());
            sum = lanes.mul_add(V::splat(1.0), sum);
        }
        sum.sum()
    }
}
