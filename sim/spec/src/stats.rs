//! Means and percentiles as every report prints them.

use serde::{Deserialize, Serialize};

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
}
