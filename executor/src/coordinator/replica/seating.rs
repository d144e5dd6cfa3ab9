//! Who computes a layout's steps.

use infercluster_spec::layout::Seat;
use infercluster_spec::{GpuId, StageId};

/// Who computes a layout's steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::coordinator) struct Seating {
    /// Its devices, stage by stage, rank by rank.
    pub(in crate::coordinator) seats: Vec<(Seat, GpuId)>,
}

impl Seating {
    /// Its devices.
    pub(in crate::coordinator) fn gpus(&self) -> impl Iterator<Item = &GpuId> {
        self.seats.iter().map(|(_, gpu)| gpu)
    }

    /// The device that answers: rank 0 of the last stage.
    pub(in crate::coordinator) fn answerer(&self) -> GpuId {
        let last = self.stage_count().saturating_sub(1) as u32;
        let mut seats = self.seats.iter();
        let seat = seats.find(|(seat, _)| seat.stage == StageId(last) && seat.rank.0 == 0);
        seat.expect("every stage of a valid layout has a rank 0").1
    }

    /// Pipeline stages.
    pub(in crate::coordinator) fn stage_count(&self) -> usize {
        self.seats
            .iter()
            .map(|(seat, _)| seat.stage.index() + 1)
            .max()
            .unwrap_or(0)
    }
}
