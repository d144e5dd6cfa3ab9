//! One replica as the coordinator sees it: the shared scheduler, the tokens of every live sequence, the steps
//! in flight. Orders come out, results go in; this module sends nothing over the wire.

mod answers;
mod gaps;
mod seating;
mod switching;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use infercluster_serving::handover::{self, Gate, KvMark, Stamp};
use infercluster_serving::{NewSequence, Scheduler, StepPlan};
use infercluster_spec::{BatchShape, Epoch, GpuId, ReplicaId, SequenceId, StepId};
use tokio::sync::mpsc::UnboundedSender;

pub(super) use gaps::Gaps;
pub(super) use seating::Seating;

use super::request::{GenerationRequest, StreamEvent};
use super::{ReplicaStatus, RequestError};
use crate::clock;
use crate::step::{StepDescriptor, StepItem};
use crate::wire::message::{StepOrder, StepOutput, Wants};

/// Completed steps whose shapes are kept for measurements.
const MEASURED_STEPS: usize = 16 << 10;

/// A step that workers compute.
struct Dispatched {
    step: StepId,
    stamp: Stamp,
    /// The device that answers: rank 0 of the last stage.
    answerer: GpuId,
    started: Instant,
    shape: BatchShape,
    /// Who gets a token, in the order of the items.
    yields: Vec<SequenceId>,
}

/// A step that is done.
#[derive(Debug, Clone, Copy)]
pub(in crate::coordinator) struct Completed {
    pub(in crate::coordinator) step: StepId,
    pub(in crate::coordinator) epoch: Epoch,
    pub(in crate::coordinator) shape: BatchShape,
    pub(in crate::coordinator) wall_s: f64,
}

/// A live request.
struct Sequence {
    request: GenerationRequest,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    stream: UnboundedSender<StreamEvent>,
    logits_chain: u64,
    /// When its last token came, and from which step.
    last_token: Option<(Instant, StepId)>,
}

impl Sequence {
    fn wants(&self) -> Wants {
        let first = self.tokens.len() == self.request.prompt.len();
        Wants {
            logits: self.request.prompt_logits && first,
            hash: self.request.logits_hash,
        }
    }
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    steps: u64,
    step_s: f64,
    prompt_tokens: u64,
    generated_tokens: u64,
    preemptions: u64,
    finished_length: u64,
    finished_stop: u64,
    cancelled: u64,
    failed: u64,
}

/// One copy of the model.
pub(in crate::coordinator) struct Replica {
    pub(in crate::coordinator) id: ReplicaId,
    /// The layout version of the last step that was planned.
    pub(in crate::coordinator) epoch: Epoch,
    /// Who computes the next step, as far as no change is due.
    pub(in crate::coordinator) seating: Seating,
    /// Who computes from the first step of the next layout on, while that step is not planned.
    next_seating: Option<Seating>,
    scheduler: Scheduler,
    sequences: BTreeMap<SequenceId, Sequence>,
    in_flight: VecDeque<Dispatched>,
    /// Answers that came before those of earlier steps, from another device.
    early: BTreeMap<StepId, (Vec<StepOutput>, Instant)>,
    completed: VecDeque<Completed>,
    /// When the last result was taken in.
    last_result: Option<Instant>,
    /// Set once a worker is lost; everything after it hears the same.
    failure: Option<RequestError>,
    counters: Counters,
    pub(in crate::coordinator) gaps: Gaps,
    /// What streams get once the next step is on its way.
    outbox: Vec<(UnboundedSender<StreamEvent>, StreamEvent)>,
}

impl Replica {
    pub(in crate::coordinator) fn new(
        id: ReplicaId,
        epoch: Epoch,
        seating: Seating,
        scheduler: Scheduler,
    ) -> Self {
        Self {
            id,
            epoch,
            seating,
            next_seating: None,
            scheduler,
            sequences: BTreeMap::new(),
            in_flight: VecDeque::new(),
            early: BTreeMap::new(),
            completed: VecDeque::new(),
            last_result: None,
            failure: None,
            counters: Counters::default(),
            gaps: Gaps::default(),
            outbox: Vec::new(),
        }
    }

    /// Devices that compute its steps now, or will where a migration ends well.
    pub(in crate::coordinator) fn gpus(&self) -> impl Iterator<Item = &GpuId> {
        let next = self.next_seating.iter().flat_map(Seating::gpus);
        let more = next.filter(|gpu| !self.seating.gpus().any(|known| known == *gpu));
        self.seating.gpus().chain(more)
    }

