//! What a step costs: operators on devices, collectives on routes.

use infercluster_spec::{Dtype, GpuId, Operator};

/// Why there is no prediction. Never replaced by zero or a default.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
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
}

/// Seconds of operators on devices and of collectives between them.
pub trait CostModel {
    /// Time of one operator on one device, in seconds, its `speed` factor applied.
    fn operator_seconds(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<f64, CostError>;

    /// Time of a collective or transfer among devices in rank order, in seconds.
    fn collective_seconds(&self, gpus: &[GpuId], operator: &Operator) -> Result<f64, CostError>;
}
