//! Bits across instruction sets and tile shapes, values against f64.

use half::{bf16, f16};
use infercluster_spec::{IndexRange, KvBlockId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::attention::{Attention, SPLIT, TILE};
use super::elementwise::{RmsNorm, exp, rsqrt, silu};
use super::gemm::Gemm;
use super::lanes::Stored;
use super::{Isa, Kernels};
use crate::backend::{AttentionShape, AttentionSpan, Backend, HeadShape, KvShape, KvSlot, Reference};

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .map(|_| (random.next_u32() >> 8) as f32 * (1.0 / 4_194_304.0) - 2.0)
        .collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Kernels of every instruction set of this machine; says which are missing.
fn available() -> Vec<Kernels> {
    let found: Vec<Kernels> = Isa::ALL.into_iter().filter_map(Kernels::of).collect();
    if found.len() < Isa::ALL.len() {
        println!("skipped {} instruction sets", Isa::ALL.len() - found.len());
    }
    found
}

/// The one dot-product order, written out.
fn dot_by_definition(x: &[f32], weight: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let padded = x.len().next_multiple_of(16);
    for k in 0..padded {
        let at = |numbers: &[f32]| numbers.get(k).copied().unwrap_or(0.0);
        lanes[k % 16] = at(x).mul_add(at(weight), lanes[k % 16]);
    }
    let fold = |lanes: &[f32]| -> Vec<f32> {
        let half = lanes.len() / 2;
        (0..half).map(|i| lanes[i] + lanes[i + half]).collect()
    };
    fold(&fold(&fold(&fold(&lanes))))[0]
}

fn check_gemm<W: Stored>(store: impl Fn(f32) -> W, widen: impl Fn(W) -> f32) {
    let shapes = [
        (1, 1, 1),
        (3, 5, 15),
        (4, 4, 16),
        (7, 9, 33),
        (65, 6, 20),
        (2, 13, 256),
    ];
    for (seed, (m, n, k)) in shapes.into_iter().enumerate() {
        let x = numbers(seed as u64, m * k);
        let weight: Vec<W> = numbers(100 + seed as u64, n * k)
            .into_iter()
            .map(&store)
            .collect();
        let bias = numbers(200, n);
        let expected: Vec<f32> = (0..m * n)
            .map(|i| {
                let row: Vec<f32> = weight[(i % n) * k..][..k].iter().map(|w| widen(*w)).collect();
                dot_by_definition(&x[(i / n) * k..][..k], &row) + bias[i % n]
            })
            .collect();
        for kernels in available() {
            let mut out = vec![0.0; m * n];
            kernels.gemm(Gemm {
                x: &x,
                weight: &weight,
                bias: Some(&bias),
                m,
                n,
                k,
                out: &mut out,
            });
            assert_eq!(bits(&out), bits(&expected), "{:?} {m} {n} {k}", kernels.isa());
        }
    }
}

#[test]
fn products_follow_the_one_order_on_every_instruction_set() {
    check_gemm(|x| x, |x| x);
    check_gemm(bf16::from_f32, bf16::to_f32);
    check_gemm(f16::from_f32, f16::to_f32);
}

#[test]
fn a_row_does_not_depend_on_how_many_there_are() {
    let (n, k) = (11, 100);
    let (x, weight) = (numbers(1, 64 * k), numbers(2, n * k));
    for kernels in available() {
        let product = |m: usize| {
            let mut out = vec![0.0; m * n];
            kernels.gemm(Gemm {
                x: &x,
                weight: &weight,
                bias: None,
                m,
                n,
                k,
                out: &mut out,
            });
            bits(&out)
        };
        let all = product(64);
        for m in 1..64 {
            assert_eq!(product(m), all[..m * n], "{:?} {m}", kernels.isa());
        }
    }
}

#[test]
fn stored_halves_widen_exactly() {
    // Every bf16 and f16 that is a number, subnormal ones included, times one.
    let mut every: Vec<u16> = (0..=u16::MAX).collect();
    every.retain(|&stored| !bf16::from_bits(stored).is_nan() && !f16::from_bits(stored).is_nan());
    let bf: Vec<bf16> = every.iter().map(|&stored| bf16::from_bits(stored)).collect();
    let fp: Vec<f16> = every.iter().map(|&stored| f16::from_bits(stored)).collect();
    for kernels in available() {
        let n = every.len();
        let mut out = vec![0.0; n];
        kernels.gemm(Gemm {
            x: &[1.0],
            weight: &bf,
            bias: None,
            m: 1,
            n,
            k: 1,
            out: &mut out,
        });
        assert!(out.iter().zip(&bf).all(|(out, stored)| *out == stored.to_f32()));
        kernels.gemm(Gemm {
            x: &[1.0],
            weight: &fp,
            bias: None,
            m: 1,
            n,
            k: 1,
            out: &mut out,
        });
        assert!(out.iter().zip(&fp).all(|(out, stored)| *out == stored.to_f32()));
    }
}

/// Distance in units of the last place of `expected` rounded to f32.
fn ulps(found: f32, expected: f64) -> f64 {
    let rounded = expected as f32;
    let unit = (f32::from_bits(rounded.abs().to_bits() + 1) - rounded.abs()) as f64;
    (f64::from(found) - expected).abs() / unit
}

#[test]
fn elementary_functions_are_accurate() {
    let mut worst = [0.0f64; 3];
    for i in -400_000..=400_000 {
        let x = i as f32 * 0.000_25;
        if x < 88.7 {
            worst[0] = worst[0].max(ulps(exp(x), f64::from(x).exp()));
        }
        let wide = f64::from(x);
        if x > -80.0 && x != 0.0 {
            worst[1] = worst[1].max(ulps(silu(x), wide / (1.0 + (-wide).exp())));
        }
        if x > 0.0 {
            worst[2] = worst[2].max(ulps(rsqrt(x), 1.0 / wide.sqrt()));
        }
    }
    assert!(
        worst[0] < 2.0 && worst[1] < 3.5 && worst[2] < 1.5,
        "{worst:?} ulps"
    );
    assert_eq!(exp(0.0), 1.0);
    assert_eq!([exp(f32::NEG_INFINITY), exp(-105.0), exp(-1e30)], [0.0; 3]);
    assert_eq!([exp(89.0), exp(f32::INFINITY)], [f32::INFINITY; 2]);
    assert!(exp(f32::NAN).is_nan());
    assert_eq!([silu(0.0), silu(-200.0), silu(200.0)], [0.0, -0.0, 200.0]);
}

#[test]
fn elementwise_kernels_have_the_same_bits_everywhere() {
    let shape = HeadShape {
        heads: 3,
        head_dim: 22,
    };
    let positions = [0, 5, 2];
    let (x, y, table) = (numbers(1, 198), numbers(2, 198), numbers(3, 6 * 22));
    let run = |kernels: Kernels| {
        let mut gate: Vec<f32> = x.iter().map(|x| x * 30.0).collect();
        kernels.silu_mul(&mut gate, &y);
        let mut rotated = x.clone();
        kernels.rope(&mut rotated, shape, &positions, &table);
        let mut sum = x.clone();
        kernels.add(&mut sum, &y);
        let mut normed = vec![0.0; 198];
        kernels.rms_norm(RmsNorm {
            x: &x,
            m: 3,
            gain: &y[..66],
            epsilon: 1e-5,
            out: &mut normed,
        });
        bits(&[gate, rotated, sum, normed].concat())
    };
    let scalar = run(Kernels(Isa::Scalar));
    for kernels in available() {
        assert_eq!(run(kernels), scalar, "{:?}", kernels.isa());
    }
}

/// Sequences with random queries, keys and values, computed in any chunks over blocks of any size.
struct Scene {
    shape: AttentionShape,
    tokens: usize,
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Scene {
    fn new(query_heads: (u32, u32), group_size: u32, head_dim: usize, tokens: usize) -> Self {
        let query_heads = IndexRange::new(query_heads.0, query_heads.1).unwrap();
        let kv_heads = infercluster_spec::layout::kv_heads_of(query_heads, group_size).len() as usize;
        let shape = AttentionShape {
            kv: KvShape {
                kv_heads,
                head_dim,
                block_size: 16,
            },
            query_heads,
            group_size,
            scale: (head_dim as f32).sqrt().recip(),
        };
        let width = query_heads.len() as usize * head_dim;
        Self {
            shape,
            tokens,
            query: numbers(1, tokens * width),
            keys: numbers(2, tokens * kv_heads * head_dim),
            values: numbers(3, tokens * kv_heads * head_dim),
        }
    }

    /// Runs `attend` on spans of `chunk` tokens over a cache with blocks of `block_size` in falling order.
    fn run(
        &self,
        block_size: usize,
        chunk: usize,
        attend: impl Fn(&Vec<f32>, &Vec<f32>, AttentionShape, &[AttentionSpan<'_>], &mut Vec<f32>),
    ) -> Vec<f32> {
        let mut shape = self.shape;
        shape.kv.block_size = block_size;
        let blocks = self.tokens.div_ceil(block_size) as u32;
        let table: Vec<KvBlockId> = (0..blocks).rev().map(KvBlockId).collect();
        // Numbers that no token wrote must not be read.
        let mut cache = vec![f32::NAN; blocks as usize * shape.kv.block_len()];
        let slots: Vec<KvSlot> = (0..self.tokens)
            .map(|token| KvSlot {
                block: table[token / block_size],
                offset: token % block_size,
            })
            .collect();
        Reference
            .kv_write(&mut cache, shape.kv, &slots, &self.keys, &self.values)
            .unwrap();
        let mut out = vec![0.0; self.query.len()];
        for first_row in (0..self.tokens).step_by(chunk) {
            let span = AttentionSpan {
                first_row,
                rows: chunk.min(self.tokens - first_row),
                start: first_row as u32,
                block_table: &table,
            };
            attend(&self.query, &cache, shape, &[span], &mut out);
        }
        out
    }

    fn run_kernels(&self, kernels: Kernels, block_size: usize, chunk: usize) -> Vec<f32> {
        self.run(block_size, chunk, |query, cache, shape, spans, out| {
            kernels.attention(Attention {
                query,
                cache,
                shape,
                spans,
                out,
            });
        })
    }
}

#[test]
fn attention_agrees_with_f64() {
    let scenes = [
        Scene::new((0, 6), 2, 16, 3 * TILE + 5),
        Scene::new((3, 10), 4, 20, TILE + 1),
        Scene::new((0, 2), 2, 64, SPLIT + TILE + 3),
        Scene::new((1, 2), 7, 80, 2 * SPLIT + 1),
    ];
    for scene in scenes {
        let expected = scene.run(16, scene.tokens, |query, cache, shape, spans, out| {
            Reference.attention(query, cache, shape, spans, out).unwrap();
        });
        let found = scene.run_kernels(Kernels::best(), 16, scene.tokens);
        let pairs = found.iter().zip(&expected);
        let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 2e-6, "{:?}: {largest}", scene.shape);
    }
}

#[test]
fn attention_has_one_set_of_bits() {
    for scene in [
        Scene::new((3, 10), 4, 20, 2 * TILE + 5),
        Scene::new((0, 4), 2, 64, SPLIT + TILE + 3),
    ] {
        let expected = bits(&scene.run_kernels(Kernels::best(), 16, scene.tokens));
        for kernels in available() {
            for (block_size, chunk) in [(8, 1), (16, 7), (32, 64), (16, 512), (5, 100)] {
                let found = bits(&scene.run_kernels(kernels, block_size, chunk));
                assert!(found == expected, "{:?} {block_size} {chunk}", kernels.isa());
            }
        }
    }
}

#[test]
fn a_head_does_not_depend_on_its_neighbours() {
    // Query heads 3..10 in groups of 4 against the same heads with others around them.
    let all = Scene::new((0, 12), 4, 16, TILE + 9);
    let expected = all.run_kernels(Kernels::best(), 16, 512);
    let (dim, heads) = (16, 3..10);
    let take = |numbers: &[f32], width: usize, range: std::ops::Range<usize>| -> Vec<f32> {
        numbers
            .chunks_exact(width * dim)
            .flat_map(|row| row[range.start * dim..range.end * dim].to_vec())
            .collect()
    };
    let mut some = Scene::new((3, 10), 4, dim, all.tokens);
    some.query = take(&all.query, 12, heads.clone());
    some.keys = take(&all.keys, 3, 0..3);
    some.values = take(&all.values, 3, 0..3);
    let found = some.run_kernels(Kernels::best(), 16, 512);
    assert_eq!(bits(&found), bits(&take(&expected, 12, heads)));
}
