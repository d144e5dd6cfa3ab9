//! What a `config.json` of any family says about its model, for people and for comparison.
//!
//! [`Model`](infercluster_spec::Model) holds what the executor can run, and its reader refuses the rest. A
//! card refuses nothing that it can read: what is not said stays `None`, and a count of parameters that no
//! description of the family backs is `None` with the reason.

mod count;
mod keys;
mod layers;
mod storage;
mod table;

use infercluster_spec::model::{Dtype, Model};
use serde::Serialize;
use serde_json::{Map, Value};

use super::PARAMS_LIMIT;
use super::fields::Fields;
use crate::error::InventoryError;
use count::{Count, Shape, Uncounted};
use keys::Keys;
use layers::Layers;
use table::Row;

/// Most layers that a model may have; published ones stay below two hundred.
const LAYERS_LIMIT: u32 = 1 << 16;

/// Dimensions, parameters and bytes of a model of any family. What the file does not say, and no default of
/// its family fills in, is `None`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ModelCard {
    /// Its name: that of the folder or of the file.
    pub name: String,
    /// The family as the file names it.
    pub model_type: Option<String>,
    /// The family of the language model inside a wrapper.
    pub text_model_type: Option<String>,
    /// The class of the whole model.
    pub architecture: Option<String>,
    /// Layers.
    pub layers: Option<u32>,
    /// Layers that attend, and keep keys and values.
    pub attention_layers: Option<u32>,
    /// Width of the residual stream.
    pub hidden: Option<u32>,
    /// Query heads.
    pub heads: Option<u32>,
    /// Key/value heads.
    pub kv_heads: Option<u32>,
    /// Width of one head.
    pub head_dim: Option<u32>,
    /// Width of the MLP.
    pub ffn: Option<u32>,
    /// Vocabulary.
    pub vocab: Option<u32>,
    /// Routed experts of a layer.
    pub experts: Option<u32>,
    /// Experts that a token uses.
    pub experts_per_token: Option<u32>,
    /// Width of one expert.
    pub expert_ffn: Option<u32>,
    /// Longest context.
    pub max_positions: Option<u32>,
    /// Whether the LM head is the embedding table.
    pub tied_embeddings: Option<bool>,
    /// Whether keys and values come out of one narrow vector a token.
    pub latent_attention: bool,
    /// Stored precision, before quantisation.
    pub dtype: Option<Dtype>,
    /// Quantisation method.
    pub quantisation: Option<String>,
    /// Parameters of the whole model.
    pub params: Option<u64>,
    /// Parameters of the language model inside a wrapper.
    pub text_params: Option<u64>,
    /// Parameters that one token uses.
    pub active_params: Option<u64>,
    /// Why `params` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes of the stored weights.
    pub weight_bytes: Option<u64>,
    /// Bytes that one token adds to the KV cache, windows ignored.
    pub kv_bytes_per_token: Option<u64>,
    /// Keys that the file leaves out and the family's defaults filled in.
    pub assumed: Vec<String>,
    /// What else to know.
    pub notes: Vec<String>,
}

impl ModelCard {
    /// The card of a model that plans and the executor take.
    pub fn of(model: &Model) -> Self {
        let experts = model.experts;
        let active = experts.map_or(model.params(), |experts| {
            let one = 3 * u64::from(model.hidden) * u64::from(experts.ffn);
            let idle = u64::from(experts.count.saturating_sub(experts.per_token)) * u64::from(model.layers);
            model.params() - one * idle
        });
        // Quantised weights say nothing about the cache, which stays in 16 bits.
        let cache = if model.dtype.bits() < 16 {
            Dtype::Bf16
        } else {
            model.dtype
        };
        Self {
            name: model.name.clone(),
            model_type: Some(format!("{:?}", model.family).to_lowercase()),
            layers: Some(model.layers),
            attention_layers: Some(model.layers),
            hidden: Some(model.hidden),
            heads: Some(model.query_heads),
            kv_heads: Some(model.kv_heads),
            head_dim: Some(model.head_dim),
            ffn: Some(model.ffn),
            vocab: Some(model.vocab),
            experts: experts.map(|experts| experts.count),
            experts_per_token: experts.map(|experts| experts.per_token),
            expert_ffn: experts.map(|experts| experts.ffn),
            max_positions: Some(model.max_positions),
            tied_embeddings: Some(model.tied_embeddings),
            dtype: Some(model.dtype),
            params: Some(model.params()),
            active_params: Some(active),
            weight_bytes: Some(model.weight_bytes().0),
            kv_bytes_per_token: Some(model.kv_bytes_per_token(cache).0),
            ..Self::default()
        }
    }
}

