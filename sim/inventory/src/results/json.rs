//! Results in JSON: one object, a list of them, or one a line.

use infercluster_spec::json;
use serde_json::{Map, Value};

use super::facts::{self, Fact, Metric};
use super::{Loss, ResultKind, ServingResults, ServingRun, measured, whole};
use crate::config::relaxed::quote_non_finite;
use crate::error::InventoryError;

/// Longest list that is kept aside: results carry the lengths and gaps of every request.
const KEPT_LIST: usize = 16;

/// `None` where the JSON holds no results of a known kind.
pub(super) fn read(file: &str, text: &str) -> Result<Option<ServingResults>, InventoryError> {
    let text = quote_non_finite(text);
    match serde_json::from_str::<Value>(&text) {
        Ok(Value::Array(items)) => Ok(of_list(&items)),
        Ok(value) => Ok(value.as_object().and_then(of_object)),
        Err(error) => match of_lines(&text) {
            Some(results) => Ok(Some(results)),
            None => Err(InventoryError::Syntax {
                file: file.to_owned(),
                line: error.line(),
                column: error.column(),
                message: json::message_of(&error),
            }),
        },
    }
}

fn of_object(object: &Map<String, Value>) -> Option<ServingResults> {
    if let Some(benchmarks) = object.get("benchmarks").and_then(Value::as_array) {
        return guidellm(object, benchmarks);
    }
    if let Some(run) = genai_perf(object) {
        return Some(whole(ResultKind::GenaiPerf, vec![run]));
    }
    if measured::is_meta(object) {
        return Some(whole(ResultKind::VllmMeasured, vec![measured::meta(object)]));
    }
    serving(object).map(|run| whole(ResultKind::ServingJson, vec![run]))
}

fn of_list(items: &[Value]) -> Option<ServingResults> {
    let runs: Option<Vec<ServingRun>> = items.iter().map(|item| serving(item.as_object()?)).collect();
    runs.filter(|runs| !runs.is_empty())
        .map(|runs| whole(ResultKind::ServingJson, runs))
}

/// A run or a request a line. A last line that is cut off is told, and the others stand.
fn of_lines(text: &str) -> Option<ServingResults> {
    let mut objects = Vec::new();
    let mut problems = Vec::new();
    for (line, row) in (1..).zip(text.lines()).filter(|(_, row)| !row.trim().is_empty()) {
        match serde_json::from_str::<Map<String, Value>>(row) {
            Ok(object) => objects.push(object),
            Err(error) => problems.push(Loss {
                line,
                what: format!("the line is no JSON object: {}", json::message_of(&error)),
            }),
        }
    }
    let (kind, runs) = match measured::requests(&objects) {
        Some(run) => (ResultKind::VllmMeasured, vec![run]),
        None => (
            ResultKind::ServingJson,
            objects.iter().filter_map(serving).collect(),
        ),
    };
    // Text with a brace or two in it is no result.
    if runs.is_empty() || problems.len() > objects.len() {
        return None;
    }
    Some(ServingResults {
        kind,
        runs,
        complete: problems.is_empty(),
        problems,
    })
}

/// Flat keys such as `mean_ttft_ms`; at least two figures make a result.
fn serving(object: &Map<String, Value>) -> Option<ServingRun> {
    let mut run = ServingRun::default();
    let mut figures = 0;
    for (key, value) in object {
        match (key.as_str(), value) {
            (_, Value::Null) => {}
            ("model_id" | "model" | "model_name", Value::String(name)) => run.model = Some(name.clone()),
            ("backend" | "endpoint_type", Value::String(name)) => run.backend = Some(name.clone()),
            _ => match facts::of_key(key).zip(value.as_f64()) {
                Some(((fact, factor), value)) if facts::put(&mut run.report, fact, value * factor) => {
                    figures += 1
                }
                _ => keep(&mut run, key, value),
            },
        }
    }
    (figures >= 2).then_some(run)
}

/// Keeps what has no place in a report; of long lists their length.
fn keep(run: &mut ServingRun, key: &str, value: &Value) {
    let kept = match value {
        Value::Array(items) if items.len() > KEPT_LIST => {
            Value::from(format!("a list of {} entries", items.len()))
        }
        other => other.clone(),
    };
    run.other.insert(key.to_owned(), kept);
}

