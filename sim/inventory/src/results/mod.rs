//! Results of serving benchmarks and logs of engines, as their tools write them, in the words of the
//! product's own report.
//!
//! Units are those that the file states, turned into seconds. A figure that a file does not have stays
//! absent; a field that nothing here knows is kept aside as it is.

mod facts;
mod json;
mod logs;
mod measured;
mod text;

use std::collections::BTreeMap;

use infercluster_spec::report::{PartialReport, Report};
use infercluster_spec::{Document, json as documents};
use serde::Serialize;
use serde_json::Value;

use crate::error::InventoryError;

/// What a file of results turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ResultKind {
    /// The product's own report.
    Report,
    /// JSON of vLLM's or SGLang's benchmark client, and what others derive from it.
    ServingJson,
    /// The table that those clients print.
    ServingText,
    /// GuideLLM.
    Guidellm,
    /// GenAI-Perf and AIPerf.
    GenaiPerf,
    /// The summary of MLPerf's load generator.
    MlperfSummary,
    /// Measured requests of a vLLM engine, its facts or its time series.
    VllmMeasured,
    /// Log of a vLLM engine.
    VllmLog,
    /// Log of an SGLang server.
    SglangLog,
}

/// Something that a file lost.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Loss {
    /// Line of the file, from 1.
    pub line: usize,
    /// What is wrong there.
    pub what: String,
}

/// Everything of one file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServingResults {
    /// What the file is.
    pub kind: ResultKind,
    /// The runs, in the order of the file.
    pub runs: Vec<ServingRun>,
    /// Whether nothing is missing that the file itself announces.
    pub complete: bool,
    /// What is missing or cannot be.
    pub problems: Vec<Loss>,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ServingRun {
    /// The model, where the file names it.
    pub model: Option<String>,
    /// The engine, where the file names it.
    pub backend: Option<String>,
    /// The figures.
    pub report: PartialReport,
    /// What an engine's own log says of its state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineState>,
    /// Fields that have no place in a report, as the file has them.
    pub other: BTreeMap<String, Value>,
}

/// States that an engine reported, summarised.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct EngineState {
    /// How often it reported.
    pub samples: u64,
    /// Most requests running at once.
    pub running_max: Option<u64>,
    /// Most requests waiting at once.
    pub waiting_max: Option<u64>,
    /// Largest share of the KV cache in use.
    pub kv_occupancy_max: Option<f64>,
    /// Mean of the reported rates of prompt tokens.
    pub input_tokens_per_s_mean: Option<f64>,
    /// Mean of the reported rates of generated tokens.
    pub output_tokens_per_s_mean: Option<f64>,
}

/// Reads the text of a file of results; `file` is only the name that errors carry.
///
/// ```
/// let text = r#"{"completed": 40, "duration": 20.0, "request_throughput": 2.0, "mean_ttft_ms": 250.0}"#;
/// let found = infercluster_inventory::results::read("bench.json", text)?;
/// assert_eq!(found.runs[0].report.ttft_s.mean, Some(0.25));
/// # Ok::<(), infercluster_inventory::InventoryError>(())
/// ```
pub fn read(file: &str, text: &str) -> Result<ServingResults, InventoryError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if let Some(results) = own(file, text)? {
        return Ok(results);
    }
    let start = text.trim_start();
    let results = if start.starts_with(['{', '[']) {
        // Lines of a log start with a bracket, too.
        match json::read(file, text) {
            Err(error) => Some(logs::read(text).ok_or(error)?),
            Ok(found) => found,
        }
    } else if let Some(results) = measured::time_series(text) {
        Some(results)
    } else {
        text::read(text).or_else(|| logs::read(text))
    };
    results.ok_or_else(|| InventoryError::UnknownResults {
        file: file.to_owned(),
    })
}

/// A document of the product's own.
fn own(file: &str, text: &str) -> Result<Option<ServingResults>, InventoryError> {
    let schema = serde_json::from_str::<Value>(text)
        .ok()
        .and_then(|value| value.get("schema").cloned());
    if schema.as_ref().and_then(Value::as_str) != Some(Report::SCHEMA) {
        return Ok(None);
    }
    let report: Report = documents::read(file, text)?;
    Ok(Some(whole(
        ResultKind::Report,
        vec![ServingRun {
            report: PartialReport::from(&report),
            ..ServingRun::default()
        }],
    )))
}

/// Results without a loss.
fn whole(kind: ResultKind, runs: Vec<ServingRun>) -> ServingResults {
    ServingResults {
        kind,
        runs,
        complete: true,
        problems: Vec::new(),
    }
}
