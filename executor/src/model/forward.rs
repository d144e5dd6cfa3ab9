//! What a seat computes of a step.

use infercluster_spec::layout::Reduction;

use super::weights::{Attention, Layer, Linear};
use super::{Dims, ModelError, SeatModel, Segment, SegmentKind, SegmentMeter, StageOutput};
use crate::backend::{AttentionShape, AttentionSpan, Backend, BackendError, HeadShape, KvSlot};
use crate::comm::Communicator;
use crate::kv::{KvError, KvStore};
use crate::step::StepItem;

/// Sees the state after a layer.
pub type LayerObserver<'a, B> = &'a mut dyn FnMut(u32, &B, &<B as Backend>::Buffer) -> Result<(), ModelError>;

impl<B: Backend> SeatModel<B> {
    /// Computes this seat's part of a step. `hidden_in` is what the stage before gave, and absent on the
    /// first stage. Every rank of the stage makes the same call; `kv` was made for the same layout and
    /// seat. After an error the cache may hold part of the step, which a repeated step overwrites.
    pub fn forward(
        &mut self,
        kv: &mut KvStore<B>,
        items: &[StepItem],
        hidden_in: Option<&B::Buffer>,
        comm: &mut dyn Communicator<B>,
        meter: &mut dyn SegmentMeter,
    ) -> Result<StageOutput<B>, ModelError> {
        self.forward_observed(kv, items, hidden_in, comm, meter, &mut |_, _, _| Ok(()))
    }

    /// [`Self::forward`] that shows the state after each of its layers: its number, the device, and
    /// `[tokens, hidden]` numbers, the same on every rank.
    pub fn forward_observed(
        &mut self,
        kv: &mut KvStore<B>,
        items: &[StepItem],
        hidden_in: Option<&B::Buffer>,
        comm: &mut dyn Communicator<B>,
        meter: &mut dyn SegmentMeter,
        observe: LayerObserver<'_, B>,
    ) -> Result<StageOutput<B>, ModelError> {
        if comm.size() != self.tp_size {
            return Err(ModelError::GroupSize {
                found: comm.size(),
                expected: self.tp_size,
            });
        }
        let batch = self.batch(kv, items)?;
        self.check_hidden(hidden_in, batch.tokens())?;
        self.scratch
            .reserve(&self.backend, &self.dims, &self.layers, batch.tokens())?;
        meter.begin();
        let mut state = self.first_state(items, hidden_in, batch.tokens())?;
        let positions = batch.positions.iter().max().map_or(0, |last| *last as usize + 1);
        let mut pass = Pass {
            backend: &self.backend,
            dims: &self.dims,
            rope: self.rope.reach(&self.backend, positions)?,
            batch: &batch,
            tp_size: self.tp_size,
            scratch: self.scratch.buffers.as_mut().expect("reserved above"),
            state: &mut state,
            kv,
            comm,
            meter,
        };
        let mut number = self.first_layer;
        for layer in &self.layers {
            match self.reduction {
                Reduction::Fast => pass.fast_layer(layer, number)?,
                Reduction::Invariant => pass.invariant_layer(layer, number)?,
            }
            observe(number, pass.backend, pass.state)?;
            number += 1;
        }
        let output = self.finish(&batch, state)?;
        self.backend.synchronize()?;
        meter.end(Segment {
            layer: number.saturating_sub(1),
            kind: SegmentKind::StageEnd,
        });
        Ok(output)
    }

