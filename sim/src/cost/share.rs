//! Seconds of one segment on one device as a function of its share: what the planner's inner loop and the
//! sum over a stage both ask.
//!
//! | segment | operators on a rank with `H` query heads, `G` KV heads, `C` columns, `R` rows, `V` vocabulary rows |
//! |---|---|
//! | attention | traffic, GEMM `t x (H + 2G) d x hidden`, prefill and decode attention; `fast`: GEMM `t x hidden x H d` |
//! | output rows | `invariant`: GEMM `t x R x (all query heads) d` |
//! | MLP | traffic, GEMM `t x 2C x hidden`; `fast`: GEMM `t x hidden x C` |
//! | down rows | `invariant`: GEMM `t x R x ffn` |
//! | head | traffic, GEMM `rows x V x hidden` |
//!
//! `t` counts ALL tokens of the step, prefill and decode: there is one GEMM. Every rank norms the whole
//! width and adds the residual, whatever its share, so traffic never vanishes.
//!
//! Left out: the embedding (one table row a token, read on the host) and a sliding window (attention reads
//! the whole context, an over-estimate for models that have one).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use infercluster_spec::layout::{CPU_F32, Reduction};
use infercluster_spec::{BatchShape, Bytes, Dtype, GpuId, Layout, Model, NodeId, Operator, SegmentKind};

use super::{CostError, CostModel};

/// Dtype of activations under a numerics profile: single precision where the profile or the weights say
/// so, 16 bits otherwise. It sizes traffic and collectives.
pub fn activation_dtype(numerics: &str, weights: Dtype) -> Dtype {
    match weights {
        _ if numerics == CPU_F32 => Dtype::F32,
        Dtype::F32 | Dtype::Tf32 => Dtype::F32,
        Dtype::F16 => Dtype::F16,
        _ => Dtype::Bf16,
    }
}

/// Prices shares of a model under one reduction.
#[derive(Clone)]
pub struct ShareCost<'a> {
    cost: &'a dyn CostModel,
    model: &'a Model,
    reduction: Reduction,
    kv_dtype: Dtype,
    activation: Dtype,
    shared: Arc<BTreeSet<GpuId>>,
}

/// Seconds of an attention segment around its kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionProjections {
    /// Traffic and the projection of queries, keys and values.
    before_s: f64,
    /// The K-slice of the output projection, in `fast`.
    after_s: f64,
}

impl<'a> ShareCost<'a> {
    /// Prices the shares of a layout's cut. `seated` are all devices that compute at the same time: those
    /// that share a node are charged what neighbours cost each other.
    pub fn new(
        cost: &'a dyn CostModel,
        model: &'a Model,
        reduction: Reduction,
        numerics: &str,
        kv_dtype: Dtype,
        seated: impl IntoIterator<Item = GpuId>,
    ) -> Result<Self, CostError> {
        if model.experts.is_some() {
            return Err(CostError::Unsupported {
                model: model.name.clone(),
                what: "routed experts",
            });
        }
        let mut nodes: BTreeMap<NodeId, BTreeSet<GpuId>> = BTreeMap::new();
        for gpu in seated {
            nodes.entry(cost.node_of(gpu)?).or_default().insert(gpu);
        }
        let shared = nodes.into_values().filter(|gpus| gpus.len() > 1).flatten();
        Ok(Self {
            cost,
            model,
            reduction,
            kv_dtype,
            activation: activation_dtype(numerics, model.dtype),
            shared: Arc::new(shared.collect()),
        })
    }

    /// Prices the shares of a layout.
    pub fn of_layout(cost: &'a dyn CostModel, layout: &Layout, model: &'a Model) -> Result<Self, CostError> {
        let seated = layout.seats().map(|(_, gpu)| gpu);
        Self::new(
            cost,
            model,
            layout.reduction,
            &layout.numerics,
            layout.kv.dtype,
            seated,
        )
    }

    /// The attention segment of one layer with that many query and KV heads.
    pub fn attention_seconds(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        query_heads: u32,
        kv_heads: u32,
    ) -> Result<f64, CostError> {
        let operators = self.attention_operators_s(gpu, shape, query_heads, kv_heads)?;
        self.corrected(gpu, SegmentKind::Attention, operators)
    }

    /// The output-row segment of one layer with that many rows (`invariant`).
    pub fn output_rows_seconds(&self, gpu: GpuId, shape: &BatchShape, rows: u32) -> Result<f64, CostError> {
        let operators = self.output_rows_operators_s(gpu, shape, rows)?;
        self.corrected(gpu, SegmentKind::OutputRows, operators)
    }

    /// The MLP segment of one layer with that many columns.
    pub fn mlp_seconds(&self, gpu: GpuId, shape: &BatchShape, columns: u32) -> Result<f64, CostError> {
        let operators = self.mlp_operators_s(gpu, shape, columns)?;
        self.corrected(gpu, SegmentKind::Mlp, operators)
    }

    /// The down-row segment of one layer with that many rows (`invariant`).
    pub fn down_rows_seconds(&self, gpu: GpuId, shape: &BatchShape, rows: u32) -> Result<f64, CostError> {
        let operators = self.down_rows_operators_s(gpu, shape, rows)?;
        self.corrected(gpu, SegmentKind::DownRows, operators)
    }

    /// The final norm and the LM head with that many vocabulary rows.
    pub fn head_seconds(&self, gpu: GpuId, shape: &BatchShape, rows: u32) -> Result<f64, CostError> {
        let operators = self.head_operators_s(gpu, shape, rows)?;
        self.corrected(gpu, SegmentKind::Head, operators)
    }

