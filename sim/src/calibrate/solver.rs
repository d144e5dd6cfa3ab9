//! Robust least squares in log space, by Levenberg-Marquardt.
//!
//! Every parameter is positive and searched by its logarithm inside bounds; the residual of a row is
//! `ln(predicted) - ln(measured)`, so a microsecond and a second weigh the same. Huber weights
//! `min(1, delta / |residual|)` keep outliers from pulling; `delta` is 1.345 robust standard deviations of
//! the residuals, re-estimated between rounds.

use infercluster_spec::stats::percentile;
use nalgebra::{DMatrix, DVector};

/// A positive unknown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Parameter {
    pub(super) start: f64,
    pub(super) lower: f64,
    pub(super) upper: f64,
}

impl Parameter {
    /// An unknown that starts at `start`, moved inside `lower..=upper` if it lies outside.
    pub(super) fn new(start: f64, lower: f64, upper: f64) -> Self {
        Self {
            start: start.clamp(lower, upper),
            lower,
            upper,
        }
    }
}

/// The found values and what is left over.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Solution {
    pub(super) values: Vec<f64>,
    /// Robust sum of the residuals' losses: smaller is better.
    pub(super) loss: f64,
}

/// Rounds of re-estimated weights, and damped steps in each.
const ROUNDS: usize = 4;
const STEPS: usize = 40;
/// Least width of the Huber band: 0.1 %, so that exact rows do not make it vanish.
const MIN_DELTA: f64 = 1e-3;
/// Step of the forward difference in a logarithm.
const DIFFERENCE: f64 = 1e-6;

/// Minimises the residuals of `measured` (positive) against `predict(values, row)` from several starts;
/// `None` where no start gives finite predictions.
pub(super) fn solve(
    starts: &[Vec<Parameter>],
    measured: &[f64],
    predict: &dyn Fn(&[f64], usize) -> f64,
) -> Option<Solution> {
    let solutions = starts
        .iter()
        .filter_map(|start| Search::new(start, measured, predict)?.run());
    solutions.min_by(|one, other| one.loss.total_cmp(&other.loss))
}

struct Search<'a> {
    bounds: &'a [Parameter],
    measured: Vec<f64>,
    predict: &'a dyn Fn(&[f64], usize) -> f64,
    logs: DVector<f64>,
    residuals: DVector<f64>,
    delta: f64,
}

impl<'a> Search<'a> {
    fn new(
        bounds: &'a [Parameter],
        measured: &[f64],
        predict: &'a dyn Fn(&[f64], usize) -> f64,
    ) -> Option<Self> {
        let mut search = Self {
            bounds,
            measured: measured.iter().map(|seconds| seconds.ln()).collect(),
            predict,
            logs: DVector::from_iterator(bounds.len(), bounds.iter().map(|bound| bound.start.ln())),
            residuals: DVector::zeros(measured.len()),
            delta: f64::INFINITY,
        };
        search.residuals = search.residuals_at(&search.logs)?;
        Some(search)
    }

    fn run(mut self) -> Option<Solution> {
        for _ in 0..ROUNDS {
            self.delta = huber_band(&self.residuals);
            self.descend()?;
        }
        Some(Solution {
            values: self.logs.iter().map(|log| log.exp()).collect(),
            loss: self.loss(&self.residuals),
        })
    }

    /// Damped Gauss-Newton steps until one gains less than a part in 10^10.
    fn descend(&mut self) -> Option<()> {
        let mut damping = 1e-3;
        let mut loss = self.loss(&self.residuals);
        for _ in 0..STEPS {
            let (normal, gradient) = self.normal_equations()?;
            let Some((logs, residuals, lower)) = self.improve(&normal, &gradient, loss, &mut damping) else {
                break;
            };
            let gain = loss - lower;
            (self.logs, self.residuals, loss) = (logs, residuals, lower);
            if gain <= 1e-10 * loss {
                break;
            }
        }
        Some(())
    }

    /// The first step that lowers the loss, under rising damping; `None` at a minimum.
    fn improve(
        &self,
        normal: &DMatrix<f64>,
        gradient: &DVector<f64>,
        loss: f64,
        damping: &mut f64,
    ) -> Option<(DVector<f64>, DVector<f64>, f64)> {
        while *damping < 1e12 {
            let mut damped = normal.clone();
            for i in 0..damped.nrows() {
                damped[(i, i)] += *damping * normal[(i, i)].max(1e-12);
            }
            let step = damped.cholesky().map(|factor| factor.solve(gradient));
            let moved = step.map(|step| self.clamped(&(&self.logs - step)));
            let tried = moved.and_then(|logs| Some((self.residuals_at(&logs)?, logs)));
            if let Some((residuals, logs)) = tried {
                let lower = self.loss(&residuals);
                if lower < loss {
                    *damping = (*damping / 4.0).max(1e-9);
                    return Some((logs, residuals, lower));
                }
            }
            *damping *= 8.0;
        }
        None
    }

