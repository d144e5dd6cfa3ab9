//! The engine thread: one queue of events, all state in one place.
//!
//! Changes of layout are [`migrate`]'s, over the same state.
//!
//! Events that wait are taken together, then steps are dispatched, then tokens are delivered: workers never wait
//! for clients.

mod migrate;
mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{self, HandoverId, Record, Stamp};
use infercluster_serving::{Router, RouterPolicy};
use infercluster_spec::{Epoch, GpuId, Layout, ReplicaId, SequenceId, StepId, Term};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::CoordinatorOptions;
use super::error::{ExecutorError, RequestError};
use super::fleet::{Fleet, Joined};
use super::measure::{Measurements, Status, WorkerStatus, step_records};
use super::migration::{Migration, MigrationError, MigrationReport};
use super::records::{Recorded, Records, Reign};
use super::replica::Replica;
use super::request::{GenerationRequest, StreamEvent};
use crate::clock::{self, Deadline};
use crate::probe::ProbeTrace;
use crate::speed::Speed;
use crate::store::StoreError;
use crate::wire::handshake::Unwelcome;
use crate::wire::message::{DocumentText, FromWorker, Prepare, Shadow, StepOutput, ToWorker, WorkerTimes};
use pools::{build_replicas, kv_pools};

/// How often workers are pinged and limits are looked at.
const TICK: Duration = Duration::from_secs(1);
/// How long a failed step waits for the news which worker is lost, which names the cause and not a witness.
const SUSPICION: Duration = Duration::from_millis(300);

/// What reaches the engine.
#[derive(Debug)]
pub(super) enum Event {
    /// A worker joined.
    Joined(Box<Joined>),
    /// A worker said something.
    Worker {
        gpu: GpuId,
        message: FromWorker,
        at: Instant,
    },
    /// A worker's connection ended.
    Lost { gpu: GpuId, reason: String },
    /// A worker with the right token was refused.
    Unwelcome { gpu: GpuId, source: Unwelcome },
    /// A new request.
    Submit {
        sequence: SequenceId,
        request: GenerationRequest,
        stream: UnboundedSender<StreamEvent>,
    },
    /// A client went away.
    Cancel(SequenceId),
    /// A question about the state.
    Status(oneshot::Sender<Status>),
    /// A question about times.
    Measure(oneshot::Sender<Measurements>),
    /// A wish for another layout.
    Migrate {
        to: Box<Layout>,
        reply: oneshot::Sender<Result<MigrationReport, MigrationError>>,
    },
    /// A question about the migration under way, or the last one.
    Migration(oneshot::Sender<Option<MigrationReport>>),
    /// A question about the layout in force.
    Layout(oneshot::Sender<(Epoch, Layout)>),
    /// The record log has done what it was asked.
    Recorded(Result<Recorded, StoreError>),
    /// The end.
    Stop,
}

/// A step failed on a worker, maybe because another is lost.
struct Suspicion {
    due: Instant,
    replica: ReplicaId,
    error: RequestError,
}

/// An answer about times that is being collected.
struct Collection {
    reply: oneshot::Sender<Measurements>,
    missing: BTreeSet<GpuId>,
    workers: BTreeMap<GpuId, WorkerTimes>,
    elapsed: Duration,
}

/// All state of a coordinator.
pub(super) struct Engine {
    options: CoordinatorOptions,
    sender: Sender<Event>,
    queue: Receiver<Event>,
    fleet: Fleet,
    router: Router,
    replicas: Vec<Replica>,
    /// The handover protocol of each replica.
    protocols: Vec<handover::Coordinator>,
    records: Records,
    /// The name of the layout in force.
    layout_id: HandoverId,
    epoch: Epoch,
    /// Attempts so far: each gives its layout a name.
    attempts: u64,
    /// What the first layout gave for the probe.
    probe: ProbeTrace,
    migration: Option<Migration>,
    last_migration: Option<MigrationReport>,
    owners: BTreeMap<SequenceId, ReplicaId>,
    suspicions: Vec<Suspicion>,
    collection: Option<Collection>,
    window: Instant,
    refused: u64,
}

