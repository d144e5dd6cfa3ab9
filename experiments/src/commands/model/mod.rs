//! `model show` and `model make`.

mod make;
mod weights;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use infercluster_spec::{Bytes, Dtype, Model};
use serde::Serialize;

use crate::Outcome;
use crate::models;
use crate::screen::{Screen, facts};
use weights::Weights;

pub(crate) use make::{DEFAULT_SEED, Preset};

/// Shows a model, or makes a small random one.
#[derive(Debug, Args)]
pub(crate) struct ModelCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(Show),
    Make(make::Make),
}

/// Shows dimensions, parameters and bytes of a model; checks the weights in its folder, where there are some.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster model show meta-llama-3.1-8b/config.json")]
struct Show {
    /// A Hugging Face config.json, the folder that holds one, or a model file of this program.
    model: PathBuf,
}

/// What follows from a model's dimensions.
#[derive(Debug, Serialize)]
struct Sizes<'a> {
    model: &'a Model,
    parameters: u64,
    weight_bytes: u64,
    kv_bytes_per_token_bf16: u64,
    eos_ids: &'a [u32],
    /// Keys that the file leaves out and the family's defaults filled in.
    assumed: &'a [&'static str],
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<Weights>,
}

/// Runs the command.
pub(crate) fn run(command: ModelCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Show(arguments) => show(&arguments, screen),
        Action::Make(arguments) => make::run(&arguments, screen),
    }
}

fn show(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let config = models::read(&arguments.model)?;
    let model = &config.model;
    let checkpoint = match arguments.model.is_dir() {
        true => Weights::of(&arguments.model, model)?,
        false => None,
    };
    let sizes = Sizes {
        parameters: model.params(),
        weight_bytes: model.weight_bytes().0,
        kv_bytes_per_token_bf16: model.kv_bytes_per_token(Dtype::Bf16).0,
        eos_ids: &config.eos_ids,
        assumed: &config.assumed,
        checkpoint,
        model,
    };
    screen.answer(&sizes, people)?;
    Ok(Outcome::Done)
}

fn people(sizes: &Sizes) -> String {
    let model = sizes.model;
    let heads = format!(
        "{} query heads on {} KV heads of width {}",
        model.query_heads, model.kv_heads, model.head_dim
    );
    let mut lines = vec![
        ("model", format!("{} ({:?} layers)", model.name, model.family)),
        ("layers", model.layers.to_string()),
        ("hidden", model.hidden.to_string()),
        ("attention", heads),
        ("mlp columns", model.ffn.to_string()),
    ];
    if let Some(experts) = model.experts {
        let text = format!(
            "{} of {} columns, {} a token",
            experts.count, experts.ffn, experts.per_token
        );
        lines.push(("experts", text));
    }
    lines.extend([
        ("vocabulary", model.vocab.to_string()),
        ("longest context", format!("{} tokens", model.max_positions)),
        ("parameters", parameters(sizes.parameters)),
        (
            "weights",
            format!("{} in {}", Bytes(sizes.weight_bytes), model.dtype),
        ),
        (
            "KV of one token",
            format!("{} in bf16", Bytes(sizes.kv_bytes_per_token_bf16)),
        ),
    ]);
    if let Some(weights) = &sizes.checkpoint {
        lines.push(("checkpoint", weights.text()));
    }
    if !sizes.assumed.is_empty() {
        let text = format!(
            "{} (not in the file, defaults of the family)",
            sizes.assumed.join(", ")
        );
        lines.push(("assumed", text));
    }
    facts(lines)
}

fn parameters(count: u64) -> String {
    if count >= 1_000_000_000 {
        format!("{:.3} billion", count as f64 / 1e9)
    } else {
        format!("{:.3} million", count as f64 / 1e6)
    }
}
