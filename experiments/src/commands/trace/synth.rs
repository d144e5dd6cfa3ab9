//! `trace synth`: seeded traces.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use infercluster_spec::SimDuration;
use infercluster_traces::format::TraceFormat;
use infercluster_traces::synth::{
    Amount, ArrivalProcess, DEFAULT_SEED, LengthDistribution, Lengths, SynthSpec, synthesise,
};

use crate::Outcome;
use crate::screen::Screen;

/// Makes a trace from a seed.
///
/// Lengths are drawn from distributions, or from the rows of another trace.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster trace synth --arrivals poisson:2 --input 64-256 --output-tokens 32 --count 100 -o short.jsonl\n  \
    infercluster trace synth --arrivals gamma:5,2.0 --like conv.csv --duration \"60 s\" -o bursty.jsonl")]
pub(super) struct Synth {
    /// When requests arrive: poisson:RATE, gamma:RATE,CV, constant:RATE (requests a second) or closed.
    #[arg(long, default_value = "poisson:1")]
    arrivals: Arrivals,
    /// Prompt tokens: 128, 64-256, or lognormal:MEDIAN,SIGMA,MAX.
    #[arg(long, default_value = "128", conflicts_with = "like")]
    input: Lengthwise,
    /// Tokens to generate: 32, 16-64, or lognormal:MEDIAN,SIGMA,MAX.
    #[arg(long, default_value = "32", conflicts_with = "like")]
    output_tokens: Lengthwise,
    /// Draw both lengths from rows of this trace instead.
    #[arg(long)]
    like: Option<PathBuf>,
    /// Stop after so many requests.
    #[arg(long, required_unless_present = "duration")]
    count: Option<u64>,
    /// Stop before this time, such as "60 s".
    #[arg(long, conflicts_with = "count")]
    duration: Option<SimDuration>,
    /// Seed of the generators.
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
    /// Name that reports show.
    #[arg(long, default_value = "synthetic")]
    name: String,
    /// Format to write: azure, vidur, vidur-lengths, mooncake or lines.
    #[arg(long, default_value_t = TraceFormat::Lines)]
    format: TraceFormat,
    /// Where to write it.
    #[arg(short, long, default_value = "-")]
    output: PathBuf,
}

/// An arrival process as the command line writes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrivals(pub(super) ArrivalProcess);

/// A length distribution as the command line writes it.
#[derive(Debug, Clone, Copy)]
struct Lengthwise(LengthDistribution);

impl FromStr for Arrivals {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (kind, numbers) = text.split_once(':').unwrap_or((text, ""));
            let numbers: Vec<f64> = numbers_of(numbers)?;
            match (kind, numbers.as_slice()) {
                ("poisson", &[rate]) => Some(ArrivalProcess::Poisson { rate }),
                ("constant", &[rate]) => Some(ArrivalProcess::Constant { rate }),
                ("gamma", &[rate, cv]) => Some(ArrivalProcess::Gamma { rate, cv }),
                ("closed", &[]) => Some(ArrivalProcess::Closed),
                _ => None,
            }
        };
        parse()
            .map(Self)
            .ok_or_else(|| "write poisson:RATE, gamma:RATE,CV, constant:RATE or closed".to_owned())
    }
}

impl FromStr for Lengthwise {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            if let Some(numbers) = text.strip_prefix("lognormal:") {
                let [median, sigma, max] = numbers.splitn(3, ',').collect::<Vec<_>>().try_into().ok()?;
                return Some(LengthDistribution::LogNormal {
                    median: median.parse().ok()?,
                    sigma: sigma.parse().ok()?,
                    max: max.parse().ok()?,
                });
            }
            match text.split_once('-') {
                Some((min, max)) => Some(LengthDistribution::Uniform {
                    min: min.parse().ok()?,
                    max: max.parse().ok()?,
                }),
                None => Some(LengthDistribution::Fixed {
                    tokens: text.parse().ok()?,
                }),
            }
        };
        parse()
            .map(Self)
            .ok_or_else(|| "write 128, 64-256 or lognormal:MEDIAN,SIGMA,MAX".to_owned())
    }
}

/// Numbers between commas; an empty text has none.
fn numbers_of(text: &str) -> Option<Vec<f64>> {
    text.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| part.parse().ok())
        .collect()
}

/// Runs the command.
pub(super) fn run(arguments: &Synth, screen: &Screen) -> anyhow::Result<Outcome> {
    let like = arguments.like.as_deref().map(super::load).transpose()?;
    let lengths = match &like {
        Some(like) => Lengths::Resampled { from: &like.trace },
        None => Lengths::Independent {
            input: arguments.input.0,
            output: arguments.output_tokens.0,
        },
    };
    let amount = match (arguments.count, arguments.duration) {
        (_, Some(duration)) => Amount::Until(duration),
        (count, None) => Amount::Count(count.unwrap_or_default()),
    };
    let trace = synthesise(&SynthSpec {
        name: &arguments.name,
        arrivals: arguments.arrivals.0,
        lengths,
        amount,
        seed: arguments.seed,
    })?;
    super::save(&trace, arguments.format, &arguments.output, screen)?;
    Ok(Outcome::Done)
}