    /// Checks the items and spreads them into rows.
    fn batch<'a>(&self, kv: &KvStore<B>, items: &'a [StepItem]) -> Result<Batch<'a>, ModelError> {
        let mut batch = Batch::default();
        for item in items {
            if item.tokens.is_empty() {
                return Err(ModelError::EmptyItem);
            }
            let needed = u64::from(item.start) + item.tokens.len() as u64;
            if needed > u64::from(self.dims.max_positions) {
                return Err(ModelError::TooLong {
                    needed,
                    limit: self.dims.max_positions,
                });
            }
            let vocab = self.dims.vocab;
            if let Some(&token) = item.tokens.iter().find(|token| **token >= vocab) {
                return Err(ModelError::UnknownToken { token, vocab });
            }
            batch.slots.extend(kv.item_slots(item)?);
            batch.spans.push(AttentionSpan {
                first_row: batch.positions.len(),
                rows: item.tokens.len(),
                start: item.start,
                block_table: &item.block_table,
            });
            batch
                .positions
                .extend(item.start..item.start + item.tokens.len() as u32);
            if item.wants_logits {
                batch.logit_rows.push(batch.positions.len() - 1);
            }
        }
        if batch.tokens() == 0 {
            return Err(ModelError::EmptyItem);
        }
        Ok(batch)
    }

    fn check_hidden(&self, hidden_in: Option<&B::Buffer>, tokens: usize) -> Result<(), ModelError> {
        let found = hidden_in.map_or(0, |state| self.backend.len(state));
        let expected = if self.embedding.is_some() {
            0
        } else {
            tokens * self.dims.hidden
        };
        // A longer buffer is a reused one.
        if found < expected || (expected == 0 && found > 0) {
            return Err(ModelError::HiddenSize { found, expected });
        }
        Ok(())
    }

    fn first_state(
        &self,
        items: &[StepItem],
        hidden_in: Option<&B::Buffer>,
        tokens: usize,
    ) -> Result<B::Buffer, ModelError> {
        let hidden = self.dims.hidden;
        let mut state = self.backend.allocate(tokens * hidden)?;
        if let Some(embedding) = &self.embedding {
            let mut rows = Vec::with_capacity(tokens * hidden);
            for token in items.iter().flat_map(|item| &item.tokens) {
                embedding.lookup(*token, &mut rows)?;
            }
            self.backend.upload(&rows, &mut state, 0)?;
        } else if let Some(given) = hidden_in {
            let rows: Vec<usize> = (0..tokens).collect();
            self.backend.select_rows(given, hidden, &rows, &mut state)?;
        }
        Ok(state)
    }

    fn finish(&self, batch: &Batch<'_>, state: B::Buffer) -> Result<StageOutput<B>, ModelError> {
        let Some(head) = &self.head else {
            return Ok(StageOutput::Hidden {
                state,
                tokens: batch.tokens(),
            });
        };
        let (hidden, items) = (self.dims.hidden, batch.logit_rows.len());
        let mut chosen = self.backend.allocate(items * hidden)?;
        let mut normed = self.backend.allocate(items * hidden)?;
        let mut logits = self.backend.allocate(items * head.vocab.len() as usize)?;
        self.backend
            .select_rows(&state, hidden, &batch.logit_rows, &mut chosen)?;
        self.backend
            .rms_norm(&chosen, items, &head.norm, self.dims.epsilon, &mut normed)?;
        if let Some(weight) = &head.weight {
            self.backend.gemm(&normed, items, weight, None, &mut logits)?;
        }
        Ok(StageOutput::Logits {
            logits,
            items,
            vocab: head.vocab,
        })
    }
}

/// The rows of a step.
#[derive(Default)]
struct Batch<'a> {
    positions: Vec<u32>,
    slots: Vec<KvSlot>,
    spans: Vec<AttentionSpan<'a>>,
    logit_rows: Vec<usize>,
}

impl Batch<'_> {
    fn tokens(&self) -> usize {
        self.positions.len()
    }
}

/// Buffers between operators, kept from step to step.
pub(super) struct Scratch<B: Backend> {
    tokens: usize,
    buffers: Option<Buffers<B>>,
}

impl<B: Backend> Default for Scratch<B> {
    fn default() -> Self {
        Self {
            tokens: 0,
            buffers: None,
        }
    }
}

struct Buffers<B: Backend> {
    normed: B::Buffer,
    query: B::Buffer,
    key: B::Buffer,
    value: B::Buffer,
    attention: B::Buffer,
    gate: B::Buffer,
    up: B::Buffer,
    /// Rows or partial sums of an output or down projection.
    projected: B::Buffer,
    /// What a gather gives, rank after rank.
    parts: B::Buffer,
    /// The same as one matrix.
    joined: B::Buffer,
}

impl<B: Backend> Scratch<B> {
    fn reserve(
        &mut self,
        backend: &B,
        dims: &Dims,
        layers: &[Layer<B>],
        tokens: usize,
    ) -> Result<(), BackendError> {
        if tokens <= self.tokens && self.buffers.is_some() {
            return Ok(());
        }
        let widest = |width: &dyn Fn(&Layer<B>) -> usize| layers.iter().map(width).max().unwrap_or(0);
        let queries = widest(&|layer| {
            let attention = layer.attention.as_ref();
            attention.map_or(0, |part| part.query_heads.len() as usize * dims.head_dim)
        });
        let keys = widest(&|layer| {
            let attention = layer.attention.as_ref();
            attention.map_or(0, |part| part.kv_heads * dims.head_dim)
        });
        let columns = widest(&|layer| layer.mlp.as_ref().map_or(0, |mlp| mlp.columns));
        let joined = dims.all_queries.max(dims.ffn).max(dims.hidden);
        let buffer = |width: usize| backend.allocate(tokens * width);
        self.buffers = Some(Buffers {
            normed: buffer(dims.hidden)?,
            query: buffer(queries)?,
            key: buffer(keys)?,
            value: buffer(keys)?,
            attention: buffer(queries)?,
            gate: buffer(columns)?,
            up: buffer(columns)?,
            projected: buffer(dims.hidden)?,
            parts: buffer(joined)?,
            joined: buffer(joined)?,
        });
        self.tokens = tokens;
        Ok(())
    }
}

