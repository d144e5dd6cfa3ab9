//! One step: what the protocol reads of it, what it computes, what it answers and how long that took.

use std::time::Duration;

use infercluster_serving::handover::{
    HandoverId, ItemMark, KvUnit, RankAction, RankEvent, Stamp, StepHeader,
};
use infercluster_spec::{Epoch, StepId, Term};

use super::StepLoop;
use crate::clock;
use crate::speed::{SegmentTimes, TimesByKind};
use crate::step::StepDescriptor;
use crate::wire::WireError;
use crate::wire::message::{FromWorker, StepOrder, StepOutput, StepTimes, SwitchTimes};
use crate::worker::runtime::StepResult;

/// Steps whose times are kept one by one.
const LATEST_STEPS: usize = 16 << 10;
/// Which step of which reign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StepKey {
    step: StepId,
    term: Term,
    epoch: Epoch,
}

impl StepKey {
    fn of(step: StepId, stamp: Stamp) -> Self {
        Self {
            step,
            term: stamp.term,
            epoch: stamp.epoch,
        }
    }
}

impl StepLoop {
    pub(super) fn step(&mut self, order: StepOrder) -> Result<(), WireError> {
        let Some(header) = header_of(&order) else {
            let StepDescriptor { epoch, step, .. } = order.descriptor;
            return self.answers.send(&FromWorker::StepFailed {
                epoch,
                step,
                reason: "its lists differ in length".to_owned(),
                peer: None,
            });
        };
        if order.carried.is_some() {
            self.first_step_since = Some(clock::now());
        }
        self.orders.insert(StepKey::of(header.step, header.stamp), order);
        self.feed(RankEvent::Step(header))?;
        self.copy_in_gap()
    }

    /// Computes a step; answers what the protocol says next.
    pub(super) fn compute(
        &mut self,
        layout: HandoverId,
        header: &StepHeader,
    ) -> Result<Vec<RankAction>, WireError> {
        let (step, epoch) = (header.step, header.stamp.epoch);
        for unit in &header.released {
            self.tables.remove(unit);
            if let Some(copying) = &mut self.copying {
                copying.forget(*unit);
            }
        }
        let tail = if self.copying_of(layout).is_some() {
            self.send_tail()?
        } else {
            Duration::ZERO
        };
        let order = self.orders.remove(&StepKey::of(step, header.stamp));
        self.orders.retain(|key, _| key.step > step);
        self.serving = Some(layout);
        let failed = |reason, peer| FromWorker::StepFailed {
            epoch,
            step,
            reason,
            peer,
        };
        let (Some(order), Some(loaded)) = (order, self.runtimes.get_mut(&layout)) else {
            let reason = format!("layout {} is not prepared here", layout.0);
            self.answers.send(&failed(reason, None))?;
            return Ok(Vec::new());
        };
        for (item, mark) in order.descriptor.items.iter().zip(&header.items) {
            let table = self.tables.entry(mark.unit).or_default();
            if table.len() != item.block_table.len() {
                table.clone_from(&item.block_table);
            }
        }
        let started = clock::now();
        match loaded.runtime.run(&order, &mut self.pacer) {
            Ok(result) => {
                let compute = started.elapsed();
                self.count(step, compute, result.upstream);
                self.answer(&order, result)?;
                if let (Some(_), Some(since)) = (&order.carried, self.first_step_since.take()) {
                    let marks = (started - tail).saturating_duration_since(since);
                    self.answers.send(&FromWorker::Switched {
                        layout_id: layout,
                        times: SwitchTimes { marks, tail, compute },
                    })?;
                }
                Ok(self.machine.handle(RankEvent::StepDone(step)))
            }
            Err(error) => {
                // Closing its connections lets peers fail at once and not by deadline.
                self.switchboard.close_layout(layout);
                self.runtimes.remove(&layout);
                self.answers.send(&failed(error.to_string(), error.peer()))?;
                Ok(Vec::new())
            }
        }
    }

    fn answer(&self, order: &StepOrder, result: StepResult) -> Result<(), WireError> {
        let Some(choices) = result.choices else {
            return Ok(());
        };
        let items = order.descriptor.items.iter().filter(|item| item.wants_logits);
        let outputs = items
            .zip(choices)
            .map(|(item, choice)| StepOutput {
                sequence: item.sequence,
                token: choice.token,
                logits_hash: choice.logits_hash,
                logits: choice.logits,
            })
            .collect();
        let StepDescriptor {
            term, epoch, step, ..
        } = order.descriptor;
        self.answers.send(&FromWorker::StepDone {
            term,
            epoch,
            step,
            outputs,
        })
    }

    fn count(&mut self, step: StepId, took: Duration, upstream: Duration) {
        let by_kind = self.pacer.take();
        let compute_s = by_kind
            .iter()
            .map(|(kind, times)| (*kind, times.paced_s()))
            .collect();
        add(&mut self.times.segments, &by_kind);
        self.times.steps += 1;
        self.times.step_s += took.as_secs_f64();
        self.times.upstream_s += upstream.as_secs_f64();
        if self.latest.len() == LATEST_STEPS {
            self.latest.pop_front();
        }
        self.last_step = took.saturating_sub(upstream);
        let wall_s = self.last_step.as_secs_f64();
        self.latest.push_back(StepTimes {
            step,
            wall_s,
            compute_s,
        });
    }

    pub(super) fn report_times(&mut self) -> Result<(), WireError> {
        let mut times = std::mem::take(&mut self.times);
        times.latest = std::mem::take(&mut self.latest).into();
        self.answers.send(&FromWorker::Times(times))
    }
}

fn add(sums: &mut TimesByKind, more: &TimesByKind) {
    for (kind, times) in more {
        let sum: &mut SegmentTimes = sums.entry(*kind).or_default();
        *sum += times;
    }
}

/// What the protocol reads of a step; `None` where the order's lists differ in length.
fn header_of(order: &StepOrder) -> Option<StepHeader> {
    let StepDescriptor {
        term,
        epoch,
        step,
        items,
    } = &order.descriptor;
    if order.incarnations.len() != items.len() || order.wants.len() != items.len() {
        return None;
    }
    let marks = items.iter().zip(&order.incarnations).map(|(item, &incarnation)| {
        Some(ItemMark {
            unit: KvUnit {
                sequence: item.sequence,
                incarnation,
            },
            start: item.start,
            count: u32::try_from(item.tokens.len())
                .ok()
                .filter(|count| item.start.checked_add(*count).is_some())?,
        })
    });
    Some(StepHeader {
        stamp: Stamp {
            term: *term,
            epoch: *epoch,
        },
        step: *step,
        items: marks.collect::<Option<_>>()?,
        released: order.released.clone(),
        carried: order.carried.clone(),
    })
}
