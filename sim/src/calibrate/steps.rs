//! What only whole steps show, fitted from measured steps of real runs.
//!
//! The calibration that comes in prices single operators. Two fits add to it:
//!
//! 1. **Compute.** A rank's seconds in one kind of segment are `slowdown x (repeats x floor / speed +
//!    scale[kind] x operators)`: `scale` for caches that are cold between layers, `floor` for dispatch,
//!    `slowdown` (needs runs with and without a neighbour) for a shared memory bus. One fit per device type.
//! 2. **The rest of the wall time.** `wall - sum over kinds of (slowest rank's compute)` is
//!    `host floor + per row x sampled rows + rounds x alpha + bytes x beta`, the terms that carry to other
//!    cuts and other batches: an uneven layout changes bytes and compute but no round, another batch size
//!    changes bytes and rows. Runs on one rank have no rounds and pin the host terms; runs on several then
//!    pin alpha and beta. Both lines hold for all device types of the runs together.
//!
//! Alpha here is larger than a bare message's: it holds the wait for the slower rank's jitter and its wake-up,
//! which is what a step pays. Links other than loopback keep the fit that they came with.
//!
//! Left out: layer groups of one stage whose slowest ranks differ inside one kind of segment, where a sum
//! of maxima is more than the maximum of sums. It matters only in half-moved stages.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::calibration::{
    AffineFit, DeviceCalibration, LinkFit, Residual, StepFit, residual_name,
};
use infercluster_spec::cluster::LinkKind;
use infercluster_spec::operator::{RankStep, StepRecord};
use infercluster_spec::{Calibration, Cluster, GpuId, Model, ReplicaId, SegmentKind, StageId, StepRun};

use super::CalibrateError;
use super::residual::{self, Comparison};
use super::solver::{self, Parameter};
use crate::cost::{AnalyticCost, StageCost};

/// Steps below which nothing is fitted: ten for each of the four terms of the wall time.
const MIN_STEPS: usize = 40;

/// Adds step corrections, host time and loopback cost to `base`, from runs that it may be judged against
/// only if they are held out. The residual `step` of every device type says how well whole steps are met.
pub fn fit_steps(
    runs: &[StepRun],
    cluster: &Cluster,
    model: &Model,
    base: &Calibration,
) -> Result<Calibration, CalibrateError> {
    let mut calibration = base.clone();
    // Corrections of an earlier fit would be counted twice.
    for device in calibration.devices.values_mut() {
        device.step = None;
    }
    let cost = AnalyticCost::new(cluster, &calibration)?;
    let observed = observe(runs, &cost, model)?;
    if observed.walls.len() < MIN_STEPS {
        return Err(CalibrateError::TooFewSteps {
            steps: observed.walls.len(),
            needed: MIN_STEPS,
        });
    }
    let mut types: BTreeMap<String, Vec<ComputeRow>> = BTreeMap::new();
    for row in observed.compute {
        types
            .entry(cost.device_type(row.gpu)?.to_owned())
            .or_default()
            .push(row);
    }
    let overhead = fit_walls(&observed.walls).ok_or_else(|| no_fit(residual_name::STEP, model))?;
    for (device_type, rows) in types {
        let step = fit_compute(&rows).ok_or_else(|| no_fit(&device_type, model))?;
        let device = calibration.devices.entry(device_type).or_default();
        device.step = Some(step);
        device.host_step = Some(overhead.host);
    }
    if let Some((alpha_s, bytes_per_s)) = overhead.loopback {
        let provenance = base
            .links
            .get(&LinkKind::Loopback)
            .map(|fit| fit.provenance.clone());
        let link = LinkFit {
            provenance: provenance.unwrap_or_default(),
            alpha_s,
            bytes_per_s,
        };
        calibration.links.insert(LinkKind::Loopback, link);
    }
    let comparisons = compare_steps(runs, cluster, model, &calibration)?;
    let summary = residual::summary(residual_name::STEP, model.dtype, &comparisons);
    for device in calibration
        .devices
        .values_mut()
        .filter(|device| device.step.is_some())
    {
        replace_residual(device, &summary);
    }
    Ok(calibration)
}

/// Predicted beside measured wall times, in the order of the runs' steps with work: how a calibration is
/// judged on runs that it has not seen.
pub fn compare_steps(
    runs: &[StepRun],
    cluster: &Cluster,
    model: &Model,
    calibration: &Calibration,
) -> Result<Vec<Comparison>, CalibrateError> {
    let cost = AnalyticCost::new(cluster, calibration)?;
    let mut comparisons = Vec::new();
    for (position, run) in runs.iter().enumerate() {
        let mut stages = BTreeMap::new();
        for record in working(run) {
            check(position, record)?;
            let stage = resolve(&mut stages, &cost, run, model, record)?;
            comparisons.push(Comparison {
                predicted_s: stage.step(&record.shape)?.total_s,
                measured_s: record.wall_s,
            });
        }
    }
    Ok(comparisons)
}