/// An object a metric: `{"unit": "ms", "avg": 12.0, "p99": 30.0}`.
fn genai_perf(object: &Map<String, Value>) -> Option<ServingRun> {
    let mut run = ServingRun::default();
    let mut figures = 0;
    for (key, value) in object {
        let Some(fields) = value.as_object().filter(|fields| fields.contains_key("unit")) else {
            keep(&mut run, key, value);
            continue;
        };
        let unit = fields.get("unit").and_then(Value::as_str).unwrap_or_default();
        let factor = facts::seconds_in(unit);
        let average = || fields.get("avg").and_then(Value::as_f64);
        let rate = match key.as_str() {
            "request_throughput" => Some(Fact::RequestRate),
            "output_token_throughput" => Some(Fact::OutputRate),
            "request_count" => Some(Fact::Completed),
            _ => None,
        };
        if let Some(value) = rate.and_then(|_| average()) {
            figures += u32::from(facts::put(
                &mut run.report,
                rate.expect("it was just matched"),
                value,
            ));
            continue;
        }
        let Some(metric) = facts::metric_of(key) else {
            keep(&mut run, key, value);
            continue;
        };
        for (name, value) in fields {
            let statistic = facts::statistic_of(name).zip(value.as_f64());
            if let Some((statistic, value)) = statistic {
                let fact = Fact::Latency(metric, statistic);
                figures += u32::from(facts::put(&mut run.report, fact, value * factor));
            }
        }
    }
    (figures >= 2).then_some(run)
}

/// A list of runs, each with distributions by outcome; those of successful requests are the report.
fn guidellm(object: &Map<String, Value>, benchmarks: &[Value]) -> Option<ServingResults> {
    let model = object
        .get("config")
        .and_then(|config| config.pointer("/spec/backend/model"))
        .or_else(|| object.get("args").and_then(|arguments| arguments.get("model")))
        .and_then(Value::as_str);
    let mut runs = Vec::new();
    for benchmark in benchmarks {
        let metrics = benchmark.get("metrics")?.as_object()?;
        let mut run = ServingRun {
            model: model.map(str::to_owned),
            ..ServingRun::default()
        };
        let number = |path: &str| benchmark.pointer(path).and_then(Value::as_f64);
        let mut put = |fact: Fact, value: Option<f64>| {
            value.is_some_and(|value| facts::put(&mut run.report, fact, value))
        };
        put(Fact::Completed, number("/metrics/request_totals/successful"));
        let lost = [
            number("/metrics/request_totals/errored"),
            number("/metrics/request_totals/incomplete"),
        ];
        put(
            Fact::Failed,
            lost[0]
                .zip(lost[1])
                .map(|(errored, incomplete)| errored + incomplete),
        );
        put(Fact::Duration, number("/duration"));
        put(
            Fact::InputTokens,
            number("/metrics/prompt_token_count/successful/total_sum"),
        );
        put(
            Fact::OutputTokens,
            number("/metrics/output_token_count/successful/total_sum"),
        );
        put(
            Fact::RequestRate,
            number("/metrics/requests_per_second/successful/mean"),
        );
        put(
            Fact::InputRate,
            number("/metrics/prompt_tokens_per_second/successful/mean"),
        );
        put(
            Fact::OutputRate,
            number("/metrics/output_tokens_per_second/successful/mean"),
        );
        put(
            Fact::TotalRate,
            number("/metrics/tokens_per_second/successful/mean"),
        );
        for (key, metric, factor) in [
            ("time_to_first_token_ms", Metric::Ttft, 1e-3),
            ("inter_token_latency_ms", Metric::Itl, 1e-3),
            ("time_per_output_token_ms", Metric::Tpot, 1e-3),
            ("request_latency", Metric::E2e, 1.0),
        ] {
            let Some(found) = metrics.get(key).and_then(|metric| metric.get("successful")) else {
                continue;
            };
            distribution(&mut run, metric, found, factor);
        }
        runs.push(run);
    }
    (!runs.is_empty()).then(|| whole(ResultKind::Guidellm, runs))
}

fn distribution(run: &mut ServingRun, metric: Metric, found: &Value, factor: f64) {
    let percentiles = found.get("percentiles").and_then(Value::as_object);
    let fields = found
        .as_object()
        .into_iter()
        .flatten()
        .chain(percentiles.into_iter().flatten());
    for (name, value) in fields {
        if let Some((statistic, value)) = facts::statistic_of(name).zip(value.as_f64()) {
            facts::put(&mut run.report, Fact::Latency(metric, statistic), value * factor);
        }
    }
}
