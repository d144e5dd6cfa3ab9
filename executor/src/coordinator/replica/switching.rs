//! The replica's part in a change of layout: what the protocol asks about, and who computes after it.

use std::collections::BTreeMap;
use std::time::Duration;

use infercluster_serving::handover::{self, KvMark, KvUnit, ServingView};
use infercluster_spec::StepId;

use super::{Replica, Seating};

impl Replica {
    /// Watches what a migration does to its streams, and knows who computes after it.
    pub(in crate::coordinator) fn begin_migration(&mut self, seating: Seating) {
        self.gaps.begin();
        self.next_seating = Some(seating);
    }

    /// The first step of the new layout is named.
    pub(in crate::coordinator) fn name_first_step(&mut self, step: StepId) {
        self.gaps.name_first_step(step);
    }

    /// The migration has ended. Where the new layout is in force it computes from now on, even if its first step
    /// was never sent because a loss came between.
    pub(in crate::coordinator) fn end_migration(&mut self, committed: bool) {
        self.gaps.end();
        if committed {
            self.take_next_seating();
        }
        self.next_seating = None;
    }

    /// Holds waiting sequences back, or lets them in.
    pub(in crate::coordinator) fn set_admission(&mut self, admits: bool) {
        self.scheduler.set_admission(admits);
    }

    /// All KV is void: steps in flight will not come, and every sequence is prefilled again.
    pub(in crate::coordinator) fn lose_kv(&mut self) {
        self.scheduler.lose_kv();
        self.in_flight.clear();
        self.early.clear();
    }

    /// Tokens in the cache of each live unit, of completed steps.
    pub(in crate::coordinator) fn computed(&self) -> BTreeMap<KvUnit, u32> {
        let live = self
            .scheduler
            .sequences()
            .filter(|status| status.computed_tokens > 0);
        live.map(|status| (status.unit(), status.computed_tokens))
            .collect()
    }

    /// What the protocol asks about; a record takes `record_time` to become durable, and `gap_tokens` can be copied
    /// between two steps without being noticed.
    pub(in crate::coordinator) fn view<'a>(
        &self,
        computed: &'a BTreeMap<KvUnit, u32>,
        record_time: Duration,
        gap_tokens: u64,
    ) -> ServingView<'a> {
        const MOST: f64 = 64.0;
        // A round is asked, sent and confirmed between steps, so marks are always some steps behind.
        const ROUND_STEPS: u64 = 4;
        let in_flight: u64 = self.in_flight.iter().map(|step| step.shape.new_tokens).sum();
        let recent = self.completed.back().map_or(0.0, |done| done.wall_s);
        let steps = if recent > 0.0 {
            (record_time.as_secs_f64() / recent).ceil().clamp(1.0, MOST)
        } else {
            1.0
        };
        ServingView {
            next_step: self.scheduler.next_step(),
            completed_below: self.scheduler.completed_below(),
            lead: steps as u64 * self.seating.stage_count() as u64,
            is_idle: self.scheduler.running() + self.scheduler.waiting() == 0,
            computed,
            step_tokens: gap_tokens.max(ROUND_STEPS * (in_flight + self.scheduler.running() as u64)),
        }
    }

    /// Whether a new layout waits for a step and nobody has work for one.
    pub(super) fn wants_empty_step(&self, protocol: &handover::Coordinator) -> bool {
        protocol.wants_steps()
            && self.next_seating.is_some()
            && self.in_flight.is_empty()
            && self.scheduler.running() + self.scheduler.waiting() == 0
    }

    /// The marks of every unit with KV, once all steps so far are done.
    pub(super) fn carried(&self) -> Vec<KvMark> {
        let live = self
            .scheduler
            .sequences()
            .filter(|status| status.planned_tokens > 0);
        live.map(|status| KvMark {
            unit: status.unit(),
            tokens: status.planned_tokens,
        })
        .collect()
    }

    pub(super) fn take_next_seating(&mut self) {
        if let Some(next) = self.next_seating.take() {
            self.seating = next;
            self.scheduler
                .set_max_in_flight(self.seating.stage_count() as u32)
                .expect("a valid layout has stages");
        }
    }
}
