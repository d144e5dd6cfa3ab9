//! `trace show`, `trace convert` and `trace synth`.

mod convert;
mod synth;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use infercluster_spec::Trace;
use infercluster_traces::format::TraceFormat;
use infercluster_traces::read::{self, Loaded};
use infercluster_traces::statistics::{LengthStatistics, statistics_of_file};
use infercluster_traces::{ClientPool, servegen, write};
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
///
/// Rows with an empty prompt or answer, as failed requests leave them, count as rows; no request is made of
/// them. Of a folder of clients (ServeGen), which holds rates and distributions instead of requests, the
/// lengths are those to expect.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster trace show AzureLLMInferenceTrace_conv.csv\n  \
    infercluster trace show ServeGen/data/language/m-large --json")]
struct Show {
    /// A trace file in any format that is known, compressed with gzip or not, or a folder of clients.
    trace: PathBuf,
}

#[derive(Debug, Serialize)]
struct Shown {
    format: String,
    rows: u64,
    /// Rows that no request is made of.
    dropped_rows: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<u64>,
    /// Requests that the rates of a folder promise.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected_requests: Option<f64>,
    has_arrivals: bool,
    span_s: Option<f64>,
    rate_per_s: Option<f64>,
    gap_cv: Option<f64>,
    dispersion_1s: Option<f64>,
    input: Option<LengthStatistics>,
    output: Option<LengthStatistics>,
    has_prefix_hashes: bool,
}

impl Shown {
    fn of_file(loaded: &Loaded) -> Self {
        let found = statistics_of_file(loaded);
        Self {
            format: loaded.format.to_string(),
            rows: found.rows,
            dropped_rows: loaded.dropped_rows,
            clients: None,
            expected_requests: None,
            has_arrivals: found.has_arrivals,
            span_s: found.span_s,
            rate_per_s: found.rate_per_s,
            gap_cv: found.gap_cv,
            dispersion_1s: found.dispersion_1s,
            input: Some(found.input),
            output: Some(found.output),
            has_prefix_hashes: found.has_prefix_hashes,
        }
    }

    fn of_pool(pool: &ClientPool) -> Self {
        let found = pool.statistics();
        Self {
            format: "servegen".to_owned(),
            rows: found.windows,
            dropped_rows: 0,
            clients: Some(found.clients),
            expected_requests: Some(found.expected_requests),
            has_arrivals: false,
            span_s: None,
            rate_per_s: None,
            gap_cv: None,
            dispersion_1s: None,
            input: found.input,
            output: found.output,
            has_prefix_hashes: false,
        }
    }
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
    let shown = match arguments.trace.is_dir() {
        true => Shown::of_pool(&servegen::load(&arguments.trace)?),
        false => Shown::of_file(&load(&arguments.trace)?),
    };
    screen.answer(&shown, people)?;
    Ok(Outcome::Done)
}

fn people(shown: &Shown) -> String {
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let mut about = vec![("format", shown.format.clone())];
    match (shown.clients, shown.expected_requests) {
        (Some(clients), Some(expected)) => about.extend([
            (
                "clients",
                format!("{clients}, with rates in {} windows", shown.rows),
            ),
            ("requests", format!("some {expected:.0} to expect")),
        ]),
        _ => about.push((
            "requests",
            format!("{} ({} of them empty)", shown.rows, shown.dropped_rows),
        )),
    }
    about.extend([
        ("span", format!("{} s", optional(shown.span_s))),
        ("rate", format!("{} requests/s", optional(shown.rate_per_s))),
        ("variation of gaps", optional(shown.gap_cv)),
        ("dispersion in 1 s", optional(shown.dispersion_1s)),
        (
            "prefix hashes",
            if shown.has_prefix_hashes { "yes" } else { "no" }.to_owned(),
        ),
    ]);
    let mut table = Columns::new(["tokens", ">mean", ">p50", ">p99", ">max"]);
    for (name, lengths) in [("prompt", shown.input), ("answer", shown.output)] {
        lengths
            .into_iter()
            .for_each(|lengths| table.row(length_row(name, lengths)));
    }
    format!("{}\n{table}", facts(about))
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
