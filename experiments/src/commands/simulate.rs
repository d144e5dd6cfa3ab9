//! `simulate`: what a layout will do with a trace.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use infercluster_serving::RouterPolicy;
use infercluster_sim::cost::AnalyticCost;
use infercluster_sim::engine::{self, EngineChoice, EngineUsed};
use infercluster_sim::scenario::{DEFAULT_TURNAROUND, Load, Scenario};
use infercluster_spec::{Bytes, Calibration, EngineOptions, Layout, SimDuration};
use infercluster_traces::read::require_arrivals;

use crate::Outcome;
use crate::commands::trace;
use crate::reports::{self, SloFlag};
use crate::screen::Screen;
use crate::{clusters, io, models};

/// Replays a trace over a layout on a cluster, in a discrete-event simulator.
///
/// Rates come from the calibration; what it leaves open comes from the datasheet in the cluster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster simulate --cluster \"4 x l40s, 1 x ndr\" --model llama/config.json --layout layout.json \
    --trace conv.csv --slo ttft=2s,itl=100ms\n  \
    infercluster simulate --cluster c.json --model tiny --layout even.json --trace short.jsonl --clients 8 --json")]
pub(crate) struct Simulate {
    /// A cluster: document, short file, or one line.
    #[arg(long)]
    cluster: PathBuf,
    /// The model: a folder, a config.json or a model file.
    #[arg(long)]
    model: PathBuf,
    /// The layout.
    #[arg(long)]
    layout: PathBuf,
    /// The requests.
    #[arg(long)]
    trace: PathBuf,
    /// Fitted parameters, as `calibrate` writes them.
    #[arg(long)]
    calibration: Option<PathBuf>,
    /// Closed loop of so many clients instead of the trace's arrival times.
    #[arg(long)]
    clients: Option<u32>,
    /// In a closed loop, from the end of an answer to the client's next request.
    #[arg(long, default_value_t = DEFAULT_TURNAROUND, requires = "clients")]
    turnaround: SimDuration,
    /// In a closed loop, send for so long.
    #[arg(long, requires = "clients")]
    duration: Option<SimDuration>,
    /// Latency limits, such as ttft=2s,itl=100ms.
    #[arg(long)]
    slo: Option<SloFlag>,
    /// Most new tokens of one step.
    #[arg(long)]
    chunk: Option<u32>,
    /// Most sequences of one step.
    #[arg(long)]
    max_sequences: Option<u32>,
    /// How requests are shared among replicas.
    #[arg(long, value_enum, default_value_t = RouterChoice::CapacityWeighted)]
    router: RouterChoice,
    /// Device memory that neither weights nor KV may use, such as "2 GiB".
    #[arg(long)]
    memory_reserve: Option<Bytes>,
    /// KV blocks that a replica may have at most.
    #[arg(long)]
    kv_blocks: Option<u32>,
    /// Which engine; both give the same report.
    #[arg(long, value_enum, default_value_t = EngineName::Fast)]
    engine: EngineName,
    /// Write one row a request here.
    #[arg(long)]
    requests_csv: Option<PathBuf>,
}

/// Engines by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    /// Runs of equal steps at once, where the scenario allows it.
    Fast,
    /// Every step by itself.
    Step,
}

impl From<EngineName> for EngineChoice {
    fn from(name: EngineName) -> Self {
        match name {
            EngineName::Fast => Self::Fastest,
            EngineName::Step => Self::StepByStep,
        }
    }
}

/// Router policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RouterChoice {
    /// One after the other.
    RoundRobin,
    /// Where the fewest requests are under way.
    LeastOutstanding,
    /// The fewest in proportion to the replica's capacity.
    CapacityWeighted,
}

impl From<RouterChoice> for RouterPolicy {
    fn from(choice: RouterChoice) -> Self {
        match choice {
            RouterChoice::RoundRobin => Self::RoundRobin,
            RouterChoice::LeastOutstanding => Self::LeastOutstanding,
            RouterChoice::CapacityWeighted => Self::CapacityWeighted,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Simulate, screen: &Screen) -> anyhow::Result<Outcome> {
    let cluster = clusters::read(&arguments.cluster)?.cluster;
    let model = models::read(&arguments.model)?.model;
    let layout: Layout = io::read_document(&arguments.layout)?;
    let trace = trace::load(&arguments.trace)?.trace;
    let calibration = match &arguments.calibration {
        Some(path) => io::read_document(path)?,
        None => Calibration::default(),
    };
    let cost = AnalyticCost::new(&cluster, &calibration)?;
    let mut scenario = Scenario::new(&cluster, &model, &layout, &cost, &trace);
    match arguments.clients {
        Some(clients) => {
            scenario.load = Load::Closed {
                clients,
                turnaround: arguments.turnaround,
                duration: arguments.duration,
            }
        }
        None => require_arrivals(&trace)?,
    }
    let default = EngineOptions::default();
    scenario.options.token_budget = arguments.chunk.unwrap_or(default.token_budget);
    scenario.options.max_sequences = arguments.max_sequences.unwrap_or(default.max_sequences);
    scenario.router = arguments.router.into();
    scenario.memory_reserve = arguments.memory_reserve.unwrap_or_default();
    scenario.kv_blocks_limit = arguments.kv_blocks;
    scenario.slo = arguments.slo.map(|flag| flag.0);
    let outcome = engine::run(&scenario, arguments.engine.into())?;
    if let EngineUsed::StepByStep {
        uncovered: Some(reason),
    } = outcome.engine
    {
        screen.say(format!("note: simulated step by step, since {reason}"));
    }
    if let Some(path) = &arguments.requests_csv {
        let requests = outcome.requests.summaries(&trace);
        io::write_bytes(path, &reports::requests_csv(requests)?)?;
    }
    screen.document(&outcome.report, reports::people)?;
    Ok(reports::judge(&outcome.report, screen))
}
