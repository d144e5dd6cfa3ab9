//! One replica as the coordinator sees it: the shared scheduler, the tokens of every live sequence, the steps
//! in flight. Orders come out, results go in; this module sends nothing over the wire.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{self, Gate, KvMark, KvUnit, ServingView, Stamp};
use infercluster_serving::{NewSequence, Phase, Scheduler, StepOutcome, StepPlan};
use infercluster_spec::layout::Seat;
use infercluster_spec::{BatchShape, Epoch, GpuId, ReplicaId, SequenceId, StageId, StepId};
use tokio::sync::mpsc::UnboundedSender;
use xxhash_rust::xxh3::Xxh3;

use super::request::{FinishReason, GenerationRequest, StreamEvent};
use super::{ReplicaStatus, RequestError};
use crate::clock;
use crate::step::{StepDescriptor, StepItem};
use crate::wire::message::{StepOrder, StepOutput, Wants};

/// Completed steps whose shapes are kept for measurements.
const MEASURED_STEPS: usize = 16 << 10;

/// Why a worker's answer cannot be used: a bug on one of the two sides.
#[derive(Debug, thiserror::Error)]
pub(super) enum AnswerError {
    #[error("{0}")]
    Order(#[from] infercluster_serving::SchedulerError),
    #[error("it gave tokens for {found:?} where {expected:?} wanted them")]
    Sequences {
        found: Vec<SequenceId>,
        expected: Vec<SequenceId>,
    },
    #[error("{sequence} asked for a logits hash and none came")]
    NoHash { sequence: SequenceId },
}

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
pub(super) struct Completed {
    pub(super) step: StepId,
    pub(super) epoch: Epoch,
    pub(super) shape: BatchShape,
    pub(super) wall_s: f64,
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

/// Gaps between tokens that are kept from before a migration.
const RECENT_GAPS: usize = 512;

/// Gaps between the tokens of each stream around a change of layout, in seconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Gaps {
    /// The latest ones.
    recent: VecDeque<f64>,
    /// Those when the migration began.
    pub(super) before: VecDeque<f64>,
    pub(super) meanwhile: Vec<f64>,
    /// From the last token of the old layout to the first of the new one.
    pub(super) pauses: Vec<f64>,
    pub(super) after: Vec<f64>,
    /// Whether a migration is under way.
    watches: bool,
    /// The first step of the new layout.
    first_step: Option<StepId>,
}

impl Gaps {
    fn begin(&mut self) {
        *self = Self {
            recent: std::mem::take(&mut self.recent),
            watches: true,
            ..Self::default()
        };
        self.before.clone_from(&self.recent);
    }

    fn note(&mut self, gap_s: f64, before: StepId, step: StepId) {
        if self.recent.len() == RECENT_GAPS {
            self.recent.pop_front();
        }
        self.recent.push_back(gap_s);
        if !self.watches {
            return;
        }
        match self.first_step {
            Some(first) if before >= first => self.after.push(gap_s),
            Some(first) if step >= first => self.pauses.push(gap_s),
            _ => self.meanwhile.push(gap_s),
        }
    }
}

/// Who computes a layout's steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seating {
    /// Its devices, stage by stage, rank by rank.
    pub(super) seats: Vec<(Seat, GpuId)>,
}

