//! Headers of one model, in one file or several, as a [`ModelCard`].

use std::collections::BTreeMap;
use std::path::Path;

use infercluster_spec::model::Dtype;
use serde::Serialize;

use super::types::{file_type, tensor_type};
use super::{GgufError, GgufHeader, GgufValue, part_paths};
use crate::config::ModelCard;

/// What the header says beside the card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GgufCard {
    /// The card.
    #[serde(flatten)]
    pub card: ModelCard,
    /// Version of the format.
    pub gguf_version: u32,
    /// Tensors in the files that were read.
    pub tensors: usize,
    /// Tensors of each type.
    pub tensor_types: BTreeMap<String, usize>,
    /// Files that the model is cut into.
    pub parts: u64,
    /// Those of them that were read.
    pub parts_read: usize,
}

/// The card of a model from the headers of its files, the first of them first.
///
/// # Panics
/// Without a header.
pub fn card(name: &str, headers: &[GgufHeader]) -> GgufCard {
    let first = headers.first().expect("a model has a file");
    let header = headers
        .iter()
        .find(|header| header.text("general.architecture").is_some())
        .unwrap_or(first);
    let mut card = dimensions(name, header);
    let parts = first.parts();
    sizes(&mut card, headers);
    if (headers.len() as u64) < parts {
        card.reason = Some(format!(
            "{} of {parts} files were read, the others are not beside them",
            headers.len()
        ));
        (card.params, card.active_params, card.weight_bytes) = (None, None, None);
    }
    let tensors = headers.iter().flat_map(|header| &header.tensors);
    let mut tensor_types: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in tensors {
        let name = tensor_type(tensor.type_id).map_or_else(
            || format!("type {}", tensor.type_id),
            |known| known.name.to_owned(),
        );
        *tensor_types.entry(name).or_default() += 1;
    }
    GgufCard {
        card,
        gguf_version: first.version,
        tensors: headers.iter().map(|header| header.tensors.len()).sum(),
        tensor_types,
        parts,
        parts_read: headers.len(),
    }
}

/// Reads the model whose file, or first file, is at `path`: of a model in several files those beside it, too.
pub fn load_card(path: &Path) -> Result<GgufCard, GgufError> {
    let first = super::load(path)?;
    let parts = first.parts();
    let paths = match parts {
        1 => vec![path.to_owned()],
        _ => part_paths(path, parts).unwrap_or_else(|| vec![path.to_owned()]),
    };
    let mut headers = Vec::new();
    let mut short = Vec::new();
    for part in paths.iter().filter(|part| part.is_file()) {
        let header = super::load(part)?;
        let length = std::fs::metadata(part).map_or(0, |facts| facts.len());
        if length < header.data_end() {
            short.push(format!(
                "{} has {length} bytes of {}: the data of its last tensors is missing",
                part.display(),
                header.data_end()
            ));
        }
        headers.push(header);
    }
    if headers.is_empty() {
        headers.push(first);
    }
    let name = path
        .file_stem()
        .map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned());
    let mut card = card(&name, &headers);
    card.card.notes.extend(short);
    Ok(card)
}

/// Reads `{architecture}.{key}`, which holds one number or one a layer.
struct Keys<'a> {
    header: &'a GgufHeader,
    architecture: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.header.metadata.get(&format!("{}.{key}", self.architecture))
    }

    fn list(&self, key: &str) -> Option<&[u64]> {
        match self.get(key) {
            Some(GgufValue::Counts(counts)) => Some(counts),
            _ => None,
        }
    }

    /// One number; of a list of equal ones, zeros left out, that one.
    fn number(&self, key: &str) -> Option<u32> {
        let narrow = |count: u64| u32::try_from(count).ok();
        match self.get(key)? {
            GgufValue::Count(count) => narrow(*count),
            GgufValue::Counts(counts) => {
                let mut real = counts.iter().filter(|count| **count > 0);
                let first = *real.next()?;
                real.all(|count| *count == first).then(|| narrow(first)).flatten()
            }
            _ => None,
        }
    }

    fn positive(&self, key: &str) -> Option<u32> {
        self.number(key).filter(|count| *count > 0)
    }
}

fn dimensions(name: &str, header: &GgufHeader) -> ModelCard {
    let architecture = header.text("general.architecture");
    let keys = Keys {
        header,
        architecture: architecture.unwrap_or_default(),
    };
    let layers = keys.positive("block_count");
    let heads = keys.positive("attention.head_count");
    let kv_heads = keys.positive("attention.head_count_kv");
    let hidden = keys.positive("embedding_length");
    let vocab = keys.positive("vocab_size").or_else(|| vocabulary(header));
    let head_dim = keys.positive("attention.key_length").or_else(|| {
        let (hidden, heads) = hidden.zip(heads)?;
        hidden.is_multiple_of(heads).then(|| hidden / heads)
    });
    let mut card = ModelCard {
        name: header
            .text("general.name")
            .map_or_else(|| name.to_owned(), |own| own.chars().take(200).collect()),
        model_type: architecture.map(str::to_owned),
        layers,
        attention_layers: attending(&keys, layers),
        hidden,
        heads,
        kv_heads: kv_heads.or(heads.filter(|_| keys.get("attention.head_count_kv").is_none())),
        head_dim,
        ffn: keys.positive("feed_forward_length"),
        vocab,
        experts: keys.positive("expert_count"),
        experts_per_token: keys.positive("expert_used_count"),
        expert_ffn: keys.positive("expert_feed_forward_length"),
        max_positions: keys.positive("context_length"),
        latent_attention: keys.positive("attention.kv_lora_rank").is_some(),
        quantisation: header
            .count("general.file_type")
            .and_then(file_type)
            .map(str::to_owned),
        ..ModelCard::default()
    };
    cache(&mut card, &keys);
    card
}

