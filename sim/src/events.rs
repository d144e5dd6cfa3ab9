//! The event queue: integer time and a total order, so that the same run happens in the same order
//! everywhere.
//!
//! Events are ordered by (time, class, sequence). At one instant completions and deliveries come first, then
//! arrivals, then decisions; within a class the one that was scheduled first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use infercluster_spec::{ReplicaId, SimTime, StageId, StepId};

/// Everything that can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A stage has computed its step.
    StageDone { replica: ReplicaId, stage: StageId },
    /// A stage has the input of a step.
    StageInput {
        replica: ReplicaId,
        stage: StageId,
        step: StepId,
    },
    /// The request at that position of the trace is sent.
    Arrival { position: usize },
    /// A replica looks for steps to plan.
    Plan { replica: ReplicaId },
}

impl Event {
    fn class(self) -> u8 {
        match self {
            Self::StageDone { .. } | Self::StageInput { .. } => 0,
            Self::Arrival { .. } => 1,
            Self::Plan { .. } => 2,
        }
    }
}

/// What will happen, soonest first.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    heap: BinaryHeap<Reverse<(SimTime, u8, u64, Event)>>,
    scheduled: u64,
    now: SimTime,
}

impl EventQueue {
    /// The instant of the event that was taken last.
    pub(crate) fn now(&self) -> SimTime {
        self.now
    }

    /// Events that were ever scheduled.
    pub(crate) fn scheduled(&self) -> u64 {
        self.scheduled
    }

    /// Schedules an event.
    pub(crate) fn push(&mut self, at: SimTime, event: Event) {
        assert!(at >= self.now, "{event:?} at {at:?} lies before {:?}", self.now);
        self.heap
            .push(Reverse((at, event.class(), self.scheduled, event)));
        self.scheduled += 1;
    }

    /// Takes the next event and moves the clock to it.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let Reverse((at, _, _, event)) = self.heap.pop()?;
        self.now = at;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_come_before_arrivals_before_decisions() {
        let replica = ReplicaId(0);
        let stage = StageId(0);
        let mut queue = EventQueue::default();
        let events = [
            (SimTime(5), Event::Plan { replica }),
            (SimTime(5), Event::Arrival { position: 1 }),
            (SimTime(5), Event::Arrival { position: 0 }),
            (SimTime(5), Event::StageDone { replica, stage }),
            (SimTime(4), Event::Plan { replica }),
        ];
        for (at, event) in events {
            queue.push(at, event);
        }
        let order: Vec<Event> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [4, 3, 1, 2, 0].map(|index: usize| events[index].1));
        assert_eq!(queue.now(), SimTime(5));
    }
}
