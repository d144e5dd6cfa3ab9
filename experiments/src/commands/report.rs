//! `report show`: results of a run, our own or somebody else's.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use infercluster_inventory::results::{self, EngineState, ServingResults, ServingRun};
use infercluster_spec::report::PartialSummary;

use crate::screen::{Columns, Screen, facts};
use crate::{Outcome, io};

/// Looks at results of serving.
#[derive(Debug, Args)]
pub(crate) struct ReportCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(Show),
}

/// Shows results of a run in the words and units of this program's report.
///
/// Reads own reports, vLLM and SGLang benchmark results (JSON, or the table as printed), GuideLLM,
/// GenAI-Perf, MLPerf summaries, measured vLLM runs, and engine logs. What a file leaves out is empty; what
/// has no place in a report is kept aside. A file that is cut off is shown as far as it goes (exit code 1).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster report show vllm-bench.json\n  \
    infercluster report show sglang-bench.txt --json")]
struct Show {
    /// A file of results.
    results: PathBuf,
}

/// Runs the command.
pub(crate) fn run(command: &ReportCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    let Action::Show(arguments) = &command.action;
    let text = io::read_text(&arguments.results, io::DOCUMENT_LIMIT)?;
    let found = results::read(&io::name_of(&arguments.results), &text)?;
    screen.answer(&found, people)?;
    Ok(if found.complete {
        Outcome::Done
    } else {
        Outcome::GoalNotMet
    })
}

fn people(found: &ServingResults) -> String {
    let kind = serde_json::to_value(found.kind).unwrap_or_default();
    let mut text = format!(
        "{}, {} runs\n",
        kind.as_str().unwrap_or_default(),
        found.runs.len()
    );
    for run in &found.runs {
        text.push('\n');
        text.push_str(&one(run));
    }
    for problem in &found.problems {
        text.push_str(&format!("\nline {}: {}", problem.line, problem.what));
    }
    text
}

fn one(run: &ServingRun) -> String {
    let report = &run.report;
    let number = |value: Option<f64>| value.map(|value| format!("{value:.3}"));
    let count = |value: Option<u64>| value.map(|value| value.to_string());
    let lines = [
        ("model", run.model.clone()),
        ("backend", run.backend.clone()),
        ("completed", count(report.completed)),
        ("failed", count(report.failed)),
        ("duration, s", number(report.duration_s)),
        ("prompt tokens", count(report.input_tokens)),
        ("generated tokens", count(report.output_tokens)),
        ("requests/s", number(report.requests_per_s)),
        ("prompt tokens/s", number(report.input_tokens_per_s)),
        ("generated tokens/s", number(report.output_tokens_per_s)),
        ("all tokens/s", number(report.total_tokens_per_s)),
        ("goodput, requests/s", number(report.goodput_per_s)),
        ("engine", run.engine.map(engine)),
        ("kept aside", aside(run)),
    ];
    let mut text = facts(lines.into_iter().filter_map(|(name, value)| Some((name, value?))));
    let metrics = [
        ("ttft", report.ttft_s),
        ("itl", report.itl_s),
        ("tpot", report.tpot_s),
        ("e2e", report.e2e_s),
    ];
    let mut table = Columns::new(["ms", ">mean", ">p50", ">p90", ">p95", ">p99", ">max"]);
    let told = |(_, summary): &(&str, PartialSummary)| *summary != PartialSummary::default();
    if metrics.iter().any(told) {
        metrics
            .into_iter()
            .filter(told)
            .for_each(|(name, summary)| table.row(row(name, summary)));
        text.push_str(&table.to_string());
    }
    text
}

fn row(name: &str, summary: PartialSummary) -> [String; 7] {
    let ms = |value: Option<f64>| {
        value.map_or_else(|| "-".to_owned(), |seconds| format!("{:.2}", 1000.0 * seconds))
    };
    let PartialSummary {
        mean,
        p50,
        p90,
        p95,
        p99,
        max,
    } = summary;
    [
        name.to_owned(),
        ms(mean),
        ms(p50),
        ms(p90),
        ms(p95),
        ms(p99),
        ms(max),
    ]
}

fn engine(state: EngineState) -> String {
    let count = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
    let share = state.kv_occupancy_max;
    let kv = share.map_or_else(|| "?".to_owned(), |share| format!("{:.1} %", 100.0 * share));
    format!(
        "{} states, at most {} running and {} waiting, KV cache at most {kv} full",
        state.samples,
        count(state.running_max),
        count(state.waiting_max)
    )
}

fn aside(run: &ServingRun) -> Option<String> {
    let names: Vec<&str> = run.other.keys().map(String::as_str).collect();
    let shown = &names[..names.len().min(8)];
    (!shown.is_empty()).then(|| match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    })
}