impl Seating {
    /// Its devices.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &GpuId> {
        self.seats.iter().map(|(_, gpu)| gpu)
    }

    /// The device that answers: rank 0 of the last stage.
    fn answerer(&self) -> GpuId {
        let last = self.stage_count().saturating_sub(1) as u32;
        let mut seats = self.seats.iter();
        let seat = seats.find(|(seat, _)| seat.stage == StageId(last) && seat.rank.0 == 0);
        seat.expect("every stage of a valid layout has a rank 0").1
    }

    /// Pipeline stages.
    pub(super) fn stage_count(&self) -> usize {
        self.seats
            .iter()
            .map(|(seat, _)| seat.stage.index() + 1)
            .max()
            .unwrap_or(0)
    }
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
pub(super) struct Replica {
    pub(super) id: ReplicaId,
    /// The layout version of the last step that was planned.
    pub(super) epoch: Epoch,
    /// Who computes the next step, as far as no change is due.
    pub(super) seating: Seating,
    /// Who computes from the first step of the next layout on, while that step is not planned.
    next_seating: Option<Seating>,
    scheduler: Scheduler,
    sequences: BTreeMap<SequenceId, Sequence>,
    in_flight: VecDeque<Dispatched>,
    /// Answers that came before those of earlier steps, from another device.
    early: BTreeMap<StepId, (Vec<StepOutput>, Instant)>,
    completed: VecDeque<Completed>,
    /// Set once a worker is lost; everything after it hears the same.
    failure: Option<RequestError>,
    counters: Counters,
    pub(super) gaps: Gaps,
    /// What streams get once the next step is on its way.
    outbox: Vec<(UnboundedSender<StreamEvent>, StreamEvent)>,
}

