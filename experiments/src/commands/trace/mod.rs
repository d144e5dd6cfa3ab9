//! `trace show`, `trace convert` and `trace synth`.

mod convert;
mod synth;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use infercluster_spec::Trace;
use infercluster_traces::format::TraceFormat;
use infercluster_traces::read::{self, Loaded};
use infercluster_traces::statistics::{LengthStatistics, TraceStatistics, statistics};
use infercluster_traces::write;
use serde::Serialize;

use crate::Outcome;
use crate::io;
use crate::screen::{Columns, Screen, facts};

/// Looks at request traces, converts and makes them.
#[derive(Debug, Args)]
pub(crate) struct TraceCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(Show),
    Convert(convert::Convert),
    Synth(synth::Synth),
}

/// Detects the format of a trace and shows its statistics.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster trace show AzureLLMInferenceTrace_conv.csv")]
struct Show {
    /// A trace file in any format that is known.
    trace: PathBuf,
}

#[derive(Debug, Serialize)]
struct Shown {
    format: String,
    dropped_rows: u64,
    #[serde(flatten)]
    statistics: TraceStatistics,
}

/// Runs the command.
pub(crate) fn run(command: TraceCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Show(arguments) => show(&arguments, screen),
        Action::Convert(arguments) => convert::run(&arguments, screen),
        Action::Synth(arguments) => synth::run(&arguments, screen),
    }
}

/// Reads a trace from a file or standard input.
pub(crate) fn load(path: &Path) -> anyhow::Result<Loaded> {
    if path.as_os_str() == "-" {
        return Ok(read::read("-", std::io::stdin().lock())?);
    }
    Ok(read::load(path)?)
}

/// Writes a trace to a file or standard output, and says what the format could not hold.
fn save(trace: &Trace, format: TraceFormat, path: &Path, screen: &Screen) -> anyhow::Result<()> {
    let mut text = Vec::new();
    let written = write::write(trace, format, &io::name_of(path), &mut text)?;
    io::write_bytes(path, &text)?;
    let losses = [
        (
            written.rounded,
            "arrivals were rounded to the resolution of the format",
        ),
        (
            written.hashes_dropped,
            "requests lost their block hashes, which the format cannot hold",
        ),
    ];
    for (count, what) in losses.into_iter().filter(|(count, _)| *count > 0) {
        screen.say(format!("note: {count} {what}"));
    }
    Ok(())
}

fn show(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let loaded = load(&arguments.trace)?;
    let shown = Shown {
        format: loaded.format.to_string(),
        dropped_rows: loaded.dropped_rows,
        statistics: statistics(&loaded.trace),
    };
    screen.answer(&shown, people)?;
    Ok(Outcome::Done)
}

fn people(shown: &Shown) -> String {
    let all = &shown.statistics;
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let about = facts([
        ("format", shown.format.clone()),
        (
            "requests",
            format!("{} ({} empty rows left out)", all.rows, shown.dropped_rows),
        ),
        ("span", format!("{} s", optional(all.span_s))),
        ("rate", format!("{} requests/s", optional(all.rate_per_s))),
        ("variation of gaps", optional(all.gap_cv)),
        ("dispersion in 1 s", optional(all.dispersion_1s)),
        (
            "prefix hashes",
            if all.has_prefix_hashes { "yes" } else { "no" }.to_owned(),
        ),
    ]);
    let mut table = Columns::new(["tokens", ">mean", ">p50", ">p99", ">max"]);
    for (name, lengths) in [("prompt", all.input), ("answer", all.output)] {
        table.row(length_row(name, lengths));
    }
    format!("{about}\n{table}")
}

fn length_row(name: &str, lengths: LengthStatistics) -> [String; 5] {
    let rounded = |value: f64| format!("{value:.1}");
    [
        name.to_owned(),
        rounded(lengths.mean),
        rounded(lengths.p50),
        rounded(lengths.p99),
        lengths.max.to_string(),
    ]
}
