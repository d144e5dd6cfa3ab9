//! Rows of predicted beside measured, as a table and in a report.

use anyhow::Context as _;
use infercluster_spec::report::PredictionError;
use serde::Serialize;

use super::Observed;
use super::judged::{Measured, Spread};
use crate::screen::Columns;

/// One figure of one case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    /// The prediction beside the median.
    #[serde(flatten)]
    pub(crate) error: PredictionError,
    /// Least over the runs.
    pub(crate) least: f64,
    /// Most over the runs.
    pub(crate) most: f64,
    /// Runs.
    pub(crate) runs: usize,
}

impl Row {
    /// Compares a prediction with the median of what was measured.
    pub(crate) fn of(metric: &str, predicted: f64, measured: Spread, runs: usize) -> anyhow::Result<Self> {
        let error = PredictionError::of(metric, predicted, measured.median)
            .with_context(|| format!("{metric} was measured as {}", measured.median))?;
        Ok(Self {
            error,
            least: measured.least,
            most: measured.most,
            runs,
        })
    }

    /// Whether the prediction is within so large a share of the measurement.
    pub(crate) fn is_within(&self, share: f64) -> bool {
        self.error.relative_error.abs() <= share
    }
}

/// What a row says of a run.
type Figure = fn(&Observed) -> f64;

/// Tokens a second and latencies of one case.
pub(crate) fn rows_of(case: &str, predicted: &Observed, measured: &Measured) -> anyhow::Result<Vec<Row>> {
    let figures: [(&str, Figure); 4] = [
        ("output tokens/s", |run| run.output_tokens_per_s),
        ("ttft p50 ms", |run| 1000.0 * run.report.ttft_s.p50),
        ("itl p50 ms", |run| 1000.0 * run.report.itl_s.p50),
        ("e2e p50 ms", |run| 1000.0 * run.report.e2e_s.p50),
    ];
    figures
        .into_iter()
        .map(|(name, figure)| {
            Row::of(
                &format!("{case}, {name}"),
                figure(predicted),
                measured.spread(figure),
                measured.runs.len(),
            )
        })
        .collect()
}

/// How many times the tokens a second of the first case the second gives: medians, and the spread over the turns.
pub(crate) fn gain(
    predicted: (&Observed, &Observed),
    measured: (&Measured, &Measured),
) -> anyhow::Result<Row> {
    let rate = |run: &Observed| run.output_tokens_per_s;
    let (base, better) = measured;
    let turns: Vec<f64> = base
        .runs
        .iter()
        .zip(&better.runs)
        .map(|(base, better)| rate(&better.observed) / rate(&base.observed))
        .collect();
    let runs = turns.len();
    let spread = Spread {
        median: better.spread(rate).median / base.spread(rate).median,
        ..Spread::of(turns)
    };
    Row::of("gain", rate(predicted.1) / rate(predicted.0), spread, runs)
}

/// Rows as a person reads them.
pub(crate) fn table<'a>(rows: impl IntoIterator<Item = &'a Row>) -> String {
    let mut table = Columns::new([
        "layout, metric",
        ">predicted",
        ">measured",
        ">error",
        ">least",
        ">most",
    ]);
    for row in rows {
        let number = |value: f64| format!("{value:.3}");
        table.row([
            row.error.metric.clone(),
            number(row.error.predicted),
            number(row.error.measured),
            format!("{:+.1} %", 100.0 * row.error.relative_error),
            number(row.least),
            number(row.most),
        ]);
    }
    table.to_string()
}
