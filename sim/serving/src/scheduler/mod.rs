//! Continuous batching of one replica, as vLLM v1 does it.
//!
//! [`Scheduler::plan_step`] forms a micro-batch, [`Scheduler::complete_step`] takes its result. Token values
//! are no business of this machine; it counts. Rules:
//!
//! - A step computes at most `token_budget` tokens; at most `max_sequences` sequences run (hold KV).
//! - Running sequences come first, in order of arrival; what is left of the budget admits waiting ones, in
//!   order of arrival, their prompts in chunks. A waiting sequence is admitted only where all its known
//!   tokens fit into the free blocks, though blocks are taken chunk by chunk.
//! - When the pool is dry the latest arrived running sequence loses its KV and waits in its old place; its
//!   tokens, prompt and generated, are prefilled again. A step that preempts admits nobody.
//! - A sequence has at most one step in flight. With a pipeline up to `max_in_flight` steps are in flight and
//!   complete in dispatch order; each takes at most its share of the running sequences, rounded up, so that
//!   the micro-batches are even. A sequence in flight is never preempted: who needs its blocks waits for it.
//!
//! Where nothing is in flight and a sequence lives, there is always a step to plan: what can never fit is
//! refused at the door.
//!
//! Left out: prefix sharing and speculative tokens.

mod check;
mod plan;
mod types;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use infercluster_spec::{EngineOptions, SequenceId, StepId};

use crate::ledger::BlockLedger;
pub use check::SchedulerFault;
pub use types::{
    CompletedToken, FinishReason, Finished, KvUnit, NewSequence, Phase, PlannedItem, Refusal, SchedulerError,
    SequenceStatus, StepOutcome, StepPlan,
};

/// Position in the order of arrival: what "first come, first served" compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Arrival(u64);

/// The batching of one replica.
#[derive(Debug, Clone)]
pub struct Scheduler {
    options: EngineOptions,
    max_in_flight: u32,
    ledger: BlockLedger,
    live: BTreeMap<Arrival, Live>,
    arrivals: BTreeMap<SequenceId, Arrival>,
    running: BTreeSet<Arrival>,
    waiting: BTreeSet<Arrival>,
    in_flight: VecDeque<InFlight>,
    next_arrival: Arrival,
    next_step: StepId,
    admits: bool,
    /// Preempted since the last plan that came out.
    unreported_preemptions: Vec<SequenceId>,
    /// Blocks that came back since the last plan that came out.
    unreported_releases: Vec<KvUnit>,
}

/// A sequence that is waiting or running.
#[derive(Debug, Clone)]
struct Live {
    id: SequenceId,
    prompt_tokens: u32,
    max_new_tokens: u32,
    /// Output tokens that are known.
    generated: u32,
    /// Tokens whose KV is in the cache.
    computed: u32,
    /// Whether the known tokens are being prefilled again.
    recomputes: bool,
    /// New tokens of its step in flight.
    in_flight: Option<u32>,
    cancelled: bool,
    preemptions: u32,
}

impl Live {
    /// Prompt and generated tokens.
    fn known(&self) -> u32 {
        self.prompt_tokens + self.generated
    }

    fn unit(&self) -> KvUnit {
        KvUnit {
            sequence: self.id,
            incarnation: self.preemptions,
        }
    }

    fn phase(&self) -> Phase {
        if self.generated == 0 || self.recomputes {
            Phase::Prefill
        } else {
            Phase::Decode
        }
    }
}

/// A step that was dispatched and did not complete.
#[derive(Debug, Clone)]
struct InFlight {
    step: StepId,
    items: Vec<Pending>,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    arrival: Arrival,
    count: u32,
    yields_token: bool,
}

impl Scheduler {
    /// An empty replica. `max_in_flight` is its number of pipeline stages.
    pub fn new(
        options: EngineOptions,
        max_in_flight: u32,
        ledger: BlockLedger,
    ) -> Result<Self, SchedulerError> {
        let limits = [
            ("token_budget", options.token_budget),
            ("max_sequences", options.max_sequences),
            ("max_in_flight", max_in_flight),
        ];
        if let Some((field, _)) = limits.into_iter().find(|(_, value)| *value == 0) {
            return Err(SchedulerError::Zero { field });
        }
        Ok(Self {
            options,
            max_in_flight,
            ledger,
            live: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            running: BTreeSet::new(),
            waiting: BTreeSet::new(),
            in_flight: VecDeque::new(),
            next_arrival: Arrival(0),
            next_step: StepId(0),
            admits: true,
            unreported_preemptions: Vec::new(),
            unreported_releases: Vec::new(),
        })
    }

