//! Hugging Face `config.json` to [`Model`].
//!
//! A family is a row of data ([`family::FAMILIES`]): its names and what its config class assumes for keys
//! that a file leaves out. What such a row filled in is listed in [`ModelConfig::assumed`]. A key that would
//! change the computation in a way that [`Model`] cannot say is an error, never ignored.

mod card;
mod family;
mod fields;
pub(crate) mod relaxed;

use std::io::Read;
use std::path::Path;

use infercluster_spec::json;
use infercluster_spec::model::{Dtype, Llama3RopeScaling, Model, Rope};
use serde_json::{Map, Value};

use crate::error::InventoryError;
use family::FamilyRow;
use fields::Fields;

pub use card::{ModelCard, read_card};

/// Longest config that is read; real ones stay below 100 kB.
const FILE_LIMIT: u64 = 16 << 20;
/// Most parameters that a model may have, so that bytes and operations of it fit 64 bits.
pub const PARAMS_LIMIT: u64 = 1 << 50;

/// What a `config.json` says.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Dimensions and numerics.
    pub model: Model,
    /// Tokens that end a sequence; empty where the file names none.
    pub eos_ids: Vec<u32>,
    /// Token that starts a sequence.
    pub bos_id: Option<u32>,
    /// What the file says about the stored precision, before quantisation.
    pub torch_dtype: Option<Dtype>,
    /// Keys that the file leaves out and the family's defaults filled in, in the order of reading.
    pub assumed: Vec<&'static str>,
}

/// Reads the `config.json` at `path`, or the one inside where `path` is a directory.
///
/// The model takes the name of the directory, or of the file where that is not called `config.json`.
pub fn load(path: &Path) -> Result<ModelConfig, InventoryError> {
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    };
    let label = file.display().to_string();
    let io = |source| InventoryError::Io {
        file: label.clone(),
        source,
    };
    let mut text = String::new();
    let handle = std::fs::File::open(&file).map_err(io)?;
    handle
        .take(FILE_LIMIT + 1)
        .read_to_string(&mut text)
        .map_err(io)?;
    if text.len() as u64 > FILE_LIMIT {
        return Err(InventoryError::FileTooLong {
            file: label,
            kind: "config.json",
            found: text.len() as u64,
            limit: FILE_LIMIT,
        });
    }
    read(&label, &model_name(&file), &text)
}

fn model_name(file: &Path) -> String {
    let whole = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let stem = whole.file_stem().filter(|stem| *stem != "config");
    let name = stem.or_else(|| whole.parent().and_then(Path::file_name));
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Reads the text of a config; `file` is only the name that errors carry.
///
/// ```
/// let text = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
///     "num_attention_heads": 4, "intermediate_size": 128, "torch_dtype": "float32"}"#;
/// let config = infercluster_inventory::config::read("config.json", "tiny", text)?;
/// assert_eq!((config.model.head_dim, config.model.kv_heads), (16, 4));
/// assert!(config.assumed.contains(&"num_key_value_heads"));
/// # Ok::<(), infercluster_inventory::InventoryError>(())
/// ```
pub fn read(file: &str, name: &str, text: &str) -> Result<ModelConfig, InventoryError> {
    let value = parse(file, text)?;
    let object = whole_object(file, &value)?;
    let mut fields = Fields::new(file, object);
    let row = family::of(&fields)?;
    refuse_what_no_model_says(&fields, row)?;
    let model = model(name, row, &mut fields)?;
    check_size(file, &model)?;
    Ok(ModelConfig {
        eos_ids: fields.token_ids("eos_token_id")?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        torch_dtype: fields.dtype()?,
        assumed: fields.into_assumed(),
        model,
    })
}

/// The JSON value of a config, with bare `Infinity` and `NaN` as texts.
fn parse(file: &str, text: &str) -> Result<Value, InventoryError> {
    serde_json::from_str(&relaxed::quote_non_finite(text)).map_err(|error| InventoryError::Syntax {
        file: file.to_owned(),
        line: error.line(),
        column: error.column(),
        message: json::message_of(&error),
    })
}

fn whole_object<'a>(file: &str, value: &'a Value) -> Result<&'a Map<String, Value>, InventoryError> {
    value.as_object().ok_or_else(|| InventoryError::BadField {
        file: file.to_owned(),
        field: "the whole file".to_owned(),
        found: fields::brief(value),
        expected: "a JSON object".to_owned(),
    })
}