/// Reads the text of a config of any family; `file` is only the name that errors carry.
///
/// ```
/// let text = r#"{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
///     "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8,
///     "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}"#;
/// let card = infercluster_inventory::config::read_card("config.json", "mixtral", text)?;
/// assert_eq!(card.params, Some(46_702_792_704));
/// # Ok::<(), infercluster_inventory::InventoryError>(())
/// ```
pub fn read_card(file: &str, name: &str, text: &str) -> Result<ModelCard, InventoryError> {
    let value = super::parse(file, text)?;
    let object = super::whole_object(file, &value)?;
    let outer = Fields::new(file, object);
    let model_type = outer.text("model_type")?;
    let architecture = architecture(&outer);
    let wrapper = table::find(model_type.as_deref(), architecture.as_deref());
    let inner = language_model(object);
    let merged = keys::flattened(inner.unwrap_or(object));
    let fields = Fields::new(file, &merged);
    let inner_type = match inner {
        Some(_) => fields.text("model_type")?,
        None => None,
    };
    let text_type = inner_type.or_else(|| wrapper?.text.clone());
    let row = match &text_type {
        Some(name) => table::find(Some(name), None),
        None => wrapper,
    };
    let mut card = ModelCard {
        name: name.to_owned(),
        model_type,
        architecture,
        text_model_type: text_type,
        ..ModelCard::default()
    };
    let has_more = inner.is_some() || has_other_parts(object);
    read_into(&mut card, &outer, Keys::new(fields, row), row, has_more)?;
    Ok(card)
}

/// The first of the classes that the file names.
fn architecture(outer: &Fields) -> Option<String> {
    let first = outer.get("architectures")?.as_array()?.first()?;
    first.as_str().map(|name| name.chars().take(80).collect())
}

/// The object of the language model inside a wrapper around one.
fn language_model(object: &Map<String, Value>) -> Option<&Map<String, Value>> {
    let parts = [
        "text_config",
        "llm_config",
        "language_config",
        "thinker_config",
        "text_model_config",
    ];
    let inner = parts.iter().find_map(|key| object.get(*key)?.as_object())?;
    Some(language_model(inner).unwrap_or(inner))
}

/// Whether there is an encoder for pictures or sound beside the language model.
fn has_other_parts(object: &Map<String, Value>) -> bool {
    let is_part = |key: &String| key.contains("vision") || key.contains("visual") || key.contains("audio");
    object
        .iter()
        .any(|(key, value)| value.is_object() && is_part(key))
}

fn read_into(
    card: &mut ModelCard,
    outer: &Fields,
    mut keys: Keys,
    row: Option<&'static Row>,
    has_more: bool,
) -> Result<(), InventoryError> {
    let (Some(count), Some(hidden)) = (keys.count(keys::LAYERS)?, keys.count(keys::HIDDEN)?) else {
        return Err(not_a_model(card, &keys, row));
    };
    if count > LAYERS_LIMIT {
        return Err(too_large(outer));
    }
    card.layers = Some(count);
    card.hidden = Some(hidden);
    dimensions(card, &mut keys, row, hidden)?;
    let layers = Layers::of(&mut keys, row, count, card.experts)?;
    card.attention_layers = Some(layers.attending());
    card.dtype = match keys.dtype() {
        Some(dtype) => Some(dtype),
        None => outer.dtype().unwrap_or_default(),
    };
    // A file may give the key at either level; the outer one stands for the whole model.
    let outer_tie = outer.flag("tie_word_embeddings")?;
    card.tied_embeddings = match outer_tie {
        Some(tied) => Some(tied),
        None => keys.told_flag("tie_word_embeddings")?,
    };
    card.quantisation = match outer.object("quantization_config")? {
        Some(quantisation) => quantisation.text("quant_method")?,
        None => None,
    };
    count_parameters(card, outer, &mut keys, row, &layers, has_more)?;
    cache(card, &mut keys)?;
    let (assumed, notes) = keys.into_parts();
    card.assumed = assumed.into_iter().map(str::to_owned).collect();
    card.assumed.dedup();
    card.notes = notes;
    Ok(())
}

