//! `bench migrate`: what a live migration costs on this machine.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use infercluster_executor::bench::{self, MigrationBench, MigrationBenchOutcome, MigrationFloors};
use infercluster_executor::checkpoint::make;
use infercluster_executor::coordinator::{CoordinatorOptions, MigrationReport};
use infercluster_planner::proportional::{ProportionalRequest, proportional_layout};
use infercluster_spec::layout::Reduction;
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::stats::Summary;
use infercluster_spec::{Bytes, Dtype, Layout, Model};

use crate::Outcome;
use crate::running;
use crate::screen::{Columns, Screen};

/// Changes the layout of a service under load, back and forth at random moments, and compares every answer with
/// the undisturbed one.
///
/// Serves a made model of more than 200 MB on two worker processes. A request that fails or differs in one bit of
/// its logits fails the command, and so does a migration with less than 50 MB of live KV at its commit, fewer
/// than 20 steps or no round of KV copying, and fewer migrations with a request in prefill than were asked for.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster bench migrate --cut tensor --rounds 20")]
pub(super) struct MigrateBench {
    /// What is cut differently.
    #[arg(long, value_enum, default_value_t = Cut::Tensor)]
    cut: Cut,
    /// Migrations each way.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// How many of all migrations shall have a request in prefill when the new layout's first step is named: long
    /// prompts are sent one after another during so many.
    #[arg(long, default_value_t = 5)]
    prefills: u32,
    /// Seed of prompts and moments.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Where the model is made; it stays there.
    #[arg(long, default_value = "out/bench-migrate")]
    model_dir: PathBuf,
}

/// Pairs of layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cut {
    /// Tensor-parallel shares 50:50 and 70:30.
    Tensor,
    /// Pipeline stages 2:1 and 1:2.
    Pipeline,
}

/// Runs the command.
pub(super) fn run(arguments: &MigrateBench, screen: &Screen) -> anyhow::Result<Outcome> {
    let model = model();
    let (from, to) = layouts(arguments.cut, &model)?;
    screen.say(format!("making a model in {}", arguments.model_dir.display()));
    make(&arguments.model_dir, &model, arguments.seed)?;
    let mut options: CoordinatorOptions = running::options(&arguments.model_dir, &model, &from)?;
    // A long prompt takes many steps, so that a migration meets it, and none of them is much longer than a step
    // that only decodes.
    options.engine.token_budget = 32;
    options.engine.max_sequences = 16;
    options.kv_blocks = Some(256);
    let bench = MigrationBench {
        options,
        other: to,
        rounds: arguments.rounds,
        prefills: arguments.prefills,
        clients: 8,
        prompt_tokens: 160,
        new_tokens: 96,
        long_prompt_tokens: 1800,
        long_new_tokens: 8,
        seed: arguments.seed,
    };
    screen.say("running every request undisturbed, for its logits");
    let bar = screen.progress(u64::from(2 * arguments.rounds), "migrations");
    let outcome = bench::migrate(&bench, |_| bar.inc(1))?;
    bar.finish_and_clear();
    screen.answer(&outcome, people)?;
    outcome.check(MigrationFloors {
        weight_bytes: Bytes(200_000_000),
        kv_bytes_at_commit: Bytes(50_000_000),
        steps_meanwhile: 20,
        rounds: 1,
        prefills: u64::from(arguments.prefills),
    })?;
    Ok(Outcome::Done)
}

/// Of more than 200 MB, with heads that can be shared 7:3 and layers that can be shared 2:1.
fn model() -> Model {
    Model {
        name: "bench-migrate".to_owned(),
        family: Family::Llama,
        layers: 18,
        hidden: 640,
        query_heads: 10,
        kv_heads: 10,
        head_dim: 64,
        ffn: 2560,
        vocab: 4096,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            llama3: None,
        },
        max_positions: 2048,
        dtype: Dtype::Bf16,
        experts: None,
        sliding_window: None,
    }
}

fn layouts(cut: Cut, model: &Model) -> anyhow::Result<(Layout, Layout)> {
    let layout = |text: &str| -> anyhow::Result<Layout> {
        let mut request = ProportionalRequest::equal(2);
        request.reduction = Reduction::Invariant;
        let shares = Some(text.parse()?);
        match cut {
            Cut::Tensor => {
                request.heads.clone_from(&shares);
                request.mlp = shares;
            }
            Cut::Pipeline => request.stages = shares,
        }
        Ok(proportional_layout(model, &request)?)
    };
    Ok(match cut {
        Cut::Tensor => (layout("50:50")?, layout("70:30")?),
        Cut::Pipeline => (layout("2:1")?, layout("1:2")?),
    })
}

