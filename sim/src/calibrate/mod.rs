//! From measurements to calibrations.
//!
//! [`fit`] turns profiles of single operators into parameters of the closed forms, [`cross_validate`] says
//! how they carry to shapes that the fit never saw, and [`fit_steps`] adds what only whole steps show.
//!
//! Emulated devices: the times of a profile with an emulated speed are multiplied by it, so the calibration
//! of a device type always stands at speed 1 and [`infercluster_spec::cluster::Gpu::speed`] applies it again.

mod operators;
mod residual;
mod solver;
mod steps;

use std::collections::BTreeMap;

use infercluster_spec::calibration::{DeviceCalibration, Residual};
use infercluster_spec::{Calibration, Cluster, Dtype, GpuId, Operator, Profile};

use crate::cost::CostError;
use operators::{Class, Fitted, Row};

pub use residual::Comparison;
pub use steps::{compare_steps, fit_steps, step_errors};

/// Why measurements give no calibration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// A profile of a device type that the cluster does not describe.
    #[error("the profile is of device type `{device_type}`, cluster `{cluster}` has {known}")]
    UnknownDeviceType {
        /// The profile's type.
        device_type: String,
        /// The cluster's name.
        cluster: String,
        /// Its types.
        known: String,
    },
    /// A time that no clock gives.
    #[error("{operator:?} on `{device_type}` was measured as {seconds} s, a positive time is needed")]
    BadTime {
        /// The device type.
        device_type: String,
        /// What ran.
        operator: Operator,
        /// What was found.
        seconds: f64,
    },
    /// An emulated device that stands still.
    #[error("the profile of `{device_type}` says emulated speed 0")]
    NoSpeed {
        /// The device type.
        device_type: String,
    },
    /// Fewer shapes than a fit of that many parameters can stand on.
    #[error("{class} of `{device_type}` in {dtype} was measured at {shapes} shapes, the fit needs {needed}")]
    TooFewShapes {
        /// The device type.
        device_type: String,
        /// Which operator.
        class: &'static str,
        /// The precision.
        dtype: Dtype,
        /// Different shapes found.
        shapes: usize,
        /// Shapes that are needed.
        needed: usize,
    },
    /// Exchanges between devices whose links are not loopback: a profile does not say which link it used.
    #[error(
        "the profile of `{device_type}` has exchanges, but cluster `{cluster}` has links of its own, and a profile does not say which one they crossed"
    )]
    UnknownLink {
        /// The device type.
        device_type: String,
        /// The cluster's name.
        cluster: String,
    },
    /// Predictions that never became finite.
    #[error("{class} of `{device_type}` in {dtype}: no start of the search gives finite predictions")]
    NoFit {
        /// The device type.
        device_type: String,
        /// Which operator.
        class: &'static str,
        /// The precision.
        dtype: Dtype,
    },
    /// Cross-validation over fewer than two parts, or more than there are shapes.
    #[error("{folds} folds over {shapes} weight shapes: at least 2 and at most one a shape are needed")]
    Folds {
        /// What was asked for.
        folds: usize,
        /// Different weight shapes found.
        shapes: usize,
    },
    /// Runs without a usable step.
    #[error("the runs hold {steps} steps with work, the fit needs {needed}")]
    TooFewSteps {
        /// Steps found.
        steps: usize,
        /// Steps needed.
        needed: usize,
    },
    /// A step whose ranks are not those of its layout.
    #[error("a step of run {run} lists ranks {found:?}, its layout seats {expected:?}")]
    RankMismatch {
        /// Position of the run.
        run: usize,
        /// Devices of the step.
        found: Vec<GpuId>,
        /// Devices of the stage.
        expected: Vec<GpuId>,
    },
    /// A wall or compute time that no clock gives.
    #[error("a step of run {run} lasted {seconds} s, a positive time is needed")]
    BadStep {
        /// Position of the run.
        run: usize,
        /// What was found.
        seconds: f64,
    },
    /// No prediction to compare with.
    #[error(transparent)]
    Cost(#[from] CostError),
}

/// Rows of one operator class in one precision, of one device type.
type Sorted<'a> = BTreeMap<(&'a str, Class, Dtype), Vec<Row>>;

