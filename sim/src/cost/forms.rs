//! The closed forms: parameters and a shape in, seconds out.
//!
//! | operator | seconds |
//! |---|---|
//! | GEMM | `floor + smax(2 m n k / (F x m / (m + h)), (w n k + a m (k + n)) / B)` |
//! | prefill attention | `floor + smax(4 H d P / (F x t / (t + h)), (2 v G d K + 2 a H d t) / B)` |
//! | decode attention | `floor + 2 v G d K / B + c S G + 4 H d K / F` |
//! | memory traffic | `floor + bytes / B` |
//!
//! with `F` FLOP/s, `B` byte/s, `h` the tokens of half rate, `w`, `a`, `v` bytes of a weight, an activation
//! and a cached value, `H`, `G` query and KV heads of the rank, `d` their width, `P` score pairs, `t` new
//! tokens, `K` tokens in the cache, `S` sequences, `c` seconds a (sequence, KV head), and
//! `smax(x, y) = (x^p + y^p)^(1/p)`.
//!
//! Left out: wave quantisation over multiprocessors and operands that stay in the last-level cache. Both
//! matter for small weights on large devices, where the forms are then off by tens of percent.

use infercluster_spec::calibration::{AffineFit, DecodeFit, RooflineFit};
use infercluster_spec::{Dtype, Operator};

/// Bytes of an activation beside weights of a dtype: single precision stays single, all else is 16 bits.
pub(crate) fn activation_bytes(weights: Dtype) -> f64 {
    match weights {
        Dtype::F32 | Dtype::Tf32 => 4.0,
        _ => 2.0,
    }
}

/// The precision under which forms that are linear in an amount are filed: bytes are bytes, whatever they hold.
pub(crate) const AMOUNT_DTYPE: Dtype = Dtype::F32;

fn stored_bytes(dtype: Dtype) -> f64 {
    dtype.bits() as f64 / 8.0
}

/// `(x^p + y^p)^(1/p)`, scaled by the larger so that no power leaves the range of `f64`.
fn smooth_max(x: f64, y: f64, sharpness: f64) -> f64 {
    let (larger, smaller) = if x >= y { (x, y) } else { (y, x) };
    if larger == 0.0 {
        return 0.0;
    }
    larger * (1.0 + (smaller / larger).powf(sharpness)).powf(1.0 / sharpness)
}

fn roofline(fit: &RooflineFit, flops: f64, bytes: f64, tokens: f64) -> f64 {
    let compute = flops / fit.flops_per_s * ((tokens + fit.half_rate_m) / tokens);
    fit.floor_s + smooth_max(compute, bytes / fit.bytes_per_s, fit.sharpness)
}

/// Seconds of a GEMM, or of prefill attention, with that fit; `None` for operators of another form.
pub fn roofline_seconds(fit: &RooflineFit, dtype: Dtype, operator: &Operator) -> Option<f64> {
    match *operator {
        Operator::Gemm { m, n, k } => Some(gemm_seconds(fit, dtype, m, n, k)),
        Operator::AttentionPrefill {
            query_heads,
            kv_heads,
            head_dim,
            new_tokens,
            score_pairs,
            kv_tokens,
        } => {
            let heads = HeadShare {
                query_heads,
                kv_heads,
                head_dim,
            };
            let seconds = prefill_seconds(fit, dtype, heads, new_tokens, score_pairs, kv_tokens);
            Some(seconds)
        }
        _ => None,
    }
}

/// Seconds of decode attention with that fit; `None` for operators of another form.
pub fn decode_attention_seconds(fit: &DecodeFit, dtype: Dtype, operator: &Operator) -> Option<f64> {
    match *operator {
        Operator::AttentionDecode {
            query_heads,
            kv_heads,
            head_dim,
            sequences,
            kv_tokens,
        } => {
            let heads = HeadShare {
                query_heads,
                kv_heads,
                head_dim,
            };
            Some(decode_seconds(fit, dtype, heads, sequences, kv_tokens))
        }
        _ => None,
    }
}

/// Seconds of `[m, k] x [n, k]^T` with weights of `dtype`; nothing to compute takes no time.
fn gemm_seconds(fit: &RooflineFit, dtype: Dtype, m: u64, n: u64, k: u64) -> f64 {
    if m == 0 || n == 0 || k == 0 {
        return 0.0;
    }
    let (m, n, k) = (m as f64, n as f64, k as f64);
    let bytes = stored_bytes(dtype) * n * k + activation_bytes(dtype) * m * (k + n);
    roofline(fit, 2.0 * m * n * k, bytes, m)
}