    /// Which devices share a node with another that computes at the same time.
    pub fn is_shared(&self, gpu: GpuId) -> bool {
        self.shared.contains(&gpu)
    }

    /// The cost model that prices the operators.
    pub fn cost(&self) -> &'a dyn CostModel {
        self.cost
    }

    /// Bytes of `count` activations.
    pub fn activation_bytes(&self, count: u64) -> Bytes {
        self.activation.bytes(count)
    }

    pub(crate) fn model(&self) -> &'a Model {
        self.model
    }

    pub(crate) fn reduction(&self) -> Reduction {
        self.reduction
    }

    pub(crate) fn attention_operators_s(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        query_heads: u32,
        kv_heads: u32,
    ) -> Result<f64, CostError> {
        let projections = self.attention_projections(gpu, shape.new_tokens, query_heads, kv_heads)?;
        self.with_kernels_s(projections, gpu, shape, query_heads, kv_heads)
    }

    /// What the attention segment takes around its kernels: a matter of tokens alone.
    pub(crate) fn attention_projections(
        &self,
        gpu: GpuId,
        tokens: u64,
        query_heads: u32,
        kv_heads: u32,
    ) -> Result<AttentionProjections, CostError> {
        let (hidden, width) = (self.hidden(), u64::from(self.model.head_dim));
        let (queries, keys) = (u64::from(query_heads) * width, u64::from(kv_heads) * width);
        // Residual add reads two vectors and writes one, the norm reads and writes one; rotation reads and
        // writes queries and keys; keys and values go to the cache.
        let traffic = 5 * hidden + 2 * (queries + keys) + 2 * keys;
        let before_s =
            self.traffic_s(gpu, tokens, traffic)? + self.gemm_s(gpu, tokens, queries + 2 * keys, hidden)?;
        let after_s = match self.reduction {
            Reduction::Fast => self.gemm_s(gpu, tokens, hidden, queries)?,
            Reduction::Invariant => 0.0,
        };
        Ok(AttentionProjections { before_s, after_s })
    }

    /// The attention segment, its kernels put between what surrounds them.
    pub(crate) fn with_kernels_s(
        &self,
        projections: AttentionProjections,
        gpu: GpuId,
        shape: &BatchShape,
        query_heads: u32,
        kv_heads: u32,
    ) -> Result<f64, CostError> {
        let head_dim = self.model.head_dim;
        let prefill = Operator::AttentionPrefill {
            query_heads,
            kv_heads,
            head_dim,
            new_tokens: shape.prefill_new,
            score_pairs: shape.prefill_score_pairs,
            kv_tokens: shape.prefill_kv_tokens,
        };
        let decode = Operator::AttentionDecode {
            query_heads,
            kv_heads,
            head_dim,
            sequences: shape.decode_sequences,
            kv_tokens: shape.decode_kv_tokens,
        };
        Ok(projections.before_s
            + self.cost.operator_seconds(gpu, self.kv_dtype, &prefill)?
            + self.cost.operator_seconds(gpu, self.kv_dtype, &decode)?
            + projections.after_s)
    }

    pub(crate) fn output_rows_operators_s(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        rows: u32,
    ) -> Result<f64, CostError> {
        let inputs = u64::from(self.model.query_heads) * u64::from(self.model.head_dim);
        self.gemm_s(gpu, shape.new_tokens, u64::from(rows), inputs)
    }

    pub(crate) fn mlp_operators_s(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        columns: u32,
    ) -> Result<f64, CostError> {
        let (tokens, hidden, columns) = (shape.new_tokens, self.hidden(), u64::from(columns));
        // Residual and norm as before; the activation reads gate and up and writes one.
        let mut seconds = self.traffic_s(gpu, tokens, 5 * hidden + 3 * columns)?
            + self.gemm_s(gpu, tokens, 2 * columns, hidden)?;
        if self.reduction == Reduction::Fast {
            seconds += self.gemm_s(gpu, tokens, hidden, columns)?;
        }
        Ok(seconds)
    }

    pub(crate) fn down_rows_operators_s(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        rows: u32,
    ) -> Result<f64, CostError> {
        self.gemm_s(gpu, shape.new_tokens, u64::from(rows), u64::from(self.model.ffn))
    }

    pub(crate) fn head_operators_s(
        &self,
        gpu: GpuId,
        shape: &BatchShape,
        rows: u32,
    ) -> Result<f64, CostError> {
        let hidden = self.hidden();
        Ok(self.traffic_s(gpu, shape.logits_rows, 2 * hidden)?
            + self.gemm_s(gpu, shape.logits_rows, u64::from(rows), hidden)?)
    }

    fn corrected(&self, gpu: GpuId, kind: SegmentKind, operators_s: f64) -> Result<f64, CostError> {
        let correction = self.cost.segment_correction(gpu, kind, self.is_shared(gpu))?;
        Ok(correction.apply(operators_s))
    }

    fn gemm_s(&self, gpu: GpuId, m: u64, n: u64, k: u64) -> Result<f64, CostError> {
        self.cost
            .operator_seconds(gpu, self.model.dtype, &Operator::Gemm { m, n, k })
    }

    fn traffic_s(&self, gpu: GpuId, tokens: u64, values_per_token: u64) -> Result<f64, CostError> {
        let bytes = self.activation_bytes(tokens.saturating_mul(values_per_token));
        self.cost
            .operator_seconds(gpu, self.activation, &Operator::Elementwise { bytes })
    }

    fn hidden(&self) -> u64 {
        u64::from(self.model.hidden)
    }
}
