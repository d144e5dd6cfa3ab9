//! The report: the same value from the simulator and from a real service, so that the two compare.
//!
//! Definitions (DESIGN section 9): `ttft` is arrival to first token, `itl` every gap between tokens of a
//! request, `tpot` the mean gap of a request, `e2e` arrival to last token; `duration_s` is first arrival to
//! last token and rates divide by it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, RequestId};
use crate::json::Document;
use crate::stats::Summary;
use crate::units::{SimDuration, SimTime, Tokens};

/// What happened to one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// Which request.
    pub id: RequestId,
    /// When it arrived.
    pub arrival: SimTime,
    /// Prompt tokens.
    pub input: Tokens,
    /// When each token was out; empty where it never got one.
    pub token_times: Vec<SimTime>,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Whether it got all its tokens.
    pub completed: bool,
}

/// Latency limits; a request meets them when each that is set holds for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Slo {
    /// Limit on time to first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft: Option<SimDuration>,
    /// Limit on every gap between tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl: Option<SimDuration>,
    /// Limit on the mean gap of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<SimDuration>,
    /// Limit on the whole request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2e: Option<SimDuration>,
}

/// Share of time in which devices computed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct BusyFraction {
    /// Mean over devices, weighted by capability.
    pub weighted: f64,
    /// Per device.
    pub per_gpu: BTreeMap<GpuId, f64>,
}

/// What a run did.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Report {
    /// Requests that got all their tokens.
    pub completed: u64,
    /// Requests that did not.
    pub failed: u64,
    /// Requests that were never sent, because they can never fit.
    pub skipped: u64,
    /// Times a sequence lost its KV and was computed again.
    pub preemptions: u64,
    /// First arrival to last token, seconds.
    pub duration_s: f64,
    /// Completed requests a second.
    pub requests_per_s: f64,
    /// Generated tokens a second.
    pub output_tokens_per_s: f64,
    /// Prompt and generated tokens a second.
    pub total_tokens_per_s: f64,
    /// Time to first token, seconds.
    pub ttft_s: Summary,
    /// Every gap between tokens of a request, seconds.
    pub itl_s: Summary,
    /// Mean gap of a request, seconds.
    pub tpot_s: Summary,
    /// Whole request, seconds.
    pub e2e_s: Summary,
    /// Requests a second that met every limit; absent without limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput_per_s: Option<f64>,
    /// Share of completed requests that met every limit; absent without limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slo_attainment: Option<f64>,
    /// Share of time in which devices computed; absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_fraction: Option<BusyFraction>,
    /// Steps that the schedulers planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
}

impl Document for Report {
    const SCHEMA: &'static str = "infercluster-report/1";
}

impl Report {
    /// Computes every latency and rate from what happened to each request.
    ///
    /// Only completed requests enter latencies; tokens of failed ones do not count as throughput.
    pub fn from_records(records: &[RequestRecord], slo: Option<Slo>) -> Self {
        let done: Vec<&RequestRecord> = records.iter().filter(|record| record.completed).collect();
        let (mut ttft, mut itl, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut met = 0_u64;
        for record in &done {
            let Some(latency) = Latency::of(record) else {
                continue;
            };
            met += u64::from(slo.is_some_and(|slo| latency.meets(slo)));
            ttft.push(seconds(latency.ttft));
            e2e.push(seconds(latency.e2e));
            tpot.extend(latency.tpot);
            itl.extend(
                record
                    .token_times
                    .windows(2)
                    .map(|pair| seconds(pair[1].since(pair[0]))),
            );
        }
        let first = done.iter().map(|record| record.arrival).min();
        let last = done.iter().filter_map(|record| record.token_times.last()).max();
        let duration_s = first
            .zip(last)
            .map_or(0.0, |(first, last)| seconds(last.since(first)));
        let rate = |count: u64| {
            if duration_s > 0.0 {
                count as f64 / duration_s
            } else {
                0.0
            }
        };
        let output: u64 = done.iter().map(|record| record.token_times.len() as u64).sum();
        let input: u64 = done.iter().map(|record| record.input.0).sum();
        let completed = done.len() as u64;
        Self {
            completed,
            failed: records.len() as u64 - completed,
            preemptions: records.iter().map(|record| u64::from(record.preemptions)).sum(),
            duration_s,
            requests_per_s: rate(completed),
            output_tokens_per_s: rate(output),
            total_tokens_per_s: rate(input + output),
            ttft_s: Summary::of(ttft),
            itl_s: Summary::of(itl),
            tpot_s: Summary::of(tpot),
            e2e_s: Summary::of(e2e),
            goodput_per_s: slo.map(|_| rate(met)),
            slo_attainment: slo.map(|_| {
                if completed == 0 {
                    0.0
                } else {
                    met as f64 / completed as f64
                }
            }),
            ..Self::default()
        }
    }
}

/// The latencies of one completed request.
struct Latency {
    ttft: SimDuration,
    e2e: SimDuration,
    tpot: Option<f64>,
    itl_max: SimDuration,
}

impl Latency {
    fn of(record: &RequestRecord) -> Option<Self> {
        let (first, last) = (*record.token_times.first()?, *record.token_times.last()?);
        let gaps = record.token_times.len() - 1;
        let longest = record
            .token_times
            .windows(2)
            .map(|pair| pair[1].since(pair[0]))
            .max();
        Some(Self {
            ttft: first.since(record.arrival),
            e2e: last.since(record.arrival),
            tpot: (gaps > 0).then(|| last.since(first).as_seconds() / gaps as f64),
            itl_max: longest.unwrap_or_default(),
        })
    }

