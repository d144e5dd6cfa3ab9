//! The operators that a step is made of: what the cost model predicts and what `profile` measures.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, ReplicaId, StageId};
use crate::json::Document;
use crate::layout::Layout;
use crate::model::Dtype;
use crate::units::{Bytes, Flops, Fraction};

/// One operator with its shape, on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "operator", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Operator {
    /// `[m, k] x [n, k]^T`: `m` tokens, `n` weight rows, `k` inputs.
    Gemm {
        /// Tokens.
        m: u64,
        /// Weight rows.
        n: u64,
        /// Inputs of a row.
        k: u64,
    },
    /// Attention of new tokens over themselves and what is cached before them.
    AttentionPrefill {
        /// Query heads on this rank.
        query_heads: u32,
        /// KV heads on this rank.
        kv_heads: u32,
        /// Width of a head.
        head_dim: u32,
        /// New tokens of all sequences.
        new_tokens: u64,
        /// Sum over sequences of (query, key) pairs that the causal mask leaves: new x cached +
        /// new x (new + 1) / 2. Kept as a sum of squares, since a mean shape is wrong.
        score_pairs: u64,
        /// Cached and new tokens of all sequences.
        kv_tokens: u64,
    },
    /// Attention of one new token a sequence.
    AttentionDecode {
        /// Query heads on this rank.
        query_heads: u32,
        /// KV heads on this rank.
        kv_heads: u32,
        /// Width of a head.
        head_dim: u32,
        /// Sequences.
        sequences: u64,
        /// Tokens in the cache of all sequences together.
        kv_tokens: u64,
    },
    /// Norms, rotations, activations and residuals: memory traffic of this many bytes.
    Elementwise {
        /// Bytes read and written.
        bytes: Bytes,
    },
    /// A copy inside device memory.
    Copy {
        /// Bytes copied.
        bytes: Bytes,
    },
    /// One message between two ranks.
    Transfer {
        /// Bytes of the message.
        bytes: Bytes,
    },
    /// Sum over ranks, the result on all.
    AllReduce {
        /// Ranks.
        ranks: u32,
        /// Bytes of one rank's vector.
        bytes: Bytes,
    },
    /// Uneven gather, the result on all.
    AllGather {
        /// Ranks.
        ranks: u32,
        /// Bytes of the largest share, which paces it.
        largest: Bytes,
        /// Bytes of all shares.
        total: Bytes,
    },
    /// Host work of one step: scheduling, launch, sampling.
    HostStep {
        /// Sequences in the step.
        sequences: u64,
    },
}

impl Operator {
    /// Useful floating-point operations (multiply-add is two); past 64 bits the count stays at its limit.
    pub fn flops(&self) -> Flops {
        match *self {
            Self::Gemm { m, n, k } => Flops(m.saturating_mul(n).saturating_mul(k).saturating_mul(2)),
            Self::AttentionPrefill {
                query_heads,
                head_dim,
                score_pairs,
                ..
            } => Flops(
                (4 * u64::from(query_heads))
                    .saturating_mul(u64::from(head_dim))
                    .saturating_mul(score_pairs),
            ),
            Self::AttentionDecode {
                query_heads,
                head_dim,
                kv_tokens,
                ..
            } => Flops(
                (4 * u64::from(query_heads))
                    .saturating_mul(u64::from(head_dim))
                    .saturating_mul(kv_tokens),
            ),
            _ => Flops(0),
        }
    }
}

/// One measured operator.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// What ran.
    #[serde(flatten)]
    pub operator: Operator,
    /// Dtype of the weights or the cache.
    pub dtype: Dtype,
    /// Median time in seconds.
    pub median_s: f64,
    /// 10th percentile in seconds.
    pub p10_s: f64,
    /// 90th percentile in seconds.
    pub p90_s: f64,
    /// How often it ran.
    pub samples: u32,
}

/// What `profile` writes: measurements of one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Key into the cluster's device types.
    pub device_type: String,
    /// Where the figures come from.
    pub provenance: Provenance,
    /// The rows.
    pub measurements: Vec<Measurement>,
}

impl Document for Profile {
    const SCHEMA: &'static str = "infercluster-profile/1";
}

