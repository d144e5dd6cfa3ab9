//! The coordinator's side of a handover.

mod copying;
mod types;

use std::collections::BTreeSet;

use infercluster_spec::{Epoch, GpuId, StepId, Term};

use super::fault::{Fault, Planted};
use super::{Answer, Command, HandoverId, HandoverPlan, Lane, Notice, Order, Record, Stamp};
use copying::KvCopy;
pub use types::{
    AbortReason, CoordinatorAction, CoordinatorEvent, Gate, HandoverEnd, HandoverError, ServingView,
};

/// The state of a replica's coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coordinator {
    stamp: Stamp,
    layout: HandoverId,
    roster: BTreeSet<GpuId>,
    /// Ranks that may have to be told that they have no seat.
    others: BTreeSet<GpuId>,
    state: State,
    planted: Planted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Serving,
    Preparing {
        plan: HandoverPlan,
        ready: BTreeSet<GpuId>,
    },
    Copying {
        plan: HandoverPlan,
        copy: KvCopy,
    },
    Committing {
        plan: HandoverPlan,
        first_step: StepId,
    },
    Switching {
        plan: HandoverPlan,
        first_step: StepId,
        settled: BTreeSet<GpuId>,
    },
    Releasing {
        plan: HandoverPlan,
        first_step: StepId,
        pending: BTreeSet<GpuId>,
    },
    Aborting {
        plan: HandoverPlan,
        pending: BTreeSet<GpuId>,
    },
    TakingTerm {
        /// The attempt that the loss hit.
        hit: Option<HandoverId>,
    },
    Adopting {
        pending: BTreeSet<GpuId>,
        next_step: StepId,
    },
    Deposed,
}