    /// `J^T W J` and `J^T W r`; a parameter that its bound stops from going downhill takes no part.
    fn normal_equations(&self) -> Option<(DMatrix<f64>, DVector<f64>)> {
        let mut jacobian = DMatrix::zeros(self.residuals.len(), self.logs.len());
        for column in 0..self.logs.len() {
            let mut shifted = self.logs.clone();
            shifted[column] += DIFFERENCE;
            let slope = (self.residuals_at(&shifted)? - &self.residuals) / DIFFERENCE;
            jacobian.set_column(column, &slope);
        }
        let weights = self.residuals.map(|residual| self.weight(residual));
        let mut weighted = jacobian.clone();
        for (mut row, weight) in weighted.row_iter_mut().zip(weights.iter()) {
            row *= *weight;
        }
        let mut normal = weighted.tr_mul(&jacobian);
        let mut gradient = weighted.tr_mul(&self.residuals);
        for (i, bound) in self.bounds.iter().enumerate() {
            let stopped_below = self.logs[i] <= bound.lower.ln() && gradient[i] > 0.0;
            let stopped_above = self.logs[i] >= bound.upper.ln() && gradient[i] < 0.0;
            if stopped_below || stopped_above {
                normal.row_mut(i).fill(0.0);
                normal.column_mut(i).fill(0.0);
                normal[(i, i)] = 1.0;
                gradient[i] = 0.0;
            }
        }
        Some((normal, gradient))
    }

    fn residuals_at(&self, logs: &DVector<f64>) -> Option<DVector<f64>> {
        let values: Vec<f64> = logs.iter().map(|log| log.exp()).collect();
        let residuals = self
            .measured
            .iter()
            .enumerate()
            .map(|(row, measured)| (self.predict)(&values, row).ln() - measured);
        let residuals = DVector::from_iterator(self.measured.len(), residuals);
        residuals
            .iter()
            .all(|residual| residual.is_finite())
            .then_some(residuals)
    }

    fn clamped(&self, logs: &DVector<f64>) -> DVector<f64> {
        let bounded = logs.iter().zip(self.bounds);
        DVector::from_iterator(
            logs.len(),
            bounded.map(|(log, bound)| log.clamp(bound.lower.ln(), bound.upper.ln())),
        )
    }

    fn weight(&self, residual: f64) -> f64 {
        (self.delta / residual.abs()).min(1.0)
    }

    /// Huber's loss: half the square inside the band, linear outside.
    fn loss(&self, residuals: &DVector<f64>) -> f64 {
        let losses = residuals.iter().map(|residual| {
            let size = residual.abs();
            if size <= self.delta {
                0.5 * size * size
            } else {
                self.delta * (size - 0.5 * self.delta)
            }
        });
        losses.sum()
    }
}

/// 1.345 robust standard deviations (1.4826 times the median absolute residual).
fn huber_band(residuals: &DVector<f64>) -> f64 {
    let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let median = percentile(&sizes, 50.0).unwrap_or(0.0);
    (1.345 * 1.4826 * median).max(MIN_DELTA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_through_outliers() {
        // 2 + 3 x for x = 1..20, every seventh row ten times too large.
        let at = |values: &[f64], row: usize| values[0] + values[1] * (row + 1) as f64;
        let measured: Vec<f64> = (0..20)
            .map(|row| at(&[2.0, 3.0], row) * if row % 7 == 3 { 10.0 } else { 1.0 })
            .collect();
        let start = vec![Parameter::new(1.0, 1e-6, 1e6), Parameter::new(1.0, 1e-6, 1e6)];
        let found = solve(&[start], &measured, &at).unwrap();
        // Three rows of 20 lie ln 10 too high: plain least squares would raise all by 3/20 of that, 41 %.
        assert!((found.values[0] / 2.0 - 1.0).abs() < 0.05, "{found:?}");
        assert!((found.values[1] / 3.0 - 1.0).abs() < 0.05, "{found:?}");
    }

    #[test]
    fn bounds_hold_and_leave_the_rest_free() {
        // The true intercept 2 lies below its bound of 4; the slope still adapts.
        let at = |values: &[f64], row: usize| values[0] + values[1] * (row + 1) as f64;
        let measured: Vec<f64> = (0..20).map(|row| at(&[2.0, 3.0], row)).collect();
        let start = vec![Parameter::new(10.0, 4.0, 1e6), Parameter::new(1.0, 1e-6, 1e6)];
        let found = solve(&[start], &measured, &at).unwrap();
        assert!((found.values[0] - 4.0).abs() < 1e-9, "{found:?}");
        assert!((2.5..3.0).contains(&found.values[1]), "{found:?}");
    }
}
