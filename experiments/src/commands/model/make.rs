//! `model make`: a random model with a fixed seed, where none can be downloaded.

use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::{Args, ValueEnum};
use infercluster_executor::checkpoint;
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::{Bytes, Dtype, Model};
use serde::Serialize;

use crate::Outcome;
use crate::failure::WithFix as _;
use crate::models;
use crate::screen::Screen;

/// The seed where none is given.
pub(crate) const DEFAULT_SEED: u64 = 1;

/// Largest model that is made without being asked twice: enough for every test, small for every disk.
const SIZE_LIMIT: Bytes = Bytes(8 << 30);

/// Makes a small random model: a config.json and a model.safetensors.
///
/// Weights are drawn from a generator with a fixed seed, so the model says nothing meaningful, but the same
/// dimensions and seed give the same bytes on every machine.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  infercluster model make -o tiny\n  \
    infercluster model make --preset small --layers 12 --dtype bf16 --seed 7 -o deep")]
pub(crate) struct Make {
    /// Folder to write; made where it does not exist.
    #[arg(short, long)]
    output: PathBuf,
    /// Dimensions to start from.
    #[arg(long, value_enum, default_value_t = Preset::Tiny)]
    preset: Preset,
    /// Seed of the generator.
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
    /// How the layers compute.
    #[arg(long, value_enum)]
    family: Option<MakeFamily>,
    /// Decoder layers.
    #[arg(long)]
    layers: Option<u32>,
    /// Width of the residual stream.
    #[arg(long)]
    hidden: Option<u32>,
    /// Query heads.
    #[arg(long)]
    query_heads: Option<u32>,
    /// Key/value heads; divides the query heads.
    #[arg(long)]
    kv_heads: Option<u32>,
    /// Width of one head, even.
    #[arg(long)]
    head_dim: Option<u32>,
    /// MLP columns.
    #[arg(long)]
    ffn: Option<u32>,
    /// Vocabulary.
    #[arg(long)]
    vocab: Option<u32>,
    /// Longest context.
    #[arg(long)]
    max_positions: Option<u32>,
    /// How weights are stored: f32, bf16 or f16.
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Use the embedding table as LM head.
    #[arg(long)]
    tied: bool,
}

/// Ready dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// 2.3 MB: answers at once.
    Tiny,
    /// 36 MB: a step takes milliseconds.
    Small,
    /// 112 MB: what the quickstart serves.
    Quick,
    /// 440 MB: steps are bound by memory, as those of real models are.
    Medium,
}

/// Families that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MakeFamily {
    /// Llama 2 and 3.
    Llama,
    /// Llama with q/k/v biases.
    Qwen2,
}

impl Preset {
    /// The dimensions; every count is uneven to cut, as real ones are.
    pub(crate) fn model(self, name: &str) -> Model {
        let (layers, hidden, heads, kv_heads, head_dim, ffn, vocab) = match self {
            Self::Tiny => (4, 96, 6, 2, 16, 320, 512),
            Self::Small => (8, 256, 8, 4, 32, 1024, 2048),
            Self::Quick => (6, 512, 8, 4, 64, 2048, 4096),
            Self::Medium => (12, 768, 12, 4, 64, 3072, 4096),
        };
        Model {
            name: name.to_owned(),
            family: Family::Llama,
            layers,
            hidden,
            query_heads: heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            tied_embeddings: false,
            qkv_bias: false,
            rms_epsilon: 1e-5,
            rope: Rope {
                theta: 10_000.0,
                llama3: None,
            },
            max_positions: 4096,
            dtype: Dtype::F32,
            experts: None,
            sliding_window: None,
        }
    }
}

#[derive(Debug, Serialize)]
struct Made<'a> {
    folder: String,
    seed: u64,
    random: bool,
    model: &'a Model,
    weight_bytes: u64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Make, screen: &Screen) -> anyhow::Result<Outcome> {
    let model = model(arguments)?;
    checkpoint::make(&arguments.output, &model, arguments.seed)?;
    let made = Made {
        folder: arguments.output.display().to_string(),
        seed: arguments.seed,
        random: true,
        weight_bytes: model.weight_bytes().0,
        model: &model,
    };
    screen.answer(&made, |made| {
        format!(
            "{}: random weights from seed {}, {} layers, {} in {}; its answers mean nothing",
            made.folder,
            made.seed,
            model.layers,
            model.weight_bytes(),
            model.dtype
        )
    })?;
    Ok(Outcome::Done)
}

fn model(arguments: &Make) -> anyhow::Result<Model> {
    let name = arguments.output.file_name();
    let name = name.map_or_else(|| "made".into(), |name| name.to_string_lossy().into_owned());
    let mut model = arguments.preset.model(&name);
    if arguments.family == Some(MakeFamily::Qwen2) {
        model.family = Family::Qwen2;
        model.qkv_bias = true;
    }
    let dimensions = [
        ("--layers", arguments.layers, &mut model.layers),
        ("--hidden", arguments.hidden, &mut model.hidden),
        ("--query-heads", arguments.query_heads, &mut model.query_heads),
        ("--kv-heads", arguments.kv_heads, &mut model.kv_heads),
        ("--head-dim", arguments.head_dim, &mut model.head_dim),
        ("--ffn", arguments.ffn, &mut model.ffn),
        ("--vocab", arguments.vocab, &mut model.vocab),
        (
            "--max-positions",
            arguments.max_positions,
            &mut model.max_positions,
        ),
    ];
    for (flag, asked, field) in dimensions {
        // A million of anything is past every model.
        let value = asked.unwrap_or(*field);
        if !(1..=1_000_000).contains(&value) {
            bail!("{flag} is {value}, between 1 and 1000000 are accepted");
        }
        *field = value;
    }
    model.dtype = arguments.dtype.unwrap_or(model.dtype);
    model.tied_embeddings = arguments.tied;
    check(&model)?;
    Ok(model)
}

/// Checks the dimensions, and that the files will not fill a disk.
fn check(model: &Model) -> anyhow::Result<()> {
    models::check(model)?;
    let found = model.weight_bytes();
    if found > SIZE_LIMIT {
        let refused = Err(anyhow!("the model would take {found}, {SIZE_LIMIT} is the limit"));
        return refused.fix("make fewer layers or a narrower model");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_size_that_help_says() {
        let megabytes = |preset: Preset| preset.model("m").weight_bytes().0 / 1_000_000;
        assert_eq!(
            [Preset::Tiny, Preset::Small, Preset::Quick, Preset::Medium].map(megabytes),
            [2, 35, 111, 440]
        );
        for preset in [Preset::Tiny, Preset::Small, Preset::Quick, Preset::Medium] {
            assert!(check(&preset.model("m")).is_ok());
        }
    }
}
