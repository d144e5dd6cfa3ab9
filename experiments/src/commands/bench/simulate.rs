//! `bench simulate`: how fast the simulator is on this machine.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use infercluster_inventory::{Catalogue, cluster_file};
use infercluster_serving::RouterPolicy;
use infercluster_sim::cost::AnalyticCost;
use infercluster_sim::engine::{self, EngineChoice, EngineUsed, RunOutcome};
use infercluster_sim::scenario::{FixedSteps, Scenario, StepTimes};
use infercluster_spec::layout::{
    DEFAULT_BLOCK_SIZE, DEFAULT_QUANTUM, KvCache, LayerGroup, Reduction, Replica, ReplicaRole, Shard, Stage,
};
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::{
    Bytes, Calibration, Cluster, Dtype, EngineOptions, GpuId, IndexRange, Layout, Model, SimDuration, Trace,
};
use infercluster_traces::synth::{
    Amount, ArrivalProcess, DEFAULT_SEED, LengthDistribution, Lengths, SynthSpec, synthesise,
};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::commands::simulate::EngineName;
use crate::process::{cpu_time, peak_memory};
use crate::screen::{Columns, Screen};

/// Times the simulator on workloads of the same shape: Poisson arrivals, prompts of 1000 to 3000 and answers of 128
/// to 384 tokens.
///
/// 32 replicas of one GPU, round robin, 20,000 blocks of 16 tokens, 256 sequences, 8192 tokens a step; a step with any
/// prefill takes 50 ms, any other 20 ms. Each job runs in a process of its own, once to warm up and then in rounds;
/// CPU time is the mean of the rounds, peak memory that of the whole process.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  infercluster bench simulate\n  \
    infercluster bench simulate l s --engine step --rounds 1\n  \
    infercluster bench simulate l --requests 1000000")]
pub(super) struct SimulateBench {
    /// Which jobs; all where none is named.
    #[arg(value_enum)]
    jobs: Vec<Job>,
    /// Timed rounds of each.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Requests, where it is not the job's own number.
    #[arg(long)]
    requests: Option<u64>,
    /// Which engine.
    #[arg(long, value_enum, default_value_t = EngineName::Fast)]
    engine: EngineName,
    /// Seed of the workload.
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
}

/// Workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Job {
    /// 100 requests a second.
    L,
    /// 520 a second: the pool runs dry.
    S,
    /// L with the cost model of an 8B model on H100.
    R,
    /// R with a budget of 512 tokens.
    C,
    /// S with least-outstanding routing.
    G,
    /// 1,000,000 requests on 1,024 mixed GPUs with the cost model, routed by capacity, saturated.
    X,
}

/// What one job took.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct JobAnswer {
    job: Job,
    /// Which engine ran; with the reason where it was not the one asked for.
    engine: String,
    requests: u64,
    output_tokens: u64,
    rounds: u32,
    cpu_s_mean: f64,
    cpu_s_min: f64,
    cpu_s_max: f64,
    /// Peak memory of the process, trace included; absent where the system does not tell.
    peak_memory: Option<Bytes>,
    running_peak: u32,
    free_blocks_min: u32,
    preemptions: u64,
    steps: u64,
    events: u64,
}

/// Runs the command.
pub(super) fn run(arguments: &SimulateBench, screen: &Screen) -> anyhow::Result<Outcome> {
    ensure!(
        arguments.rounds > 0,
        "0 rounds measure nothing, at least 1 is needed"
    );
    let answers = match arguments.jobs.as_slice() {
        [job] => vec![measure(*job, arguments)?],
        [] => apart(Job::value_variants(), arguments, screen)?,
        jobs => apart(jobs, arguments, screen)?,
    };
    screen.answer(&answers, people)?;
    Ok(Outcome::Done)
}

