//! Measures the operators of a step on a device: the rows that calibration is fitted to.
//!
//! Weights and caches are cycled through copies that together exceed the caches of a processor, since a step
//! walks through all weights of a model before it meets the first again. A row is the median over samples;
//! a sample is one run, or several where one is too short for the clock.

use std::time::Duration;

use infercluster_spec::stats::percentile;
use infercluster_spec::{Bytes, Dtype, IndexRange, KvBlockId, Measurement, Model, Operator};

use crate::backend::{AttentionShape, AttentionSpan, Backend, BackendError, KvShape, MatrixShape};
use crate::clock;
use crate::model::{Segment, SegmentKind, SegmentMeter};

/// Tokens of a KV block while profiling.
const BLOCK_SIZE: usize = 16;
/// Most copies of one operand.
const COPIES_LIMIT: u64 = 64;
/// Shortest sample: some thousand times the resolution of the clock.
const SHORTEST_SAMPLE: Duration = Duration::from_micros(50);

/// `m` tokens by a weight of `n` rows and `k` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmShape {
    /// Tokens.
    pub m: usize,
    /// Weight rows.
    pub n: usize,
    /// Inputs of a row.
    pub k: usize,
}

/// New tokens of some equal sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionBatch {
    /// How many sequences.
    pub sequences: usize,
    /// Tokens of each that are in the cache already.
    pub cached: usize,
    /// New tokens of each; 1 is decode.
    pub new: usize,
}

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileGrid {
    /// How weights are stored.
    pub dtype: Dtype,
    /// Matrix products.
    pub gemm: Vec<GemmShape>,
    /// Query heads that attention is measured with, from head 0 on.
    pub query_heads: Vec<u32>,
    /// Query heads that share a KV head.
    pub group_size: u32,
    /// Width of a head.
    pub head_dim: usize,
    /// Attention batches.
    pub attention: Vec<AttentionBatch>,
    /// Bytes that element-wise operators and copies move.
    pub bytes: Vec<Bytes>,
    /// Bytes that copies of one operand add up to.
    pub working_set: Bytes,
    /// Most samples of a row.
    pub samples: u32,
    /// A row ends early when it has taken this long and has five samples.
    pub row_limit: Duration,
}

impl ProfileGrid {
    /// Shapes that shards of a model meet: its matrices whole, halved and quartered along the side that
    /// a layout cuts, for 1 to `tokens` tokens.
    pub fn of_model(model: &Model, tokens: usize) -> Self {
        let [hidden, ffn, head_dim] = [model.hidden, model.ffn, model.head_dim].map(|side| side as usize);
        let queries = model.query_heads as usize * head_dim;
        let mut matrices = Vec::new();
        for part in [1, 2, 4] {
            let share = |side: usize| (side / part).max(1);
            matrices.extend([
                (share(queries), hidden),
                (share(hidden), queries),
                (share(ffn), hidden),
                (share(hidden), ffn),
            ]);
        }
        matrices.push((model.vocab as usize, hidden));
        matrices.sort_unstable();
        matrices.dedup();
        let counts: Vec<usize> = std::iter::successors(Some(1), |m| Some(m * 4))
            .take_while(|m| *m <= tokens)
            .collect();
        let product = |(n, k)| counts.iter().map(move |&m| GemmShape { m, n, k });
        let heads = [model.query_heads, model.query_heads / 2, model.group_size()];
        let context = model.max_positions as usize;
        let batch = |sequences, cached, new| AttentionBatch {
            sequences,
            cached,
            new,
        };
        Self {
            dtype: model.dtype,
            gemm: matrices.iter().copied().flat_map(product).collect(),
            query_heads: heads.into_iter().filter(|heads| *heads > 0).collect(),
            group_size: model.group_size(),
            head_dim,
            attention: [
                batch(1, 63, 1),
                batch(1, 1023, 1),
                batch(8, 255, 1),
                batch(32, 127, 1),
                batch(1, 0, 64),
                batch(1, 0, 256),
                batch(1, 256, 128),
                batch(4, 0, 64),
            ]
            .into_iter()
            .filter(|batch| batch.cached + batch.new <= context)
            .collect(),
            bytes: [1 << 14, 1 << 18, 1 << 22].map(Bytes).to_vec(),
            working_set: model.weight_bytes().min(Bytes(256 << 20)),
            samples: 25,
            row_limit: Duration::from_millis(60),
        }
    }
}

