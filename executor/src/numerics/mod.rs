//! Kernels of profile `cpu-f32/1`: the same bits on every instruction set, for every batch and layout.
//!
//! - One dot-product order: 16 lanes along K (lane = k mod 16) of fused multiply-adds, a tail padded with
//!   zeros, and a fixed pairwise tree over the lanes. Register tiles over tokens and weight rows never change
//!   it, so a row's bits do not depend on how many rows are computed together.
//! - Element-wise functions are polynomials of fused multiply-adds written once ([`elementwise`]) and
//!   compiled per instruction set; nothing reorders them.
//! - Attention walks keys in tiles and splits at absolute positions ([`attention`]).
//!
//! Kernels are generic over [`lanes::Lanes`]; [`Kernels`] picks the instruction set once.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod gemm;
mod lanes;
#[cfg(test)]
mod tests;

/// An instruction set with kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Portable code with `f32::mul_add`.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// Kernels of an instruction set that this machine has: holding one is the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernels(Isa);

impl Kernels {
    /// The fastest ones.
    pub(crate) fn best() -> Self {
        let best = Isa::ALL.into_iter().rev().find(|isa| isa.is_available());
        Self(best.unwrap_or(Isa::Scalar))
    }

    /// Those of one instruction set, where this machine has it.
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    pub(crate) fn isa(self) -> Isa {
        self.0
    }
}

/// Defines a method of [`Kernels`] that runs `$body` compiled for the chosen instruction set. With `lanes`
/// the body is generic over `Lanes` and the sides of its register tile, else it is plain code that the
/// compiler vectorises.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident $(<$generic:ident: $bound:path>)? ($($arg:ident: $type:ty),* $(,)?) = lanes $body:ident) => {
        impl $crate::numerics::Kernels {
            $(#[$doc])*
            pub(crate) fn $name $(<$generic: $bound>)? (self, $($arg: $type),*) {
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512 $(<$generic: $bound>)? ($($arg: $type),*) {
                    // SAFETY: this function has the features that `Avx512` asks for.
                    unsafe { $body::<$crate::numerics::lanes::Avx512, $($generic,)? 4, 4>($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2 $(<$generic: $bound>)? ($($arg: $type),*) {
                    // SAFETY: this function has the features that `Avx2` asks for.
                    unsafe { $body::<$crate::numerics::lanes::Avx2, $($generic,)? 2, 2>($($arg),*) }
                }
                match self.isa() {
                    // SAFETY: a `Kernels` exists only where its features were detected.
                    #[cfg(target_arch = "x86_64")]
                    $crate::numerics::Isa::Avx512 => unsafe { avx512 $(::<$generic>)? ($($arg),*) },
                    // SAFETY: a `Kernels` exists only where its features were detected.
                    #[cfg(target_arch = "x86_64")]
                    $crate::numerics::Isa::Avx2 => unsafe { avx2 $(::<$generic>)? ($($arg),*) },
                    // SAFETY: `Scalar` asks for no feature.
                    _ => unsafe { $body::<$crate::numerics::lanes::Scalar, $($generic,)? 2, 2>($($arg),*) },
                }
            }
        }
    };
    ($(#[$doc:meta])* $name:ident ($($arg:ident: $type:ty),* $(,)?) = plain $body:ident) => {
        impl $crate::numerics::Kernels {
            $(#[$doc])*
            pub(crate) fn $name(self, $($arg: $type),*) {
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $type),*) {
                    $body($($arg),*)
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $type),*) {
                    $body($($arg),*)
                }
                match self.isa() {
                    // SAFETY: a `Kernels` exists only where its features were detected.
                    #[cfg(target_arch = "x86_64")]
                    $crate::numerics::Isa::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: a `Kernels` exists only where its features were detected.
                    #[cfg(target_arch = "x86_64")]
                    $crate::numerics::Isa::Avx2 => unsafe { avx2($($arg),*) },
                    _ => $body($($arg),*),
                }
            }
        }
    };
}
pub(crate) use kernel;