/// The part of an attention shape that a rank's share decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadShare {
    query_heads: u32,
    kv_heads: u32,
    head_dim: u32,
}

/// Seconds of prefill attention over a cache of `dtype`; nothing to compute takes no time.
fn prefill_seconds(
    fit: &RooflineFit,
    dtype: Dtype,
    heads: HeadShare,
    new_tokens: u64,
    score_pairs: u64,
    kv_tokens: u64,
) -> f64 {
    if heads.query_heads == 0 || new_tokens == 0 {
        return 0.0;
    }
    let (query, kv, dim) = widths(heads);
    let tokens = new_tokens as f64;
    let bytes = 2.0 * stored_bytes(dtype) * kv * dim * kv_tokens as f64
        + 2.0 * activation_bytes(dtype) * query * dim * tokens;
    roofline(fit, 4.0 * query * dim * score_pairs as f64, bytes, tokens)
}

/// Seconds of decode attention over a cache of `dtype`; nothing to compute takes no time.
fn decode_seconds(fit: &DecodeFit, dtype: Dtype, heads: HeadShare, sequences: u64, kv_tokens: u64) -> f64 {
    if heads.query_heads == 0 || sequences == 0 {
        return 0.0;
    }
    let (query, kv, dim) = widths(heads);
    let cached = kv_tokens as f64;
    fit.floor_s
        + 2.0 * stored_bytes(dtype) * kv * dim * cached / fit.bytes_per_s
        + fit.per_pair_s * sequences as f64 * kv
        + 4.0 * query * dim * cached / fit.flops_per_s
}

fn widths(heads: HeadShare) -> (f64, f64, f64) {
    (
        f64::from(heads.query_heads),
        f64::from(heads.kv_heads),
        f64::from(heads.head_dim),
    )
}

/// `floor + x / rate` in seconds.
pub fn affine_seconds(fit: &AffineFit, amount: f64) -> f64 {
    fit.floor_s + amount / fit.per_s
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIT: RooflineFit = RooflineFit {
        floor_s: 1e-6,
        flops_per_s: 1e12,
        bytes_per_s: 1e9,
        half_rate_m: 0.0,
        sharpness: 1.0,
    };

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-12, "{found} != {expected}");
    }

    #[test]
    fn gemm_by_hand() {
        // 2 x 10 x 100 x 1000 = 2e6 FLOP = 2 us; 4 x 1e5 + 4 x 10 x 1100 = 444 kB = 444 us; sharpness 1 adds.
        close(gemm_seconds(&FIT, Dtype::F32, 10, 100, 1000), 447e-6);
        // Half rate at 10 tokens doubles the compute term.
        let slow = RooflineFit {
            half_rate_m: 10.0,
            ..FIT
        };
        close(gemm_seconds(&slow, Dtype::F32, 10, 100, 1000), 449e-6);
        // A sharp maximum leaves the larger term: (444^40 + 2^40)^(1/40) = 444.
        let sharp = RooflineFit {
            sharpness: 40.0,
            ..FIT
        };
        close(gemm_seconds(&sharp, Dtype::F32, 10, 100, 1000), 445e-6);
        // Weights of one byte, activations of two: 1e5 + 2 x 11000 = 122 us.
        close(gemm_seconds(&FIT, Dtype::Fp8, 10, 100, 1000), 125e-6);
        assert_eq!(gemm_seconds(&FIT, Dtype::F32, 10, 0, 1000), 0.0);
    }

    #[test]
    fn attention_by_hand() {
        let heads = HeadShare {
            query_heads: 6,
            kv_heads: 2,
            head_dim: 50,
        };
        // 4 x 6 x 50 x 15000 = 18e6 FLOP = 18 us; KV 2 x 2 x 2 x 50 x 200 = 80 kB, in and out
        // 2 x 2 x 6 x 50 x 100 = 120 kB: 200 us.
        close(
            prefill_seconds(&FIT, Dtype::Bf16, heads, 100, 15_000, 200),
            219e-6,
        );
        let decode = DecodeFit {
            floor_s: 2e-6,
            bytes_per_s: 1e9,
            per_pair_s: 1e-7,
            flops_per_s: 1e12,
        };
        // KV 2 x 2 x 2 x 50 x 1000 = 400 kB = 400 us; 8 sequences x 2 heads = 1.6 us; 1.2e6 FLOP = 1.2 us.
        close(decode_seconds(&decode, Dtype::F16, heads, 8, 1000), 404.8e-6);
        let none = HeadShare {
            query_heads: 0,
            kv_heads: 0,
            head_dim: 50,
        };
        assert_eq!(decode_seconds(&decode, Dtype::F16, none, 8, 1000), 0.0);
    }
}