    /// The same, numbering steps from `next_step`: for a coordinator that takes over.
    pub fn starting_at(mut self, next_step: StepId) -> Self {
        self.next_step = next_step;
        self
    }

    /// Takes a sequence in, behind all others, or says why it can never run here.
    pub fn add(&mut self, new: NewSequence) -> Result<(), Refusal> {
        self.check_fit(&new)?;
        let arrival = self.next_arrival;
        self.next_arrival = Arrival(arrival.0 + 1);
        self.arrivals.insert(new.id, arrival);
        self.waiting.insert(arrival);
        let live = Live {
            id: new.id,
            prompt_tokens: new.prompt_tokens,
            max_new_tokens: new.max_new_tokens,
            generated: new.generated_tokens,
            computed: 0,
            recomputes: new.generated_tokens > 0,
            in_flight: None,
            cancelled: false,
            preemptions: 0,
        };
        self.live.insert(arrival, live);
        Ok(())
    }

    /// Whether a sequence could run here if it had the replica for itself.
    pub fn check_fit(&self, new: &NewSequence) -> Result<(), Refusal> {
        let sequence = new.id;
        if self.arrivals.contains_key(&sequence) {
            return Err(Refusal::Duplicate { sequence });
        }
        if new.prompt_tokens == 0 {
            return Err(Refusal::EmptyPrompt { sequence });
        }
        if new.generated_tokens >= new.max_new_tokens {
            return Err(Refusal::NothingToGenerate {
                sequence,
                max_new_tokens: new.max_new_tokens,
                generated_tokens: new.generated_tokens,
            });
        }
        let context = u64::from(new.prompt_tokens) + u64::from(new.max_new_tokens);
        let max_context = self.options.max_context.unwrap_or(u32::MAX);
        if context > u64::from(max_context) {
            return Err(Refusal::TooLong {
                sequence,
                context,
                max_context,
            });
        }
        // The last token is never computed, so it needs no place.
        let needed = self.ledger.blocks_for((context - 1) as u32);
        if needed > self.ledger.total() {
            return Err(Refusal::PoolTooSmall {
                sequence,
                needed,
                total: self.ledger.total(),
            });
        }
        Ok(())
    }

    /// Plans the next step and counts it as in flight; `None` where nothing can run now: as many steps as
    /// may be are in flight, every running sequence is, or nobody is there.
    pub fn plan_step(&mut self) -> Option<StepPlan> {
        plan::plan_step(self)
    }

    /// Numbers a step without items and counts it as in flight: it carries a change of layout where nobody
    /// has work.
    pub fn plan_empty_step(&mut self) -> StepPlan {
        plan::plan_empty_step(self)
    }

    /// Takes the result of the oldest step in flight. `ended_early` names the sequences whose new token
    /// ends them before their length does (end of text, a stop string).
    pub fn complete_step(
        &mut self,
        step: StepId,
        ended_early: &[SequenceId],
    ) -> Result<StepOutcome, SchedulerError> {
        self.check_completion(step, ended_early)?;
        let items = self
            .in_flight
            .pop_front()
            .map_or_else(Vec::new, |oldest| oldest.items);
        let mut outcome = StepOutcome {
            step,
            tokens: Vec::new(),
            finished: Vec::new(),
            dropped: Vec::new(),
        };
        for item in items {
            self.complete_item(item, ended_early, &mut outcome);
        }
        Ok(outcome)
    }

    fn check_completion(&self, step: StepId, ended_early: &[SequenceId]) -> Result<(), SchedulerError> {
        let oldest = self.in_flight.front();
        let Some(oldest) = oldest.filter(|oldest| oldest.step == step) else {
            return Err(SchedulerError::OutOfOrder {
                step,
                oldest: oldest.map(|oldest| oldest.step),
            });
        };
        let yields = |sequence: &SequenceId| {
            let arrival = self.arrivals.get(sequence);
            oldest
                .items
                .iter()
                .any(|item| item.yields_token && Some(&item.arrival) == arrival)
        };
        match ended_early.iter().find(|sequence| !yields(sequence)) {
            Some(&sequence) => Err(SchedulerError::NoToken { sequence, step }),
            None => Ok(()),
        }
    }

