//! `bench unlike`: what uneven shares gain on two workers of unlike speed, and how well it was foreseen.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use infercluster_executor::checkpoint;
use infercluster_executor::coordinator::Coordinator;
use infercluster_executor::speed::SpeedCheck;
use infercluster_planner::draw::draw_layout;
use infercluster_planner::replica::Workload;
use infercluster_spec::calibration::Residual;
use infercluster_spec::layout::Reduction;
use infercluster_spec::{Bytes, Calibration, GpuId, Layout, Model, SimDuration, Trace, memory};
use serde::Serialize;

use crate::Outcome;
use crate::commands::model::{DEFAULT_SEED as MODEL_SEED, Preset};
use crate::planning::{Answer, Planned};
use crate::profiling::CPU_TYPE;
use crate::rig::judged::{self, Case, Measured, Repeats};
use crate::rig::rows::{self, Row};
use crate::rig::{ClosedLoop, Observed, Rig, even_of, gain_bound, short_requests};
use crate::running::{self, Speeds};
use crate::screen::Screen;

/// Serves a model that fits neither of two unlike workers, evenly cut and as planned, and compares what was
/// predicted.
///
/// Each worker may use 95 % of the memory of the weights, so that only a tensor-parallel group holds them. The cost
/// model is fitted to single operators, to the first worker alone (which may use more memory for that) and to the
/// even layout, at the asked concurrency and a quarter of it. The planned layout is then judged at the asked
/// concurrency, at half and at one and a half of it. Fails with exit code 1 where a prediction is off by more than
/// 10 %, or the gain is less than 0.90 of what whole shares allow.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: infercluster bench unlike --speed 1.0:0.4 --concurrency 16 --duration \"30 s\""
)]
pub(super) struct UnlikeBench {
    /// A model's folder; where it holds none, one is made there.
    #[arg(long, default_value = "out/bench-unlike")]
    model_dir: PathBuf,
    /// Emulated speeds of the two workers.
    #[arg(long, default_value = "1.0:0.4")]
    speed: Speeds,
    /// Clients, each with one request at a time.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// How long clients send in each run at that concurrency; runs at others take a third, those that are fitted
    /// to a fifth.
    #[arg(long, default_value = "30 s")]
    duration: SimDuration,
    /// Runs of each layout and concurrency, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=100))]
    repeats: u8,
}

/// Share of the weights' memory that one worker may use.
const MEMORY_PERCENT: u64 = 95;
/// Requests of the trace: more than workers of this size answer in any sensible time.
const REQUESTS: u64 = 20_000;
/// Noisy runs that are repeated, of all.
const SPARE_RUNS: usize = 3;
/// Largest error of a prediction.
const ERROR_LIMIT: f64 = 0.10;
/// Least share of the gain that whole shares allow.
const GAIN_FLOOR: f64 = 0.90;

/// The answer.
#[derive(Debug, Serialize)]
struct UnlikeReport {
    model: String,
    weight_bytes: u64,
    /// What each worker may use.
    memory_bytes: u64,
    /// Why one worker does not do.
    refusal: Refusal,
    drawing: String,
    /// Predicted beside measured, by layout, concurrency and metric.
    comparison: Vec<Row>,
    /// Tokens a second of the planned layout over those of the even one.
    gain: Row,
    /// What ideal whole shares would gain, on the cost model.
    gain_bound: f64,
    /// Measured gain over that.
    gain_over_bound: f64,
    calibration: Vec<Residual>,
    /// Asked and achieved speeds of all judged runs.
    speeds: Vec<SpeedCheck>,
    /// Noisy runs that were repeated.
    runs_set_aside: usize,
    /// Noisy runs that count, because none was left to repeat them.
    noisy_runs: usize,
    /// What is off by more than is accepted.
    missed: Vec<String>,
}

/// A single worker with the whole model.
#[derive(Debug, Serialize)]
struct Refusal {
    /// Bytes that the planner misses on it.
    missing_bytes: u64,
    /// What a worker says that is to hold it all the same.
    worker: String,
}

