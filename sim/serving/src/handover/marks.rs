//! What the handover reads out of the scheduler.

use std::collections::BTreeMap;

use super::{ItemMark, KvMark, KvUnit, Stamp, StepHeader};
use crate::scheduler::{Scheduler, StepPlan};

/// Tokens in the cache of each live unit, completed steps only: [`super::ServingView::computed`].
pub fn computed_marks(scheduler: &Scheduler) -> BTreeMap<KvUnit, u32> {
    let with_kv = scheduler.sequences().filter(|status| status.computed_tokens > 0);
    with_kv
        .map(|status| (status.unit(), status.computed_tokens))
        .collect()
}

/// Tokens in the cache of each live unit once every planned step has completed: asked before the first step of
/// a layout is planned, it is what that step's header carries.
pub fn carried_marks(scheduler: &Scheduler) -> Vec<KvMark> {
    let with_kv = scheduler.sequences().filter(|status| status.planned_tokens > 0);
    let mark = |status: crate::scheduler::SequenceStatus| KvMark {
        unit: status.unit(),
        tokens: status.planned_tokens,
    };
    with_kv.map(mark).collect()
}

impl StepHeader {
    /// The header of a planned step; `carried` on the first step of a layout.
    pub fn new(stamp: Stamp, plan: &StepPlan, carried: Option<Vec<KvMark>>) -> Self {
        let item = |item: &crate::scheduler::PlannedItem| ItemMark {
            unit: item.unit(),
            start: item.start,
            count: item.count,
        };
        Self {
            stamp,
            step: plan.step,
            items: plan.items.iter().map(item).collect(),
            released: plan.released.clone(),
            carried,
        }
    }
}
