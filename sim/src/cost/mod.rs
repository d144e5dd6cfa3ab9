//! What a step costs: operators on devices, collectives on routes, and their sum over a stage.
//!
//! [`AnalyticCost`] answers from a cluster's datasheet corrected by a calibration; [`StageCost`] and
//! [`ShareCost`] put operators together into the segments between which a tensor-parallel group
//! synchronises. Everything here is seconds in `f64`; the engine rounds once, to picoseconds.
//!
//! Not known here: batching, queues, time. Links shared with other traffic are not known either: a
//! collective is charged as if it were alone on its links.

mod analytic;
mod forms;
mod pace;
mod rates;
mod segments;
mod share;

pub use analytic::AnalyticCost;
pub(crate) use forms::AMOUNT_DTYPE;
pub use forms::{affine_seconds, decode_attention_seconds, roofline_seconds};
pub use infercluster_spec::{BatchShape, SegmentKind};
pub(crate) use pace::StagePace;
pub use rates::{DEFAULT_EFFICIENCY, DefaultEfficiency, DeviceRates};
pub use segments::{SegmentTime, StageCost, StageTime, stage_step_time};
pub use share::{ShareCost, activation_dtype};

use infercluster_spec::{Dtype, GpuId, NodeId, Operator, ReplicaId, StageId};

use crate::topology::{CollectiveGroup, TopologyError};

/// Why there is no prediction. Never replaced by zero or a default.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// A device that the cluster does not have.
    #[error("{gpu} is not in cluster `{cluster}`")]
    UnknownGpu {
        /// The device.
        gpu: GpuId,
        /// The cluster's name.
        cluster: String,
    },
    /// A device whose type the cluster file does not describe.
    #[error("{gpu} is of type `{device_type}`, which cluster `{cluster}` does not describe")]
    UnknownDeviceType {
        /// The device.
        gpu: GpuId,
        /// Its type.
        device_type: String,
        /// The cluster's name.
        cluster: String,
    },
    /// The device type has no rate for that precision.
    #[error("{gpu} of type {device_type} has no {what} rate for {dtype}")]
    NoRate {
        /// The device.
        gpu: GpuId,
        /// Its type.
        device_type: String,
        /// Which operator.
        what: &'static str,
        /// The precision.
        dtype: Dtype,
    },
    /// A device that stands still.
    #[error("{gpu} has speed 0, so nothing on it ever ends")]
    NoSpeed {
        /// The device.
        gpu: GpuId,
    },
    /// An operator that is asked of the wrong function.
    #[error("{operator:?} is not a {wanted} operator")]
    WrongOperator {
        /// The operator.
        operator: Operator,
        /// What the function answers for.
        wanted: &'static str,
    },
    /// A model whose layers this cost model has no form for.
    #[error("model `{model}` has {what}, for which there is no cost form")]
    Unsupported {
        /// The model's name.
        model: String,
        /// What it has.
        what: &'static str,
    },
    /// A stage that the layout does not have, or one without layers or ranks.
    #[error("the layout has no {stage} with layers and ranks in {replica}")]
    NoStage {
        /// The replica.
        replica: ReplicaId,
        /// The stage.
        stage: StageId,
    },
    /// No way between devices.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A formula that left the finite numbers, as absurd fits or shapes make it do.
    #[error("{operator:?} on {gpu} comes out as {seconds} s")]
    NotFinite {
        /// The device.
        gpu: GpuId,
        /// The operator.
        operator: Operator,
        /// What the formula gave.
        seconds: f64,
    },
}

/// Where a prediction comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Fitted to measurements of this device type and precision.
    Calibrated,
    /// The same, but longer than anything that was measured: the form is trusted past its evidence.
    Extrapolated,
    /// Datasheet peaks times [`DEFAULT_EFFICIENCY`].
    Datasheet,
}

/// Corrections that whole steps show beyond their operators; `infercluster_spec::calibration::StepFit`
/// resolved for one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentCorrection {
    /// Seconds of every segment beyond its operators.
    pub floor_s: f64,
    /// Factor on the operators.
    pub scale: f64,
}

impl SegmentCorrection {
    /// No correction.
    pub const NONE: Self = Self {
        floor_s: 0.0,
        scale: 1.0,
    };

    /// `floor_s + scale x operators_s`, in seconds.
    pub fn apply(self, operators_s: f64) -> f64 {
        self.floor_s + self.scale * operators_s
    }
}

/// Seconds of operators on devices and of collectives between them.
pub trait CostModel: Send + Sync {
    /// Time of one compute operator or host step on one device, in seconds. The device's `speed` divides
    /// compute, not host time. An operator without work (a rank with no heads) is not launched and takes no
    /// time.
    fn operator_seconds(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<f64, CostError>;

    /// Where that time comes from.
    fn origin(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<Origin, CostError>;

    /// What a segment on this device costs beyond its operators, `speed` applied; `shared` where the layout
    /// seats another device on the same node.
    fn segment_correction(
        &self,
        gpu: GpuId,
        kind: SegmentKind,
        shared: bool,
    ) -> Result<SegmentCorrection, CostError>;

    /// Whether two devices cost the same in everything but their routes, so that one's answers hold for the
    /// other.
    fn is_alike(&self, one: GpuId, other: GpuId) -> bool {
        one == other
    }

    /// Resolves the routes among devices once, for many collectives.
    fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, CostError>;

    /// The node that holds a device.
    fn node_of(&self, gpu: GpuId) -> Result<NodeId, CostError>;

    /// Time of a collective or transfer among devices in rank order, in seconds.
    fn collective_seconds(&self, gpus: &[GpuId], operator: &Operator) -> Result<f64, CostError> {
        let group = self.group(gpus)?;
        group.seconds(operator).ok_or(CostError::WrongOperator {
            operator: *operator,
            wanted: "collective",
        })
    }
}

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod tests;