impl Engine {
    /// Starts the workers and loads the first layout; the record log is in `state_dir`, or ends with the service.
    pub(super) fn start(
        options: CoordinatorOptions,
        state_dir: Option<&Path>,
    ) -> Result<Self, ExecutorError> {
        let (sender, queue) = mpsc::channel();
        let pools = kv_pools(&options)?;
        let seated: BTreeSet<GpuId> = options.layout.seats().map(|(_, gpu)| gpu).collect();
        let Reign { records, record } = Records::begin(state_dir, &sender, |term, epoch| Record {
            term,
            epoch,
            layout: name_of(term, 0),
            roster: seated,
            first_step: StepId(0),
        })?;
        let replicas = build_replicas(&options, &pools, record.epoch)?;
        let fleet = Fleet::start(
            &options.launch,
            &options.layout,
            &options.model,
            &sender,
            &queue,
            options.limits.join,
        )?;
        let capacities: Vec<u64> = pools.iter().map(|pool| u64::from(*pool)).collect();
        let protocol = |replica: &Replica| {
            let roster = replica.seating.gpus().copied().collect();
            let record = Record {
                roster,
                ..record.clone()
            };
            handover::Coordinator::new(record.term, &record, BTreeSet::new(), StepId(0))
        };
        let mut engine = Self {
            options,
            sender,
            queue,
            fleet,
            router: Router::new(RouterPolicy::default(), &capacities),
            protocols: replicas.iter().map(protocol).collect(),
            replicas,
            records,
            layout_id: record.layout,
            epoch: record.epoch,
            attempts: 0,
            probe: ProbeTrace::default(),
            migration: None,
            last_migration: None,
            owners: BTreeMap::new(),
            suspicions: Vec::new(),
            collection: None,
            window: clock::now(),
            refused: 0,
        };
        engine.load(&pools)?;
        engine.window = clock::now();
        Ok(engine)
    }

    /// A handle of the queue.
    pub(super) fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Has the first layout adopted by all its workers and waits until every one is ready.
    fn load(&mut self, pools: &[u32]) -> Result<(), ExecutorError> {
        let seats: Vec<_> = self.options.layout.seats().collect();
        let mut missing = BTreeSet::new();
        for (seat, gpu) in seats {
            let stamp = self.protocols[seat.replica.index()].stamp();
            let layout = DocumentText::of(&self.options.layout);
            let prepare = self.prepare(
                gpu,
                (self.layout_id, stamp),
                layout,
                pools[seat.replica.index()],
                None,
            );
            missing.insert(gpu);
            self.fleet.send([&gpu], &ToWorker::Prepare(Box::new(prepare)));
        }
        for index in 0..self.replicas.len() {
            self.drive(index, handover::CoordinatorEvent::Tick);
        }
        let deadline = Deadline::after(self.options.limits.load);
        while let Some(&waited_for) = missing.first() {
            let event = deadline
                .remaining()
                .and_then(|left| self.queue.recv_timeout(left).ok());
            match event {
                Some(Event::Worker { gpu, message, .. }) => match message {
                    FromWorker::Loaded { trace, .. } => self.take_first_probe(gpu, trace)?,
                    FromWorker::LoadFailed { reason, .. } => {
                        let epoch = self.epoch;
                        return Err(ExecutorError::Prepare { gpu, epoch, reason });
                    }
                    FromWorker::Answer(answer) => {
                        self.listen(gpu, answer);
                        let replica = self.replica_of(gpu);
                        if replica.is_some_and(|replica| self.protocols[replica.index()].is_settled()) {
                            missing.retain(|gpu| self.replica_of(*gpu) != replica);
                        }
                    }
                    _ => {}
                },
                Some(Event::Lost { gpu, reason }) => {
                    let description = self.fleet.note_lost(gpu, &reason);
                    return Err(ExecutorError::Lost { gpu, description });
                }
                Some(_) => {}
                None => {
                    return Err(ExecutorError::Load {
                        gpu: waited_for,
                        epoch: self.epoch,
                        waited_ms: deadline.waited().as_millis() as u64,
                    });
                }
            }
        }
        Ok(())
    }

    /// Ranks of a stage, and replicas, see the same numbers.
    fn take_first_probe(&mut self, gpu: GpuId, trace: ProbeTrace) -> Result<(), ExecutorError> {
        let (reduction, layers) = (self.options.layout.reduction, self.options.model.layers);
        if let Some(layer) = trace.first_conflict(&self.probe, reduction, layers) {
            return Err(ExecutorError::Probe { gpu, layer });
        }
        self.probe.merge(trace);
        Ok(())
    }