/// Signed relative errors of [`compare_steps`].
pub fn step_errors(
    runs: &[StepRun],
    cluster: &Cluster,
    model: &Model,
    calibration: &Calibration,
) -> Result<Vec<f64>, CalibrateError> {
    let comparisons = compare_steps(runs, cluster, model, calibration)?;
    Ok(comparisons.into_iter().map(Comparison::relative_error).collect())
}

/// Compute of one rank in one kind of segment of one step.
struct ComputeRow {
    gpu: GpuId,
    kind: SegmentKind,
    /// Segments in the step, over the device's speed.
    floors: f64,
    /// Uncorrected seconds of their operators, the device's speed applied.
    operators_s: f64,
    shared: bool,
    measured_s: f64,
}

/// Wall time of one step and the terms that explain it.
struct WallRow {
    /// Seconds explained before: compute of the slowest ranks, and exchanges on links that keep their fit.
    known_s: f64,
    sampled_rows: f64,
    rounds: f64,
    bytes: f64,
    wall_s: f64,
}

struct Observed {
    compute: Vec<ComputeRow>,
    walls: Vec<WallRow>,
}

fn observe(runs: &[StepRun], cost: &AnalyticCost, model: &Model) -> Result<Observed, CalibrateError> {
    let mut observed = Observed {
        compute: Vec::new(),
        walls: Vec::new(),
    };
    for (position, run) in runs.iter().enumerate() {
        let mut stages = BTreeMap::new();
        for record in working(run) {
            check(position, record)?;
            let stage = resolve(&mut stages, cost, run, model, record)?;
            let found: Vec<GpuId> = record.ranks.iter().map(|rank| rank.gpu).collect();
            if found != stage.gpus() {
                return Err(CalibrateError::RankMismatch {
                    run: position,
                    found,
                    expected: stage.gpus().to_vec(),
                });
            }
            observed.add(stage, cost, record)?;
        }
    }
    Ok(observed)
}

impl Observed {
    fn add(
        &mut self,
        stage: &StageCost,
        cost: &AnalyticCost,
        record: &StepRecord,
    ) -> Result<(), CalibrateError> {
        let group = stage.group();
        let mut wall = WallRow {
            known_s: SegmentKind::ALL
                .iter()
                .map(|kind| slowest(&record.ranks, *kind))
                .sum(),
            sampled_rows: stage.sampled_rows(&record.shape) as f64,
            rounds: 0.0,
            bytes: 0.0,
            wall_s: record.wall_s,
        };
        let mut work: BTreeMap<SegmentKind, (f64, Vec<f64>)> = BTreeMap::new();
        for segment in stage.work(&record.shape)? {
            let repeats = f64::from(segment.repeats);
            let parts = group
                .parts(&segment.collective)
                .expect("a stage asks its group for gathers and all-reduces only");
            if group.is_loopback {
                wall.rounds += repeats * parts.messages;
                wall.bytes += repeats * parts.bytes * group.flows();
            } else {
                wall.known_s +=
                    repeats * (parts.messages * group.alpha_s + parts.bytes * group.seconds_per_byte);
            }
            let (floors, operators_s) = work
                .entry(segment.kind)
                .or_insert_with(|| (0.0, vec![0.0; record.ranks.len()]));
            *floors += repeats;
            for (sum, seconds) in operators_s.iter_mut().zip(&segment.operators_s) {
                *sum += repeats * seconds;
            }
        }
        for (kind, (floors, operators_s)) in work {
            for (rank, operators_s) in record.ranks.iter().zip(operators_s) {
                let measured_s = rank.compute_s.get(&kind).copied().unwrap_or(0.0);
                // A rank without a share of this kind may not report it.
                if measured_s > 0.0 {
                    self.compute.push(ComputeRow {
                        gpu: rank.gpu,
                        kind,
                        floors: floors / cost.speed(rank.gpu)?,
                        operators_s,
                        shared: stage.is_shared(rank.gpu),
                        measured_s,
                    });
                }
            }
        }
        self.walls.push(wall);
        Ok(())
    }
}

fn working(run: &StepRun) -> impl Iterator<Item = &StepRecord> {
    run.steps.iter().filter(|record| record.shape.new_tokens > 0)
}

type Stages<'a> = BTreeMap<(ReplicaId, StageId), StageCost<'a>>;

