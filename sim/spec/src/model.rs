//! The model: dimensions that a plan needs, and the bytes and operations that follow from them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::json::Document;
use crate::units::Bytes;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// Tensor-core rounding of single.
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 8-bit float.
    Fp8,
    /// 8-bit integer.
    Int8,
    /// 4-bit float.
    Fp4,
    /// 4-bit integer.
    Int4,
}

impl Dtype {
    /// Every dtype, widest first.
    pub const ALL: [Self; 8] = [
        Self::F32,
        Self::Tf32,
        Self::Bf16,
        Self::F16,
        Self::Fp8,
        Self::Int8,
        Self::Fp4,
        Self::Int4,
    ];

    /// Bits of one stored number, scales of block formats not counted.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F32 | Self::Tf32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::Fp8 | Self::Int8 => 8,
            Self::Fp4 | Self::Int4 => 4,
        }
    }

    /// Bytes of `count` stored numbers, rounded up to whole bytes.
    pub fn bytes(self, count: u64) -> Bytes {
        Bytes(
            (u128::from(count) * u128::from(self.bits()))
                .div_ceil(8)
                .try_into()
                .expect("tensor fits 64 bits"),
        )
    }

    /// The name that files use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Fp4 => "fp4",
            Self::Int4 => "int4",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = String;
    /// Accepts the file names and the long names of Hugging Face configs (`bfloat16`, `float32`, ...).
    fn from_str(text: &str) -> Result<Self, String> {
        let long = match text {
            "float32" | "float" => "f32",
            "bfloat16" => "bf16",
            "float16" | "half" => "f16",
            "float8_e4m3fn" | "float8" => "fp8",
            other => other,
        };
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == long)
            .ok_or_else(|| {
                format!(
                    "`{text}` is no dtype, known are {}",
                    Self::ALL.map(Self::name).join(", ")
                )
            })
    }
}

/// How the layers compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Family {
    /// Llama 2 and 3, and what shares their layer.
    Llama,
    /// Qwen2: Llama with q/k/v bias.
    Qwen2,
    /// Qwen3: Llama with q/k norms.
    Qwen3,
    /// Mistral: Llama with a sliding window.
    Mistral,
}

/// How positions turn query and key vectors (rotate-half form).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Llama 3's stretching of low frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llama3: Option<Llama3RopeScaling>,
}

/// Parameters of `rope_type: llama3`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3RopeScaling {
    /// Stretch of wavelengths past the original context.
    pub factor: f64,
    /// Wavelengths above `original / low_freq_factor` are stretched in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original / high_freq_factor` stay.
    pub high_freq_factor: f64,
    /// Context length of pre-training.
    pub original_max_position: u32,
}

/// Experts of a mixture; `None` in [`Model::experts`] for a dense model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Routed experts a layer.
    pub count: u32,
    /// Experts a token uses.
    pub per_token: u32,
    /// MLP columns of one expert.
    pub ffn: u32,
}

/// A decoder-only transformer with grouped-query attention and a gated MLP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A name for reports.
    pub name: String,
    /// How the layers compute.
    pub family: Family,
    /// Decoder layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub query_heads: u32,
    /// Key/value heads; divides `query_heads`.
    pub kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// MLP columns (width between gate/up and down).
    pub ffn: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Whether the LM head is the embedding table.
    pub tied_embeddings: bool,
    /// Whether q, k and v projections have a bias.
    pub qkv_bias: bool,
    /// Epsilon of the RMS norms.
    pub rms_epsilon: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Longest context.
    pub max_positions: u32,
    /// How weights are stored.
    pub dtype: Dtype,
    /// Experts of a mixture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Attention window, where layers have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<u32>,
}

impl Document for Model {
    const SCHEMA: &'static str = "infercluster-model/1";
}

impl Model {
    /// Query heads that share one KV head.
    pub fn group_size(&self) -> u32 {
        self.query_heads / self.kv_heads
    }

    /// Parameters of one layer, norms and biases included.
    pub fn layer_params(&self) -> u64 {
        let (hidden, head_dim) = (u64::from(self.hidden), u64::from(self.head_dim));
        let (queries, keys) = (
            u64::from(self.query_heads) * head_dim,
            u64::from(self.kv_heads) * head_dim,
        );
        let attention = 2 * hidden * queries + 2 * hidden * keys;
        let bias = if self.qkv_bias { queries + 2 * keys } else { 0 };
        let head_norms = if self.family == Family::Qwen3 {
            2 * head_dim
        } else {
            0
        };
        let mlp = match self.experts {
            None => 3 * hidden * u64::from(self.ffn),
            Some(experts) => u64::from(experts.count) * (3 * hidden * u64::from(experts.ffn) + hidden),
        };
        attention + bias + head_norms + mlp + 2 * hidden
    }

    /// Parameters of the whole model; a tied table counts once.
    pub fn params(&self) -> u64 {
        let table = u64::from(self.vocab) * u64::from(self.hidden);
        let tables = if self.tied_embeddings { table } else { 2 * table };
        tables + u64::from(self.layers) * self.layer_params() + u64::from(self.hidden)
    }

    /// Weight bytes in the stored dtype.
    pub fn weight_bytes(&self) -> Bytes {
        self.dtype.bytes(self.params())
    }

    /// KV bytes of one token in one layer for `kv_heads` heads stored as `dtype`: key and value.
    pub fn kv_bytes_per_token_layer(&self, kv_heads: u32, dtype: Dtype) -> Bytes {
        dtype.bytes(2 * u64::from(kv_heads) * u64::from(self.head_dim))
    }

    /// KV bytes of one token in all layers.
    pub fn kv_bytes_per_token(&self, dtype: Dtype) -> Bytes {
        self.kv_bytes_per_token_layer(self.kv_heads, dtype) * u64::from(self.layers)
    }
}
