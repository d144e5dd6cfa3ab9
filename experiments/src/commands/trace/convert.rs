//! `trace convert`: another format, scaled, cut or clipped.

use std::path::PathBuf;

use clap::Args;
use infercluster_spec::{SimDuration, SimTime, Tokens};
use infercluster_traces::format::TraceFormat;
use infercluster_traces::synth::DEFAULT_SEED;
use infercluster_traces::transform::{LengthLimits, clip_lengths, cut_window, scale_time};

use super::synth::Arrivals;
use crate::Outcome;
use crate::screen::Screen;

/// Converts a trace: another format, a window of it, another rate, shorter requests.
///
/// Steps are taken in the order of the options below.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: infercluster trace convert conv.csv --from 10min --until 20min --scale 0.5 \
    --format lines -o busy.jsonl"
)]
pub(super) struct Convert {
    /// A trace file in any format that is known.
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
    /// Seed of new arrival times.
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

/// Runs the command.
pub(super) fn run(arguments: &Convert, screen: &Screen) -> anyhow::Result<Outcome> {
    let mut trace = super::load(&arguments.trace)?.trace;
    if arguments.from.is_some() || arguments.until.is_some() {
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
