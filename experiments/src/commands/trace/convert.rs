//! `trace convert`: another format, scaled, cut or clipped.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use infercluster_spec::{SimDuration, SimTime, Tokens, Trace};
use infercluster_traces::format::TraceFormat;
use infercluster_traces::servegen;
use infercluster_traces::synth::DEFAULT_SEED;
use infercluster_traces::transform::{LengthLimits, clip_lengths, cut_window, scale_time};

use super::synth::Arrivals;
use crate::Outcome;
use crate::failure::WithFix as _;
use crate::screen::Screen;

/// Converts a trace: another format, a window of it, another rate, shorter requests.
///
/// Steps are taken in the order of the options below. Of a folder of clients (ServeGen) requests are drawn
/// for the window first, which needs `--until`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster trace convert conv.csv --from 10min --until 20min --scale 0.5 --format lines -o busy.jsonl\n  \
    infercluster trace convert ServeGen/data/language/m-large --from 40h --until 41h -o hour.jsonl")]
pub(super) struct Convert {
    /// A trace file in any format that is known, compressed with gzip or not, or a folder of clients.
    trace: PathBuf,
    /// Drop what arrives earlier, such as "10 s".
    #[arg(long)]
    from: Option<SimDuration>,
    /// Drop what arrives at this time or later.
    #[arg(long)]
    until: Option<SimDuration>,
    /// Multiply arrival times: 0.5 doubles the rate.
    #[arg(long)]
    scale: Option<f64>,
    /// Replace arrival times: poisson:RATE, gamma:RATE,CV, constant:RATE or closed.
    #[arg(long)]
    arrivals: Option<Arrivals>,
    /// Seed of new arrival times, and of requests that are drawn.
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
    /// Clip prompts to so many tokens.
    #[arg(long)]
    max_input: Option<u64>,
    /// Clip answers to so many tokens.
    #[arg(long)]
    max_output: Option<u64>,
    /// Format to write: azure, vidur, vidur-lengths, mooncake or lines.
    #[arg(long, default_value_t = TraceFormat::Lines)]
    format: TraceFormat,
    /// Where to write it.
    #[arg(short, long, default_value = "-")]
    output: PathBuf,
}

/// Requests of a folder of clients in the window that is asked for.
fn drawn(arguments: &Convert) -> anyhow::Result<Trace> {
    let pool = servegen::load(&arguments.trace)?;
    let until = arguments
        .until
        .context("a folder of clients has rates instead of requests")
        .fix("say for which time requests are drawn, such as --until 1h")?;
    let whole = |span: SimDuration| span.as_seconds().round() as u64;
    let from = arguments.from.map_or(0, whole);
    pool.generate(from, whole(until), arguments.seed)
        .context("nothing could be drawn in this window")
}

/// Runs the command.
pub(super) fn run(arguments: &Convert, screen: &Screen) -> anyhow::Result<Outcome> {
    let mut trace = match arguments.trace.is_dir() {
        true => drawn(arguments)?,
        false => super::load(&arguments.trace)?.trace,
    };
    if !arguments.trace.is_dir() && (arguments.from.is_some() || arguments.until.is_some()) {
        let from = SimTime::ZERO + arguments.from.unwrap_or(SimDuration::ZERO);
        let until = arguments
            .until
            .map_or(SimTime(u64::MAX), |until| SimTime::ZERO + until);
        cut_window(&mut trace, from, until)?;
    }
    if let Some(factor) = arguments.scale {
        scale_time(&mut trace, factor)?;
    }
    if let Some(arrivals) = arguments.arrivals {
        infercluster_traces::synth::attach_arrivals(&mut trace, arrivals.0, arguments.seed)?;
    }
    let limits = LengthLimits {
        input: arguments.max_input.map(Tokens),
        output: arguments.max_output.map(Tokens),
    };
    let clipped = clip_lengths(&mut trace, limits)?;
    if clipped > 0 {
        screen.say(format!("note: {clipped} requests were clipped"));
    }
    super::save(&trace, arguments.format, &arguments.output, screen)?;
    Ok(Outcome::Done)
}