/// Runs the command.
pub(super) fn run(arguments: &UnlikeBench, screen: &Screen) -> anyhow::Result<Outcome> {
    let report = bench(arguments, screen)?;
    screen.answer(&report, UnlikeReport::people)?;
    Ok(if report.missed.is_empty() {
        Outcome::Done
    } else {
        Outcome::GoalNotMet
    })
}

fn bench(arguments: &UnlikeBench, screen: &Screen) -> anyhow::Result<UnlikeReport> {
    let speeds = arguments.speed.pair()?;
    let model = model_of(arguments, screen)?;
    let weights = whole_weights(&model)?;
    let limit = Bytes(weights.0 / 100 * MEMORY_PERCENT);
    let rig = Rig::new(arguments.model_dir.clone(), model, speeds, limit)?;
    let loads = Loads::of(arguments);
    let trace = short_requests("judged", REQUESTS)?;
    let workload = Workload::of_trace(&trace, arguments.concurrency).context("a trace without requests")?;

    screen.say("measuring operators at both speeds");
    let operators = rig.measure_operators()?;
    let refusal = refusal(&rig, &operators, workload)?;
    screen.say(format!("one worker alone is refused: {}", refusal.worker));
    let even = even_of(&rig.plan_both(&operators, workload)?)?;
    screen.say("running one worker alone, then both evenly, for the calibration");
    let calibration = rig.calibrate(&operators, &even, &trace, &loads.fitted)?;
    let planned = rig.plan_both(&calibration, workload)?;

    let cases = loads.cases(&even, &planned.layout, &trace);
    let predicted: Vec<Observed> = cases
        .iter()
        .map(|(_, case)| rig.simulate(&calibration, case.layout, &trace, case.load))
        .collect::<anyhow::Result<_>>()?;
    let named: Vec<Case> = cases.iter().map(|(name, case)| Case { name, ..*case }).collect();
    let repeats = Repeats {
        runs: usize::from(arguments.repeats),
        spare: SPARE_RUNS,
    };
    let measured = judged::judge(&rig, &named, repeats, screen, &mut |name| {
        screen.say(format!("running {name}"));
    })?;
    report(
        &rig,
        &planned,
        &calibration,
        refusal,
        weights,
        (&named, &predicted, &measured),
    )
}

/// The loads of one bench.
struct Loads {
    asked: ClosedLoop,
    fitted: [ClosedLoop; 2],
    unseen: [ClosedLoop; 2],
}

impl Loads {
    fn of(arguments: &UnlikeBench) -> Self {
        let (clients, whole) = (arguments.concurrency, arguments.duration.0);
        let closed = |clients: u32, part: u64| ClosedLoop {
            clients: clients.max(1),
            duration: Some(SimDuration(whole / part)),
        };
        Self {
            asked: closed(clients, 1),
            fitted: [closed(clients / 4, 5), closed(clients, 5)],
            unseen: [closed(clients / 2, 3), closed(clients + clients.div_ceil(2), 3)],
        }
    }

    /// The even layout first, then the planned one at the same load, then at those that no fit has seen.
    fn cases<'a>(&self, even: &'a Layout, planned: &'a Layout, trace: &'a Trace) -> Vec<(String, Case<'a>)> {
        let case = |layout, load: ClosedLoop, kind: &str| {
            let case = Case {
                name: "",
                layout,
                trace,
                load,
            };
            (format!("{kind}, {} clients", load.clients), case)
        };
        let unseen = self.unseen.iter().map(|load| case(planned, *load, "planned"));
        [
            case(even, self.asked, "even"),
            case(planned, self.asked, "planned"),
        ]
        .into_iter()
        .chain(unseen)
        .collect()
    }
}

/// The model of the folder; made where there is none: wide enough that steps are long beside their exchanges.
fn model_of(arguments: &UnlikeBench, screen: &Screen) -> anyhow::Result<Model> {
    let folder = &arguments.model_dir;
    if folder.join("config.json").exists() {
        return running::model_of(folder);
    }
    screen.say(format!("making a random model in {}", folder.display()));
    let model = Model {
        layers: 6,
        ..Preset::Medium.model("bench-unlike")
    };
    checkpoint::make(folder, &model, MODEL_SEED)?;
    Ok(model)
}