    fn prepare(
        &self,
        gpu: GpuId,
        (layout_id, stamp): (HandoverId, Stamp),
        layout: DocumentText,
        kv_blocks: u32,
        shadow: Option<Shadow>,
    ) -> Prepare {
        let options = &self.options;
        Prepare {
            term: stamp.term,
            layout_id,
            epoch: stamp.epoch,
            model: DocumentText::of(&options.model),
            layout,
            model_dir: options.model_dir.clone(),
            kv_blocks,
            token_budget: options.engine.token_budget,
            peers: self.fleet.addresses(),
            peer_deadline: options.limits.step,
            speed: options.speeds.get(&gpu).copied().unwrap_or(Speed::FULL),
            memory: options.memory,
            shadow,
        }
    }

    /// Works until it is told to stop.
    pub(super) fn run(mut self) {
        let mut next_tick = clock::now() + TICK;
        loop {
            let now = clock::now();
            if now >= next_tick {
                self.tick();
                next_tick = now + TICK;
            }
            self.judge_suspicions();
            let due = self.suspicions.iter().map(|suspicion| suspicion.due).min();
            let wake = due.map_or(next_tick, |due| due.min(next_tick));
            match self.queue.recv_timeout(wake.saturating_duration_since(now)) {
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.drain().is_break() {
                break;
            }
            self.dispatch();
            for replica in &mut self.replicas {
                replica.deliver();
            }
        }
        for index in 0..self.replicas.len() {
            self.fail(ReplicaId(index as u32), &RequestError::Stopped);
            self.replicas[index].deliver();
        }
    }

    /// Takes what waits already, so that requests that come together start together.
    fn drain(&mut self) -> std::ops::ControlFlow<()> {
        while let Ok(event) = self.queue.try_recv() {
            if matches!(event, Event::Stop) {
                return std::ops::ControlFlow::Break(());
            }
            self.handle(event);
        }
        std::ops::ControlFlow::Continue(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Joined(joined) => self.fleet.admit(*joined),
            Event::Worker { gpu, message, at } => {
                self.fleet.hear(gpu);
                self.hear(gpu, message, at);
            }
            Event::Lost { gpu, reason } => self.lose(gpu, &reason),
            // It never was a member; its own end is seen as that of any worker.
            Event::Unwelcome { .. } => {}
            Event::Submit {
                sequence,
                request,
                stream,
            } => self.submit(sequence, request, stream),
            Event::Cancel(sequence) => {
                if let Some(replica) = self.owners.remove(&sequence) {
                    self.replicas[replica.index()].cancel(sequence);
                    self.router.finished(replica);
                }
            }
            Event::Status(reply) => {
                // Whoever asked may have given up.
                let _ = reply.send(self.status());
            }
            Event::Measure(reply) => self.measure(reply),
            Event::Migrate { to, reply } => self.migrate(*to, reply),
            Event::Migration(reply) => {
                let _ = reply.send(self.migration_report());
            }
            Event::Layout(reply) => {
                let _ = reply.send((self.epoch, self.options.layout.clone()));
            }
            Event::Recorded(recorded) => self.recorded(recorded),
            // Taken care of by whoever reads the queue.
            Event::Stop => {}
        }
    }

    fn submit(
        &mut self,
        sequence: SequenceId,
        request: GenerationRequest,
        stream: UnboundedSender<StreamEvent>,
    ) {
        if let Err(error) = self.place(sequence, request, &stream) {
            self.refused += 1;
            // A client that is gone has nothing to hear.
            let _ = stream.send(StreamEvent::Failed(error));
        }
    }

    fn place(
        &mut self,
        sequence: SequenceId,
        request: GenerationRequest,
        stream: &UnboundedSender<StreamEvent>,
    ) -> Result<(), RequestError> {
        let vocab = self.options.model.vocab;
        if let Some(&token) = request.prompt.iter().find(|token| **token >= vocab) {
            return Err(RequestError::UnknownToken { token, vocab });
        }
        let Some(replica) = self.router.route() else {
            let failure = self.replicas.iter().find_map(Replica::failure);
            return Err(failure.cloned().unwrap_or(RequestError::Stopped));
        };
        let added = self.replicas[replica.index()].add(sequence, request, stream.clone());
        match added {
            Ok(()) => {
                self.owners.insert(sequence, replica);
            }
            Err(_) => self.router.finished(replica),
        }
        added
    }

    fn hear(&mut self, gpu: GpuId, message: FromWorker, at: Instant) {
        match message {
            FromWorker::StepDone {
                term,
                epoch,
                step,
                outputs,
            } => self.complete(gpu, (step, Stamp { term, epoch }), outputs, at),
            FromWorker::StepFailed {
                step, reason, peer, ..
            } => self.suspect(gpu, step, &reason, peer),
            FromWorker::Times(times) => self.collect(gpu, Some(times)),
            FromWorker::Answer(answer) => self.listen(gpu, answer),
            FromWorker::LoadFailed {
                layout_id,
                refusal,
                reason,
            } => self.load_failed(gpu, layout_id, refusal, &reason),
            FromWorker::LaneFailed {
                layout_id,
                peer,
                reason,
            } => self.lane_failed(gpu, layout_id, peer, &reason),
            FromWorker::Loaded { layout_id, bytes, .. } => {
                tracing::debug!("{gpu} holds layout {} in {bytes}", layout_id.0);
            }
            FromWorker::Joined { .. } | FromWorker::Pong => {}
        }
    }

    fn replica_of(&self, gpu: GpuId) -> Option<ReplicaId> {
        let mut replicas = self.replicas.iter();
        replicas
            .find(|replica| replica.gpus().any(|holder| *holder == gpu))
            .map(|replica| replica.id)
    }

    fn complete(
        &mut self,
        gpu: GpuId,
        (step, stamp): (StepId, Stamp),
        outputs: Vec<StepOutput>,
        at: Instant,
    ) {
        let Some(id) = self.replica_of(gpu) else {
            return;
        };
        let replica = &mut self.replicas[id.index()];
        // What a failed replica still says is of no use.
        if replica.failure().is_some() {
            return;
        }
        match replica.hear((step, stamp), outputs, at, &self.options.eos) {
            Ok(ended) => self.release(id, &ended),
            Err(error) => {
                let description = format!("{gpu} answered {step} wrongly: {error}");
                self.fail(id, &RequestError::WorkerLost { gpu, description });
            }
        }
        if self.migration.is_some() {
            self.migration_step(id.index(), gpu, step);
        }
    }

    fn release(&mut self, replica: ReplicaId, ended: &[SequenceId]) {
        for sequence in ended {
            if self.owners.remove(sequence).is_some() {
                self.router.finished(replica);
            }
        }
    }

    /// Plans and sends as many steps as may be in flight.
    fn dispatch(&mut self) {
        for index in 0..self.replicas.len() {
            while let Some(order) = self.replicas[index].next_order(&self.protocols[index]) {
                let message = ToWorker::Step(order);
                let failed = self.fleet.send(self.replicas[index].seating.gpus(), &message);
                for (gpu, error) in failed {
                    self.lose(gpu, &format!("cannot be reached: {error}"));
                }
            }
        }
    }

    /// A step failed: at once where the worker blames itself, else after a moment in which the loss of the
    /// blamed worker may become known.
    fn suspect(&mut self, gpu: GpuId, step: StepId, reason: &str, peer: Option<GpuId>) {
        let Some(replica) = self.replica_of(gpu) else {
            return;
        };
        let blamed = peer.unwrap_or(gpu);
        let description = format!("{gpu} cannot compute {step}: {reason}");
        let error = RequestError::WorkerLost {
            gpu: blamed,
            description,
        };
        if peer.is_none() {
            self.fail(replica, &error);
        } else if self.replicas[replica.index()].failure().is_none() {
            self.suspicions.push(Suspicion {
                due: clock::now() + SUSPICION,
                replica,
                error,
            });
        }
    }

    fn judge_suspicions(&mut self) {
        let now = clock::now();
        let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.suspicions)
            .into_iter()
            .partition(|suspicion| suspicion.due <= now);
        self.suspicions = later;
        for suspicion in due {
            self.fail(suspicion.replica, &suspicion.error);
        }
    }

