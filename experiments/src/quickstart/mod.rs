//! The whole loop on one machine, by the functions that the single commands call.
//!
//! The calibration sees profiles, solo runs and the even layout at other batch sizes. It never sees the runs
//! that its predictions are compared with.

mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use indicatif::ProgressBar;
use infercluster_executor::checkpoint;
use infercluster_executor::coordinator::Coordinator;
use infercluster_executor::replay::{Pace, ReplayOptions, ReplayOutcome, Target, replay};
use infercluster_executor::speed::Speed;
use infercluster_inventory::{Catalogue, cluster_file};
use infercluster_planner::replica::{Objective, PlanProblem, Workload};
use infercluster_sim::calibrate::{fit, fit_steps};
use infercluster_sim::cost::AnalyticCost;
use infercluster_sim::scenario::Load;
use infercluster_spec::layout::{CPU_F32, DEFAULT_QUANTUM, Reduction};
use infercluster_spec::{Bytes, Calibration, Cluster, GpuId, Layout, Model, StepRun, Trace, json};
use infercluster_traces::synth::{
    Amount, ArrivalProcess, DEFAULT_SEED, LengthDistribution, Lengths, SynthSpec, synthesise,
};

use crate::commands::model::{DEFAULT_SEED as MODEL_SEED, Preset};
use crate::planning::{self, Answer, Planned, Trial};
use crate::profiling::{self, CPU_TYPE};
use crate::screen::Screen;
use crate::{io, running};

use report::Judged;
pub(crate) use report::QuickReport;

/// What a user may change.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Where everything is written.
    pub(crate) folder: PathBuf,
    /// Emulated speeds of the two workers.
    pub(crate) speeds: [Speed; 2],
    /// Requests of each judged run.
    pub(crate) requests: u64,
}

/// Sequences under way in the judged runs; calibration runs use others.
const JUDGED_CONCURRENCY: u32 = 8;
/// Sequences under way in the runs that the calibration is fitted to.
const FITTED_CONCURRENCY: [u32; 2] = [4, 12];
/// Requests of a run that the calibration is fitted to.
const FITTED_REQUESTS: u64 = 24;
/// Memory of one worker: far more than the model, so that memory binds nothing.
const WORKER_MEMORY: &str = "1 GiB";
/// Most tokens of one step that are profiled.
const PROFILED_TOKENS: usize = 64;

/// Runs the loop.
pub(crate) fn run(settings: &Settings, screen: &Screen) -> anyhow::Result<QuickReport> {
    let steps = Steps::new(screen);
    std::fs::create_dir_all(&settings.folder).with_context(|| settings.folder.display().to_string())?;
    let bench = Bench::new(settings)?;
    steps.next("making a random model with a fixed seed");
    checkpoint::make(&bench.model_dir, &bench.model, MODEL_SEED)?;

    steps.next("measuring operators at both speeds");
    let mut profiles = Vec::new();
    for speed in settings.speeds {
        profiles.push(profiling::profile(&bench.model, PROFILED_TOKENS, speed, CPU_TYPE)?.profile);
    }
    let operators = fit(&profiles, &bench.cluster)?;

    let answer = bench.plan(&operators, None)?;
    let even = even_of(&answer)?;
    steps.next("running one worker alone, then both evenly, for the calibration");
    let runs = bench.calibration_runs(&even)?;
    let calibration = fit_steps(&runs, &bench.cluster, &bench.model, &operators)?;
    bench.save("calibration.json", &calibration)?;

    steps.next("planning and simulating");
    let trace = synthetic("judged", settings.requests)?;
    let trial = Trial {
        trace: &trace,
        load: Load::closed(JUDGED_CONCURRENCY),
    };
    let planned = bench.plan(&calibration, Some(trial))?;
    let even = even_of(&planned)?;
    bench.save("even.json", &even)?;
    bench.save("planned.json", &planned.layout)?;

    steps.next("executing the even layout");
    let measured_even = bench.execute(&even, &trace, JUDGED_CONCURRENCY)?;
    steps.next("executing the planned layout");
    let measured_planned = bench.execute(&planned.layout, &trace, JUDGED_CONCURRENCY)?;
    steps.finish();

    let judged = Judged {
        even: &measured_even,
        planned: &measured_planned,
    };
    let report = QuickReport::new(&bench.model, &bench.cluster, &planned, &calibration, judged)?;
    io::write_bytes(
        &settings.folder.join("report.json"),
        json::write_plain(&report).as_bytes(),
    )?;
    io::write_bytes(&settings.folder.join("report.txt"), report.people().as_bytes())?;
    screen.say(format!("everything is in {}", settings.folder.display()));
    Ok(report)
}

/// Progress in whole steps: a bar on a terminal, nothing in pipes.
struct Steps(ProgressBar);

/// How many times [`Steps::next`] is called.
const STEPS: u64 = 6;

impl Steps {
    fn new(screen: &Screen) -> Self {
        Self(screen.progress(STEPS, "starting"))
    }