/// Where figures come from.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Provenance {
    /// What the device calls itself.
    pub device_name: String,
    /// Driver, library or kernel set.
    pub driver: String,
    /// Day of the measurement, `YYYY-MM-DD`.
    pub date: String,
    /// File, publication or command.
    pub source: String,
    /// Speed factor under which it was measured, where the device is emulated: its times are divided by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub emulated_speed: Option<Fraction>,
}

/// What one step computes on a stage: sums over its sequences, since a mean shape is wrong for attention.
/// [`BatchShape::add_prefill`] and [`BatchShape::add_decode`] keep the sums consistent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchShape {
    /// Tokens of the one GEMM, prefill and decode together.
    pub new_tokens: u64,
    /// New tokens that belong to prefill chunks.
    pub prefill_new: u64,
    /// (query, key) pairs of the prefill chunks that the causal mask leaves.
    pub prefill_score_pairs: u64,
    /// Cached and new tokens of the sequences in prefill.
    pub prefill_kv_tokens: u64,
    /// Sequences that decode one token.
    pub decode_sequences: u64,
    /// Tokens in the cache of the decoding sequences, the new one included.
    pub decode_kv_tokens: u64,
    /// Positions whose logits are wanted: decoding sequences and prefills that end in this step.
    pub logits_rows: u64,
}

impl BatchShape {
    /// Adds a prefill chunk of `new` tokens after `cached` ones; `wants_logits` where it ends its prompt.
    pub fn add_prefill(&mut self, new: u64, cached: u64, wants_logits: bool) {
        self.new_tokens += new;
        self.prefill_new += new;
        self.prefill_score_pairs += new * cached + new * (new + 1) / 2;
        self.prefill_kv_tokens += new + cached;
        self.logits_rows += u64::from(wants_logits);
    }

    /// Adds a sequence that decodes one token with `context` tokens in the cache, that token included.
    pub fn add_decode(&mut self, context: u64) {
        self.new_tokens += 1;
        self.decode_sequences += 1;
        self.decode_kv_tokens += context;
        self.logits_rows += 1;
    }
}

/// A stretch of work between two synchronisations of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind {
    /// Norm, QKV projection, attention; in `fast` the K-slice of the output projection too.
    Attention,
    /// Rows of the output projection (`invariant` only).
    OutputRows,
    /// Norm, gate and up projection, activation; in `fast` the K-slice of the down projection too.
    Mlp,
    /// Rows of the down projection (`invariant` only).
    DownRows,
    /// Final norm and rows of the LM head; in a measured step, whatever follows the last collective.
    Head,
}

impl SegmentKind {
    /// Every kind, in the order of a step.
    pub const ALL: [Self; 5] = [
        Self::Attention,
        Self::OutputRows,
        Self::Mlp,
        Self::DownRows,
        Self::Head,
    ];
}

/// What one rank did in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankStep {
    /// The device.
    pub gpu: GpuId,
    /// Compute seconds by segment kind, summed over the layers. Pacing of an emulated device belongs to
    /// them, waiting for other ranks does not.
    pub compute_s: BTreeMap<SegmentKind, f64>,
}

/// One measured step of one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// Which copy of the model.
    pub replica: ReplicaId,
    /// Which of its stages.
    pub stage: StageId,
    /// What was computed.
    pub shape: BatchShape,
    /// Wall seconds, from the hand-over to the stage (for a first stage: the decision to run the step) to
    /// its result (for a last stage: the chosen tokens at the coordinator).
    pub wall_s: f64,
    /// What each rank did, in rank order.
    pub ranks: Vec<RankStep>,
}

/// Measured steps of one run under one layout: what the executor writes and `calibrate` reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRun {
    /// The layout that ran.
    pub layout: Layout,
    /// Its steps.
    pub steps: Vec<StepRecord>,
}

impl Document for StepRun {
    const SCHEMA: &'static str = "infercluster-steps/1";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_sums_squares_per_sequence() {
        let mut shape = BatchShape::default();
        // Four new tokens after ten: pairs 11 + 12 + 13 + 14 = 50.
        shape.add_prefill(4, 10, false);
        // Three new tokens after none: 1 + 2 + 3 = 6.
        shape.add_prefill(3, 0, true);
        shape.add_decode(100);
        let expected = BatchShape {
            new_tokens: 8,
            prefill_new: 7,
            prefill_score_pairs: 56,
            prefill_kv_tokens: 17,
            decode_sequences: 1,
            decode_kv_tokens: 100,
            logits_rows: 2,
        };
        assert_eq!(shape, expected);
    }
}