/// What one worker with everything would hold in weights.
fn whole_weights(model: &Model) -> anyhow::Result<Bytes> {
    let single = Layout::single(model, Reduction::Fast);
    let seats = memory::seats(&single, model);
    Ok(seats.first().context("a layout without a seat")?.memory.weights)
}

/// Asks the planner and a worker to do with one worker.
fn refusal(rig: &Rig, operators: &Calibration, workload: Workload) -> anyhow::Result<Refusal> {
    let missing_bytes = match rig.plan(operators, vec![GpuId(0)], workload)? {
        Answer::Infeasible(why) => why.missing_bytes,
        Answer::Planned(_) => bail!(
            "one worker of {} holds the model: tensor parallelism is not forced",
            rig.memory()
        ),
    };
    let single = Layout::single(&rig.model, Reduction::Fast);
    match Coordinator::start(rig.options(&single, Some(rig.memory()))?) {
        Err(error) => Ok(Refusal {
            missing_bytes,
            worker: error.to_string(),
        }),
        Ok(_) => bail!("a worker of {} took the whole model", rig.memory()),
    }
}

fn report(
    rig: &Rig,
    planned: &Planned,
    calibration: &Calibration,
    refusal: Refusal,
    weights: Bytes,
    (cases, predicted, measured): (&[Case], &[Observed], &[Measured]),
) -> anyhow::Result<UnlikeReport> {
    let mut comparison = Vec::new();
    for ((case, predicted), measured) in cases.iter().zip(predicted).zip(measured) {
        comparison.extend(rows::rows_of(case.name, predicted, measured)?);
    }
    let gain = rows::gain((&predicted[0], &predicted[1]), (&measured[0], &measured[1]))?;
    let gain_bound = gain_bound(planned)?;
    let gain_over_bound = gain.error.measured / gain_bound;
    let mut missed: Vec<String> = comparison
        .iter()
        .filter(|row| !row.is_within(ERROR_LIMIT))
        .map(|row| format!("{}: {:+.1} %", row.error.metric, 100.0 * row.error.relative_error))
        .collect();
    if gain_over_bound < GAIN_FLOOR {
        missed.push(format!("gain: {gain_over_bound:.3} of the bound"));
    }
    let runs = || measured.iter().flat_map(|measured| &measured.runs);
    let device = calibration.devices.get(CPU_TYPE);
    Ok(UnlikeReport {
        model: format!("{}: random weights in {}", rig.model.name, rig.model.dtype),
        weight_bytes: weights.0,
        memory_bytes: rig.memory().0,
        refusal,
        drawing: draw_layout(&planned.layout, &rig.model, Some(&rig.cluster)),
        comparison,
        gain,
        gain_bound,
        gain_over_bound,
        calibration: device.map_or_else(Vec::new, |device| device.residuals.clone()),
        speeds: runs().flat_map(|run| run.speeds.iter().copied()).collect(),
        runs_set_aside: measured.iter().map(|measured| measured.set_aside).sum(),
        noisy_runs: runs().filter(|run| !run.is_quiet()).count(),
        missed,
    })
}

impl UnlikeReport {
    fn people(&self) -> String {
        let mut text = format!(
            "{}, {} of weights; a worker may use {}\none worker alone: the planner misses {}; {}\n\n{}\n{}",
            self.model,
            Bytes(self.weight_bytes),
            Bytes(self.memory_bytes),
            Bytes(self.refusal.missing_bytes),
            self.refusal.worker,
            self.drawing,
            rows::table(self.comparison.iter().chain([&self.gain])),
        );
        text.push_str(&format!(
            "\nwhole shares allow a gain of {:.3}: measured over bound {:.3}\n\
             medians of runs in turns; {} noisy ones were repeated, {} count all the same\n",
            self.gain_bound, self.gain_over_bound, self.runs_set_aside, self.noisy_runs
        ));
        if let Some(line) = running::speed_line(&self.speeds) {
            text.push_str(&format!("{line}\n"));
        }
        for missed in &self.missed {
            text.push_str(&format!("missed: {missed}\n"));
        }
        text
    }
}
