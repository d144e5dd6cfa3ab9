//! `plan`: the layout for given devices, and why; `plan flow`: the placement problem on its own.

mod flow;

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use infercluster_planner::replica::{Objective, PlanProblem, Workload};
use infercluster_sim::cost::AnalyticCost;
use infercluster_sim::scenario::Load;
use infercluster_spec::layout::{CPU_F32, DEFAULT_BLOCK_SIZE, DEFAULT_QUANTUM, KvCache};
use infercluster_spec::{Bytes, Calibration, Cluster, Dtype, GpuId, Trace};

use crate::Outcome;
use crate::commands::layout::ReductionChoice;
use crate::commands::trace;
use crate::failure::WithFix as _;
use crate::planning::{self, Answer, Trial};
use crate::screen::Screen;
use crate::{clusters, io, models};

/// Plans one replica over the devices of a cluster: stages, layer cuts, shares of heads, columns and rows.
///
/// The plan is compared with what engines do today and, with --trace, simulated. Exit code 1 where nothing
/// holds the workload.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "Examples:\n  \
    infercluster plan --cluster \"1 x h100-sxm; 2 x l40s, 1 x ndr\" --model llama/config.json --trace conv.csv \
    --sequences 64 --numerics gpu-bf16 --kv-dtype bf16 -o layout.json\n  \
    infercluster plan --cluster c.json --model tiny --context 256 --sequences 16 --stages 1 -o layout.json")]
pub(crate) struct Plan {
    #[command(subcommand)]
    command: Option<PlanCommand>,
    /// A cluster: document, short file, or one line.
    #[arg(long, required = true)]
    cluster: Option<PathBuf>,
    /// The model: a folder, a config.json or a model file.
    #[arg(long, required = true)]
    model: Option<PathBuf>,
    /// Requests whose lengths are the workload, and on which the plan is simulated.
    #[arg(long, required_unless_present = "context")]
    trace: Option<PathBuf>,
    /// Decode at this mean context instead of a trace's lengths.
    #[arg(long, conflicts_with = "trace")]
    context: Option<u64>,
    /// Sequences that decode at the same time.
    #[arg(long, default_value_t = 16)]
    sequences: u32,
    /// Devices to use, by number, in the order in which ranks may stand; all where absent.
    #[arg(long, value_delimiter = ',')]
    gpus: Vec<u32>,
    /// Fitted parameters, as `calibrate` writes them.
    #[arg(long)]
    calibration: Option<PathBuf>,
    /// What counts.
    #[arg(long, value_enum, default_value_t = ObjectiveChoice::Throughput)]
    objective: ObjectiveChoice,
    /// Force so many pipeline stages.
    #[arg(long)]
    stages: Option<usize>,
    /// How partial results become one.
    #[arg(long, value_enum, default_value_t = ReductionChoice::Fast)]
    reduction: ReductionChoice,
    /// Let ranks share a KV group where that pays.
    #[arg(long)]
    split_groups: bool,
    /// Unit of column cuts.
    #[arg(long, default_value_t = DEFAULT_QUANTUM)]
    quantum: u32,
    /// Tokens of a KV block.
    #[arg(long, default_value_t = DEFAULT_BLOCK_SIZE)]
    block_size: u32,
    /// How keys and values are stored; the executor of this build stores f32.
    #[arg(long, default_value_t = Dtype::F32)]
    kv_dtype: Dtype,
    /// Numerics profile; the executor of this build runs cpu-f32/1, any other is a what-if.
    #[arg(long, default_value = CPU_F32)]
    numerics: String,
    /// Device memory that neither weights nor KV may use, such as "2 GiB".
    #[arg(long, default_value = "0 B")]
    memory_reserve: Bytes,
    /// Simulate a closed loop of --sequences clients even where the trace has arrival times.
    #[arg(long)]
    closed: bool,
    /// Where to write the layout.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Problems of planning that stand on their own.
#[derive(Debug, Subcommand)]
enum PlanCommand {
    Flow(flow::Flow),
}

/// Objectives by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ObjectiveChoice {
    /// Tokens a second.
    Throughput,
    /// Time between two tokens of a sequence.
    Latency,
}

