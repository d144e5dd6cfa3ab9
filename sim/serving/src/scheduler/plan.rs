//! How a step is formed.

use infercluster_spec::StepId;

use super::{Arrival, InFlight, KvUnit, Live, Pending, Phase, PlannedItem, Scheduler, StepPlan};

/// A step in the making.
struct Draft {
    /// Tokens that still fit.
    budget: u32,
    items: Vec<Chosen>,
}

/// An item whose blocks are taken.
struct Chosen {
    arrival: Arrival,
    count: u32,
}

/// How growing a running sequence ended.
enum Growth {
    /// It has its blocks.
    Grown,
    /// It lost its place instead: it is the latest, so everybody else comes first.
    Preempted,
    /// Later sequences hold the blocks, but they are in flight.
    Waits,
}

pub(super) fn plan_step(scheduler: &mut Scheduler) -> Option<StepPlan> {
    if scheduler.in_flight.len() >= scheduler.max_in_flight as usize {
        return None;
    }
    let mut draft = Draft {
        budget: scheduler.options.token_budget,
        items: Vec::new(),
    };
    let preempted = choose_running(scheduler, &mut draft);
    if !preempted && scheduler.admits {
        admit_waiting(scheduler, &mut draft);
    }
    if draft.items.is_empty() {
        return None;
    }
    Some(dispatch(scheduler, draft))
}

pub(super) fn plan_empty_step(scheduler: &mut Scheduler) -> StepPlan {
    let draft = Draft {
        budget: 0,
        items: Vec::new(),
    };
    dispatch(scheduler, draft)
}

/// Gives running sequences their next tokens, oldest first, and answers whether any was preempted for that.
fn choose_running(scheduler: &mut Scheduler, draft: &mut Draft) -> bool {
    let before = scheduler.running.len();
    let share = scheduler.running.len().div_ceil(scheduler.max_in_flight as usize);
    let mut after = None;
    while draft.budget > 0 && draft.items.len() < share {
        let Some(arrival) = next_idle(scheduler, after) else {
            break;
        };
        after = Some(arrival);
        let live = &scheduler.live[&arrival];
        let count = (live.known() - live.computed).min(draft.budget);
        match grow(scheduler, arrival, count) {
            Growth::Grown => draft.push(arrival, count),
            Growth::Preempted | Growth::Waits => break,
        }
    }
    scheduler.running.len() < before
}

/// The first running sequence after `after` that is not in flight.
fn next_idle(scheduler: &Scheduler, after: Option<Arrival>) -> Option<Arrival> {
    let first = after.map_or(Arrival(0), |after| Arrival(after.0 + 1));
    let idle = |arrival: &&Arrival| scheduler.live[arrival].in_flight.is_none();
    scheduler.running.range(first..).find(idle).copied()
}

/// Takes blocks for the next tokens of a running sequence, from later ones where the pool is dry.
fn grow(scheduler: &mut Scheduler, arrival: Arrival, count: u32) -> Growth {
    let Live { id, computed, .. } = scheduler.live[&arrival];
    while scheduler.ledger.grow(id, computed + count).is_err() {
        let later = || scheduler.running.range(Arrival(arrival.0 + 1)..);
        let idle = |later: &&Arrival| scheduler.live[later].in_flight.is_none();
        match later().rev().find(idle).copied() {
            Some(victim) => scheduler.preempt(victim),
            None if later().next().is_some() => return Growth::Waits,
            None => {
                assert!(
                    scheduler.running.len() > 1,
                    "{id} has the pool alone and was admitted because it fits"
                );
                scheduler.preempt(arrival);
                return Growth::Preempted;
            }
        }
    }
    Growth::Grown
}

/// Gives what is left of the step to waiting sequences, oldest first, until one does not fit.
fn admit_waiting(scheduler: &mut Scheduler, draft: &mut Draft) {
    let max_sequences = scheduler.options.max_sequences as usize;
    let candidates = (scheduler.running.len() + scheduler.waiting.len()).min(max_sequences);
    let share = candidates.div_ceil(scheduler.max_in_flight as usize);
    while draft.budget > 0 && draft.items.len() < share && scheduler.running.len() < max_sequences {
        let Some(&arrival) = scheduler.waiting.first() else {
            return;
        };
        let live = &scheduler.live[&arrival];
        let (id, known) = (live.id, live.known());
        let count = known.min(draft.budget);
        if !scheduler.ledger.fits(id, known) || scheduler.ledger.grow(id, count).is_err() {
            return;
        }
        scheduler.waiting.remove(&arrival);
        scheduler.running.insert(arrival);
        draft.push(arrival, count);
    }
}

impl Draft {
    fn push(&mut self, arrival: Arrival, count: u32) {
        self.budget -= count;
        self.items.push(Chosen { arrival, count });
    }
}

/// Numbers the step and marks its sequences as in flight.
fn dispatch(scheduler: &mut Scheduler, draft: Draft) -> StepPlan {
    let step = scheduler.next_step;
    scheduler.next_step = StepId(step.0 + 1);
    let mut items = Vec::with_capacity(draft.items.len());
    let mut pending = Vec::with_capacity(draft.items.len());
    for Chosen { arrival, count } in draft.items {
        let live = scheduler.live_mut(arrival);
        live.in_flight = Some(count);
        let yields_token = live.computed + count == live.known();
        let (unit, phase, start): (KvUnit, Phase, u32) = (live.unit(), live.phase(), live.computed);
        items.push(PlannedItem {
            sequence: unit.sequence,
            incarnation: unit.incarnation,
            phase,
            start,
            count,
            yields_token,
            block_table: scheduler.ledger.table(unit.sequence).to_vec(),
        });
        pending.push(Pending {
            arrival,
            count,
            yields_token,
        });
    }
    scheduler.in_flight.push_back(InFlight { step, items: pending });
    StepPlan {
        step,
        items,
        preempted: std::mem::take(&mut scheduler.unreported_preemptions),
        released: std::mem::take(&mut scheduler.unreported_releases),
    }
}
