//! The operators that a step is made of: what the cost model predicts and what `profile` measures.

use serde::{Deserialize, Serialize};

use crate::json::Document;
use crate::model::Dtype;
use crate::units::{Bytes, Flops};

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
    /// Useful floating-point operations (multiply-add is two).
    pub fn flops(&self) -> Flops {
        match *self {
            Self::Gemm { m, n, k } => Flops(2 * m * n * k),
            Self::AttentionPrefill {
                query_heads,
                head_dim,
                score_pairs,
                ..
            } => Flops(4 * u64::from(query_heads) * u64::from(head_dim) * score_pairs),
            Self::AttentionDecode {
                query_heads,
                head_dim,
                kv_tokens,
                ..
            } => Flops(4 * u64::from(query_heads) * u64::from(head_dim) * kv_tokens),
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
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
    /// Speed factor, where the device is emulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub emulated_speed: Option<String>,
}