impl Replica {
    pub(super) fn new(id: ReplicaId, epoch: Epoch, seating: Seating, scheduler: Scheduler) -> Self {
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
            failure: None,
            counters: Counters::default(),
            gaps: Gaps::default(),
            outbox: Vec::new(),
        }
    }

    /// Devices that compute its steps now, or will where a migration ends well.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &GpuId> {
        let next = self.next_seating.iter().flat_map(Seating::gpus);
        let more = next.filter(|gpu| !self.seating.gpus().any(|known| known == *gpu));
        self.seating.gpus().chain(more)
    }

    /// Takes a request in.
    pub(super) fn add(
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
    pub(super) fn cancel(&mut self, id: SequenceId) {
        if self.sequences.remove(&id).is_some() {
            self.counters.cancelled += 1;
            self.scheduler.cancel(id);
        }
    }

    /// The next step to dispatch; `None` where nothing can run now, or the protocol says so.
    pub(super) fn next_order(&mut self, protocol: &handover::Coordinator) -> Option<StepOrder> {
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
        }
        self.epoch = stamp.epoch;
        self.counters.preemptions += plan.preempted.len() as u64;
        Some(self.order(&plan, stamp, carried))
    }

    /// Whether a new layout waits for a step and nobody has work for one.
    fn wants_empty_step(&self, protocol: &handover::Coordinator) -> bool {
        protocol.wants_steps()
            && self.next_seating.is_some()
            && self.in_flight.is_empty()
            && self.scheduler.running() + self.scheduler.waiting() == 0
    }

    /// The marks of every unit with KV, once all steps so far are done.
    fn carried(&self) -> Vec<KvMark> {
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

    fn take_next_seating(&mut self) {
        if let Some(next) = self.next_seating.take() {
            self.seating = next;
            self.scheduler
                .set_max_in_flight(self.seating.stage_count() as u32)
                .expect("a valid layout has stages");
        }
    }

    /// Watches what a migration does to its streams, and knows who computes after it.
    pub(super) fn begin_migration(&mut self, seating: Seating) {
        self.gaps.begin();
        self.next_seating = Some(seating);
    }

    /// The first step of the new layout is named.
    pub(super) fn name_first_step(&mut self, step: StepId) {
        self.gaps.first_step = Some(step);
    }

    /// The migration has ended, with the new layout in force or without.
    pub(super) fn end_migration(&mut self) {
        self.gaps.watches = false;
        self.next_seating = None;
    }

    /// Holds waiting sequences back, or lets them in.
    pub(super) fn set_admission(&mut self, admits: bool) {
        self.scheduler.set_admission(admits);
    }

    /// All KV is void: steps in flight will not come, and every sequence is prefilled again.
    pub(super) fn lose_kv(&mut self) {
        self.scheduler.lose_kv();
        self.in_flight.clear();
        self.early.clear();
    }

    /// Tokens in the cache of each live unit, of completed steps.
    pub(super) fn computed(&self) -> BTreeMap<KvUnit, u32> {
        let live = self
            .scheduler
            .sequences()
            .filter(|status| status.computed_tokens > 0);
        live.map(|status| (status.unit(), status.computed_tokens))
            .collect()
    }

    /// What the protocol asks about; a record takes `record_time` to become durable, and `gap_tokens` can be copied
    /// between two steps without being noticed.
    pub(super) fn view<'a>(
        &self,
        computed: &'a BTreeMap<KvUnit, u32>,
        record_time: Duration,
        gap_tokens: u64,
    ) -> ServingView<'a> {
        const MOST: f64 = 64.0;
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
            step_tokens: gap_tokens.max(in_flight + self.scheduler.running() as u64),
        }
    }

    /// Blocks of the pool, and how many of them are owned.
    pub(super) fn pool(&self) -> (u32, u32) {
        let ledger = self.scheduler.ledger();
        (ledger.total(), ledger.total() - ledger.free())
    }

    /// Sequences whose prompt is in the cache in part.
    pub(super) fn prefills(&self) -> u64 {
        let live = self.scheduler.sequences();
        live.filter(|status| status.planned_tokens > 0 && status.planned_tokens < status.known_tokens)
            .count() as u64
    }

    /// Completed steps since the start.
    pub(super) fn steps(&self) -> u64 {
        self.counters.steps
    }

    fn order(&mut self, plan: &StepPlan, stamp: Stamp, carried: Option<Vec<KvMark>>) -> StepOrder {
        let mut dispatched = Dispatched {
            step: plan.step,
            stamp,
            answerer: self.seating.answerer(),
            started: clock::now(),
            shape: BatchShape::default(),
            yields: Vec::new(),
        };
        let mut items = Vec::with_capacity(plan.items.len());
        let mut wants = Vec::with_capacity(plan.items.len());
        for planned in &plan.items {
            // The sequence of a cancelled request is gone here, but the scheduler plans no step with it.
            let sequence = &self.sequences[&planned.sequence];
            let (start, count) = (planned.start as usize, planned.count as usize);
            match planned.phase {
                Phase::Prefill => dispatched.shape.add_prefill(
                    u64::from(planned.count),
                    u64::from(planned.start),
                    planned.yields_token,
                ),
                Phase::Decode => dispatched.shape.add_decode(u64::from(planned.start) + 1),
            }
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

    /// Takes an answer in; answers who ended with it and with later ones that waited for it. Answers of another
    /// reign or layout than their step's are none.
    pub(super) fn hear(
        &mut self,
        (step, stamp): (StepId, Stamp),
        outputs: Vec<StepOutput>,
        at: Instant,
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        if !self
            .in_flight
            .iter()
            .any(|sent| (sent.step, sent.stamp) == (step, stamp))
        {
            return Ok(Vec::new());
        }
        let is_oldest = self.in_flight.front().is_some_and(|oldest| oldest.step == step);
        if !is_oldest {
            // Two layouts answer from two devices, so the later step's word may come first.
            self.early.insert(step, (outputs, at));
            return Ok(Vec::new());
        }
        let mut ended = self.complete(step, outputs, at, eos)?;
        while let Some(next) = self.in_flight.front().map(|oldest| oldest.step)
            && let Some((outputs, at)) = self.early.remove(&next)
        {
            ended.extend(self.complete(next, outputs, at, eos)?);
        }
        Ok(ended)
    }

    /// Takes the answer to the oldest step in flight; answers who ended with it.
    fn complete(
        &mut self,
        step: StepId,
        outputs: Vec<StepOutput>,
        at: Instant,
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        let ended_early = self.ended_early(step, &outputs, eos)?;
        let outcome = self.scheduler.complete_step(step, &ended_early)?;
        if let Some(done) = self.in_flight.pop_front() {
            let wall_s = at.saturating_duration_since(done.started).as_secs_f64();
            self.counters.steps += 1;
            self.counters.step_s += wall_s;
            if self.completed.len() == MEASURED_STEPS {
                self.completed.pop_front();
            }
            self.completed.push_back(Completed {
                step,
                epoch: done.stamp.epoch,
                shape: done.shape,
                wall_s,
            });
        }
        for output in outputs {
            self.take_token(output, step, at)?;
        }
        Ok(self.finish(&outcome))
    }

    /// Compares the answer with what was asked, and finds the sequences whose token ends a text.
    fn ended_early(
        &self,
        step: StepId,
        outputs: &[StepOutput],
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        let oldest = self.in_flight.front().filter(|oldest| oldest.step == step);
        let expected = oldest.map_or(&[][..], |oldest| &oldest.yields);
        if !outputs.iter().map(|output| &output.sequence).eq(expected) {
            return Err(AnswerError::Sequences {
                found: outputs.iter().map(|output| output.sequence).collect(),
                expected: expected.to_vec(),
            });
        }
        let ends = |output: &&StepOutput| {
            let sequence = self.sequences.get(&output.sequence);
            sequence.is_some_and(|sequence| !sequence.request.ignore_eos) && eos.contains(&output.token)
        };
        Ok(outputs
            .iter()
            .filter(ends)
            .map(|output| output.sequence)
            .collect())
    }

    fn take_token(&mut self, output: StepOutput, step: StepId, at: Instant) -> Result<(), AnswerError> {
        // A request that was cancelled while its step ran has nobody to tell.
        let Some(sequence) = self.sequences.get_mut(&output.sequence) else {
            return Ok(());
        };
        if sequence.request.logits_hash {
            let hash = output.logits_hash.ok_or(AnswerError::NoHash {
                sequence: output.sequence,
            })?;
            sequence.logits_chain = chain(sequence.logits_chain, hash);
        }
        if let Some((before, from)) = sequence.last_token.replace((at, step)) {
            let gap_s = at.saturating_duration_since(before).as_secs_f64();
            self.gaps.note(gap_s, from, step);
        }
        sequence.tokens.push(output.token);
        self.counters.generated_tokens += 1;
        if let Some(logits) = output.logits {
            self.outbox
                .push((sequence.stream.clone(), StreamEvent::PromptLogits(logits)));
        }
        let token = StreamEvent::Token {
            token: output.token,
            at,
        };
        self.outbox.push((sequence.stream.clone(), token));
        Ok(())
    }

    fn finish(&mut self, outcome: &StepOutcome) -> Vec<SequenceId> {
        let mut ended = Vec::new();
        for finished in &outcome.finished {
            let Some(sequence) = self.sequences.remove(&finished.sequence) else {
                continue;
            };
            let reason = match finished.reason {
                infercluster_serving::FinishReason::Length => FinishReason::Length,
                infercluster_serving::FinishReason::EndedEarly => FinishReason::Stop,
            };
            match reason {
                FinishReason::Length => self.counters.finished_length += 1,
                FinishReason::Stop => self.counters.finished_stop += 1,
            }
            let event = StreamEvent::Finished {
                reason,
                logits_hash: sequence.request.logits_hash.then_some(sequence.logits_chain),
                preemptions: finished.preemptions,
            };
            self.outbox.push((sequence.stream, event));
            ended.push(finished.sequence);
        }
        ended
    }

    /// Ends every request with an error, and every later one; answers who ended.
    pub(super) fn fail(&mut self, error: &RequestError) -> Vec<SequenceId> {
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
    pub(super) fn deliver(&mut self) {
        for (stream, event) in self.outbox.drain(..) {
            // A client that is gone cancels by itself.
            let _ = stream.send(event);
        }
    }

    /// Why it answers no more.
    pub(super) fn failure(&self) -> Option<&RequestError> {
        self.failure.as_ref()
    }

    /// The oldest step in flight, who answers it, and since when.
    pub(super) fn oldest_step(&self) -> Option<(StepId, GpuId, Instant)> {
        let oldest = self.in_flight.front();
        oldest.map(|step| (step.step, step.answerer, step.started))
    }

    /// Completed steps since the last call.
    pub(super) fn take_completed(&mut self) -> Vec<Completed> {
        std::mem::take(&mut self.completed).into()
    }

    /// What it does right now.
    pub(super) fn status(&self) -> ReplicaStatus {
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

/// The next link of a request's logits chain: xxh3 over the chain so far and the hash of the new row.
fn chain(so_far: u64, row: u64) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&so_far.to_le_bytes());
    hash.update(&row.to_le_bytes());
    hash.digest()
}