    fn next(&self, what: &str) {
        self.0.inc(1);
        self.0.set_message(what.to_owned());
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// The model, the two workers as a cluster, and where files go.
struct Bench {
    folder: PathBuf,
    model_dir: PathBuf,
    model: Model,
    cluster: Cluster,
    speeds: [Speed; 2],
}

impl Bench {
    fn new(settings: &Settings) -> anyhow::Result<Self> {
        let [first, second] = settings.speeds.map(Speed::factor);
        let text = format!(
            "name = \"this host\"\n[[node]]\nname = \"host\"\ngpus = \"2 x {CPU_TYPE}\"\nfabric = \"none\"\n\
             memory = \"{WORKER_MEMORY}\"\nspeed = [{first:?}, {second:?}]\n"
        );
        let cluster = cluster_file::read("quickstart", &text, &Catalogue::builtin())?.cluster;
        Ok(Self {
            folder: settings.folder.clone(),
            model_dir: settings.folder.join("model"),
            model: Preset::Quick.model("model"),
            cluster,
            speeds: settings.speeds,
        })
    }

    fn save<T: infercluster_spec::Document>(&self, name: &str, document: &T) -> anyhow::Result<()> {
        io::write_document(&self.folder.join(name), document)
    }

    /// One tensor-parallel group over both workers.
    fn plan(&self, calibration: &Calibration, trial: Option<Trial>) -> anyhow::Result<Planned> {
        let cost = AnalyticCost::new(&self.cluster, calibration)?;
        let lengths = synthetic("lengths", FITTED_REQUESTS)?;
        let workload =
            Workload::of_trace(&lengths, JUDGED_CONCURRENCY).context("a trace without requests")?;
        let single = Layout::single(&self.model, Reduction::Fast);
        let problem = PlanProblem {
            cost: &cost,
            model: &self.model,
            cluster: &self.cluster,
            gpus: vec![GpuId(0), GpuId(1)],
            reduction: Reduction::Fast,
            numerics: CPU_F32.to_owned(),
            quantum: DEFAULT_QUANTUM,
            kv: single.kv,
            split_groups: true,
            stages: Some(1),
            workload,
            objective: Objective::Throughput,
            reserve: Bytes::ZERO,
        };
        match planning::plan(&problem, trial)? {
            Answer::Planned(planned) => Ok(*planned),
            Answer::Infeasible(_) => {
                bail!("the quickstart's own model does not fit {WORKER_MEMORY} a worker")
            }
        }
    }

    /// Steps of the first worker alone and of the even layout, at batch sizes that are not judged.
    fn calibration_runs(&self, even: &Layout) -> anyhow::Result<Vec<StepRun>> {
        let alone = Layout::single(&self.model, Reduction::Fast);
        let mut runs = Vec::new();
        for layout in [&alone, even] {
            for concurrency in FITTED_CONCURRENCY {
                let trace = synthetic("fitted", FITTED_REQUESTS)?;
                let outcome = self.execute(layout, &trace, concurrency)?;
                runs.push(StepRun {
                    layout: layout.clone(),
                    steps: outcome.steps,
                });
            }
        }
        Ok(runs)
    }

    /// Starts worker processes for a layout and replays a trace in a closed loop.
    fn execute(&self, layout: &Layout, trace: &Trace, concurrency: u32) -> anyhow::Result<ReplayOutcome> {
        let coordinator = self.coordinator(layout)?;
        let options = ReplayOptions {
            pace: Pace::Closed {
                concurrency: concurrency as usize,
                duration: None,
            },
            seed: DEFAULT_SEED,
            max_context: self.model.max_positions,
            vocab: self.model.vocab,
            logits_hash: false,
            slo: None,
        };
        let outcome = replay(Target::Coordinator(&coordinator), trace, &options, &|_| ())?;
        match outcome.answers.iter().find_map(|answer| answer.error.as_ref()) {
            Some(error) => bail!(
                "{} requests failed, the first with: {error}",
                outcome.report.failed
            ),
            None => Ok(outcome),
        }
    }

    fn coordinator(&self, layout: &Layout) -> anyhow::Result<Coordinator> {
        let mut options = running::options(&self.model_dir, &self.model, layout)?;
        let speeds = [GpuId(0), GpuId(1)].into_iter().zip(self.speeds);
        options.speeds = speeds
            .filter(|(gpu, _)| layout.gpus.contains(gpu))
            .collect::<BTreeMap<_, _>>();
        options.memory = Some(WORKER_MEMORY.parse()?);
        Ok(Coordinator::start(options)?)
    }
}

/// The layout that engines would choose.
fn even_of(planned: &Planned) -> anyhow::Result<Layout> {
    let even = planned.baselines.iter().find(|baseline| baseline.kind == "even");
    Ok(even.context("no even layout fits")?.layout.clone())
}

/// Short requests, as many as asked for.
fn synthetic(name: &str, count: u64) -> anyhow::Result<Trace> {
    let uniform = |min, max| LengthDistribution::Uniform { min, max };
    Ok(synthesise(&SynthSpec {
        name,
        arrivals: ArrivalProcess::Closed,
        lengths: Lengths::Independent {
            input: uniform(16, 48),
            output: uniform(24, 48),
        },
        amount: Amount::Count(count),
        seed: DEFAULT_SEED,
    })?)
}
