//! A config read under the many names that families have for one thing, with the family's defaults for
//! what is absent.

use infercluster_spec::model::Dtype;
use serde_json::{Map, Value};

use super::super::fields::{Fields, brief};
use super::table::{Assumed, Row};
use crate::error::InventoryError;

/// Every name that published configs have for one number.
pub(super) type Names = &'static [&'static str];

pub(super) const LAYERS: Names = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
pub(super) const HIDDEN: Names = &["hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "dim"];
pub(super) const HEADS: Names = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
pub(super) const KV_HEADS: Names = &[
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "kv_n_heads",
];
pub(super) const HEAD_DIM: Names = &["head_dim", "attention_head_dim", "kv_channels", "d_kv"];
pub(super) const FFN: Names = &[
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "block_ff_dim",
    "d_ff",
    "intermediate_dim",
];
pub(super) const VOCAB: Names = &["vocab_size", "padded_vocab_size", "n_vocab"];
pub(super) const POSITIONS: Names = &[
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
];
pub(super) const EXPERTS: Names = &[
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
];
pub(super) const EXPERTS_PER_TOKEN: Names = &[
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
];
pub(super) const EXPERT_FFN: Names = &["moe_intermediate_size", "expert_ffn_hidden_size"];
pub(super) const SHARED_EXPERTS: Names = &[
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
];
pub(super) const SHARED_FFN: Names = &[
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
];

/// The language model's object of a config.
pub(super) struct Keys<'a> {
    fields: Fields<'a>,
    row: Option<&'static Row>,
    notes: Vec<String>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(fields: Fields<'a>, row: Option<&'static Row>) -> Self {
        Self {
            fields,
            row,
            notes: Vec::new(),
        }
    }

    pub(super) fn fields(&self) -> &Fields<'a> {
        &self.fields
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Keys that defaults stand for, and notes.
    pub(super) fn into_parts(self) -> (Vec<&'static str>, Vec<String>) {
        (self.fields.into_assumed(), self.notes)
    }

    /// A number of at least one under any of its names, the family's default where it is absent.
    pub(super) fn count(&mut self, names: Names) -> Result<Option<u32>, InventoryError> {
        let Some(name) = names.iter().find(|name| self.fields.has(name)) else {
            return Ok(self.assumed_count(names));
        };
        match self.fields.get(name) {
            Some(Value::Array(values)) => self.uniform(name, values),
            _ => self.fields.count(name).map(Some),
        }
    }

    /// As [`Keys::count`], where zero is a way to say that there is none.
    pub(super) fn count_or_none(&mut self, names: Names) -> Result<Option<u32>, InventoryError> {
        let zero = |value: &Value| value.as_u64() == Some(0);
        match names.iter().find(|name| self.fields.has(name)) {
            Some(name) if self.fields.get(name).is_some_and(zero) => Ok(None),
            _ => Ok(self.count(names)?.filter(|count| *count > 0)),
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool, InventoryError> {
        let assumed = self.row.and_then(|row| row.defaults.get(key));
        let assumed = matches!(assumed, Some(Assumed::Flag(true)));
        Ok(self.fields.flag(key)?.unwrap_or(assumed))
    }

    /// A flag whose default is worth telling.
    pub(super) fn told_flag(&mut self, key: &'static str) -> Result<Option<bool>, InventoryError> {
        if let Some(found) = self.fields.flag(key)? {
            return Ok(Some(found));
        }
        match self.row.and_then(|row| row.defaults.get(key)) {
            Some(Assumed::Flag(flag)) => {
                self.fields.assume(key);
                Ok(Some(*flag))
            }
            _ => Ok(None),
        }
    }

    /// The entries of a list; `None` where it is absent.
    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, InventoryError> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(other) => Err(self.fields.bad(key, brief(other), "a list or null")),
        }
    }

    /// A value as the table of families writes it in `unless`.
    pub(super) fn says(&self, key: &str, text: &str) -> bool {
        let found = match self.fields.get(key).filter(|value| !value.is_null()) {
            Some(value) => value.to_string(),
            None => match self.row.and_then(|row| row.defaults.get(key)) {
                Some(Assumed::Flag(flag)) => flag.to_string(),
                Some(Assumed::Count(count)) => count.to_string(),
                None => return false,
            },
        };
        found == text
    }

    /// The stored precision that the file names; one that nothing here stores is noted.
    pub(super) fn dtype(&mut self) -> Option<Dtype> {
        match self.fields.dtype() {
            Ok(found) => found,
            Err(error) => {
                self.notes.push(error.to_string());
                None
            }
        }
    }

    fn assumed_count(&mut self, names: Names) -> Option<u32> {
        let row = self.row?;
        let found = names.iter().find_map(|name| match row.defaults.get(*name) {
            Some(Assumed::Count(count)) => Some(*count),
            _ => None,
        })?;
        self.fields.assume(names[0]);
        Some(found)
    }

    /// A list of one number a layer: that number where all are equal, else a note.
    fn uniform(&mut self, name: &str, values: &[Value]) -> Result<Option<u32>, InventoryError> {
        let expected = "a whole number from 1 to 2147483647 or a list of them";
        let mut counts = values.iter().map(|value| {
            let count = value
                .as_u64()
                .filter(|count| (1..=i32::MAX as u64).contains(count));
            count.ok_or_else(|| self.fields.bad(name, brief(value), expected))
        });
        let Some(first) = counts.next().transpose()? else {
            return Err(self.fields.bad(name, "[]".to_owned(), expected));
        };
        let mut equal = true;
        for count in counts {
            equal &= count? == first;
        }
        if equal {
            return Ok(Some(first as u32));
        }
        self.notes.push(format!("`{name}` differs from layer to layer"));
        Ok(None)
    }
}

/// The object with those of its parts laid beside its own keys that some families put a level deeper.
pub(super) fn flattened(object: &Map<String, Value>) -> Map<String, Value> {
    let mut flat = object.clone();
    for part in ["attn_config", "ffn_config"] {
        let Some(Value::Object(inner)) = object.get(part) else {
            continue;
        };
        for (key, value) in inner.iter().filter(|(key, _)| *key != "model_type") {
            flat.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    flat
}