fn model(name: &str, row: &FamilyRow, fields: &mut Fields) -> Result<Model, InventoryError> {
    let layers = fields.count("num_hidden_layers")?;
    let hidden = fields.count("hidden_size")?;
    let query_heads = fields.count("num_attention_heads")?;
    let kv_heads = fields.count_or("num_key_value_heads", row.kv_heads.unwrap_or(query_heads))?;
    fields.divides(
        "num_attention_heads",
        query_heads,
        "num_key_value_heads",
        kv_heads,
    )?;
    let head_dim = head_dim(row, fields, hidden, query_heads)?;
    Ok(Model {
        name: name.to_owned(),
        family: row.family,
        layers,
        hidden,
        query_heads,
        kv_heads,
        head_dim,
        ffn: fields.count("intermediate_size")?,
        vocab: fields.count("vocab_size")?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", row.tied_embeddings)?,
        qkv_bias: row.qkv_bias,
        rms_epsilon: fields.positive_or("rms_norm_eps", row.rms_epsilon)?,
        rope: rope(row, fields)?,
        max_positions: fields.count_or("max_position_embeddings", row.max_positions)?,
        dtype: stored_dtype(fields)?,
        experts: None,
        sliding_window: sliding_window(row, fields)?,
    })
}

fn head_dim(
    row: &FamilyRow,
    fields: &mut Fields,
    hidden: u32,
    query_heads: u32,
) -> Result<u32, InventoryError> {
    let head_dim = if fields.has("head_dim") {
        fields.count("head_dim")?
    } else if let Some(head_dim) = row.head_dim {
        fields.count_or("head_dim", head_dim)?
    } else {
        fields.divides("hidden_size", hidden, "num_attention_heads", query_heads)?;
        fields.count_or("head_dim", hidden / query_heads)?
    };
    // Rotary embedding turns pairs of a head's numbers.
    if !head_dim.is_multiple_of(2) {
        return Err(fields.bad("head_dim", head_dim.to_string(), "an even number"));
    }
    Ok(head_dim)
}

/// `rope_theta` and `rope_scaling` at the top, or both in `rope_parameters` (transformers 5).
fn rope(row: &FamilyRow, fields: &mut Fields) -> Result<Rope, InventoryError> {
    if let Some(mut nested) = fields.object("rope_parameters")? {
        let theta = nested.positive_or("rope_theta", row.rope_theta)?;
        let llama3 = llama3_scaling(&mut nested)?;
        return Ok(Rope { theta, llama3 });
    }
    let theta = fields.positive_or("rope_theta", row.rope_theta)?;
    let llama3 = match fields.object("rope_scaling")? {
        Some(mut nested) => llama3_scaling(&mut nested)?,
        None => None,
    };
    Ok(Rope { theta, llama3 })
}

fn llama3_scaling(nested: &mut Fields) -> Result<Option<Llama3RopeScaling>, InventoryError> {
    let key = if nested.has("rope_type") {
        "rope_type"
    } else {
        "type"
    };
    match nested.text(key)?.as_deref() {
        None | Some("default") => Ok(None),
        Some("llama3") => {
            let scaling = Llama3RopeScaling {
                factor: nested.positive("factor")?,
                low_freq_factor: nested.positive("low_freq_factor")?,
                high_freq_factor: nested.positive("high_freq_factor")?,
                original_max_position: nested.count("original_max_position_embeddings")?,
            };
            if scaling.high_freq_factor <= scaling.low_freq_factor {
                let found = scaling.high_freq_factor.to_string();
                return Err(nested.bad("high_freq_factor", found, "above low_freq_factor"));
            }
            Ok(Some(scaling))
        }
        Some(other) => Err(nested.unsupported(key, format!("\"{other}\""), "\"default\" or \"llama3\"")),
    }
}