/// Tokens of the vocabulary where no key counts them.
fn vocabulary(header: &GgufHeader) -> Option<u32> {
    match header.metadata.get("tokenizer.ggml.tokens")? {
        GgufValue::Skipped { entries } => u32::try_from(*entries).ok(),
        _ => None,
    }
}

/// Layers that keep keys and values: those with KV heads, where there is a number for each.
fn attending(keys: &Keys, layers: Option<u32>) -> Option<u32> {
    if let Some(counts) = keys.list("attention.head_count_kv") {
        return u32::try_from(counts.iter().filter(|count| **count > 0).count()).ok();
    }
    if keys.number("attention.head_count") == Some(0) {
        return Some(0);
    }
    match (layers, keys.positive("full_attention_interval")) {
        (Some(layers), Some(interval)) => Some(layers / interval),
        (layers, _) => layers,
    }
}

/// The KV cache in f16, as the tools keep it unless told otherwise.
fn cache(card: &mut ModelCard, keys: &Keys) {
    if card.latent_attention {
        card.notes.push(
            "no kv_bytes_per_token: latent attention keeps one narrow vector a token and layer".to_owned(),
        );
        return;
    }
    let heads_in_all = match keys.list("attention.head_count_kv") {
        Some(counts) => counts
            .iter()
            .try_fold(0_u64, |sum, count| sum.checked_add(*count)),
        None => {
            let product = card
                .attention_layers
                .zip(card.kv_heads.or((card.attention_layers == Some(0)).then_some(0)));
            product.map(|(layers, heads)| u64::from(layers) * u64::from(heads))
        }
    };
    let width = card
        .head_dim
        .map(u64::from)
        .or((card.attention_layers == Some(0)).then_some(0));
    let bytes = 2 * Dtype::F16.bits() / 8;
    card.kv_bytes_per_token = heads_in_all
        .zip(width)
        .and_then(|(heads, width)| heads.checked_mul(width)?.checked_mul(bytes));
    if card.kv_bytes_per_token.is_some() {
        card.notes
            .push("kv_bytes_per_token is that of f16, the format says no precision".to_owned());
    }
}

fn sizes(card: &mut ModelCard, headers: &[GgufHeader]) {
    let tensors = || headers.iter().flat_map(|header| &header.tensors);
    card.params = sum(tensors().map(|tensor| tensor.elements));
    if card.params == Some(0) || card.params.is_none() {
        card.params = None;
        card.reason = Some("the file describes no tensor".to_owned());
    }
    card.weight_bytes = tensors()
        .map(|tensor| tensor.bytes)
        .try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?));
    if card.weight_bytes.is_none() {
        card.notes
            .push("no weight_bytes: some tensors are of a type that is not known here".to_owned());
    }
    card.weight_bytes = card.weight_bytes.filter(|bytes| *bytes > 0);
    let is_expert = |name: &str| name.contains("_exps");
    let routed = sum(tensors()
        .filter(|tensor| is_expert(&tensor.name))
        .map(|tensor| tensor.elements));
    card.active_params = match (card.params, routed, card.experts, card.experts_per_token) {
        (Some(params), Some(0), ..) => Some(params),
        (Some(params), Some(routed), Some(experts), Some(used)) if used <= experts => {
            let one = routed / u64::from(experts);
            Some(params - one * u64::from(experts - used))
        }
        _ => None,
    };
    let has = |wanted: &str| tensors().any(|tensor| tensor.name == wanted);
    card.tied_embeddings = has("token_embd.weight").then(|| !has("output.weight"));
    card.dtype = plain_dtype(headers);
}

fn sum(mut numbers: impl Iterator<Item = u64>) -> Option<u64> {
    numbers.try_fold(0_u64, u64::checked_add)
}

/// The precision of the weights where all matrices share one that is not a quantisation.
fn plain_dtype(headers: &[GgufHeader]) -> Option<Dtype> {
    let matrices = headers
        .iter()
        .flat_map(|header| &header.tensors)
        .filter(|tensor| tensor.shape.len() > 1);
    let mut found = matrices.map(|tensor| match tensor.type_id {
        0 => Some(Dtype::F32),
        1 => Some(Dtype::F16),
        30 => Some(Dtype::Bf16),
        _ => None,
    });
    let first = found.next()??;
    found.all(|dtype| dtype == Some(first)).then_some(first)
}