    fn lose(&mut self, gpu: GpuId, reason: &str) {
        let known = self.fleet.description_of_lost(gpu).is_some();
        let description = self.fleet.note_lost(gpu, reason);
        if known {
            return;
        }
        self.collect(gpu, None);
        let computes = |replica: &&Replica| replica.seating.gpus().any(|seated| *seated == gpu);
        match self.replicas.iter().find(computes).map(|replica| replica.id) {
            Some(replica) => self.fail(replica, &RequestError::WorkerLost { gpu, description }),
            None => self.lose_helper(gpu, description),
        }
    }

    /// Ends a replica's requests, takes it out of routing and frees what its workers hold.
    fn fail(&mut self, id: ReplicaId, error: &RequestError) {
        let replica = &mut self.replicas[id.index()];
        if replica.failure().is_some() {
            return;
        }
        match error {
            RequestError::Stopped => tracing::debug!("{id} stops"),
            _ => tracing::error!("{id} answers no more: {error}"),
        }
        let ended = replica.fail(error);
        self.router.set_available(id, false);
        self.suspicions.retain(|suspicion| suspicion.replica != id);
        let give_up = ToWorker::GiveUp {
            term: self.protocols[id.index()].stamp().term,
        };
        // A worker that cannot be reached is noticed by its reading thread.
        let _ = self.fleet.send(self.replicas[id.index()].gpus(), &give_up);
        self.release(id, &ended);
        self.fail_migration(&error.to_string());
    }

