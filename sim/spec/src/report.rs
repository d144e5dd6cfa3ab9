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

impl RequestRecord {
    /// Spans between its tokens.
    pub fn gaps(&self) -> impl Iterator<Item = SimDuration> {
        self.token_times.windows(2).map(|pair| pair[1].since(pair[0]))
    }

    /// What is left of it without each single token.
    pub fn summary(&self) -> RequestSummary {
        RequestSummary {
            id: self.id,
            arrival: self.arrival,
            input: self.input,
            output: Tokens(self.token_times.len() as u64),
            first_token: self.token_times.first().copied(),
            last_token: self.token_times.last().copied(),
            longest_gap: self.gaps().max().unwrap_or_default(),
            preemptions: self.preemptions,
            completed: self.completed,
        }
    }
}

/// What happened to one request, without each single token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestSummary {
    /// Which request.
    pub id: RequestId,
    /// When it arrived.
    pub arrival: SimTime,
    /// Prompt tokens.
    pub input: Tokens,
    /// Tokens that are out.
    pub output: Tokens,
    /// When the first was out; `None` where it never got one.
    pub first_token: Option<SimTime>,
    /// When the last was out.
    pub last_token: Option<SimTime>,
    /// Longest span between two of them; zero where there are fewer.
    pub longest_gap: SimDuration,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Whether it got all its tokens.
    pub completed: bool,
}

impl RequestSummary {
    /// Mean gap, to the picosecond; `None` where there is no gap.
    pub fn tpot(&self) -> Option<SimDuration> {
        let gaps = self.output.0.checked_sub(1).filter(|gaps| *gaps > 0)?;
        let span = self.last_token?.since(self.first_token?).0;
        let rest = span % gaps;
        Some(SimDuration(span / gaps + u64::from(rest >= gaps - rest)))
    }
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
        let done = records.iter().filter(|record| record.completed);
        let mut gaps: Vec<SimDuration> = done.flat_map(RequestRecord::gaps).collect();
        let itl_s = Summary::of_spans(&mut gaps);
        Self::from_summaries(records.iter().map(RequestRecord::summary), itl_s, slo)
    }

    /// The same from requests without each of their tokens; `itl_s` summarises the gaps of completed ones.
    pub fn from_summaries(
        requests: impl Iterator<Item = RequestSummary>,
        itl_s: Summary,
        slo: Option<Slo>,
    ) -> Self {
        let (mut ttft, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
        let (mut count, mut completed, mut preemptions, mut met) = (0, 0, 0, 0);
        let (mut input, mut output) = (0, 0);
        let mut window: Option<(SimTime, SimTime)> = None;
        for request in requests {
            count += 1;
            preemptions += u64::from(request.preemptions);
            if !request.completed {
                continue;
            }
            completed += 1;
            input += request.input.0;
            output += request.output.0;
            let Some(latency) = Latency::of(&request) else {
                continue;
            };
            met += u64::from(slo.is_some_and(|slo| latency.meets(slo)));
            ttft.push(latency.ttft);
            e2e.push(latency.e2e);
            tpot.extend(latency.tpot);
            let last = request.arrival + latency.e2e;
            let (from, to) = window.unwrap_or((request.arrival, last));
            window = Some((from.min(request.arrival), to.max(last)));
        }
        let duration_s = window.map_or(0.0, |(first, last)| seconds(last.since(first)));
        let rate = |count: u64| {
            if duration_s > 0.0 {
                count as f64 / duration_s
            } else {
                0.0
            }
        };
        Self {
            completed,
            failed: count - completed,
            preemptions,
            duration_s,
            requests_per_s: rate(completed),
            output_tokens_per_s: rate(output),
            total_tokens_per_s: rate(input + output),
            ttft_s: Summary::of_spans(&mut ttft),
            itl_s,
            tpot_s: Summary::of_spans(&mut tpot),
            e2e_s: Summary::of_spans(&mut e2e),
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
    tpot: Option<SimDuration>,
    longest_gap: SimDuration,
}

impl Latency {
    fn of(request: &RequestSummary) -> Option<Self> {
        let (first, last) = (request.first_token?, request.last_token?);
        Some(Self {
            ttft: first.since(request.arrival),
            e2e: last.since(request.arrival),
            tpot: request.tpot(),
            longest_gap: request.longest_gap,
        })
    }

    fn meets(&self, slo: Slo) -> bool {
        slo.ttft.is_none_or(|limit| self.ttft <= limit)
            && slo.itl.is_none_or(|limit| self.longest_gap <= limit)
            && slo
                .tpot
                .is_none_or(|limit| self.tpot.is_none_or(|tpot| tpot <= limit))
            && slo.e2e.is_none_or(|limit| self.e2e <= limit)
    }
}

/// Seconds, rounded to whole nanoseconds as every report prints them.
fn seconds(span: SimDuration) -> f64 {
    span.as_nanoseconds() as f64 / 1e9
}

/// One latency metric as somebody else reported it, in seconds: what they left out is absent.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PartialSummary {
    /// Arithmetic mean.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 90th percentile.
    pub p90: Option<f64>,
    /// 95th percentile.
    pub p95: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// Largest sample.
    pub max: Option<f64>,
}

/// A run as somebody else reported it, in the words and units of [`Report`]: what they left out is absent,
/// never zero.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PartialReport {
    /// Requests that got all their tokens.
    pub completed: Option<u64>,
    /// Requests that did not.
    pub failed: Option<u64>,
    /// Length of the run, seconds, as the tool measures it.
    pub duration_s: Option<f64>,
    /// Prompt tokens in all.
    pub input_tokens: Option<u64>,
    /// Generated tokens in all.
    pub output_tokens: Option<u64>,
    /// Completed requests a second.
    pub requests_per_s: Option<f64>,
    /// Prompt tokens a second.
    pub input_tokens_per_s: Option<f64>,
    /// Generated tokens a second.
    pub output_tokens_per_s: Option<f64>,
    /// Prompt and generated tokens a second.
    pub total_tokens_per_s: Option<f64>,
    /// Requests a second that met every limit.
    pub goodput_per_s: Option<f64>,
    /// Time to first token.
    pub ttft_s: PartialSummary,
    /// Gaps between tokens.
    pub itl_s: PartialSummary,
    /// Mean gap of a request.
    pub tpot_s: PartialSummary,
    /// Whole request.
    pub e2e_s: PartialSummary,
}

impl From<Summary> for PartialSummary {
    /// Without samples there is nothing to tell.
    fn from(summary: Summary) -> Self {
        if summary.samples == 0 {
            return Self::default();
        }
        Self {
            mean: Some(summary.mean),
            p50: Some(summary.p50),
            p90: Some(summary.p90),
            p95: None,
            p99: Some(summary.p99),
            max: Some(summary.max),
        }
    }
}

impl From<&Report> for PartialReport {
    fn from(report: &Report) -> Self {
        Self {
            completed: Some(report.completed),
            failed: Some(report.failed),
            duration_s: Some(report.duration_s),
            requests_per_s: Some(report.requests_per_s),
            output_tokens_per_s: Some(report.output_tokens_per_s),
            total_tokens_per_s: Some(report.total_tokens_per_s),
            goodput_per_s: report.goodput_per_s,
            ttft_s: report.ttft_s.into(),
            itl_s: report.itl_s.into(),
            tpot_s: report.tpot_s.into(),
            e2e_s: report.e2e_s.into(),
            ..Self::default()
        }
    }
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