    fn meets(&self, slo: Slo) -> bool {
        slo.ttft.is_none_or(|limit| self.ttft <= limit)
            && slo.itl.is_none_or(|limit| self.itl_max <= limit)
            && slo
                .tpot
                .is_none_or(|limit| self.tpot.is_none_or(|tpot| tpot <= limit.as_seconds()))
            && slo.e2e.is_none_or(|limit| self.e2e <= limit)
    }
}

/// Seconds, rounded to whole nanoseconds as every report prints them.
fn seconds(span: SimDuration) -> f64 {
    span.as_nanoseconds() as f64 / 1e9
}

/// A prediction beside its measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictionError {
    /// Which metric.
    pub metric: String,
    /// What the model said.
    pub predicted: f64,
    /// What the run gave.
    pub measured: f64,
    /// `(predicted - measured) / measured`.
    pub relative_error: f64,
}

impl PredictionError {
    /// Compares; `None` where the measured value is zero or either is not finite.
    pub fn of(metric: &str, predicted: f64, measured: f64) -> Option<Self> {
        let relative_error = (predicted - measured) / measured;
        relative_error.is_finite().then(|| Self {
            metric: metric.to_owned(),
            predicted,
            measured,
            relative_error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(arrival: u64, tokens: &[u64]) -> RequestRecord {
        let ms = |value: u64| SimTime(value * 1_000_000_000);
        RequestRecord {
            id: RequestId(0),
            arrival: ms(arrival),
            input: Tokens(10),
            token_times: tokens.iter().map(|&at| ms(at)).collect(),
            preemptions: 0,
            completed: true,
        }
    }

    #[test]
    fn latencies_and_rates_by_hand() {
        let ms = |value: u64| SimDuration(value * 1_000_000_000);
        // First request: ttft 100 ms, gaps 50 and 70 ms. Second: ttft 300 ms, one token.
        let records = [record(0, &[100, 150, 220]), record(200, &[500])];
        let slo = Slo {
            itl: Some(ms(60)),
            ..Slo::default()
        };
        let report = Report::from_records(&records, Some(slo));
        assert_eq!(report.duration_s, 0.5);
        assert_eq!(report.output_tokens_per_s, 8.0);
        assert_eq!(report.total_tokens_per_s, 48.0);
        assert_eq!((report.ttft_s.mean, report.ttft_s.p50), (0.2, 0.2));
        assert_eq!((report.itl_s.samples, report.itl_s.max), (2, 0.07));
        assert!((report.tpot_s.mean - 0.06).abs() < 1e-12);
        // Only the second request has no gap above 60 ms.
        assert_eq!(report.slo_attainment, Some(0.5));
        assert_eq!(report.goodput_per_s, Some(2.0));
    }

    #[test]
    fn nothing_done_is_a_report_too() {
        let report = Report::from_records(&[], None);
        assert_eq!(
            (report.completed, report.duration_s, report.ttft_s.samples),
            (0, 0.0, 0)
        );
    }
}
