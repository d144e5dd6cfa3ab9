//! Small models for unit tests.

use infercluster_spec::model::{Family, Rope};
use infercluster_spec::{Dtype, Model};

/// A dense model with those counts, heads of 8, width 96 and 50 words.
pub(crate) fn model(layers: u32, query_heads: u32, kv_heads: u32, ffn: u32) -> Model {
    Model {
        name: "tiny".to_owned(),
        family: Family::Llama,
        layers,
        hidden: 96,
        query_heads,
        kv_heads,
        head_dim: 8,
        ffn,
        vocab: 50,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            llama3: None,
        },
        max_positions: 512,
        dtype: Dtype::F32,
        experts: None,
        sliding_window: None,
    }
}