/// One step on its way through the layers.
struct Pass<'a, B: Backend> {
    backend: &'a B,
    dims: &'a Dims,
    rope: &'a B::Buffer,
    batch: &'a Batch<'a>,
    tp_size: usize,
    scratch: &'a mut Buffers<B>,
    state: &'a mut B::Buffer,
    kv: &'a mut KvStore<B>,
    comm: &'a mut dyn Communicator<B>,
    meter: &'a mut dyn SegmentMeter,
}

/// Which vectors a gather joins.
#[derive(Clone, Copy)]
enum Gathered {
    Attention,
    Gate,
    Projected,
}

impl<B: Backend> Pass<'_, B> {
    fn fast_layer(&mut self, layer: &Layer<B>, number: u32) -> Result<(), ModelError> {
        let segment = |kind| Segment { layer: number, kind };
        self.attention(layer, number)?;
        self.project(layer.output.as_ref(), Gathered::Attention)?;
        self.sum_over_ranks(segment(SegmentKind::Attention))?;
        self.mlp(layer)?;
        self.project(layer.down.as_ref(), Gathered::Gate)?;
        self.sum_over_ranks(segment(SegmentKind::Mlp))
    }

    fn invariant_layer(&mut self, layer: &Layer<B>, number: u32) -> Result<(), ModelError> {
        let segment = |kind| Segment { layer: number, kind };
        let widths = &layer.widths;
        self.attention(layer, number)?;
        self.gather(
            Gathered::Attention,
            &widths.attention,
            segment(SegmentKind::Attention),
        )?;
        self.project_joined(layer.output.as_ref(), Gathered::Attention)?;
        self.gather(
            Gathered::Projected,
            &widths.rows,
            segment(SegmentKind::OutputRows),
        )?;
        self.add_joined()?;
        self.mlp(layer)?;
        self.gather(Gathered::Gate, &widths.mlp, segment(SegmentKind::Mlp))?;
        self.project_joined(layer.down.as_ref(), Gathered::Gate)?;
        self.gather(Gathered::Projected, &widths.rows, segment(SegmentKind::DownRows))?;
        self.add_joined()
    }

    /// Attention of this rank's heads, into `scratch.attention`.
    fn attention(&mut self, layer: &Layer<B>, number: u32) -> Result<(), ModelError> {
        let Some(attention) = &layer.attention else {
            return Ok(());
        };
        let (backend, m, s) = (self.backend, self.batch.tokens(), &mut *self.scratch);
        let (cache_shape, cache) = self.kv.layer(number)?;
        if cache_shape.kv_heads != attention.kv_heads || cache_shape.head_dim != self.dims.head_dim {
            return Err(mismatch(self.kv, attention, number, self.dims.group_size));
        }
        backend.rms_norm(
            self.state,
            m,
            &layer.attention_norm,
            self.dims.epsilon,
            &mut s.normed,
        )?;
        let linear = |part: &Linear<B>, out: &mut B::Buffer| {
            backend.gemm(&s.normed, m, &part.weight, part.bias.as_ref(), out)
        };
        linear(&attention.query, &mut s.query)?;
        linear(&attention.key, &mut s.key)?;
        linear(&attention.value, &mut s.value)?;
        let heads = |heads| HeadShape {
            heads,
            head_dim: self.dims.head_dim,
        };
        let positions = &self.batch.positions;
        let queries = heads(attention.query_heads.len() as usize);
        backend.rope(&mut s.query, queries, positions, self.rope)?;
        backend.rope(&mut s.key, heads(attention.kv_heads), positions, self.rope)?;
        backend.kv_write(cache, cache_shape, &self.batch.slots, &s.key, &s.value)?;
        let shape = AttentionShape {
            kv: cache_shape,
            query_heads: attention.query_heads,
            group_size: self.dims.group_size,
            scale: self.dims.score_scale,
        };
        backend.attention(&s.query, cache, shape, &self.batch.spans, &mut s.attention)?;
        Ok(())
    }

    /// Gated activations of this rank's columns, into `scratch.gate`.
    fn mlp(&mut self, layer: &Layer<B>) -> Result<(), ModelError> {
        let Some(mlp) = &layer.mlp else {
            return Ok(());
        };
        let (backend, m, s) = (self.backend, self.batch.tokens(), &mut *self.scratch);
        backend.rms_norm(self.state, m, &layer.mlp_norm, self.dims.epsilon, &mut s.normed)?;
        backend.gemm(&s.normed, m, &mlp.gate, None, &mut s.gate)?;
        backend.gemm(&s.normed, m, &mlp.up, None, &mut s.up)?;
        backend.silu_mul(&mut s.gate, &s.up, m * mlp.columns)?;
        Ok(())
    }

    /// A projection of this rank's own vectors: zero where it has none.
    fn project(&mut self, weight: Option<&B::Weight>, source: Gathered) -> Result<(), ModelError> {
        let (m, s) = (self.batch.tokens(), &mut *self.scratch);
        let x = match source {
            Gathered::Gate => &s.gate,
            _ => &s.attention,
        };
        match weight {
            Some(weight) => self.backend.gemm(x, m, weight, None, &mut s.projected)?,
            None => self.backend.clear(&mut s.projected, m * self.dims.hidden)?,
        }
        Ok(())
    }

    /// This rank's rows of a projection of everyone's vectors.
    fn project_joined(&mut self, weight: Option<&B::Weight>, source: Gathered) -> Result<(), ModelError> {
        let Some(weight) = weight else {
            return Ok(());
        };
        let (m, s) = (self.batch.tokens(), &mut *self.scratch);
        let x = match source {
            _ if self.tp_size > 1 => &s.joined,
            Gathered::Gate => &s.gate,
            _ => &s.attention,
        };
        self.backend.gemm(x, m, weight, None, &mut s.projected)?;
        Ok(())
    }

    /// Ends a segment and sums `scratch.projected` over ranks into the residual stream.
    fn sum_over_ranks(&mut self, segment: Segment) -> Result<(), ModelError> {
        let len = self.batch.tokens() * self.dims.hidden;
        self.end(segment)?;
        if self.tp_size > 1 {
            self.comm.all_reduce(&mut self.scratch.projected, len)?;
        }
        self.meter.begin();
        self.backend.add(self.state, &self.scratch.projected, len)?;
        Ok(())
    }

    /// Ends a segment and joins everyone's vectors in `scratch.joined`; a rank alone leaves them in place.
    fn gather(&mut self, what: Gathered, widths: &[usize], segment: Segment) -> Result<(), ModelError> {
        let m = self.batch.tokens();
        self.end(segment)?;
        let s = &mut *self.scratch;
        let mine = match what {
            Gathered::Attention => &s.attention,
            Gathered::Gate => &s.gate,
            Gathered::Projected => &s.projected,
        };
        if self.tp_size > 1 {
            let counts: Vec<usize> = widths.iter().map(|width| width * m).collect();
            // Parts of one row lie as their matrix does.
            let target = if m == 1 { &mut s.joined } else { &mut s.parts };
            self.comm.all_gather(mine, &counts, target)?;
        }
        self.meter.begin();
        if self.tp_size > 1 && m > 1 {
            self.backend.interleave(&s.parts, m, widths, &mut s.joined)?;
        }
        Ok(())
    }

    /// Adds the joined rows of a projection to the residual stream.
    fn add_joined(&mut self) -> Result<(), ModelError> {
        let len = self.batch.tokens() * self.dims.hidden;
        let rows = if self.tp_size > 1 {
            &self.scratch.joined
        } else {
            &self.scratch.projected
        };
        self.backend.add(self.state, rows, len)?;
        Ok(())
    }

    fn end(&mut self, segment: Segment) -> Result<(), ModelError> {
        self.backend.synchronize()?;
        self.meter.end(segment);
        Ok(())
    }
}

/// The cache was made for another layout or seat.
fn mismatch<B: Backend>(
    kv: &KvStore<B>,
    attention: &Attention<B>,
    layer: u32,
    group_size: u32,
) -> ModelError {
    let asked = infercluster_spec::layout::kv_heads_of(attention.query_heads, group_size);
    let held = kv.kv_heads(layer).unwrap_or_default();
    ModelError::Kv(KvError::UnknownHeads { layer, asked, held })
}
