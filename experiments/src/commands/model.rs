//! `model show` and `model make`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use infercluster_spec::{Bytes, Dtype, Model};
use serde::Serialize;

use crate::Outcome;
use crate::io;
use crate::screen::{Screen, facts};

/// Looks at models.
#[derive(Debug, Args)]
pub(crate) struct ModelCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(Show),
}

/// Shows dimensions, parameters and bytes of a model.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster model show model.json")]
struct Show {
    /// A model file.
    model: PathBuf,
}

/// What follows from a model's dimensions.
#[derive(Debug, Serialize)]
struct Sizes<'a> {
    model: &'a Model,
    parameters: u64,
    weight_bytes: u64,
    kv_bytes_per_token_bf16: u64,
}

/// Runs the command.
pub(crate) fn run(command: ModelCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Show(arguments) => show(&arguments, screen),
    }
}

fn show(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let model: Model = io::read_document(&arguments.model)?;
    let sizes = Sizes {
        parameters: model.params(),
        weight_bytes: model.weight_bytes().0,
        kv_bytes_per_token_bf16: model.kv_bytes_per_token(Dtype::Bf16).0,
        model: &model,
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
    facts([
        ("model", format!("{} ({:?} layers)", model.name, model.family)),
        ("layers", model.layers.to_string()),
        ("hidden", model.hidden.to_string()),
        ("attention", heads),
        ("mlp columns", model.ffn.to_string()),
        ("vocabulary", model.vocab.to_string()),
        ("longest context", format!("{} tokens", model.max_positions)),
        (
            "parameters",
            format!("{:.3} billion", sizes.parameters as f64 / 1e9),
        ),
        (
            "weights",
            format!("{} in {}", Bytes(sizes.weight_bytes), model.dtype),
        ),
        (
            "KV of one token",
            format!("{} in bf16", Bytes(sizes.kv_bytes_per_token_bf16)),
        ),
    ])
}
