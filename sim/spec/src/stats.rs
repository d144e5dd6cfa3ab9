//! Means and percentiles as every report prints them.

use serde::{Deserialize, Serialize};

use crate::units::SimDuration;

/// Linear interpolation at position `p / 100 * (n - 1)` of the ascending `sorted`; `None` when empty.
///
/// `sorted` must be ascending by `f64::total_cmp`.
pub fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let position = p / 100.0 * last as f64;
    let lower = (position.floor() as usize).min(last);
    let upper = (lower + 1).min(last);
    Some(sorted[lower] + (sorted[upper] - sorted[lower]) * (position - lower as f64))
}

/// Mean and percentiles of one latency metric, in seconds. All zero when there was no sample, which
/// `samples` tells apart from a real zero.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Arithmetic mean, summed in ascending order of value.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest sample.
    pub max: f64,
    /// How many samples there were.
    pub samples: u64,
}

impl Summary {
    /// Sorts the samples and summarises them.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |p| percentile(&samples, p).unwrap_or(0.0);
        let count = samples.len();
        Self {
            mean: if count == 0 {
                0.0
            } else {
                samples.iter().sum::<f64>() / count as f64
            },
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            max: at(100.0),
            samples: count as u64,
        }
    }

    /// Summarises spans, whose order it changes. The mean is the exact sum over the count; percentiles
    /// interpolate between order statistics in whole nanoseconds, as every report prints spans.
    pub fn of_spans(spans: &mut [SimDuration]) -> Self {
        let sum = spans.iter().map(|span| u128::from(span.0)).sum();
        let count = spans.len() as u64;
        Self::of_order(sum, count, |ranks| {
            let (mut found, mut from) = (Vec::with_capacity(ranks.len()), 0);
            for rank in ranks.iter().map(|rank| *rank as usize) {
                // Everything before `from` is below everything behind it.
                let (_, span, _) = spans[from..].select_nth_unstable(rank - from);
                found.push(*span);
                from = rank;
            }
            found
        })
    }

    /// Summarises spans of which the sum in picoseconds and the count are known. `select` answers the spans
    /// of ascending ranks, from 0.
    pub(crate) fn of_order(sum: u128, count: u64, select: impl FnOnce(&[u64]) -> Vec<SimDuration>) -> Self {
        let Some(last) = count.checked_sub(1) else {
            return Self::default();
        };
        let places = [50.0, 90.0, 99.0, 100.0].map(|p| Place::of(p, last));
        let mut ranks: Vec<u64> = places
            .iter()
            .flat_map(|place| [place.lower, place.upper])
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        let spans = select(&ranks);
        let at = |rank: u64| {
            let found = ranks.binary_search(&rank).expect("every rank was asked for");
            spans[found].as_nanoseconds() as f64 / 1e9
        };
        let [p50, p90, p99, max] =
            places.map(|place| at(place.lower) + (at(place.upper) - at(place.lower)) * place.share);
        Self {
            mean: sum as f64 / (count as f64 * 1e12),
            p50,
            p90,
            p99,
            max,
            samples: count,
        }
    }
}

/// Between which ranks a percentile lies.
#[derive(Debug, Clone, Copy)]
struct Place {
    lower: u64,
    upper: u64,
    /// Way from the lower to the upper.
    share: f64,
}

impl Place {
    fn of(p: f64, last: u64) -> Self {
        let position = p / 100.0 * last as f64;
        let lower = (position.floor() as u64).min(last);
        Self {
            lower,
            upper: (lower + 1).min(last),
            share: position - lower as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_between_ranks() {
        // Positions for n = 5: p50 at 2, p90 at 3.6, p99 at 3.96.
        let sorted = [1.0, 2.0, 3.0, 4.0, 5.0];
        assert_eq!(percentile(&sorted, 50.0), Some(3.0));
        assert!((percentile(&sorted, 90.0).unwrap() - 4.6).abs() < 1e-12);
        assert_eq!(percentile(&sorted, 100.0), Some(5.0));
        assert_eq!(percentile(&[], 50.0), None);
        assert_eq!(percentile(&[7.0], 99.0), Some(7.0));
    }

    #[test]
    fn spans_summarise_as_their_seconds_do() {
        let nanoseconds = [900, 100, 500, 300, 700];
        let mut spans = nanoseconds.map(|span| SimDuration(1000 * span));
        let of_spans = Summary::of_spans(&mut spans);
        let of_seconds = Summary::of(nanoseconds.map(|span| span as f64 / 1e9).to_vec());
        // 2500 ns over 5; p50 at rank 2, p90 at 3.6: 700 + 0.6 x 200.
        assert_eq!((of_spans.mean, of_spans.p50, of_spans.max), (5e-7, 5e-7, 9e-7));
        assert!((of_spans.p90 - 8.2e-7).abs() < 1e-18);
        assert_eq!(
            (of_spans.p90, of_spans.p99, of_spans.samples),
            (of_seconds.p90, of_seconds.p99, 5)
        );
        // 499 ps round to nothing, 500 ps to a nanosecond; the mean is exact.
        let mut spans = [SimDuration(499), SimDuration(500)];
        let fine = Summary::of_spans(&mut spans);
        assert_eq!((fine.p50, fine.max, fine.mean), (0.5e-9, 1e-9, 499.5e-12));
    }
}