/// The precision of the weights in the checkpoint: that of the quantisation where there is one.
fn stored_dtype(fields: &mut Fields) -> Result<Dtype, InventoryError> {
    if let Some(quantisation) = fields.object("quantization_config")? {
        let method = quantisation.text("quant_method")?;
        let bits = match quantisation.has("bits") {
            true => Some(quantisation.count("bits")?),
            false => None,
        };
        return match (method.as_deref(), bits) {
            (Some("fp8"), _) => Ok(Dtype::Fp8),
            (Some("gptq" | "awq"), Some(4)) => Ok(Dtype::Int4),
            (Some("gptq" | "awq"), Some(8)) => Ok(Dtype::Int8),
            _ => Err(quantisation.unsupported(
                "quant_method",
                format!(
                    "{} with {} bits",
                    method.as_deref().unwrap_or("absent"),
                    bits.map_or_else(|| "unsaid".to_owned(), |bits| bits.to_string())
                ),
                "fp8, or gptq and awq with 4 or 8 bits,",
            )),
        };
    }
    match fields.dtype()? {
        Some(dtype) => Ok(dtype),
        None => {
            fields.assume("torch_dtype");
            Ok(Dtype::Bf16)
        }
    }
}

fn sliding_window(row: &FamilyRow, fields: &mut Fields) -> Result<Option<u32>, InventoryError> {
    // Qwen configs carry a window that a flag of its own switches on.
    if row.window_needs_flag && !fields.flag_or("use_sliding_window", false)? {
        return Ok(None);
    }
    if fields.is_null("sliding_window") {
        return Ok(None);
    }
    match row.sliding_window {
        Some(window) => fields.count_or("sliding_window", window).map(Some),
        None if fields.has("sliding_window") => fields.count("sliding_window").map(Some),
        None => Ok(None),
    }
}

fn refuse_what_no_model_says(fields: &Fields, row: &FamilyRow) -> Result<(), InventoryError> {
    // Llama and Qwen3 mean a bias on all four projections, which no published checkpoint has.
    if !row.qkv_bias && fields.flag("attention_bias")?.unwrap_or(false) {
        return Err(fields.unsupported("attention_bias", "true".to_owned(), "false"));
    }
    if fields.flag("mlp_bias")?.unwrap_or(false) {
        return Err(fields.unsupported("mlp_bias", "true".to_owned(), "false"));
    }
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(found) = fields.text(key)?.filter(|found| found != "silu") {
            return Err(fields.unsupported(key, format!("\"{found}\""), "\"silu\""));
        }
    }
    if let Some(found) = fields
        .number("partial_rotary_factor")?
        .filter(|found| *found != 1.0)
    {
        return Err(fields.unsupported("partial_rotary_factor", found.to_string(), "1"));
    }
    Ok(())
}

/// `Model` multiplies in 64 bits; what passes here cannot overflow there.
fn check_size(file: &str, model: &Model) -> Result<(), InventoryError> {
    let wide = |count: u32| u128::from(count);
    let product = |factors: &[u128]| {
        factors
            .iter()
            .try_fold(1_u128, |so_far, factor| so_far.checked_mul(*factor))
    };
    let heads = wide(model.query_heads) + 2 * wide(model.kv_heads);
    let attention = product(&[
        wide(model.layers),
        wide(model.hidden) + 2,
        2 * heads,
        wide(model.head_dim),
    ]);
    let mlp = product(&[wide(model.layers), wide(model.hidden), 3, wide(model.ffn) + 2]);
    let tables = product(&[2, wide(model.vocab) + 1, wide(model.hidden)]);
    let context = product(&[
        wide(model.layers),
        2 * heads,
        wide(model.head_dim),
        wide(model.max_positions),
    ]);
    let limit = u128::from(PARAMS_LIMIT);
    let within = |count: Option<u128>, limit: u128| count.is_some_and(|count| count <= limit);
    let total = (|| attention?.checked_add(mlp?)?.checked_add(tables?))();
    if !within(total, limit) {
        return Err(InventoryError::TooLarge {
            file: file.to_owned(),
            fields: "layers, hidden size, heads, head width, intermediate size and vocabulary",
            limit: PARAMS_LIMIT,
        });
    }
    // A sequence of full length, in numbers of its KV cache.
    if !within(context, limit) {
        return Err(InventoryError::TooLarge {
            file: file.to_owned(),
            fields: "layers, heads, head width and max_position_embeddings (the cache of one sequence)",
            limit: PARAMS_LIMIT,
        });
    }
    Ok(())
}