fn dimensions(
    card: &mut ModelCard,
    keys: &mut Keys,
    row: Option<&Row>,
    hidden: u32,
) -> Result<(), InventoryError> {
    card.vocab = keys.count(keys::VOCAB)?;
    card.max_positions = keys.count_or_none(keys::POSITIONS)?;
    card.ffn = keys
        .count_or_none(keys::FFN)?
        .or(match keys.count(&["expansion_ratio"])? {
            Some(ratio) => ratio.checked_mul(hidden),
            None => plain_width(row, hidden),
        });
    card.experts = keys.count_or_none(keys::EXPERTS)?.filter(|experts| *experts > 1);
    if card.experts.is_some() {
        card.experts_per_token = keys.count_or_none(keys::EXPERTS_PER_TOKEN)?;
        card.expert_ffn = keys.count_or_none(keys::EXPERT_FFN)?.or(card.ffn);
    }
    if row.is_some_and(|row| row.attention.is_some()) {
        return Ok(());
    }
    card.heads = keys.count(keys::HEADS)?;
    card.kv_heads = kv_heads(keys, card.heads)?;
    card.latent_attention = keys.fields().has("kv_lora_rank") || assumes_latent(row);
    card.head_dim = keys.count(keys::HEAD_DIM)?;
    if let (None, Some(heads), false) = (card.head_dim, card.heads, card.latent_attention) {
        match hidden.is_multiple_of(heads) {
            true => card.head_dim = Some(hidden / heads),
            false => keys.note(format!("{heads} heads do not divide the hidden size {hidden}")),
        }
    }
    Ok(())
}

fn assumes_latent(row: Option<&Row>) -> bool {
    row.is_some_and(|row| row.defaults.contains_key("kv_lora_rank"))
}

/// Families of the first generation say the width of the MLP only where it is not four times the hidden size.
fn plain_width(row: Option<&Row>, hidden: u32) -> Option<u32> {
    let row = row?;
    let is_plain = row.mlp == table::MlpForm::Plain && row.count.is_some();
    is_plain.then(|| hidden.checked_mul(4)).flatten()
}

fn kv_heads(keys: &mut Keys, heads: Option<u32>) -> Result<Option<u32>, InventoryError> {
    let shares_one = keys.flag("multi_query")? && !keys.flag("new_decoder_architecture")?;
    if shares_one || keys.fields().text("attn_type")?.as_deref() == Some("multiquery_attention") {
        return Ok(Some(1));
    }
    if keys.flag("multi_query_attention")? {
        return Ok(keys.count(&["multi_query_group_num"])?.or(Some(1)));
    }
    let found = keys.count(keys::KV_HEADS)?;
    let is_said = keys::KV_HEADS.iter().any(|name| keys.fields().has(name));
    // Without the key, every query head has keys and values of its own.
    Ok(found.or(heads.filter(|_| !is_said)))
}

fn count_parameters(
    card: &mut ModelCard,
    outer: &Fields,
    keys: &mut Keys,
    row: Option<&Row>,
    layers: &Layers,
    has_more: bool,
) -> Result<(), InventoryError> {
    let shape = Shape {
        hidden: card.hidden.unwrap_or_default(),
        heads: card.heads,
        kv_heads: card.kv_heads,
        head_dim: card.head_dim,
        ffn: card.ffn,
        vocab: card.vocab,
        positions: card.max_positions,
        tied: card.tied_embeddings.unwrap_or(false),
        experts: card.experts,
        experts_per_token: card.experts_per_token,
        expert_ffn: card.expert_ffn,
    };
    let counted = match row {
        None => Err(Uncounted::Because(unknown_family(card))),
        Some(row) => match foreign_class(card, row) {
            Some(reason) if !has_more => Err(Uncounted::Because(reason)),
            _ => count::count(keys, row, shape, layers),
        },
    };
    let count: Count = match counted {
        Ok(count) => count,
        Err(Uncounted::Bad(error)) => return Err(error),
        Err(Uncounted::Because(reason)) => {
            card.reason = Some(reason);
            return Ok(());
        }
    };
    let limited = |number: u128| match u64::try_from(number) {
        Ok(number) if number <= PARAMS_LIMIT => Ok(number),
        _ => Err(too_large(outer)),
    };
    let total = limited(count.total())?;
    if has_more {
        card.text_params = Some(total);
        card.reason =
            Some("only the language model inside is described here, not the parts beside it".to_owned());
        return Ok(());
    }
    card.params = Some(total);
    card.active_params = Some(limited(count.active())?);
    match storage::weight_bytes(outer, count, card.dtype)? {
        Ok(bytes) => card.weight_bytes = Some(u64::try_from(bytes).map_err(|_| too_large(outer))?),
        Err(reason) => keys.note(format!("no weight_bytes: {reason}")),
    }
    Ok(())
}

