//! What a trace holds, in the definitions that published descriptions of traces use.

use infercluster_spec::stats::percentile;
use infercluster_spec::{SimTime, Trace};
use serde::Serialize;

use crate::read::Loaded;

/// Statistics of a trace. What needs two arrivals or more is absent without them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceStatistics {
    /// Requests.
    pub rows: u64,
    /// Whether every request has an arrival time.
    pub has_arrivals: bool,
    /// Last minus first arrival, seconds.
    pub span_s: Option<f64>,
    /// `rows / span_s`.
    pub rate_per_s: Option<f64>,
    /// Population standard deviation over mean of consecutive gaps, zero gaps kept.
    pub gap_cv: Option<f64>,
    /// Variance over mean of arrivals in bins of one second from the first arrival.
    pub dispersion_1s: Option<f64>,
    /// Prompt tokens.
    pub input: LengthStatistics,
    /// Tokens to generate.
    pub output: LengthStatistics,
    /// Whether requests carry hashes of their prompt's blocks.
    pub has_prefix_hashes: bool,
}

/// Statistics of one of the two lengths; all zero in an empty trace.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LengthStatistics {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile, linear interpolation at `0.99 (n - 1)`.
    pub p99: f64,
    /// Largest.
    pub max: u64,
}

/// Statistics of the requests of a trace.
pub fn statistics(trace: &Trace) -> TraceStatistics {
    let requests = trace.requests.iter();
    let rows = requests.map(|request| (request.arrival, request.input.0, request.output.0));
    summary(rows.collect(), has_hashes(trace))
}

/// Statistics of a file as it is: rows that no request can be made of count, too.
pub fn statistics_of_file(loaded: &Loaded) -> TraceStatistics {
    let requests = loaded.trace.requests.iter();
    let requests = requests.map(|request| (request.arrival, request.input.0, request.output.0));
    let dropped = loaded
        .dropped
        .iter()
        .map(|row| (row.arrival, row.input, row.output));
    let mut rows: Vec<_> = requests.chain(dropped).collect();
    rows.sort_by_key(|(arrival, ..)| *arrival);
    summary(rows, has_hashes(&loaded.trace))
}

fn has_hashes(trace: &Trace) -> bool {
    trace
        .requests
        .iter()
        .any(|request| !request.block_hashes.is_empty())
}

/// Rows in arrival order: arrival, prompt, answer.
fn summary(rows: Vec<(Option<SimTime>, u64, u64)>, has_prefix_hashes: bool) -> TraceStatistics {
    let arrivals: Option<Vec<SimTime>> = rows.iter().map(|(arrival, ..)| *arrival).collect();
    let arrivals = arrivals.filter(|arrivals| !arrivals.is_empty());
    let span_s = match arrivals.as_deref() {
        Some([first, .., last]) => Some(last.since(*first).as_seconds()),
        _ => None,
    };
    TraceStatistics {
        rows: rows.len() as u64,
        has_arrivals: arrivals.is_some(),
        span_s,
        rate_per_s: span_s
            .filter(|span| *span > 0.0)
            .map(|span| rows.len() as f64 / span),
        gap_cv: arrivals.as_deref().and_then(gap_cv),
        dispersion_1s: arrivals.as_deref().and_then(dispersion_1s),
        input: lengths(rows.iter().map(|(_, input, _)| *input).collect()),
        output: lengths(rows.iter().map(|(.., output)| *output).collect()),
        has_prefix_hashes,
    }
}

fn lengths(mut tokens: Vec<u64>) -> LengthStatistics {
    tokens.sort_unstable();
    let sorted: Vec<f64> = tokens.iter().map(|&count| count as f64).collect();
    let at = |p| percentile(&sorted, p).unwrap_or(0.0);
    LengthStatistics {
        mean: match tokens.len() {
            0 => 0.0,
            count => tokens.iter().sum::<u64>() as f64 / count as f64,
        },
        p50: at(50.0),
        p99: at(99.0),
        max: tokens.last().copied().unwrap_or(0),
    }
}

fn gap_cv(arrivals: &[SimTime]) -> Option<f64> {
    let gaps: Vec<f64> = arrivals
        .windows(2)
        .map(|pair| pair[1].since(pair[0]).as_seconds())
        .collect();
    let count = gaps.len() as f64;
    let mean = gaps.iter().sum::<f64>() / count;
    let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
    (mean > 0.0).then(|| variance.sqrt() / mean)
}

/// Bins without an arrival enter by their number, so a gap of years costs nothing.
fn dispersion_1s(arrivals: &[SimTime]) -> Option<f64> {
    const SECOND: u64 = 1_000_000_000_000;
    let (first, last) = (arrivals.first()?, arrivals.last()?);
    if arrivals.len() < 2 {
        return None;
    }
    let bin = |arrival: &SimTime| arrival.since(*first).0 / SECOND;
    let bins = (bin(last) + 1) as f64;
    let squares: f64 = arrivals
        .chunk_by(|a, b| bin(a) == bin(b))
        .map(|together| (together.len() as f64).powi(2))
        .sum();
    let mean = arrivals.len() as f64 / bins;
    Some((squares / bins - mean * mean) / mean)
}
