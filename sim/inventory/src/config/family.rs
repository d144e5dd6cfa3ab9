//! Families as rows of data: their names, and what their config classes assume for absent keys.

use infercluster_spec::model::Family;
use serde_json::Value;

use super::fields::{Fields, brief};
use crate::error::InventoryError;

/// Names and defaults of one family, as its configuration class in `transformers` has them.
#[derive(Debug)]
pub(super) struct FamilyRow {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) family: Family,
    /// `None`: as many as query heads.
    pub(super) kv_heads: Option<u32>,
    /// `None`: hidden size over query heads.
    pub(super) head_dim: Option<u32>,
    pub(super) tied_embeddings: bool,
    pub(super) qkv_bias: bool,
    pub(super) rms_epsilon: f64,
    pub(super) rope_theta: f64,
    pub(super) max_positions: u32,
    pub(super) sliding_window: Option<u32>,
    pub(super) window_needs_flag: bool,
}

const LLAMA: FamilyRow = FamilyRow {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    family: Family::Llama,
    kv_heads: None,
    head_dim: None,
    tied_embeddings: false,
    qkv_bias: false,
    rms_epsilon: 1e-6,
    rope_theta: 10_000.0,
    max_positions: 2048,
    sliding_window: None,
    window_needs_flag: false,
};

pub(super) const FAMILIES: [FamilyRow; 4] = [
    LLAMA,
    FamilyRow {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        family: Family::Qwen2,
        qkv_bias: true,
        max_positions: 32_768,
        sliding_window: Some(4096),
        window_needs_flag: true,
        ..LLAMA
    },
    FamilyRow {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        family: Family::Qwen3,
        head_dim: Some(128),
        max_positions: 32_768,
        sliding_window: Some(4096),
        window_needs_flag: true,
        ..LLAMA
    },
    FamilyRow {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        family: Family::Mistral,
        kv_heads: Some(8),
        max_positions: 131_072,
        sliding_window: Some(4096),
        ..LLAMA
    },
];

/// The family that a config names. Where it gives both `model_type` and `architectures`, both must agree:
/// a classifier or a vision model on a Llama trunk is not the Llama that generates.
pub(super) fn of(fields: &Fields) -> Result<&'static FamilyRow, InventoryError> {
    let model_type = fields.text("model_type")?;
    let architectures = fields.get("architectures").filter(|value| !value.is_null());
    let architecture = architectures.map(|value| {
        let first = value.as_array().and_then(|names| names.first());
        (first.and_then(Value::as_str), brief(value))
    });
    let unknown = |field, found| InventoryError::UnknownArchitecture {
        file: fields.file().to_owned(),
        field,
        found,
        known: FAMILIES
            .iter()
            .map(|row| format!("{} ({})", row.model_type, row.architecture))
            .collect::<Vec<_>>()
            .join(", "),
    };
    match (model_type, architecture) {
        (None, None) => Err(unknown("model_type", "absent".to_owned())),
        (Some(name), architecture) => {
            let row = FAMILIES
                .iter()
                .find(|row| row.model_type == name)
                .ok_or_else(|| unknown("model_type", format!("\"{name}\"")))?;
            match architecture {
                Some((first, found)) if first != Some(row.architecture) => {
                    Err(unknown("architectures", found))
                }
                _ => Ok(row),
            }
        }
        (None, Some((first, found))) => FAMILIES
            .iter()
            .find(|row| Some(row.architecture) == first)
            .ok_or_else(|| unknown("architectures", found)),
    }
}
