//! `model show`: dimensions, parameters and bytes of a model of any family.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use infercluster_inventory::config::{self, ModelCard};
use infercluster_inventory::gguf::{self, GgufCard};
use infercluster_spec::{Bytes, Model};
use serde::Serialize;

use super::weights::Weights;
use crate::failure::WithFix as _;
use crate::screen::{Screen, facts};
use crate::{Outcome, io, models};

/// Shows dimensions, parameters and bytes of a model; checks the weights in its folder, where there are some.
///
/// Every family of language models is read. What a file does not say is empty; parameters are counted where
/// the family is described, else there is a reason.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster model show meta-llama-3.1-8b/config.json\n  \
    infercluster model show SmolLM2-135M-Instruct-Q4_K_M.gguf --json")]
pub(super) struct Show {
    /// A Hugging Face config.json, the folder that holds one, a GGUF file, or a model file of this program.
    model: PathBuf,
}

/// A model as it was found.
#[derive(Debug)]
enum Found {
    Config(ModelCard),
    Gguf(GgufCard),
}

impl Found {
    fn card(&self) -> &ModelCard {
        match self {
            Self::Config(card) => card,
            Self::Gguf(found) => &found.card,
        }
    }
}

/// A card of either kind, and what the executor makes of the model.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    card: &'a ModelCard,
    #[serde(flatten)]
    gguf: Option<GgufFacts<'a>>,
    /// As plans and the executor take it; absent where they do not run its layers.
    model: Option<&'a Model>,
    eos_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<Weights>,
}

#[derive(Debug, Serialize)]
struct GgufFacts<'a> {
    gguf_version: u32,
    tensors: usize,
    tensor_types: &'a std::collections::BTreeMap<String, usize>,
    parts: u64,
    parts_read: usize,
}

/// Runs the command.
pub(super) fn run(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let path = &arguments.model;
    if is_gguf(path) {
        let found = Found::Gguf(gguf::load_card(path)?);
        return show(&found, None, None, screen);
    }
    let text = config_text(path)?;
    let name = models::stem(path);
    let label = io::name_of(path);
    let usable = models::of_text(path, &text);
    let found = match &usable {
        Ok(config) if models::is_own_document(&text) => Found::Config(ModelCard::of(&config.model)),
        Err(_) if models::is_own_document(&text) => return Err(usable.expect_err("it was just matched")),
        _ => Found::Config(config::read_card(&label, &name, &text)?),
    };
    let usable = usable.ok();
    let checkpoint = match (&usable, path.is_dir()) {
        (Some(config), true) => Weights::of(path, &config.model)?,
        _ => None,
    };
    show(&found, usable.as_ref(), checkpoint, screen)
}

/// The text of the config at `path`, or inside it.
fn config_text(path: &Path) -> anyhow::Result<String> {
    if !path.is_dir() {
        return io::read_text(path, io::DOCUMENT_LIMIT);
    }
    let inside = path.join("config.json");
    io::read_text(&inside, io::DOCUMENT_LIMIT)
        .with_context(|| format!("{} holds no readable config.json", path.display()))
        .fix("name a folder with a config.json, or a GGUF file")
}

/// Files of this format say so in their first bytes, whatever they are called.
fn is_gguf(path: &Path) -> bool {
    let mut start = [0; 4];
    // A pipe would lose the bytes that are looked at.
    let opened = path.is_file().then(|| std::fs::File::open(path));
    let Some(Ok(mut file)) = opened else {
        return false;
    };
    file.read_exact(&mut start).is_ok() && start == *b"GGUF"
}

fn show(
    found: &Found,
    usable: Option<&config::ModelConfig>,
    checkpoint: Option<Weights>,
    screen: &Screen,
) -> anyhow::Result<Outcome> {
    let gguf = match found {
        Found::Config(_) => None,
        Found::Gguf(found) => Some(GgufFacts {
            gguf_version: found.gguf_version,
            tensors: found.tensors,
            tensor_types: &found.tensor_types,
            parts: found.parts,
            parts_read: found.parts_read,
        }),
    };
    let shown = Shown {
        card: found.card(),
        gguf,
        model: usable.map(|config| &config.model),
        eos_ids: usable.map_or(&[], |config| &config.eos_ids),
        checkpoint,
    };
    screen.answer(&shown, people)?;
    Ok(Outcome::Done)
}