fn cache(card: &mut ModelCard, keys: &mut Keys) -> Result<(), InventoryError> {
    let mut note = |text: &str| keys.note(text);
    if card.latent_attention {
        note("no kv_bytes_per_token: latent attention keeps one narrow vector a token and layer");
        return Ok(());
    }
    let Some(dtype) = card.dtype else {
        note("no kv_bytes_per_token: the file does not say a precision");
        return Ok(());
    };
    // Without attention nothing is kept, however wide a head would be.
    let (kv_heads, head_dim) = match card.attention_layers {
        Some(0) => (card.kv_heads.or(Some(0)), card.head_dim.or(Some(0))),
        _ => (card.kv_heads, card.head_dim),
    };
    if let (Some(layers), Some(kv_heads), Some(head_dim)) = (card.attention_layers, kv_heads, head_dim) {
        card.kv_bytes_per_token = storage::kv_bytes_per_token(layers, kv_heads, head_dim, dtype);
    }
    let global = keys.count(&["num_global_key_value_heads"])?;
    if let (Some(heads), Some(width)) = (global, keys.count(&["global_head_dim"])?) {
        keys.note(format!(
            "layers of full attention have {heads} KV heads of width {width}, kv_bytes_per_token counts every layer alike"
        ));
    }
    if let Some(shared) = keys.count_or_none(&["num_kv_shared_layers"])? {
        keys.note(format!(
            "the last {shared} layers use keys and values of layers below"
        ));
    }
    if let Some(more) = keys.count_or_none(&["num_nextn_predict_layers"])? {
        keys.note(format!("{more} layers that draft further tokens are not counted"));
    }
    Ok(())
}

fn unknown_family(card: &ModelCard) -> String {
    let shown = |name: &Option<String>| {
        name.as_deref()
            .unwrap_or("absent")
            .chars()
            .take(60)
            .collect::<String>()
    };
    match &card.text_model_type {
        Some(_) => format!(
            "model type `{}` inside is not known",
            shown(&card.text_model_type)
        ),
        None => format!(
            "model type `{}` (architecture `{}`) is not known",
            shown(&card.model_type),
            shown(&card.architecture)
        ),
    }
}

/// A classifier on a known trunk has other parameters than the model that generates.
fn foreign_class(card: &ModelCard, row: &Row) -> Option<String> {
    let name = card.architecture.as_deref()?;
    let is_known = row.architectures.is_empty() || row.architectures.iter().any(|known| known == name);
    let is_relative = table::find(None, Some(name)).is_some_and(|other| other.count.is_some());
    (!is_known && !is_relative).then(|| {
        format!(
            "architecture `{name}` is not the one of `{}` that generates",
            row.model_type
        )
    })
}

/// Neither layers nor a width: whatever this is, it is no language model of a known form.
fn not_a_model(card: &ModelCard, keys: &Keys, row: Option<&Row>) -> InventoryError {
    let known = || {
        let names: Vec<&str> = table::rows().iter().map(|row| row.model_type.as_str()).collect();
        let (first, more) = names.split_at(names.len().min(12));
        format!("{} and {} more", first.join(", "), more.len())
    };
    if row.is_none() {
        let name = card.model_type.as_ref().or(card.architecture.as_ref());
        let found = name.map_or_else(|| "absent".to_owned(), |name| format!("\"{name}\""));
        return InventoryError::UnknownArchitecture {
            file: keys.fields().file().to_owned(),
            field: "model_type",
            found,
            known: known(),
        };
    }
    InventoryError::Missing {
        file: keys.fields().file().to_owned(),
        field: "num_hidden_layers and hidden_size".to_owned(),
        expected: "whole numbers of at least 1".to_owned(),
    }
}

fn too_large(outer: &Fields) -> InventoryError {
    InventoryError::TooLarge {
        file: outer.file().to_owned(),
        fields: "layers, hidden size, heads, head width, intermediate size, experts and vocabulary",
        limit: PARAMS_LIMIT,
    }
}