fn resolve<'s, 'a>(
    stages: &'s mut Stages<'a>,
    cost: &'a AnalyticCost,
    run: &StepRun,
    model: &'a Model,
    record: &StepRecord,
) -> Result<&'s StageCost<'a>, CalibrateError> {
    let key = (record.replica, record.stage);
    Ok(match stages.entry(key) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => new.insert(StageCost::new(
            cost,
            &run.layout,
            model,
            record.replica,
            record.stage,
        )?),
    })
}

fn check(run: usize, record: &StepRecord) -> Result<(), CalibrateError> {
    let compute = record.ranks.iter().flat_map(|rank| rank.compute_s.values());
    let valid = |seconds: &f64| seconds.is_finite() && *seconds >= 0.0;
    match compute.copied().find(|seconds| !valid(seconds)) {
        Some(seconds) => Err(CalibrateError::BadStep { run, seconds }),
        None if !valid(&record.wall_s) || record.wall_s == 0.0 => Err(CalibrateError::BadStep {
            run,
            seconds: record.wall_s,
        }),
        None => Ok(()),
    }
}

fn slowest(ranks: &[RankStep], kind: SegmentKind) -> f64 {
    let seconds = ranks.iter().filter_map(|rank| rank.compute_s.get(&kind));
    seconds.copied().fold(0.0, f64::max)
}

/// Parameters: floor, slowdown, then one scale a kind.
fn fit_compute(rows: &[ComputeRow]) -> Option<StepFit> {
    let kinds: Vec<SegmentKind> = rows
        .iter()
        .map(|row| row.kind)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let both = rows.iter().any(|row| row.shared) && rows.iter().any(|row| !row.shared);
    let start = |slowdown: f64| {
        let mut parameters = vec![
            Parameter::new(1e-6, 1e-9, 1e-1),
            Parameter::new(slowdown, 1.0, if both { 10.0 } else { 1.0 }),
        ];
        parameters.extend(kinds.iter().map(|_| Parameter::new(1.0, 1e-3, 1e3)));
        parameters
    };
    let scales: Vec<usize> = rows
        .iter()
        .map(|row| {
            2 + kinds
                .binary_search(&row.kind)
                .expect("kinds are those of the rows")
        })
        .collect();
    let predict = |values: &[f64], row: usize| {
        let scale = values[scales[row]];
        let row = &rows[row];
        let slowdown = if row.shared { values[1] } else { 1.0 };
        slowdown * (row.floors * values[0] + scale * row.operators_s)
    };
    let measured: Vec<f64> = rows.iter().map(|row| row.measured_s).collect();
    let found = solver::solve(&[start(1.2)], &measured, &predict)?.values;
    Some(StepFit {
        segment_floor_s: found[0],
        neighbour_slowdown: found[1],
        scale: kinds.into_iter().zip(found[2..].iter().copied()).collect(),
    })
}

struct Overhead {
    host: AffineFit,
    /// Alpha and rate of loopback, where any step exchanged over it.
    loopback: Option<(f64, f64)>,
}

fn fit_walls(walls: &[WallRow]) -> Option<Overhead> {
    let exchanges = walls.iter().any(|wall| wall.rounds > 0.0);
    let mut start = vec![Parameter::new(1e-4, 1e-9, 10.0), Parameter::new(1e-5, 1e-10, 1.0)];
    if exchanges {
        start.push(Parameter::new(3e-5, 1e-9, 1.0));
        start.push(Parameter::new(2.5e-10, 1e-14, 1e-5));
    }
    let predict = |values: &[f64], row: usize| {
        let wall = &walls[row];
        let exchange = match values.get(2..4) {
            Some(loopback) => wall.rounds * loopback[0] + wall.bytes * loopback[1],
            None => 0.0,
        };
        wall.known_s + values[0] + wall.sampled_rows * values[1] + exchange
    };
    let measured: Vec<f64> = walls.iter().map(|wall| wall.wall_s).collect();
    let found = solver::solve(&[start], &measured, &predict)?.values;
    Some(Overhead {
        host: AffineFit {
            floor_s: found[0],
            per_s: 1.0 / found[1],
        },
        loopback: exchanges.then(|| (found[2], 1.0 / found[3])),
    })
}

fn replace_residual(device: &mut DeviceCalibration, summary: &Residual) {
    device
        .residuals
        .retain(|residual| residual.operator != summary.operator || residual.dtype != summary.dtype);
    device.residuals.push(summary.clone());
}

fn no_fit(device_type: &str, model: &Model) -> CalibrateError {
    CalibrateError::NoFit {
        device_type: device_type.to_owned(),
        class: residual_name::STEP,
        dtype: model.dtype,
    }
}
