//! Models as commands take them: a model file, a Hugging Face `config.json`, or a folder that holds one.

use std::path::Path;

use anyhow::{Context as _, bail};
use infercluster_inventory::ModelConfig;
use infercluster_inventory::config::{self, PARAMS_LIMIT};
use infercluster_spec::{Model, json};
use serde_json::Value;

use crate::io;

/// Reads a model; a model file of this program names no end-of-sequence tokens.
pub(crate) fn read(path: &Path) -> anyhow::Result<ModelConfig> {
    if path.is_dir() {
        return Ok(config::load(path)?);
    }
    of_text(path, &io::read_text(path, io::DOCUMENT_LIMIT)?)
}

/// Reads a model from the text of the file at `path`.
pub(crate) fn of_text(path: &Path, text: &str) -> anyhow::Result<ModelConfig> {
    let name = io::name_of(path);
    if !is_own_document(text) {
        return Ok(config::read(&name, &stem(path), text)?);
    }
    let model: Model = json::read(&name, text)?;
    check(&model).with_context(|| name)?;
    Ok(ModelConfig {
        torch_dtype: Some(model.dtype),
        model,
        eos_ids: Vec::new(),
        bos_id: None,
        assumed: Vec::new(),
    })
}

/// Whether a text says that it is a document of this program; a broken one is left to the reader's message.
pub(crate) fn is_own_document(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|value| value.get("schema").is_some())
}

/// The model's name where the file does not give one: `config.json` says nothing, its folder does.
pub(crate) fn stem(path: &Path) -> String {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let stem = whole.file_stem().filter(|stem| *stem != "config" && *stem != "-");
    let name = stem.or_else(|| whole.parent()?.file_name());
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Checks the dimensions of a document, as the reader of configs does for its own: counts and bytes that follow
/// from them fit 64 bits, and heads divide.
pub(crate) fn check(model: &Model) -> anyhow::Result<()> {
    let counts = [
        ("layers", model.layers),
        ("hidden", model.hidden),
        ("query_heads", model.query_heads),
        ("kv_heads", model.kv_heads),
        ("head_dim", model.head_dim),
        ("ffn", model.ffn),
        ("vocab", model.vocab),
        ("max_positions", model.max_positions),
    ];
    if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
        bail!("field `{field}` is 0, at least 1 is needed");
    }
    if !model.query_heads.is_multiple_of(model.kv_heads) {
        bail!(
            "{} KV heads do not divide {} query heads",
            model.kv_heads,
            model.query_heads
        );
    }
    if model.head_dim % 2 == 1 {
        bail!(
            "a head of width {} cannot be rotated, the width must be even",
            model.head_dim
        );
    }
    let numbers = numbers(model);
    if numbers.is_none_or(|numbers| numbers > u128::from(PARAMS_LIMIT)) {
        bail!("its weights and the cache of one sequence hold more than {PARAMS_LIMIT} numbers, the limit");
    }
    Ok(())
}

/// Parameters and the cache of one full sequence, a little rounded up; `None` past 128 bits.
fn numbers(model: &Model) -> Option<u128> {
    let wide = |count: u32| u128::from(count) + 2;
    let (experts, ffn) = model
        .experts
        .map_or((1, model.ffn), |experts| (experts.count, experts.ffn));
    let heads = (2 * (wide(model.query_heads) + wide(model.kv_heads))).checked_mul(wide(model.head_dim))?;
    let mlp = 3_u128.checked_mul(wide(ffn))?.checked_mul(wide(experts))?;
    let layer = wide(model.hidden).checked_mul(heads.checked_add(mlp)?)?;
    let cache = heads.checked_mul(wide(model.max_positions))?;
    let tables = 2 * wide(model.vocab) * wide(model.hidden);
    wide(model.layers)
        .checked_mul(layer.checked_add(cache)?)?
        .checked_add(tables)
}
