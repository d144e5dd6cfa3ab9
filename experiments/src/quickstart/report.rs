//! What the quickstart tells: one table of predicted against measured, and how it was got.

use infercluster_executor::speed::SpeedCheck;
use infercluster_planner::draw::draw_layout;
use infercluster_spec::calibration::{Residual, residual_name};
use infercluster_spec::{Calibration, Report};
use serde::Serialize;

use super::migration::Migrated;
use crate::planning::Planned;
use crate::profiling::CPU_TYPE;
use crate::rig::judged::{Measured, Run};
use crate::rig::rows::{self, Row};
use crate::rig::{Observed, Rig, gain_bound};
use crate::running;

/// One layout.
#[derive(Clone, Copy)]
pub(super) struct Judged<'a> {
    /// What the simulator says.
    pub(super) predicted: &'a Observed,
    /// What the workers did.
    pub(super) measured: &'a Measured,
}

/// Everything that a report is made of.
pub(super) struct Parts<'a> {
    pub(super) rig: &'a Rig,
    pub(super) planned: &'a Planned,
    pub(super) calibration: &'a Calibration,
    pub(super) even: Judged<'a>,
    pub(super) chosen: Judged<'a>,
    pub(super) migration: Migrated,
}

/// The answer of `quickstart`.
#[derive(Debug, Serialize)]
pub(crate) struct QuickReport {
    /// The model is random: its answers mean nothing.
    random_model: String,
    drawing: String,
    /// Predicted against measured, by metric: medians over the runs, with their spread.
    comparison: Vec<Row>,
    /// How many times the tokens a second of the even layout the planned one gives.
    gain: Row,
    /// What ideal whole shares would gain on the same cost model.
    gain_bound: f64,
    /// Residuals of the fits.
    calibration: Vec<Residual>,
    /// What a live change from the one layout to the other cost.
    migration: Migrated,
    /// Asked and achieved speeds of all judged runs.
    speeds: Vec<SpeedCheck>,
    /// Judged runs that were noisy and were repeated.
    runs_set_aside: usize,
    /// Noisy runs that count all the same, because the spare ones were used up.
    noisy_runs: usize,
    /// Whether no run that counts was noisy, so that the figures may be quoted.
    is_valid: bool,
    measured_even: Vec<Report>,
    measured_planned: Vec<Report>,
}

impl QuickReport {
    pub(super) fn new(parts: Parts) -> anyhow::Result<Self> {
        let Parts { rig, planned, .. } = parts;
        let (even, chosen) = (parts.even, parts.chosen);
        let mut comparison = rows::rows_of("even", even.predicted, even.measured)?;
        comparison.extend(rows::rows_of("planned", chosen.predicted, chosen.measured)?);
        let both = || [even.measured, chosen.measured].into_iter();
        let runs = || both().flat_map(|measured| &measured.runs);
        let noisy_runs = runs().filter(|run| !run.is_quiet()).count();
        let residuals = parts.calibration.devices.get(CPU_TYPE);
        let reports = |measured: &Measured| {
            let runs = measured.runs.iter();
            runs.map(|run: &Run| run.observed.report.clone()).collect()
        };
        Ok(Self {
            random_model: format!(
                "{}: random weights, {} in {}",
                rig.model.name,
                rig.model.weight_bytes(),
                rig.model.dtype
            ),
            drawing: draw_layout(&planned.layout, &rig.model, Some(&rig.cluster)),
            comparison,
            gain: rows::gain(
                (even.predicted, chosen.predicted),
                (even.measured, chosen.measured),
            )?,
            gain_bound: gain_bound(planned)?,
            calibration: residuals.map_or_else(Vec::new, |device| device.residuals.clone()),
            migration: parts.migration,
            speeds: runs().flat_map(|run| run.speeds.iter().copied()).collect(),
            runs_set_aside: both().map(|measured| measured.set_aside).sum(),
            noisy_runs,
            is_valid: noisy_runs == 0,
            measured_even: reports(even.measured),
            measured_planned: reports(chosen.measured),
        })
    }

    /// The report as a person reads it.
    pub(crate) fn people(&self) -> String {
        let mut text = format!("{}\n\nthe planned layout\n{}\n", self.random_model, self.drawing);
        text.push_str(&rows::table(self.comparison.iter().chain([&self.gain])));
        text.push_str(&format!(
            "live migration: {}\n\n\
             measured: medians of {} runs of each layout, in turns; {} noisy ones were repeated\n\
             the planned layout gives {:.2} times the tokens a second of the even one; whole shares allow {:.2}\n",
            self.migration.people(),
            self.gain.runs,
            self.runs_set_aside,
            self.gain.error.measured,
            self.gain_bound
        ));
        if let Some(step) = self
            .calibration
            .iter()
            .find(|residual| residual.operator == residual_name::STEP)
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
            text.push_str(&format!(
                "{} of the runs were noisy (an emulated speed missed by more than 2 %, or a machine that slowed \
                 down) and no run was left to repeat them: do not quote these figures\n",
                self.noisy_runs
            ));
        }
        text
    }
}