/// Runs each job in a process of its own, since peak memory belongs to a process.
fn apart(jobs: &[Job], arguments: &SimulateBench, screen: &Screen) -> anyhow::Result<Vec<JobAnswer>> {
    let program = std::env::current_exe().context("this program")?;
    let mut answers = Vec::new();
    for job in jobs {
        let name = |value: Option<clap::builder::PossibleValue>| {
            value.map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        let mut command = Command::new(&program);
        command.args(["--json", "bench", "simulate", &name(job.to_possible_value())]);
        command.args(["--rounds", &arguments.rounds.to_string()]);
        command.args(["--engine", &name(arguments.engine.to_possible_value())]);
        command.args(["--seed", &arguments.seed.to_string()]);
        if let Some(requests) = arguments.requests {
            command.args(["--requests", &requests.to_string()]);
        }
        let output = command
            .stderr(Stdio::inherit())
            .output()
            .context("this program")?;
        ensure!(output.status.success(), "the process of job {job:?} failed");
        let answer: Vec<JobAnswer> = serde_json::from_slice(&output.stdout).context("a job's answer")?;
        answers.extend(answer);
        screen.say(format!("{job:?} done"));
    }
    Ok(answers)
}

/// Everything that the scenario of a job borrows.
struct Setup {
    cluster: Cluster,
    model: Model,
    layout: Layout,
    trace: Trace,
}

fn measure(job: Job, arguments: &SimulateBench) -> anyhow::Result<JobAnswer> {
    let setup = job.setup(arguments)?;
    let cost = AnalyticCost::new(&setup.cluster, &Calibration::default())?;
    let mut scenario = Scenario::new(&setup.cluster, &setup.model, &setup.layout, &cost, &setup.trace);
    job.configure(&mut scenario);
    let choice = EngineChoice::from(arguments.engine);
    let mut outcome = engine::run(&scenario, choice)?;
    let mut rounds = Vec::new();
    for _ in 0..arguments.rounds {
        drop(outcome);
        let before = cpu_time();
        outcome = engine::run(&scenario, choice)?;
        rounds.push((cpu_time() - before).as_secs_f64());
    }
    Ok(answer(job, &setup, &outcome, &rounds))
}

fn answer(job: Job, setup: &Setup, outcome: &RunOutcome, rounds: &[f64]) -> JobAnswer {
    let engine = match outcome.engine {
        EngineUsed::Coalesced => "fast".to_owned(),
        EngineUsed::StepByStep { uncovered: None } => "step".to_owned(),
        EngineUsed::StepByStep {
            uncovered: Some(reason),
        } => format!("step: {reason}"),
    };
    let replicas = outcome.replicas.iter();
    let free_blocks = replicas
        .clone()
        .map(|replica| replica.kv_blocks - replica.kv_blocks_peak);
    JobAnswer {
        job,
        engine,
        requests: setup.trace.requests.len() as u64,
        output_tokens: outcome.requests.output_tokens(),
        rounds: rounds.len() as u32,
        cpu_s_mean: rounds.iter().sum::<f64>() / rounds.len() as f64,
        cpu_s_min: rounds.iter().copied().fold(f64::INFINITY, f64::min),
        cpu_s_max: rounds.iter().copied().fold(0.0, f64::max),
        peak_memory: peak_memory(),
        running_peak: replicas.map(|replica| replica.running_peak).max().unwrap_or(0),
        free_blocks_min: free_blocks.min().unwrap_or(0),
        preemptions: outcome.report.preemptions,
        steps: outcome.report.steps.unwrap_or(0),
        events: outcome.events,
    }
}

impl Job {
    fn setup(self, arguments: &SimulateBench) -> anyhow::Result<Setup> {
        let (line, requests, rate) = match self {
            Self::L | Self::R | Self::C => ("4 x (8 x h100-sxm, nvswitch, 8 x ndr)", 100_000, 100.0),
            Self::S | Self::G => ("4 x (8 x h100-sxm, nvswitch, 8 x ndr)", 100_000, 520.0),
            Self::X => (
                "64 x (8 x h100-sxm, nvswitch, 8 x ndr); 32 x (8 x a100-sxm4-80gb, nvswitch, 8 x ndr); 32 x (8 x l40s, 8 x ndr)",
                1_000_000,
                30_000.0,
            ),
        };
        let cluster = cluster_file::read_line(line, &Catalogue::builtin())?.cluster;
        let model = model();
        let layout = one_gpu_replicas(&model, cluster.gpus().map(|(_, gpu)| gpu.id));
        let trace = synthesise(&SynthSpec {
            name: "bench",
            arrivals: ArrivalProcess::Poisson { rate },
            lengths: Lengths::Independent {
                input: LengthDistribution::Uniform { min: 1000, max: 3000 },
                output: LengthDistribution::Uniform { min: 128, max: 384 },
            },
            amount: Amount::Count(arguments.requests.unwrap_or(requests)),
            seed: arguments.seed,
        })?;
        Ok(Setup {
            cluster,
            model,
            layout,
            trace,
        })
    }

    fn configure(self, scenario: &mut Scenario) {
        let is_modelled = matches!(self, Self::R | Self::C | Self::X);
        if !is_modelled {
            scenario.steps = StepTimes::Fixed(FixedSteps {
                prefill: SimDuration(50_000_000_000),
                decode: SimDuration(20_000_000_000),
            });
        }
        scenario.options = EngineOptions {
            token_budget: if self == Self::C { 512 } else { 8192 },
            max_sequences: 256,
            max_context: None,
        };
        scenario.kv_blocks_limit = (self != Self::X).then_some(20_000);
        scenario.router = match self {
            Self::G => RouterPolicy::LeastOutstanding,
            Self::X => RouterPolicy::CapacityWeighted,
            _ => RouterPolicy::RoundRobin,
        };
    }
}

/// Llama 3.1 8B.
fn model() -> Model {
    Model {
        name: "llama-3.1-8b".to_owned(),
        family: Family::Llama,
        layers: 32,
        hidden: 4096,
        query_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 14_336,
        vocab: 128_256,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 500_000.0,
            llama3: None,
        },
        max_positions: 131_072,
        dtype: Dtype::Bf16,
        experts: None,
        sliding_window: None,
    }
}

