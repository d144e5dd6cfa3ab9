//! Lanes of AVX2 with FMA and F16C: two registers of eight.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Lanes;

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX.
        unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: the caller has AVX.
        unsafe { Self(_mm256_set1_ps(number), _mm256_set1_ps(number)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has AVX and promises sixteen elements.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller has AVX2 and promises sixteen elements; a bf16 is the upper half of an f32.
        unsafe {
            let widen = |from: *const bf16| {
                let stored = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(stored))
            };
            Self(widen(from), widen(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller has F16C and promises sixteen elements.
        unsafe {
            let widen = |from: *const f16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            Self(widen(from), widen(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has AVX and promises sixteen elements.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: the caller has AVX.
        unsafe { Self(_mm256_mul_ps(self.0, factor.0), _mm256_mul_ps(self.1, factor.1)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller has FMA.
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, factor.0, term.0),
                _mm256_fmadd_ps(self.1, factor.1, term.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller has AVX.
        unsafe { sum_halves(_mm256_add_ps(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn sum4(four: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller has AVX.
        unsafe {
            let [a, b, c, d] = four;
            sum4_halves([
                _mm256_add_ps(a.0, a.1),
                _mm256_add_ps(b.0, b.1),
                _mm256_add_ps(c.0, c.1),
                _mm256_add_ps(d.0, d.1),
            ])
        }
    }
}

/// The tree below lane i + lane i + 8.
///
/// # Safety
/// The caller has AVX.
#[inline(always)]
pub(super) unsafe fn sum_halves(eight: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = quarter(eight);
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// Lane i + lane i + 4. Plain functions and no closures here: a closure handed to `map` may be compiled
/// apart, without the features, and then passes registers through memory.
///
/// # Safety
/// The caller has AVX.
#[inline(always)]
unsafe fn quarter(eight: __m256) -> __m128 {
    // SAFETY: the caller has AVX.
    unsafe { _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight)) }
}

/// Four of [`sum_halves`] side by side.
///
/// # Safety
/// The caller has AVX.
#[inline(always)]
pub(super) unsafe fn sum4_halves(eights: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the caller has AVX; the last store writes the four elements of `sums`.
    unsafe {
        let [a, b, c, d] = eights;
        let (a, b, c, d) = (quarter(a), quarter(b), quarter(c), quarter(d));
        // Lane i + lane i + 2 of two numbers in one register.
        let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        let even = _mm_shuffle_ps::<0b10_00_10_00>(ab, cd);
        let odd = _mm_shuffle_ps::<0b11_01_11_01>(ab, cd);
        let mut sums = [0.0; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(even, odd));
        sums
    }
}
