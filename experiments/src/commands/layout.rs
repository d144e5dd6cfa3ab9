//! `layout make` and `layout show`.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum};
use infercluster_planner::draw::draw_layout;
use infercluster_planner::proportional::{ProportionalRequest, proportional_layout};
use infercluster_planner::proportions::Proportions;
use infercluster_spec::layout::{CPU_F32, DEFAULT_BLOCK_SIZE, DEFAULT_QUANTUM, Reduction};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{Dtype, IndexRange, Layout};

use crate::Outcome;
use crate::failure::WithFix as _;
use crate::screen::{Columns, Screen};
use crate::{io, models};

/// Letters of the name of a numerics profile.
const PROFILE_LIMIT: usize = 64;

/// Makes a layout from proportions, or draws one.
#[derive(Debug, Args)]
pub(crate) struct LayoutCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Make(Make),
    Show(Show),
}

/// Makes a layout from proportions.
///
/// Every stage uses the same tensor-parallel proportions; what is not given is equal. Units are shared by
/// largest remainder, ties to the lower rank: whole KV groups of query heads, layers, and quanta of columns.
/// Output rows and vocabulary follow --mlp.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster layout make --model-dir tiny --devices 2 --heads 2:1 --mlp 70:30 -o uneven.json\n  \
    infercluster layout make --model-dir tiny --devices 4 --stages 2:1 --reduction invariant -o staged.json")]
struct Make {
    /// Folder with the model's config.json, or a model file.
    #[arg(long)]
    model_dir: PathBuf,
    /// Devices: tensor-parallel ranks times stages.
    #[arg(long)]
    devices: u32,
    /// Layers by stage, such as 2:1.
    #[arg(long)]
    stages: Option<Proportions>,
    /// Query heads by rank, such as 5:1.
    #[arg(long)]
    heads: Option<Proportions>,
    /// MLP columns, output rows and vocabulary by rank, such as 70:30.
    #[arg(long)]
    mlp: Option<Proportions>,
    /// Cut inside KV groups too: ranks that share a group each hold its KV head.
    #[arg(long)]
    split_groups: bool,
    /// Unit of column cuts; 1 cuts exactly.
    #[arg(long, default_value_t = DEFAULT_QUANTUM)]
    quantum: u32,
    /// How partial results become one.
    #[arg(long, value_enum, default_value_t = ReductionChoice::Fast)]
    reduction: ReductionChoice,
    /// Tokens of a KV block.
    #[arg(long, default_value_t = DEFAULT_BLOCK_SIZE)]
    block_size: u32,
    /// How keys and values are stored; the executor of this build stores f32.
    #[arg(long, default_value_t = Dtype::F32)]
    kv_dtype: Dtype,
    /// Numerics profile; the executor of this build runs cpu-f32/1, any other is a what-if.
    #[arg(long, default_value = CPU_F32)]
    numerics: String,
    /// Where to write it; standard output where absent.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Reductions by their names in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReductionChoice {
    /// All-reduce of partial sums: bits depend on the layout.
    Fast,
    /// Gathers of whole rows: the same bits for every layout.
    Invariant,
}

impl From<ReductionChoice> for Reduction {
    fn from(choice: ReductionChoice) -> Self {
        match choice {
            ReductionChoice::Fast => Self::Fast,
            ReductionChoice::Invariant => Self::Invariant,
        }
    }
}

/// Draws a layout; with its model, checks it too.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster layout show uneven.json --model tiny")]
struct Show {
    /// A layout file.
    layout: PathBuf,
    /// The model that it cuts: a folder, a config.json or a model file.
    #[arg(long)]
    model: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(command: LayoutCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Make(arguments) => make(&arguments, screen),
        Action::Show(arguments) => show(&arguments, screen),
    }
}

fn make(arguments: &Make, screen: &Screen) -> anyhow::Result<Outcome> {
    let name = &arguments.numerics;
    if name.is_empty() || name.len() > PROFILE_LIMIT || name.contains(|c: char| !c.is_ascii_graphic()) {
        let refused = Err(anyhow!(
            "--numerics {name:?} is no name of a profile: 1 to {PROFILE_LIMIT} letters without spaces are"
        ));
        return refused.fix(format!("name one that exists, such as {CPU_F32}"));
    }
    let model = models::read(&arguments.model_dir)?.model;
    let mut request = ProportionalRequest::equal(arguments.devices);
    request.stages.clone_from(&arguments.stages);
    request.heads.clone_from(&arguments.heads);
    request.mlp.clone_from(&arguments.mlp);
    request.split_groups = arguments.split_groups;
    request.quantum = arguments.quantum;
    request.reduction = arguments.reduction.into();
    request.kv.block_size = arguments.block_size;
    request.kv.dtype = arguments.kv_dtype;
    let mut layout = proportional_layout(&model, &request)?;
    layout.numerics.clone_from(&arguments.numerics);
    validate_layout(&layout, &model, None)?;
    let path = arguments.output.clone().unwrap_or_else(|| "-".into());
    io::write_document(&path, &layout)?;
    if arguments.output.is_some() && !screen.is_json() {
        screen.out(draw_layout(&layout, &model, None))?;
    }
    Ok(Outcome::Done)
}

fn show(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let layout: Layout = io::read_document(&arguments.layout)?;
    let model = arguments.model.as_deref().map(models::read).transpose()?;
    let model = model.map(|config| config.model);
    if let Some(model) = &model {
        validate_layout(&layout, model, None)?;
    }
    screen.document(&layout, |layout| match &model {
        Some(model) => draw_layout(layout, model, None),
        None => table_of(layout),
    })?;
    Ok(Outcome::Done)
}

/// The layout as a table, one row a shard: all that can be said without its model.
fn table_of(layout: &Layout) -> String {
    let reduction = match layout.reduction {
        Reduction::Fast => "fast",
        Reduction::Invariant => "invariant",
    };
    let devices = layout.seats().count();
    let mut table = Columns::new([
        "replica",
        "stage",
        "layers",
        "rank",
        "device",
        ">query heads",
        ">mlp columns",
        ">output rows",
        ">vocabulary",
    ]);
    for (replica, copy) in layout.replicas.iter().enumerate() {
        for (stage, part) in copy.stages.iter().enumerate() {
            for group in &part.layer_groups {
                for (rank, shard) in group.shards.iter().enumerate() {
                    table.row([
                        replica.to_string(),
                        stage.to_string(),
                        group.layers.to_string(),
                        rank.to_string(),
                        shard.gpu.to_string(),
                        share(Some(shard.query_heads)),
                        share(Some(shard.mlp_columns)),
                        share(shard.output_rows),
                        share(shard.vocab),
                    ]);
                }
            }
        }
    }
    format!(
        "{}: {devices} seats, {reduction} reduction, {}, KV blocks of {} tokens in {}\n{table}",
        layout.model, layout.numerics, layout.kv.block_size, layout.kv.dtype
    )
}

/// A range with its length, `-` where there is none.
fn share(range: Option<IndexRange>) -> String {
    match range {
        Some(range) if !range.is_empty() => format!("{range} ({})", range.len()),
        _ => "-".to_owned(),
    }
}