impl Coordinator {
    /// Takes a replica over in a term that was just taken, from its record; `others` are ranks that may
    /// still serve an older layout. Its first act, on the next tick, is to have the record adopted.
    pub fn new(term: Term, record: &Record, others: BTreeSet<GpuId>, next_step: StepId) -> Self {
        let pending = record.roster.union(&others).copied().collect();
        Self {
            stamp: Stamp {
                term,
                epoch: record.epoch,
            },
            layout: record.layout,
            roster: record.roster.clone(),
            others,
            state: State::Adopting { pending, next_step },
            planted: Planted::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn with_fault(self, planted: Planted) -> Self {
        Self { planted, ..self }
    }

    /// The reign and the layout version in force.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Whether neither a handover nor a recovery is under way.
    pub fn is_settled(&self) -> bool {
        self.state == State::Serving
    }

    /// Whether another coordinator reigns, so that this one must stop.
    pub fn is_deposed(&self) -> bool {
        self.state == State::Deposed
    }

    /// Whether a committed layout waits for its first steps, which an idle driver sends empty.
    pub fn wants_steps(&self) -> bool {
        matches!(self.state, State::Switching { .. })
    }

    /// Whether what a rank says is of this reign; results of any other are dropped.
    pub fn accepts(&self, answer: &Answer) -> bool {
        answer.term == self.stamp.term
    }

    /// Whether and how that step may leave now.
    pub fn gate(&self, step: StepId) -> Gate {
        let go = |epoch, is_first, roster: &BTreeSet<GpuId>| Gate::Go {
            stamp: Stamp {
                term: self.stamp.term,
                epoch,
            },
            is_first,
            roster: roster.clone(),
        };
        let in_force = self.stamp.epoch;
        match &self.state {
            State::Committing { plan, first_step } if step >= *first_step => {
                if self.planted.is(Fault::DispatchBeforeRecord) {
                    return go(Epoch(in_force.0 + 1), step == *first_step, &plan.new);
                }
                Gate::Hold
            }
            State::Switching { plan, first_step, .. } | State::Releasing { plan, first_step, .. } => {
                if step < *first_step {
                    let before = in_force
                        .0
                        .checked_sub(1)
                        .expect("a committed epoch has one before it");
                    go(Epoch(before), false, &plan.old)
                } else {
                    go(in_force, step == *first_step, &plan.new)
                }
            }
            State::TakingTerm { .. } | State::Adopting { .. } | State::Deposed => Gate::Hold,
            State::Serving
            | State::Preparing { .. }
            | State::Copying { .. }
            | State::Committing { .. }
            | State::Aborting { .. } => go(in_force, false, &self.roster),
        }
    }

    /// Begins a handover.
    pub fn begin(&mut self, plan: HandoverPlan) -> Result<Vec<CoordinatorAction>, HandoverError> {
        if self.state != State::Serving {
            return Err(HandoverError::Busy);
        }
        if plan.old != self.roster {
            return Err(HandoverError::WrongStart);
        }
        if plan.new.is_empty() {
            return Err(HandoverError::Empty);
        }
        if plan.id <= self.layout {
            return Err(HandoverError::UsedId { layout: self.layout });
        }
        let is_bad = |lane: &&Lane| !plan.old.contains(&lane.from) || !plan.new.contains(&lane.to);
        if let Some(lane) = plan.lanes.iter().find(is_bad) {
            return Err(HandoverError::BadLane { lane: lane.id });
        }
        self.state = State::Preparing {
            plan,
            ready: BTreeSet::new(),
        };
        Ok(self.say_again())
    }

    /// Takes an event in and answers what to do.
    pub fn handle(&mut self, event: CoordinatorEvent, view: ServingView) -> Vec<CoordinatorAction> {
        let mut actions = match event {
            _ if self.is_deposed() => Vec::new(),
            CoordinatorEvent::Answer { from, answer } if self.accepts(&answer) => {
                self.listen(from, answer.notice)
            }
            CoordinatorEvent::Answer { .. } => Vec::new(),
            CoordinatorEvent::Written(layout) => self.written(layout),
            CoordinatorEvent::WriteRefused(term) => {
                // A coordinator that takes a term itself has made its own write outdated.
                self.depose(term, matches!(self.state, State::Committing { .. }))
            }
            CoordinatorEvent::TermRefused(term) => {
                self.depose(term, matches!(self.state, State::TakingTerm { .. }))
            }
            CoordinatorEvent::RankLost(gpu) => self.rank_lost(gpu),
            CoordinatorEvent::TermTaken { term, record } => self.term_taken(term, &record, view),
            CoordinatorEvent::Deadline => self.deadline(),
            CoordinatorEvent::Tick => self.say_again(),
        };
        self.advance(view, &mut actions);
        actions
    }

    fn depose(&mut self, term: Term, awaits: bool) -> Vec<CoordinatorAction> {
        if awaits && term == self.stamp.term {
            self.state = State::Deposed;
        }
        Vec::new()
    }

    fn listen(&mut self, from: GpuId, notice: Notice) -> Vec<CoordinatorAction> {
        match (&mut self.state, notice) {
            (State::Preparing { plan, ready }, Notice::Ready { handover }) if handover == plan.id => {
                ready.insert(from);
            }
            (
                State::Preparing { plan, .. } | State::Copying { plan, .. },
                Notice::Refused { handover, reason },
            ) if handover == plan.id => return self.abort(AbortReason::Refused { gpu: from, reason }),
            (State::Copying { plan, copy }, Notice::Arrived { handover, lane, mark })
                if handover == plan.id =>
            {
                let arrived = copy.arrived.entry((lane, mark.unit)).or_default();
                *arrived = (*arrived).max(mark.tokens);
            }
            (State::Copying { plan, copy }, Notice::Mirrors { handover }) if handover == plan.id => {
                copy.mirrors.iter_mut().for_each(|mirrors| {
                    mirrors.insert(from);
                });
            }
            (State::Switching { plan, settled, .. }, Notice::Settled { handover }) if handover == plan.id => {
                settled.insert(from);
            }
            (State::Releasing { plan, pending, .. }, Notice::Released { handover })
            | (State::Aborting { plan, pending }, Notice::Aborted { handover })
                if handover == plan.id =>
            {
                pending.remove(&from);
            }
            (State::Adopting { pending, .. }, Notice::Adopted) => {
                pending.remove(&from);
            }
            _ => {}
        }
        Vec::new()
    }

    /// Goes on as far as what is known allows.
    fn advance(&mut self, view: ServingView, actions: &mut Vec<CoordinatorAction>) {
        match &mut self.state {
            State::Preparing { plan, ready } if plan.old.union(&plan.new).all(|gpu| ready.contains(gpu)) => {
                let copy = KvCopy::begin(view.computed);
                let plan = plan.clone();
                self.state = State::Copying { plan, copy };
                actions.extend(self.say_again());
            }
            State::Copying { plan, copy } if copy.reached(plan, view.computed) => {
                if copy.is_last_round {
                    return self.commit(view, actions);
                }
                actions.extend(copy.next_round(plan, view).map(CoordinatorAction::Throttle));
                if copy.asks {
                    copy.asks = false;
                    actions.extend(self.say_again());
                }
            }
            State::Switching {
                plan,
                first_step,
                settled,
            } if view.completed_below > *first_step && plan.new.is_subset(settled) => {
                self.release(actions);
            }
            State::Releasing { plan, pending, .. } if pending.is_empty() => {
                let end = HandoverEnd::Committed {
                    handover: plan.id,
                    with_loss: false,
                };
                self.state = State::Serving;
                self.others.clear();
                actions.push(CoordinatorAction::Ended(end));
            }
            State::Aborting { pending, .. } | State::Adopting { pending, .. } if pending.is_empty() => {
                self.state = State::Serving;
                self.others.clear();
            }
            _ => {}
        }
    }

    /// Names the step and has the record written.
    fn commit(&mut self, view: ServingView, actions: &mut Vec<CoordinatorAction>) {
        let State::Copying { plan, copy } = &self.state else {
            return;
        };
        if copy.throttles {
            actions.push(CoordinatorAction::Throttle(false));
        }
        let next = view.next_step.0;
        let first_step = if self.planted.is(Fault::PastStep) {
            StepId(next.saturating_sub(1))
        } else if view.is_idle {
            StepId(next)
        } else {
            StepId(next + view.lead)
        };
        let plan = plan.clone();
        actions.push(CoordinatorAction::Write(Record {
            term: self.stamp.term,
            epoch: Epoch(self.stamp.epoch.0 + 1),
            layout: plan.id,
            roster: plan.new.clone(),
            first_step,
        }));
        self.state = State::Committing { plan, first_step };
    }

    fn written(&mut self, layout: HandoverId) -> Vec<CoordinatorAction> {
        let (plan, first_step) = match &self.state {
            State::Committing { plan, first_step } if plan.id == layout => (plan, first_step),
            // The write of a handover that a loss has hit: the next term has read the record.
            _ => return Vec::new(),
        };
        let (plan, first_step) = (plan.clone(), *first_step);
        self.stamp.epoch = Epoch(self.stamp.epoch.0 + 1);
        self.layout = plan.id;
        self.others.extend(&plan.old);
        self.roster = plan.new.clone();
        self.state = State::Switching {
            plan,
            first_step,
            settled: BTreeSet::new(),
        };
        let mut actions = Vec::new();
        if self.planted.is(Fault::ReleaseEarly) {
            self.release(&mut actions);
        }
        actions
    }

    fn release(&mut self, actions: &mut Vec<CoordinatorAction>) {
        if let State::Switching { plan, first_step, .. } = &self.state {
            self.state = State::Releasing {
                plan: plan.clone(),
                first_step: *first_step,
                pending: plan.old.union(&plan.new).copied().collect(),
            };
            actions.extend(self.say_again());
        }
    }

    fn deadline(&mut self) -> Vec<CoordinatorAction> {
        match self.state {
            State::Preparing { .. } | State::Copying { .. } => self.abort(AbortReason::Deadline),
            _ => Vec::new(),
        }
    }

    /// Gives the handover up; only before its record.
    fn abort(&mut self, reason: AbortReason) -> Vec<CoordinatorAction> {
        let (plan, throttles) = match &self.state {
            State::Preparing { plan, .. } => (plan.clone(), false),
            State::Copying { plan, copy } => (plan.clone(), copy.throttles),
            _ => return Vec::new(),
        };
        let handover = plan.id;
        let pending = plan.old.union(&plan.new).copied().collect();
        self.state = State::Aborting { plan, pending };
        let mut actions = self.say_again();
        if throttles {
            actions.push(CoordinatorAction::Throttle(false));
        }
        actions.push(CoordinatorAction::Ended(HandoverEnd::Aborted {
            handover,
            reason,
        }));
        actions
    }

    /// A loss ends this term, whatever was under way: the next one begins from the record.
    fn rank_lost(&mut self, gpu: GpuId) -> Vec<CoordinatorAction> {
        let mut actions = Vec::new();
        if !self.depends_on(gpu) {
            // It has nothing to give up any more.
            self.others.remove(&gpu);
            if let State::Adopting { pending, .. } = &mut self.state {
                pending.remove(&gpu);
            }
            return actions;
        }
        let hit = match &self.state {
            State::TakingTerm { .. } => return actions,
            State::Copying { plan, copy } => {
                if copy.throttles {
                    actions.push(CoordinatorAction::Throttle(false));
                }
                Some(plan)
            }
            State::Preparing { plan, .. }
            | State::Committing { plan, .. }
            | State::Switching { plan, .. }
            | State::Releasing { plan, .. } => Some(plan),
            State::Aborting { plan, .. } => {
                self.others.extend(&plan.new);
                None
            }
            State::Serving | State::Adopting { .. } | State::Deposed => None,
        };
        if let Some(plan) = hit {
            self.others.extend(plan.old.union(&plan.new));
        }
        self.state = State::TakingTerm {
            hit: hit.map(|plan| plan.id),
        };
        actions.push(CoordinatorAction::TakeTerm {
            above: self.stamp.term,
        });
        actions
    }

    fn depends_on(&self, gpu: GpuId) -> bool {
        let moves = match &self.state {
            State::Preparing { plan, .. }
            | State::Copying { plan, .. }
            | State::Committing { plan, .. }
            | State::Switching { plan, .. }
            | State::Releasing { plan, .. }
            | State::Aborting { plan, .. } => plan.old.contains(&gpu) || plan.new.contains(&gpu),
            _ => false,
        };
        moves || self.roster.contains(&gpu)
    }

    fn term_taken(&mut self, term: Term, record: &Record, view: ServingView) -> Vec<CoordinatorAction> {
        let State::TakingTerm { hit } = self.state else {
            return Vec::new();
        };
        self.stamp.term = term;
        self.others.extend(&self.roster);
        if !self.planted.is(Fault::AbortAfterRecord) {
            self.stamp.epoch = record.epoch;
            self.layout = record.layout;
            self.roster = record.roster.clone();
        }
        self.state = State::Adopting {
            pending: self.roster.union(&self.others).copied().collect(),
            next_step: view.next_step,
        };
        let mut actions = vec![CoordinatorAction::LoseKv];
        actions.extend(self.say_again());
        if let Some(handover) = hit {
            let end = if record.layout == handover {
                HandoverEnd::Committed {
                    handover,
                    with_loss: true,
                }
            } else {
                let reason = AbortReason::RankLost;
                HandoverEnd::Aborted { handover, reason }
            };
            actions.push(CoordinatorAction::Ended(end));
        }
        actions
    }

    /// Everything that is asked and not yet answered.
    fn say_again(&self) -> Vec<CoordinatorAction> {
        let stamp = self.stamp;
        let tell = |to, command| CoordinatorAction::Tell {
            to,
            order: Order { stamp, command },
        };
        match &self.state {
            State::Preparing { plan, ready } => {
                let missing = plan.old.union(&plan.new).filter(|gpu| !ready.contains(gpu));
                missing.map(|gpu| tell(*gpu, prepare(plan, *gpu))).collect()
            }
            State::Copying { plan, copy } => copy
                .unanswered(plan)
                .map(|(gpu, command)| tell(gpu, command))
                .collect(),
            State::Releasing { plan, pending, .. } => {
                let handover = plan.id;
                let release = |gpu: &GpuId| tell(*gpu, Command::Release { handover });
                pending.iter().map(release).collect()
            }
            State::Aborting { plan, pending } => {
                let handover = plan.id;
                let abort = |gpu: &GpuId| tell(*gpu, Command::Abort { handover });
                pending.iter().map(abort).collect()
            }
            State::Adopting { pending, next_step } => pending
                .iter()
                .map(|gpu| tell(*gpu, self.adoption(*gpu, *next_step)))
                .collect(),
            State::Serving
            | State::Committing { .. }
            | State::Switching { .. }
            | State::TakingTerm { .. }
            | State::Deposed => Vec::new(),
        }
    }

    fn adoption(&self, gpu: GpuId, next_step: StepId) -> Command {
        if self.roster.contains(&gpu) {
            Command::Adopt {
                layout: self.layout,
                next_step,
            }
        } else {
            Command::Retire
        }
    }
}

fn prepare(plan: &HandoverPlan, gpu: GpuId) -> Command {
    let incoming = plan.lanes.iter().filter(|lane| lane.to == gpu);
    let outgoing = plan.lanes.iter().filter(|lane| lane.from == gpu);
    Command::Prepare {
        handover: plan.id,
        leaves_or_stays: plan.old.contains(&gpu),
        joins: plan.new.contains(&gpu),
        incoming: incoming.map(|lane| lane.id).collect(),
        outgoing: outgoing.map(|lane| lane.id).collect(),
    }
}