/// Fits every operator class, precision and device type that the profiles measure. What they do not measure
/// stays absent, so that the cost model falls back to the datasheet and says so; what they measure at too
/// few shapes is refused.
pub fn fit(profiles: &[Profile], cluster: &Cluster) -> Result<Calibration, CalibrateError> {
    let mut calibration = Calibration::default();
    for profile in profiles {
        let device = calibration
            .devices
            .entry(profile.device_type.clone())
            .or_insert_with(|| DeviceCalibration {
                provenance: profile.provenance.clone(),
                ..DeviceCalibration::default()
            });
        // Pooled profiles of one type stand at speed 1 together.
        device.provenance.emulated_speed = None;
    }
    for ((device_type, class, dtype), rows) in sort(profiles, cluster)? {
        let fitted = operators::fit_class(device_type, class, dtype, &rows)?;
        let device = calibration.devices.entry(device_type.to_owned()).or_default();
        device
            .residuals
            .push(residual::summary(class.name(), dtype, &fitted.compare(&rows)));
        fitted.store(dtype, device, &mut calibration.links);
    }
    Ok(calibration)
}

/// Errors on weight shapes that the fit did not see, per device type: shapes (for GEMM `n x k`, for attention
/// the heads, for others the amount) are dealt into `folds` parts, each is predicted from the rest.
pub fn cross_validate(
    profiles: &[Profile],
    cluster: &Cluster,
    folds: usize,
) -> Result<BTreeMap<String, Vec<Residual>>, CalibrateError> {
    let mut residuals: BTreeMap<String, Vec<Residual>> = BTreeMap::new();
    for ((device_type, class, dtype), rows) in sort(profiles, cluster)? {
        let shapes: std::collections::BTreeSet<_> = rows
            .iter()
            .map(|row| operators::weight_shape(&row.operator))
            .collect();
        let shapes: Vec<_> = shapes.into_iter().collect();
        if folds < 2 || folds > shapes.len() {
            return Err(CalibrateError::Folds {
                folds,
                shapes: shapes.len(),
            });
        }
        let mut comparisons = Vec::with_capacity(rows.len());
        for fold in 0..folds {
            let is_held = |row: &&Row| {
                let position = shapes.binary_search(&operators::weight_shape(&row.operator));
                position.is_ok_and(|position| position % folds == fold)
            };
            let (held, kept): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(is_held);
            let (held, kept): (Vec<Row>, Vec<Row>) = (
                held.into_iter().copied().collect(),
                kept.into_iter().copied().collect(),
            );
            let fitted: Fitted = operators::fit_class(device_type, class, dtype, &kept)?;
            comparisons.extend(fitted.compare(&held));
        }
        residuals
            .entry(device_type.to_owned())
            .or_default()
            .push(residual::summary(class.name(), dtype, &comparisons));
    }
    Ok(residuals)
}

fn sort<'a>(profiles: &'a [Profile], cluster: &Cluster) -> Result<Sorted<'a>, CalibrateError> {
    let mut sorted = Sorted::new();
    for profile in profiles {
        let device_type = profile.device_type.as_str();
        if !cluster.device_types.contains_key(device_type) {
            let known: Vec<&str> = cluster.device_types.keys().map(String::as_str).collect();
            return Err(CalibrateError::UnknownDeviceType {
                device_type: device_type.to_owned(),
                cluster: cluster.name.clone(),
                known: known.join(", "),
            });
        }
        let speed = profile
            .provenance
            .emulated_speed
            .map_or(1.0, |speed| speed.value());
        if speed == 0.0 {
            return Err(CalibrateError::NoSpeed {
                device_type: device_type.to_owned(),
            });
        }
        for measurement in &profile.measurements {
            let Some(class) = Class::of(&measurement.operator) else {
                continue;
            };
            if class == Class::Exchange && !cluster.links.is_empty() {
                return Err(CalibrateError::UnknownLink {
                    device_type: device_type.to_owned(),
                    cluster: cluster.name.clone(),
                });
            }
            if !(measurement.median_s.is_finite() && measurement.median_s > 0.0) {
                return Err(CalibrateError::BadTime {
                    device_type: device_type.to_owned(),
                    operator: measurement.operator,
                    seconds: measurement.median_s,
                });
            }
            // Pacing stretches compute; host work and exchanges run as they are.
            let paced = if class.is_compute() { speed } else { 1.0 };
            sorted
                .entry((device_type, class, class.dtype(measurement.dtype)))
                .or_default()
                .push(Row {
                    operator: measurement.operator,
                    seconds: measurement.median_s * paced,
                });
        }
    }
    Ok(sorted)
}

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod step_tests;
#[cfg(test)]
mod tests;