impl From<ObjectiveChoice> for Objective {
    fn from(choice: ObjectiveChoice) -> Self {
        match choice {
            ObjectiveChoice::Throughput => Self::Throughput,
            ObjectiveChoice::Latency => Self::Latency,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Plan, screen: &Screen) -> anyhow::Result<Outcome> {
    if let Some(PlanCommand::Flow(arguments)) = &arguments.command {
        return flow::run(arguments, screen);
    }
    let cluster = clusters::read(given(&arguments.cluster, "--cluster")?)?.cluster;
    let model = models::read(given(&arguments.model, "--model")?)?.model;
    let trace = match &arguments.trace {
        Some(path) => Some(trace::load(path)?.trace),
        None => None,
    };
    let calibration = match &arguments.calibration {
        Some(path) => io::read_document(path)?,
        None => Calibration::default(),
    };
    let cost = AnalyticCost::new(&cluster, &calibration)?;
    let problem = PlanProblem {
        cost: &cost,
        model: &model,
        cluster: &cluster,
        gpus: devices(arguments, &cluster)?,
        reduction: arguments.reduction.into(),
        numerics: arguments.numerics.clone(),
        quantum: arguments.quantum,
        kv: KvCache {
            block_size: arguments.block_size,
            dtype: arguments.kv_dtype,
        },
        split_groups: arguments.split_groups,
        stages: arguments.stages,
        workload: workload(arguments, trace.as_ref())?,
        objective: arguments.objective.into(),
        reserve: arguments.memory_reserve,
    };
    let trial = trace.as_ref().map(|trace| trial(arguments, trace));
    let answer = planning::plan(&problem, trial)?;
    screen.answer(&answer, |answer| {
        planning::people(answer, &model, &cluster, problem.objective)
    })?;
    let Answer::Planned(planned) = answer else {
        return Ok(Outcome::GoalNotMet);
    };
    if let Some(output) = &arguments.output {
        io::write_document(output, &planned.layout)?;
    }
    Ok(Outcome::Done)
}

/// A path that is needed unless a subcommand is given.
fn given<'a>(path: &'a Option<PathBuf>, flag: &str) -> anyhow::Result<&'a Path> {
    path.as_deref().ok_or_else(|| anyhow!("{flag} is missing"))
}

/// Most devices that one replica is planned over: structures grow with every one of them.
const DEVICES_LIMIT: usize = 64;

fn devices(arguments: &Plan, cluster: &Cluster) -> anyhow::Result<Vec<GpuId>> {
    let gpus: Vec<GpuId> = if arguments.gpus.is_empty() {
        cluster.gpus().map(|(_, gpu)| gpu.id).collect()
    } else {
        arguments.gpus.iter().copied().map(GpuId).collect()
    };
    if gpus.len() > DEVICES_LIMIT {
        let refused = Err(anyhow!(
            "one replica over {} devices was asked for, {DEVICES_LIMIT} is the limit",
            gpus.len()
        ));
        return refused.fix("name the devices of one replica, such as --gpus 0,1,2,3");
    }
    Ok(gpus)
}

fn workload(arguments: &Plan, trace: Option<&Trace>) -> anyhow::Result<Workload> {
    match (trace, arguments.context) {
        (Some(trace), _) => Workload::of_trace(trace, arguments.sequences)
            .ok_or_else(|| anyhow!("trace `{}` holds no request", trace.name)),
        (None, Some(context)) => Ok(Workload::decode(arguments.sequences, context)),
        (None, None) => bail!("neither --trace nor --context was given"),
    }
}

fn trial<'a>(arguments: &Plan, trace: &'a Trace) -> Trial<'a> {
    let has_arrivals = trace.requests.iter().all(|request| request.arrival.is_some());
    let load = if has_arrivals && !arguments.closed {
        Load::Open
    } else {
        Load::closed(arguments.sequences)
    };
    Trial { trace, load }
}