/// Measures every row of a grid. The meter is told of every sample, so that an emulated speed is paid here as
/// it is in a step.
pub fn measure<B: Backend>(
    backend: &B,
    grid: &ProfileGrid,
    meter: &mut dyn SegmentMeter,
) -> Result<Vec<Measurement>, BackendError> {
    let mut bench = Bench {
        backend,
        grid,
        meter,
        rows: Vec::new(),
    };
    for shape in &grid.gemm {
        bench.gemm(*shape)?;
    }
    for heads in &grid.query_heads {
        for batch in &grid.attention {
            bench.attention(*heads, *batch)?;
        }
    }
    for bytes in &grid.bytes {
        bench.elementwise(*bytes)?;
        bench.copy(*bytes)?;
    }
    Ok(bench.rows)
}

struct Bench<'a, B: Backend> {
    backend: &'a B,
    grid: &'a ProfileGrid,
    meter: &'a mut dyn SegmentMeter,
    rows: Vec<Measurement>,
}

impl<B: Backend> Bench<'_, B> {
    fn gemm(&mut self, shape: GemmShape) -> Result<(), BackendError> {
        let GemmShape { m, n, k } = shape;
        let backend = self.backend;
        let bytes = self.grid.dtype.bytes(n as u64 * k as u64);
        let stored = vec![0x2c; bytes.0 as usize];
        let matrix = MatrixShape { rows: n, columns: k };
        let weights = (0..self.copies(bytes))
            .map(|_| backend.load_weight(&stored, matrix, self.grid.dtype))
            .collect::<Result<Vec<_>, _>>()?;
        let x = self.filled(m * k)?;
        let mut out = backend.allocate(m * n)?;
        let operator = Operator::Gemm {
            m: m as u64,
            n: n as u64,
            k: k as u64,
        };
        self.row(operator, self.grid.dtype, |run| {
            backend.gemm(&x, m, &weights[run % weights.len()], None, &mut out)
        })
    }

    fn attention(&mut self, heads: u32, batch: AttentionBatch) -> Result<(), BackendError> {
        let AttentionBatch {
            sequences,
            cached,
            new,
        } = batch;
        let (backend, group_size) = (self.backend, self.grid.group_size);
        let query_heads = IndexRange::new(0, heads).expect("zero is not above a count");
        let kv_heads = infercluster_spec::layout::kv_heads_of(query_heads, group_size).len();
        let shape = AttentionShape {
            kv: KvShape {
                kv_heads: kv_heads as usize,
                head_dim: self.grid.head_dim,
                block_size: BLOCK_SIZE,
            },
            query_heads,
            group_size,
            scale: 1.0 / (self.grid.head_dim as f32).sqrt(),
        };
        let blocks = (cached + new).div_ceil(BLOCK_SIZE);
        let cache_len = sequences * blocks * shape.kv.block_len();
        let copies = self.copies(Dtype::F32.bytes(cache_len as u64));
        let caches = (0..copies)
            .map(|_| self.filled(cache_len))
            .collect::<Result<Vec<_>, _>>()?;
        let tables: Vec<Vec<KvBlockId>> = (0..sequences)
            .map(|one| {
                (one * blocks..(one + 1) * blocks)
                    .map(|id| KvBlockId(id as u32))
                    .collect()
            })
            .collect();
        let spans: Vec<AttentionSpan<'_>> = tables
            .iter()
            .enumerate()
            .map(|(one, block_table)| AttentionSpan {
                first_row: one * new,
                rows: new,
                start: cached as u32,
                block_table,
            })
            .collect();
        let width = sequences * new * heads as usize * self.grid.head_dim;
        let query = self.filled(width)?;
        let mut out = backend.allocate(width)?;
        let operator = attention_operator(heads, kv_heads, self.grid.head_dim as u32, batch);
        self.row(operator, Dtype::F32, |run| {
            backend.attention(&query, &caches[run % caches.len()], shape, &spans, &mut out)
        })
    }

    /// A norm, an activation and a residual sum: two, three and three passes over their share of the bytes.
    fn elementwise(&mut self, bytes: Bytes) -> Result<(), BackendError> {
        let backend = self.backend;
        let len = (bytes.0 / 32).max(1) as usize;
        let mut x = self.filled(len)?;
        let y = self.filled(len)?;
        let mut out = backend.allocate(len)?;
        let operator = Operator::Elementwise {
            bytes: Bytes(32 * len as u64),
        };
        self.row(operator, Dtype::F32, |_| {
            backend.rms_norm(&x, 1, &y, 1e-5, &mut out)?;
            backend.silu_mul(&mut out, &y, len)?;
            backend.add(&mut x, &out, len)
        })
    }

    fn copy(&mut self, bytes: Bytes) -> Result<(), BackendError> {
        let backend = self.backend;
        let len = (bytes.0 / 4).max(1) as usize;
        let from = self.filled(len)?;
        let mut to = backend.allocate(len)?;
        let operator = Operator::Copy {
            bytes: Bytes(4 * len as u64),
        };
        self.row(operator, Dtype::F32, |_| {
            backend.select_rows(&from, len, &[0], &mut to)
        })
    }

    /// How many copies of an operand make up the working set.
    fn copies(&self, bytes: Bytes) -> usize {
        (self.grid.working_set.0 / bytes.0.max(1)).clamp(1, COPIES_LIMIT) as usize
    }

    fn filled(&self, len: usize) -> Result<B::Buffer, BackendError> {
        let numbers: Vec<f32> = (0..len).map(|i| (i % 251) as f32 * 0.004 - 0.5).collect();
        let mut buffer = self.backend.allocate(len)?;
        self.backend.upload(&numbers, &mut buffer, 0)?;
        Ok(buffer)
    }

    /// Runs an operator until there are samples enough. The first run warms up and sizes the samples.
    fn row(
        &mut self,
        operator: Operator,
        dtype: Dtype,
        mut run: impl FnMut(usize) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut runs = 0;
        let mut sample = |repeats: u32, meter: &mut dyn SegmentMeter| {
            let started = clock::now();
            meter.begin();
            for _ in 0..repeats {
                run(runs)?;
                self.backend.synchronize()?;
                runs += 1;
            }
            meter.end(Segment {
                layer: 0,
                kind: SegmentKind::StageEnd,
            });
            Ok::<_, BackendError>(started.elapsed() / repeats)
        };
        let first = sample(1, self.meter)?.max(Duration::from_nanos(1));
        let repeats = SHORTEST_SAMPLE
            .as_nanos()
            .div_ceil(first.as_nanos())
            .clamp(1, 1 << 16) as u32;
        let started = clock::now();
        let mut seconds = Vec::new();
        while (seconds.len() as u32) < self.grid.samples
            && (seconds.len() < 5 || started.elapsed() < self.grid.row_limit)
        {
            seconds.push(sample(repeats, self.meter)?.as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let at = |p| percentile(&seconds, p).unwrap_or(0.0);
        self.rows.push(Measurement {
            operator,
            dtype,
            median_s: at(50.0),
            p10_s: at(10.0),
            p90_s: at(90.0),
            samples: seconds.len() as u32,
        });
        Ok(())
    }
}

fn attention_operator(query_heads: u32, kv_heads: u32, head_dim: u32, batch: AttentionBatch) -> Operator {
    let AttentionBatch {
        sequences,
        cached,
        new,
    } = batch;
    let kv_tokens = (sequences * (cached + new)) as u64;
    if new == 1 {
        return Operator::AttentionDecode {
            query_heads,
            kv_heads,
            head_dim,
            sequences: sequences as u64,
            kv_tokens,
        };
    }
    Operator::AttentionPrefill {
        query_heads,
        kv_heads,
        head_dim,
        new_tokens: (sequences * new) as u64,
        score_pairs: (sequences * (new * cached + new * (new + 1) / 2)) as u64,
        kv_tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Cpu;
    use crate::model::NoMeter;

    #[test]
    fn every_shape_of_a_grid_becomes_a_row() {
        let grid = ProfileGrid {
            dtype: Dtype::Bf16,
            gemm: vec![GemmShape { m: 2, n: 8, k: 24 }],
            query_heads: vec![4],
            group_size: 2,
            head_dim: 8,
            attention: vec![
                AttentionBatch {
                    sequences: 3,
                    cached: 10,
                    new: 1,
                },
                AttentionBatch {
                    sequences: 2,
                    cached: 5,
                    new: 4,
                },
            ],
            bytes: vec![Bytes(6400)],
            working_set: Bytes(1 << 16),
            samples: 5,
            row_limit: Duration::ZERO,
        };
        let rows = measure(&Cpu::new(), &grid, &mut NoMeter).unwrap();
        let operators: Vec<Operator> = rows.iter().map(|row| row.operator).collect();
        let (query_heads, kv_heads, head_dim) = (4, 2, 8);
        let by_hand = [
            Operator::Gemm { m: 2, n: 8, k: 24 },
            Operator::AttentionDecode {
                query_heads,
                kv_heads,
                head_dim,
                sequences: 3,
                kv_tokens: 33,
            },
            // Pairs of a sequence: 4 x 5 cached, and 1 + 2 + 3 + 4 new.
            Operator::AttentionPrefill {
                query_heads,
                kv_heads,
                head_dim,
                new_tokens: 8,
                score_pairs: 60,
                kv_tokens: 18,
            },
            Operator::Elementwise { bytes: Bytes(6400) },
            Operator::Copy { bytes: Bytes(6400) },
        ];
        assert_eq!(operators, by_hand);
        for row in rows {
            assert!(0.0 < row.p10_s && row.p10_s <= row.median_s && row.median_s <= row.p90_s);
            assert_eq!(row.samples, 5);
        }
    }
}