fn people(shown: &Shown) -> String {
    let card = shown.card;
    let mut lines = vec![("model", title(card))];
    let number = |count: Option<u32>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
    lines.push(("layers", layers(card)));
    lines.push(("hidden", number(card.hidden)));
    if card.heads.is_some() {
        let text = format!(
            "{} query heads on {} KV heads of width {}",
            number(card.heads),
            number(card.kv_heads),
            number(card.head_dim)
        );
        lines.push((
            "attention",
            if card.latent_attention {
                format!("{text}, latent")
            } else {
                text
            },
        ));
    }
    lines.push(("mlp columns", number(card.ffn)));
    if let Some(experts) = card.experts {
        let text = format!(
            "{experts} of {} columns, {} a token",
            number(card.expert_ffn),
            number(card.experts_per_token)
        );
        lines.push(("experts", text));
    }
    lines.push(("vocabulary", number(card.vocab)));
    if let Some(positions) = card.max_positions {
        lines.push(("longest context", format!("{positions} tokens")));
    }
    lines.extend(sizes(card));
    if let Some(gguf) = &shown.gguf {
        let types = gguf
            .tensor_types
            .iter()
            .map(|(name, count)| format!("{count} {name}"));
        let types: Vec<String> = types.collect();
        let files = match gguf.parts {
            1 => String::new(),
            parts => format!(" in {} of {parts} files", gguf.parts_read),
        };
        lines.push((
            "tensors",
            format!("{}{files}: {}", gguf.tensors, types.join(", ")),
        ));
    }
    if let Some(weights) = &shown.checkpoint {
        lines.push(("checkpoint", weights.text()));
    }
    if shown.model.is_none() {
        lines.push((
            "runs here",
            "no: plans and the executor take Llama, Qwen2, Qwen3 and Mistral configs".to_owned(),
        ));
    }
    if !card.assumed.is_empty() {
        let text = format!(
            "{} (not in the file, defaults of the family)",
            card.assumed.join(", ")
        );
        lines.push(("assumed", text));
    }
    lines.extend(card.notes.iter().map(|note| ("note", note.clone())));
    facts(lines)
}

fn title(card: &ModelCard) -> String {
    let family = card.model_type.as_deref().unwrap_or("family not said");
    match &card.text_model_type {
        Some(inside) if Some(inside) != card.model_type.as_ref() => {
            format!("{} ({family} around {inside})", card.name)
        }
        _ => format!("{} ({family})", card.name),
    }
}

fn layers(card: &ModelCard) -> String {
    match (card.layers, card.attention_layers) {
        (Some(layers), Some(attending)) if attending != layers => {
            format!("{layers}, of which {attending} attend")
        }
        (Some(layers), _) => layers.to_string(),
        (None, _) => "?".to_owned(),
    }
}

fn sizes(card: &ModelCard) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    match (card.params, card.active_params) {
        (Some(params), Some(active)) if active != params => {
            lines.push((
                "parameters",
                format!("{}, {} a token", parameters(params), parameters(active)),
            ));
        }
        (Some(params), _) => lines.push(("parameters", parameters(params))),
        (None, _) => {
            let reason = card.reason.as_deref().unwrap_or("not said");
            lines.push(("parameters", format!("not counted: {reason}")));
        }
    }
    if let Some(params) = card.text_params {
        lines.push(("language model", parameters(params)));
    }
    if let Some(bytes) = card.weight_bytes {
        let stored = match (&card.quantisation, card.dtype) {
            (Some(method), _) => format!("{} in {method}", Bytes(bytes)),
            (None, Some(dtype)) => format!("{} in {dtype}", Bytes(bytes)),
            (None, None) => Bytes(bytes).to_string(),
        };
        lines.push(("weights", stored));
    }
    if let Some(bytes) = card.kv_bytes_per_token {
        lines.push(("KV of one token", Bytes(bytes).to_string()));
    }
    lines
}

fn parameters(count: u64) -> String {
    if count >= 1_000_000_000 {
        format!("{:.3} billion", count as f64 / 1e9)
    } else {
        format!("{:.3} million", count as f64 / 1e6)
    }
}
