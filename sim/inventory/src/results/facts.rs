//! Names that the tools give to one figure, and the figure's place in a report.

use infercluster_spec::report::{PartialReport, PartialSummary};

/// A place in a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fact {
    Completed,
    Failed,
    Duration,
    InputTokens,
    OutputTokens,
    RequestRate,
    InputRate,
    OutputRate,
    TotalRate,
    Goodput,
    Latency(Metric, Statistic),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Metric {
    Ttft,
    Itl,
    Tpot,
    E2e,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statistic {
    Mean,
    P50,
    P90,
    P95,
    P99,
    Max,
}

/// The whole counts and rates of JSON results.
const JSON_NAMES: [(&str, Fact); 17] = [
    ("completed", Fact::Completed),
    ("successful_requests", Fact::Completed),
    ("failed", Fact::Failed),
    ("failed_requests", Fact::Failed),
    ("duration", Fact::Duration),
    ("benchmark_duration", Fact::Duration),
    ("total_input_tokens", Fact::InputTokens),
    ("total_input", Fact::InputTokens),
    ("total_output_tokens", Fact::OutputTokens),
    ("total_output", Fact::OutputTokens),
    ("request_throughput", Fact::RequestRate),
    ("input_throughput", Fact::InputRate),
    ("output_throughput", Fact::OutputRate),
    ("total_token_throughput", Fact::TotalRate),
    ("total_throughput", Fact::TotalRate),
    ("request_goodput", Fact::Goodput),
    ("request_goodput:", Fact::Goodput),
];

/// A key of JSON results with the factor that makes it seconds. Latencies are `{statistic}_{metric}` in
/// seconds, or with `_ms` at the end in milliseconds.
pub(super) fn of_key(key: &str) -> Option<(Fact, f64)> {
    if let Some((_, fact)) = JSON_NAMES.iter().find(|(name, _)| *name == key) {
        return Some((*fact, 1.0));
    }
    let (name, factor) = match key.strip_suffix("_ms") {
        Some(name) => (name, 1e-3),
        None => (key.strip_suffix("_s").unwrap_or(key), 1.0),
    };
    let (statistic, metric) = name.split_once('_')?;
    Some((
        Fact::Latency(metric_of(metric)?, statistic_of(statistic)?),
        factor,
    ))
}

pub(super) fn metric_of(name: &str) -> Option<Metric> {
    Some(match name {
        "ttft" | "time_to_first_token" => Metric::Ttft,
        "itl" | "inter_token_latency" => Metric::Itl,
        "tpot" | "time_per_output_token" => Metric::Tpot,
        "e2el" | "e2e" | "e2e_latency" | "request_latency" => Metric::E2e,
        _ => return None,
    })
}

pub(super) fn statistic_of(name: &str) -> Option<Statistic> {
    Some(match name {
        "mean" | "avg" | "average" => Statistic::Mean,
        "median" | "p50" => Statistic::P50,
        "p90" => Statistic::P90,
        "p95" => Statistic::P95,
        "p99" => Statistic::P99,
        "max" => Statistic::Max,
        _ => return None,
    })
}

/// Labels of printed tables, in lower case and without their unit.
const LABELS: [(&str, Fact); 15] = [
    ("successful requests", Fact::Completed),
    ("failed requests", Fact::Failed),
    ("benchmark duration", Fact::Duration),
    ("total input tokens", Fact::InputTokens),
    ("total generated tokens", Fact::OutputTokens),
    ("total output tokens", Fact::OutputTokens),
    ("request throughput", Fact::RequestRate),
    ("request goodput", Fact::Goodput),
    ("input token throughput", Fact::InputRate),
    ("output token throughput", Fact::OutputRate),
    ("total token throughput", Fact::TotalRate),
    ("total output throughput", Fact::OutputRate),
    (
        "average time-to-first-token [ttft]",
        Fact::Latency(Metric::Ttft, Statistic::Mean),
    ),
    (
        "average time-per-output-token [tpot]",
        Fact::Latency(Metric::Tpot, Statistic::Mean),
    ),
    (
        "average request latency",
        Fact::Latency(Metric::E2e, Statistic::Mean),
    ),
];

/// A label such as `p99 ttft`; the unit was taken off.
pub(super) fn of_label(label: &str) -> Option<Fact> {
    if let Some((_, fact)) = LABELS.iter().find(|(name, _)| *name == label) {
        return Some(*fact);
    }
    let (statistic, metric) = label.split_once(' ')?;
    Some(Fact::Latency(
        metric_of(&metric.replace(' ', "_"))?,
        statistic_of(statistic)?,
    ))
}

/// Puts a figure into its place; `false` for one that cannot be: negative, not finite, a count with a
/// fraction.
pub(super) fn put(report: &mut PartialReport, fact: Fact, value: f64) -> bool {
    if !(value.is_finite() && value >= 0.0) {
        return false;
    }
    let count = || (value.fract() == 0.0 && value <= 9e15).then_some(value as u64);
    let rate = match fact {
        Fact::Completed | Fact::Failed | Fact::InputTokens | Fact::OutputTokens => {
            let Some(count) = count() else {
                return false;
            };
            let place = match fact {
                Fact::Completed => &mut report.completed,
                Fact::Failed => &mut report.failed,
                Fact::InputTokens => &mut report.input_tokens,
                _ => &mut report.output_tokens,
            };
            *place = Some(count);
            return true;
        }
        Fact::Latency(metric, statistic) => place(latency(report, metric), statistic),
        Fact::Duration => &mut report.duration_s,
        Fact::RequestRate => &mut report.requests_per_s,
        Fact::InputRate => &mut report.input_tokens_per_s,
        Fact::OutputRate => &mut report.output_tokens_per_s,
        Fact::TotalRate => &mut report.total_tokens_per_s,
        Fact::Goodput => &mut report.goodput_per_s,
    };
    *rate = Some(value);
    true
}

pub(super) fn latency(report: &mut PartialReport, metric: Metric) -> &mut PartialSummary {
    match metric {
        Metric::Ttft => &mut report.ttft_s,
        Metric::Itl => &mut report.itl_s,
        Metric::Tpot => &mut report.tpot_s,
        Metric::E2e => &mut report.e2e_s,
    }
}

fn place(summary: &mut PartialSummary, statistic: Statistic) -> &mut Option<f64> {
    match statistic {
        Statistic::Mean => &mut summary.mean,
        Statistic::P50 => &mut summary.p50,
        Statistic::P90 => &mut summary.p90,
        Statistic::P95 => &mut summary.p95,
        Statistic::P99 => &mut summary.p99,
        Statistic::Max => &mut summary.max,
    }
}

/// Seconds in one unit of time as tools spell it; 1 for what is no time.
pub(super) fn seconds_in(unit: &str) -> f64 {
    match unit.trim().to_ascii_lowercase().as_str() {
        "ms" | "milliseconds" => 1e-3,
        "us" | "microseconds" => 1e-6,
        "ns" | "nanoseconds" => 1e-9,
        _ => 1.0,
    }
}
