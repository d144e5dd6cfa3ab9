//! `replay`: a trace against real workers, reported as `simulate` reports.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use infercluster_executor::coordinator::Coordinator;
use infercluster_executor::replay::{
    Pace, ReplayOptions, ReplayOutcome, ServedModel, Target, replay, served_model,
};
use infercluster_spec::report::RequestRecord;
use infercluster_spec::{SimDuration, StepRun, Trace};

use crate::Outcome;
use crate::commands::trace;
use crate::io;
use crate::reports::{self, SloFlag};
use crate::running::{self, RunFlags};
use crate::screen::Screen;

/// Replays a trace against a service, or against workers started for it, and reports as `simulate` does.
///
/// Prompts are random ids of the trace's lengths from a seed; answers have the trace's lengths. Requests that
/// can never fit are counted as skipped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster replay --trace short.jsonl --url http://127.0.0.1:8000\n  \
    infercluster replay --trace short.jsonl --model-dir tiny --layout uneven.json --speed 1.0:0.4 \
    --concurrency 16 --duration \"30 s\" --json")]
pub(crate) struct Replay {
    /// The requests.
    #[arg(long)]
    trace: PathBuf,
    /// A running service.
    #[arg(long, required_unless_present = "model_dir", conflicts_with = "model_dir")]
    url: Option<String>,
    #[command(flatten)]
    run: Option<RunFlags>,
    /// Closed loop: so many requests at a time instead of the trace's arrival times.
    #[arg(long)]
    concurrency: Option<usize>,
    /// In a closed loop, send for so long and start again after the last request.
    #[arg(long, requires = "concurrency")]
    duration: Option<SimDuration>,
    /// Multiply arrival times: 0.5 doubles the rate.
    #[arg(long, default_value_t = 1.0, conflicts_with = "concurrency")]
    stretch: f64,
    /// Seed of the prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Latency limits, such as ttft=2s,itl=100ms.
    #[arg(long)]
    slo: Option<SloFlag>,
    /// Write one row a request here.
    #[arg(long)]
    requests_csv: Option<PathBuf>,
    /// Write the measured steps here, for `calibrate --steps`; only with --model-dir.
    #[arg(long, conflicts_with = "url")]
    steps: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Replay, screen: &Screen) -> anyhow::Result<Outcome> {
    let trace = trace::load(&arguments.trace)?.trace;
    let outcome = match (&arguments.url, &arguments.run) {
        (Some(url), _) => {
            let model = served_model(url)?;
            send(Target::Url(url), arguments, &trace, model, screen)?
        }
        (None, Some(flags)) => {
            let options = flags.options()?;
            let layout = options.layout.clone();
            let model = ServedModel {
                max_context: options.model.max_positions,
                vocab: options.model.vocab,
            };
            let coordinator = Coordinator::start(options)?;
            let outcome = send(
                Target::Coordinator(&coordinator),
                arguments,
                &trace,
                model,
                screen,
            )?;
            if let Some(path) = &arguments.steps {
                let steps = outcome.steps.clone();
                io::write_document(path, &StepRun { layout, steps })?;
            }
            outcome
        }
        (None, None) => return Err(anyhow!("neither --url nor --model-dir was given")),
    };
    if let Some(path) = &arguments.requests_csv {
        io::write_bytes(
            path,
            &reports::requests_csv(outcome.records.iter().map(RequestRecord::summary))?,
        )?;
    }
    screen.document(&outcome.report, reports::people)?;
    if let Some(line) = running::speed_line(&outcome.speeds) {
        screen.say(line);
    }
    if let Some(error) = outcome.answers.iter().find_map(|answer| answer.error.as_ref()) {
        screen.say(format!(
            "note: {} requests failed, the first with: {error}",
            outcome.report.failed
        ));
    }
    running::demand_speeds(&outcome.speeds)?;
    Ok(reports::judge(&outcome.report, screen))
}

fn send(
    target: Target,
    arguments: &Replay,
    trace: &Trace,
    model: ServedModel,
    screen: &Screen,
) -> anyhow::Result<ReplayOutcome> {
    let pace = match arguments.concurrency {
        Some(concurrency) => Pace::Closed {
            concurrency,
            duration: arguments
                .duration
                .map(|span| Duration::from_nanos(span.as_nanoseconds())),
        },
        None => Pace::Open {
            stretch: arguments.stretch,
        },
    };
    let options = ReplayOptions {
        pace,
        seed: arguments.seed,
        max_context: model.max_context,
        vocab: model.vocab,
        logits_hash: false,
        slo: arguments.slo.map(|flag| flag.0),
    };
    let bar = screen.progress(trace.requests.len() as u64, "requests");
    let outcome = replay(target, trace, &options, &|ended| bar.set_position(ended as u64));
    bar.finish_and_clear();
    Ok(outcome?)
}
