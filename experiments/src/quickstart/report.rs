//! What the quickstart tells: one table of predicted against measured, and how it was got.

use anyhow::Context as _;
use infercluster_executor::replay::ReplayOutcome;
use infercluster_executor::speed::SpeedCheck;
use infercluster_planner::draw::draw_layout;
use infercluster_spec::calibration::Residual;
use infercluster_spec::report::PredictionError;
use infercluster_spec::{Calibration, Cluster, Model, Report};
use serde::Serialize;

use crate::planning::Planned;
use crate::profiling::CPU_TYPE;
use crate::running;
use crate::screen::Columns;

/// The two runs that predictions are compared with.
#[derive(Clone, Copy)]
pub(super) struct Judged<'a> {
    /// Of the even layout.
    pub(super) even: &'a ReplayOutcome,
    /// Of the planned one.
    pub(super) planned: &'a ReplayOutcome,
}

/// The answer of `quickstart`.
#[derive(Debug, Serialize)]
pub(crate) struct QuickReport {
    /// The model is random: its answers mean nothing.
    random_model: String,
    drawing: String,
    /// Predicted against measured, by metric.
    comparison: Vec<PredictionError>,
    /// How many times the tokens a second of the even layout the planned one gives.
    gain: PredictionError,
    /// What ideal whole shares would gain on the same cost model.
    gain_bound: f64,
    calibration: Vec<Residual>,
    /// Asked and achieved speeds of both runs.
    speeds: Vec<SpeedCheck>,
    /// Whether every emulated speed was kept, so that the figures may be quoted.
    is_valid: bool,
    migration: &'static str,
    measured_even: Report,
    measured_planned: Report,
}

/// What this build says about the step that it does not take.
const NO_MIGRATION: &str =
    "not part of this run: `infercluster bench migrate` changes layouts under load and measures the pause";

impl QuickReport {
    pub(super) fn new(
        model: &Model,
        cluster: &Cluster,
        planned: &Planned,
        calibration: &Calibration,
        judged: Judged,
    ) -> anyhow::Result<Self> {
        let even = planned.baselines.iter().find(|baseline| baseline.kind == "even");
        let even = even.context("no even layout was planned")?;
        let simulated_even = even
            .simulated
            .as_ref()
            .context("the even layout was not simulated")?;
        let simulated = planned.simulated.as_ref().context("the plan was not simulated")?;
        let mut comparison = compare("even", simulated_even, &judged.even.report)?;
        comparison.extend(compare("planned", simulated, &judged.planned.report)?);
        let rate = |report: &Report| report.output_tokens_per_s;
        let gain = error(
            "gain",
            rate(simulated) / rate(simulated_even),
            rate(&judged.planned.report) / rate(&judged.even.report),
        )?;
        let speeds: Vec<SpeedCheck> = [judged.even, judged.planned]
            .iter()
            .flat_map(|outcome| outcome.speeds.iter().copied())
            .collect();
        let residuals = calibration
            .devices
            .get(CPU_TYPE)
            .map(|device| device.residuals.clone());
        Ok(Self {
            random_model: format!(
                "{}: random weights, {} in {}",
                model.name,
                model.weight_bytes(),
                model.dtype
            ),
            drawing: draw_layout(&planned.layout, model, Some(cluster)),
            comparison,
            gain,
            gain_bound: even.step_s / planned.bounds.integer_shares_s,
            calibration: residuals.unwrap_or_default(),
            is_valid: speeds.iter().all(SpeedCheck::is_valid),
            speeds,
            migration: NO_MIGRATION,
            measured_even: judged.even.report.clone(),
            measured_planned: judged.planned.report.clone(),
        })
    }

    /// The report as a person reads it.
    pub(crate) fn people(&self) -> String {
        let mut text = format!("{}\n\nthe planned layout\n{}\n", self.random_model, self.drawing);
        let mut table = Columns::new(["layout, metric", ">predicted", ">measured", ">error"]);
        for row in self.comparison.iter().chain([&self.gain]) {
            table.row([
                row.metric.clone(),
                format!("{:.3}", row.predicted),
                format!("{:.3}", row.measured),
                format!("{:+.1} %", 100.0 * row.relative_error),
            ]);
        }
        text.push_str(&table.to_string());
        text.push_str(&format!(
            "\nthe planned layout gives {:.2} times the tokens a second of the even one; whole shares allow {:.2}\n",
            self.gain.measured, self.gain_bound
        ));
        if let Some(step) = self
            .calibration
            .iter()
            .find(|residual| residual.operator == "step")
        {
            text.push_str(&format!(
                "calibration: {} steps of other runs, error median {:.1} %, p90 {:.1} %\n",
                step.rows,
                100.0 * step.median_error,
                100.0 * step.p90_error
            ));
        }
        if let Some(line) = running::speed_line(&self.speeds) {
            text.push_str(&format!("{line}\n"));
        }
        if !self.is_valid {
            text.push_str("an emulated speed was missed by more than 2 %: other work took its core, do not quote these figures\n");
        }
        text.push_str(&format!("live migration: {}\n", self.migration));
        text
    }
}

/// The metrics of one layout.
fn compare(layout: &str, predicted: &Report, measured: &Report) -> anyhow::Result<Vec<PredictionError>> {
    let metrics = |report: &Report| {
        [
            ("output tokens/s", report.output_tokens_per_s),
            ("ttft p50 ms", 1000.0 * report.ttft_s.p50),
            ("itl p50 ms", 1000.0 * report.itl_s.p50),
            ("e2e p50 ms", 1000.0 * report.e2e_s.p50),
        ]
    };
    let pairs = metrics(predicted).into_iter().zip(metrics(measured));
    pairs
        .map(|((name, predicted), (_, measured))| error(&format!("{layout}, {name}"), predicted, measured))
        .collect()
}

fn error(metric: &str, predicted: f64, measured: f64) -> anyhow::Result<PredictionError> {
    PredictionError::of(metric, predicted, measured)
        .with_context(|| format!("{metric} was measured as {measured}"))
}