/// A whole copy of the model on each device.
fn one_gpu_replicas(model: &Model, gpus: impl Iterator<Item = GpuId>) -> Layout {
    let all = |count| IndexRange::new(0, count).expect("zero is not above a count");
    let replica = |gpu: GpuId| Replica {
        role: ReplicaRole::Mixed,
        stages: vec![Stage {
            layer_groups: vec![LayerGroup {
                layers: all(model.layers),
                shards: vec![Shard {
                    gpu,
                    query_heads: all(model.query_heads),
                    mlp_columns: all(model.ffn),
                    output_rows: None,
                    vocab: Some(all(model.vocab)),
                    experts: Vec::new(),
                }],
            }],
        }],
    };
    let gpus: Vec<GpuId> = gpus.collect();
    Layout {
        model: model.name.clone(),
        reduction: Reduction::Fast,
        numerics: "gpu-bf16".to_owned(),
        quantum: DEFAULT_QUANTUM,
        kv: KvCache {
            block_size: DEFAULT_BLOCK_SIZE,
            dtype: Dtype::Bf16,
        },
        replicas: gpus.iter().copied().map(replica).collect(),
        gpus,
    }
}

fn people(answers: &Vec<JobAnswer>) -> String {
    let mut table = Columns::new([
        "job",
        ">requests",
        ">CPU s",
        ">least",
        ">most",
        ">peak MB",
        ">running",
        ">free blocks",
        ">preemptions",
        ">steps",
        ">events",
        ">M tokens/s",
        "engine",
    ]);
    for one in answers {
        let seconds = |seconds: f64| format!("{seconds:.4}");
        let memory = one.peak_memory.map(|peak| format!("{:.1}", peak.as_f64() / 1e6));
        table.row([
            format!("{:?}", one.job),
            one.requests.to_string(),
            seconds(one.cpu_s_mean),
            seconds(one.cpu_s_min),
            seconds(one.cpu_s_max),
            memory.unwrap_or_else(|| "-".to_owned()),
            one.running_peak.to_string(),
            one.free_blocks_min.to_string(),
            one.preemptions.to_string(),
            one.steps.to_string(),
            one.events.to_string(),
            format!("{:.1}", one.output_tokens as f64 / one.cpu_s_mean / 1e6),
            one.engine.clone(),
        ]);
    }
    table.to_string()
}