    fn complete_item(&mut self, item: Pending, ended_early: &[SequenceId], outcome: &mut StepOutcome) {
        let live = self.live_mut(item.arrival);
        let sequence = live.id;
        live.in_flight = None;
        live.computed += item.count;
        if live.cancelled {
            self.remove(item.arrival);
            outcome.dropped.push(sequence);
            return;
        }
        if !item.yields_token {
            return;
        }
        live.generated += 1;
        live.recomputes = false;
        let reason = if ended_early.contains(&sequence) {
            Some(FinishReason::EndedEarly)
        } else {
            (live.generated == live.max_new_tokens).then_some(FinishReason::Length)
        };
        let (index, preemptions) = (live.generated - 1, live.preemptions);
        outcome.tokens.push(CompletedToken { sequence, index });
        if let Some(reason) = reason {
            self.remove(item.arrival);
            outcome.finished.push(Finished {
                sequence,
                reason,
                generated_tokens: index + 1,
                preemptions,
            });
        }
    }

    /// Drops a sequence. Where it is in flight its blocks come back with that step's completion. Says
    /// whether the sequence was there.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        let Some(&arrival) = self.arrivals.get(&sequence) else {
            return false;
        };
        let live = self.live_mut(arrival);
        if live.in_flight.is_some() {
            live.cancelled = true;
        } else {
            self.remove(arrival);
        }
        true
    }

    /// All KV of the replica is lost: no step in flight will complete, and every running sequence is
    /// prefilled again from its known tokens. Answers the steps that were in flight, oldest first.
    pub fn lose_kv(&mut self) -> Vec<StepId> {
        for arrival in std::mem::take(&mut self.running) {
            self.running.insert(arrival);
            self.live_mut(arrival).in_flight = None;
            if self.live_mut(arrival).cancelled {
                self.remove(arrival);
            } else {
                self.preempt(arrival);
            }
        }
        self.in_flight.drain(..).map(|pending| pending.step).collect()
    }

    /// Lets waiting sequences in, or holds them back (a migration that throttles prefill).
    pub fn set_admission(&mut self, admits: bool) {
        self.admits = admits;
    }

    /// Steps that may be in flight, from the next plan on: another pipeline depth after a migration.
    pub fn set_max_in_flight(&mut self, max_in_flight: u32) -> Result<(), SchedulerError> {
        if max_in_flight == 0 {
            return Err(SchedulerError::Zero {
                field: "max_in_flight",
            });
        }
        self.max_in_flight = max_in_flight;
        Ok(())
    }

    /// The number that the next planned step gets.
    pub fn next_step(&self) -> StepId {
        self.next_step
    }

    /// Steps in flight, oldest first.
    pub fn steps_in_flight(&self) -> impl Iterator<Item = StepId> {
        self.in_flight.iter().map(|pending| pending.step)
    }

    /// Every step below this one has completed, or was lost with its KV.
    pub fn completed_below(&self) -> StepId {
        self.in_flight
            .front()
            .map_or(self.next_step, |oldest| oldest.step)
    }

    /// The KV pool.
    pub fn ledger(&self) -> &BlockLedger {
        &self.ledger
    }

    /// Sequences that hold KV.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait for a place.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Every live sequence in order of arrival.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceStatus> {
        self.live.values().map(|live| SequenceStatus {
            sequence: live.id,
            known_tokens: live.known(),
            incarnation: live.preemptions,
            computed_tokens: live.computed,
            planned_tokens: live.computed + live.in_flight.unwrap_or(0),
        })
    }

    fn live_mut(&mut self, arrival: Arrival) -> &mut Live {
        self.live
            .get_mut(&arrival)
            .expect("every arrival in a queue lives")
    }

    /// Takes a running sequence's KV away and puts it back in its place among the waiting.
    fn preempt(&mut self, arrival: Arrival) {
        let live = self.live_mut(arrival);
        assert!(
            live.in_flight.is_none(),
            "{} is in flight and cannot be preempted",
            live.id
        );
        let unit = live.unit();
        live.computed = 0;
        live.recomputes = true;
        live.preemptions += 1;
        let sequence = live.id;
        self.release(unit);
        self.running.remove(&arrival);
        self.waiting.insert(arrival);
        self.unreported_preemptions.push(sequence);
    }

    fn remove(&mut self, arrival: Arrival) {
        let live = self
            .live
            .remove(&arrival)
            .expect("only live sequences are removed");
        self.arrivals.remove(&live.id);
        self.running.remove(&arrival);
        self.waiting.remove(&arrival);
        self.release(live.unit());
    }

    fn release(&mut self, unit: KvUnit) {
        if self.ledger.release(unit.sequence) > 0 {
            self.unreported_releases.push(unit);
        }
    }
}
