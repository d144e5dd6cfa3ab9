//! How far predictions are from measurements.

use infercluster_spec::Dtype;
use infercluster_spec::calibration::Residual;
use infercluster_spec::stats::percentile;

/// One prediction beside what was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Predicted seconds.
    pub predicted_s: f64,
    /// Measured seconds, positive.
    pub measured_s: f64,
}

impl Comparison {
    /// `(predicted - measured) / measured`.
    pub fn relative_error(self) -> f64 {
        (self.predicted_s - self.measured_s) / self.measured_s
    }
}

/// Summary of comparisons, of which there is at least one.
pub(super) fn summary(operator: &str, dtype: Dtype, comparisons: &[Comparison]) -> Residual {
    let errors: Vec<f64> = comparisons.iter().map(|one| one.relative_error()).collect();
    let at = |mut errors: Vec<f64>, p| {
        errors.sort_by(f64::total_cmp);
        percentile(&errors, p).expect("an operator class without rows has no summary")
    };
    let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    Residual {
        operator: operator.to_owned(),
        dtype,
        rows: u32::try_from(errors.len()).unwrap_or(u32::MAX),
        longest_s: comparisons.iter().map(|one| one.measured_s).fold(0.0, f64::max),
        median_error: at(sizes.clone(), 50.0),
        p90_error: at(sizes, 90.0),
        bias: at(errors, 50.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_bias_by_hand() {
        // Sizes 0.125, 0.25, 0.5: median 0.25, p90 at position 1.8. Signed -0.5, 0.125, 0.25: median 0.125.
        let found: Vec<Comparison> = [(9.0, 8.0), (2.0, 4.0), (5.0, 4.0)]
            .map(|(predicted_s, measured_s)| Comparison {
                predicted_s,
                measured_s,
            })
            .to_vec();
        let found = summary("gemm", Dtype::F32, &found);
        assert_eq!((found.rows, found.median_error, found.bias), (3, 0.25, 0.125));
        assert_eq!(found.longest_s, 8.0);
        assert!((found.p90_error - 0.45).abs() < 1e-12);
    }
}