    fn tick(&mut self) {
        self.judge_migration();
        for (gpu, error) in self.fleet.broadcast(&ToWorker::Ping) {
            self.lose(gpu, &format!("cannot be reached: {error}"));
        }
        let limits = self.options.limits;
        for gpu in self.fleet.silent(limits.silence) {
            self.lose(
                gpu,
                &format!("has said nothing for {} s", limits.silence.as_secs()),
            );
        }
        for index in 0..self.replicas.len() {
            let replica = &self.replicas[index];
            let Some((step, gpu, started)) = replica.oldest_step() else {
                continue;
            };
            if started.elapsed() > limits.step {
                let description = format!("{gpu} did not finish {step} within {} s", limits.step.as_secs());
                self.fail(
                    ReplicaId(index as u32),
                    &RequestError::WorkerLost { gpu, description },
                );
            }
        }
    }

    /// The protocol of the replica that a device belongs to hears what the device says.
    fn listen(&mut self, gpu: GpuId, answer: handover::Answer) {
        let Some(replica) = self.replica_of(gpu).or_else(|| self.migrating_replica(gpu)) else {
            return;
        };
        self.drive(
            replica.index(),
            handover::CoordinatorEvent::Answer { from: gpu, answer },
        );
    }

    fn status(&self) -> Status {
        let workers = self.fleet.processes().into_iter();
        Status {
            replicas: self.replicas.iter().map(Replica::status).collect(),
            workers: workers
                .map(|(gpu, process)| WorkerStatus { gpu, process })
                .collect(),
            refused: self.refused,
        }
    }

    fn measure(&mut self, reply: oneshot::Sender<Measurements>) {
        // Dropping an older question's reply answers it with "stopped"; only one is collected at a time.
        let now = clock::now();
        self.collection = Some(Collection {
            reply,
            missing: self.fleet.living(),
            workers: BTreeMap::new(),
            elapsed: now - self.window,
        });
        self.window = now;
        for (gpu, error) in self.fleet.broadcast(&ToWorker::TakeTimes) {
            self.lose(gpu, &format!("cannot be reached: {error}"));
        }
        self.finish_collection();
    }

    fn collect(&mut self, gpu: GpuId, times: Option<WorkerTimes>) {
        if let Some(collection) = &mut self.collection
            && collection.missing.remove(&gpu)
        {
            collection.workers.extend(times.map(|times| (gpu, times)));
            self.finish_collection();
        }
    }

    fn finish_collection(&mut self) {
        let Some(collection) = self
            .collection
            .take_if(|collection| collection.missing.is_empty())
        else {
            return;
        };
        let mut steps = Vec::new();
        for replica in &mut self.replicas {
            let completed = replica.take_completed();
            steps.extend(step_records(replica, &completed, &collection.workers));
        }
        // Whoever asked may have given up.
        let _ = collection.reply.send(Measurements {
            elapsed: collection.elapsed,
            workers: collection.workers,
            speeds: self.options.speeds.clone(),
            steps,
        });
    }
}

/// The name of a layout: unique over all terms.
fn name_of(term: Term, attempt: u64) -> HandoverId {
    HandoverId(term.0 << 32 | attempt)
}