    /// Takes a request in.
    pub(in crate::coordinator) fn add(
        &mut self,
        id: SequenceId,
        request: GenerationRequest,
        stream: UnboundedSender<StreamEvent>,
    ) -> Result<(), RequestError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        // A prompt past 32 bits is longer than any context, which the scheduler says.
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        self.scheduler
            .add(NewSequence::new(id, prompt_tokens, request.max_tokens))?;
        self.counters.prompt_tokens += u64::from(prompt_tokens);
        let sequence = Sequence {
            tokens: request.prompt.clone(),
            request,
            stream,
            logits_chain: 0,
            last_token: None,
        };
        self.sequences.insert(id, sequence);
        Ok(())
    }

    /// Drops a request whose client is gone.
    pub(in crate::coordinator) fn cancel(&mut self, id: SequenceId) {
        if self.sequences.remove(&id).is_some() {
            self.counters.cancelled += 1;
            self.scheduler.cancel(id);
        }
    }

    /// The next step to dispatch; `None` where nothing can run now, or the protocol says so.
    pub(in crate::coordinator) fn next_order(
        &mut self,
        protocol: &handover::Coordinator,
    ) -> Option<StepOrder> {
        if self.failure.is_some() {
            return None;
        }
        let (stamp, is_first) = if protocol.is_settled() {
            (protocol.stamp(), false)
        } else {
            match protocol.gate(self.scheduler.next_step()) {
                Gate::Hold => return None,
                Gate::Go { stamp, is_first, .. } => (stamp, is_first),
            }
        };
        let carried = is_first.then(|| self.carried());
        let plan = match self.scheduler.plan_step() {
            Some(plan) => plan,
            None if self.wants_empty_step(protocol) => self.scheduler.plan_empty_step(),
            None => return None,
        };
        if is_first {
            self.take_next_seating();
            self.gaps.dispatch_s = self.last_result.map(|at| at.elapsed().as_secs_f64());
        }
        self.epoch = stamp.epoch;
        self.counters.preemptions += plan.preempted.len() as u64;
        Some(self.order(&plan, stamp, carried))
    }

    /// Blocks of the pool, and how many of them are owned.
    pub(in crate::coordinator) fn pool(&self) -> (u32, u32) {
        let ledger = self.scheduler.ledger();
        (ledger.total(), ledger.total() - ledger.free())
    }

    /// Sequences whose prompt is in the cache in part.
    pub(in crate::coordinator) fn prefills(&self) -> u64 {
        let live = self.scheduler.sequences();
        live.filter(|status| status.planned_tokens > 0 && status.planned_tokens < status.known_tokens)
            .count() as u64
    }

    /// Completed steps since the start.
    pub(in crate::coordinator) fn steps(&self) -> u64 {
        self.counters.steps
    }

    fn order(&mut self, plan: &StepPlan, stamp: Stamp, carried: Option<Vec<KvMark>>) -> StepOrder {
        let mut dispatched = Dispatched {
            step: plan.step,
            stamp,
            answerer: self.seating.answerer(),
            started: clock::now(),
            shape: plan.shape(),
            yields: Vec::new(),
        };
        let mut items = Vec::with_capacity(plan.items.len());
        let mut wants = Vec::with_capacity(plan.items.len());
        for planned in &plan.items {
            // The sequence of a cancelled request is gone here, but the scheduler plans no step with it.
            let sequence = &self.sequences[&planned.sequence];
            let (start, count) = (planned.start as usize, planned.count as usize);
            if planned.yields_token {
                dispatched.yields.push(planned.sequence);
            }
            wants.push(sequence.wants());
            items.push(StepItem {
                sequence: planned.sequence,
                start: planned.start,
                tokens: sequence.tokens[start..start + count].to_vec(),
                block_table: planned.block_table.clone(),
                wants_logits: planned.yields_token,
            });
        }
        self.in_flight.push_back(dispatched);
        let descriptor = StepDescriptor {
            term: stamp.term,
            epoch: stamp.epoch,
            step: plan.step,
            items,
        };
        StepOrder {
            descriptor,
            wants,
            incarnations: plan.items.iter().map(|item| item.incarnation).collect(),
            released: plan.released.clone(),
            carried,
        }
    }

    /// Ends every request with an error, and every later one; answers who ended.
    pub(in crate::coordinator) fn fail(&mut self, error: &RequestError) -> Vec<SequenceId> {
        let error = self.failure.get_or_insert_with(|| error.clone());
        self.in_flight.clear();
        self.early.clear();
        let mut ended = Vec::new();
        for (id, sequence) in std::mem::take(&mut self.sequences) {
            self.counters.failed += 1;
            self.outbox
                .push((sequence.stream, StreamEvent::Failed(error.clone())));
            self.scheduler.cancel(id);
            ended.push(id);
        }
        ended
    }

    /// Sends what streams are owed.
    pub(in crate::coordinator) fn deliver(&mut self) {
        for (stream, event) in self.outbox.drain(..) {
            // A client that is gone cancels by itself.
            let _ = stream.send(event);
        }
    }

    /// Why it answers no more.
    pub(in crate::coordinator) fn failure(&self) -> Option<&RequestError> {
        self.failure.as_ref()
    }

    /// The oldest step in flight, who answers it, and since when.
    pub(in crate::coordinator) fn oldest_step(&self) -> Option<(StepId, GpuId, Instant)> {
        let oldest = self.in_flight.front();
        oldest.map(|step| (step.step, step.answerer, step.started))
    }

    /// Completed steps since the last call.
    pub(in crate::coordinator) fn take_completed(&mut self) -> Vec<Completed> {
        std::mem::take(&mut self.completed).into()
    }

    /// What it does right now.
    pub(in crate::coordinator) fn status(&self) -> ReplicaStatus {
        let (ledger, counters) = (self.scheduler.ledger(), self.counters);
        ReplicaStatus {
            id: self.id,
            epoch: self.epoch,
            running: self.scheduler.running() as u64,
            waiting: self.scheduler.waiting() as u64,
            kv_blocks: u64::from(ledger.total()),
            kv_blocks_free: u64::from(ledger.free()),
            steps: counters.steps,
            step_s: counters.step_s,
            prompt_tokens: counters.prompt_tokens,
            generated_tokens: counters.generated_tokens,
            preemptions: counters.preemptions,
            finished_length: counters.finished_length,
            finished_stop: counters.finished_stop,
            cancelled: counters.cancelled,
            failed: counters.failed,
            failure: self.failure.as_ref().map(ToString::to_string),
        }
    }
}
