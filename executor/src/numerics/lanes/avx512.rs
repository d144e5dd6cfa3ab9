//! Lanes of AVX-512: one register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Lanes;
use super::avx2::{sum_halves, sum4_halves};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

impl Lanes for Avx512 {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512F.
        unsafe { Self(_mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: the caller has AVX-512F.
        unsafe { Self(_mm512_set1_ps(number)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has AVX-512F and promises sixteen elements.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller has AVX-512F and promises sixteen elements; a bf16 is the upper half of an
        // f32.
        unsafe {
            let stored = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(stored)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller has AVX-512F and promises sixteen elements.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has AVX-512F and promises sixteen elements.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        // SAFETY: the caller has AVX-512F.
        unsafe { Self(_mm512_mul_ps(self.0, factor.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller has AVX-512F.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller has AVX-512DQ and with it AVX.
        unsafe { sum_halves(fold(self)) }
    }
    #[inline(always)]
    unsafe fn sum4(four: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller has AVX-512DQ and with it AVX.
        unsafe { sum4_halves([fold(four[0]), fold(four[1]), fold(four[2]), fold(four[3])]) }
    }
}

/// Lane i + lane i + 8.
///
/// # Safety
/// The caller has AVX-512DQ.
#[inline(always)]
unsafe fn fold(lanes: Avx512) -> __m256 {
    // SAFETY: the caller has AVX-512DQ.
    unsafe {
        _mm256_add_ps(
            _mm512_castps512_ps256(lanes.0),
            _mm512_extractf32x8_ps::<1>(lanes.0),
        )
    }
}
