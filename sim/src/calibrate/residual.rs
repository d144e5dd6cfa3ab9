//! How far predictions are from measurements.

use infercluster_spec::Dtype;
use infercluster_spec::calibration::Residual;
use infercluster_spec::stats::percentile;

/// Summary of signed relative errors `(predicted - measured) / measured`, of which there is at least one.
pub(super) fn summary(operator: &str, dtype: Dtype, errors: Vec<f64>) -> Residual {
    let at = |mut errors: Vec<f64>, p| {
        errors.sort_by(f64::total_cmp);
        percentile(&errors, p).expect("an operator class without rows has no summary")
    };
    let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    Residual {
        operator: operator.to_owned(),
        dtype,
        rows: u32::try_from(errors.len()).unwrap_or(u32::MAX),
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
        // Sizes 0.1, 0.2, 0.3: median 0.2, p90 at position 1.8. Signed -0.3, 0.1, 0.2: median 0.1.
        let found = summary("gemm", Dtype::F32, vec![0.1, -0.3, 0.2]);
        assert_eq!((found.rows, found.median_error, found.bias), (3, 0.2, 0.1));
        assert!((found.p90_error - 0.28).abs() < 1e-12);
    }
}