fn people(outcome: &MigrationBenchOutcome) -> String {
    let milliseconds = |seconds: f64| format!("{:.1}", 1e3 * seconds);
    let seconds =
        |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2}"));
    let mut moved = Columns::new([
        ">epoch",
        ">KV at commit",
        ">moved",
        ">kept",
        ">in prefill",
        ">rounds",
        ">steps",
        ">prepare s",
        ">copy s",
        ">release s",
    ]);
    let mut felt = Columns::new([
        ">epoch",
        ">pause p50 ms",
        ">worst",
        ">over ITL",
        ">to dispatch",
        ">marks",
        ">tail",
        ">compute",
        ">record",
        ">ITL before ms",
        ">meanwhile",
        ">p99",
        ">after",
    ]);
    for one in &outcome.migrations {
        moved.row([
            one.epoch.0.to_string(),
            one.kv_bytes_at_commit.to_string(),
            one.kv_bytes_moved.to_string(),
            one.kv_bytes_kept.to_string(),
            one.prefills_at_commit.to_string(),
            one.rounds.to_string(),
            one.steps_meanwhile.to_string(),
            seconds(one.prepare_s),
            seconds(one.copy_s),
            seconds(one.release_s),
        ]);
        let first = one.first_step_s;
        felt.row([
            one.epoch.0.to_string(),
            milliseconds(one.pause_s.p50),
            milliseconds(one.pause_s.max),
            milliseconds(one.pause_excess_s.p50),
            milliseconds(first.dispatch),
            milliseconds(first.marks),
            milliseconds(first.tail),
            milliseconds(first.compute),
            one.record_s.map_or_else(|| "-".to_owned(), milliseconds),
            milliseconds(one.itl_before_s.p50),
            milliseconds(one.itl_meanwhile_s.p50),
            milliseconds(one.itl_meanwhile_s.p99),
            milliseconds(one.itl_after_s.p50),
        ]);
    }
    format!(
        "{moved}\n{felt}\n{}{}",
        spread(&outcome.migrations),
        totals(outcome)
    )
}

/// Medians and extremes over the migrations of each way, which start from layouts of unlike speed.
fn spread(migrations: &[MigrationReport]) -> String {
    type Metric = (&'static str, fn(&MigrationReport) -> Option<f64>);
    let metrics: [Metric; 6] = [
        ("prepare s", |one| one.prepare_s),
        ("copy s", |one| one.copy_s),
        ("pause p50 ms", |one| Some(1e3 * one.pause_s.p50)),
        ("pause over ITL p50 ms", |one| Some(1e3 * one.pause_excess_s.p50)),
        ("ITL p50 before ms", |one| Some(1e3 * one.itl_before_s.p50)),
        ("ITL p50 meanwhile ms", |one| Some(1e3 * one.itl_meanwhile_s.p50)),
    ];
    let mut table = Columns::new(["way", "of each migration", ">p50", ">p90", ">worst"]);
    for (index, way) in ["there", "back"].into_iter().enumerate() {
        for (name, metric) in metrics {
            let of_way = migrations.iter().skip(index).step_by(2).filter_map(metric);
            let summary = Summary::of(of_way.collect());
            let number = |value: f64| format!("{value:.2}");
            let (name, way) = (name.to_owned(), way.to_owned());
            table.row([
                way,
                name,
                number(summary.p50),
                number(summary.p90),
                number(summary.max),
            ]);
        }
    }
    table.to_string()
}

fn totals(outcome: &MigrationBenchOutcome) -> String {
    let spread = |summary: &Summary| {
        let [p50, p90, p99, worst] = [summary.p50, summary.p90, summary.p99, summary.max].map(|s| 1e3 * s);
        format!("p50 {p50:.1} ms, p90 {p90:.1} ms, p99 {p99:.1} ms, worst {worst:.1} ms")
    };
    format!(
        "\n{} of weights; {} migrations, {} with a request in prefill; {} requests, 0 failed, every logits hash \
         as undisturbed\npause of {} streams: {}\n  over the median gap before: {}\n",
        outcome.weight_bytes,
        outcome.migrations.len(),
        outcome.prefills,
        outcome.requests,
        outcome.pause_s.samples,
        spread(&outcome.pause_s),
        spread(&outcome.pause_excess_s),
    )
}
