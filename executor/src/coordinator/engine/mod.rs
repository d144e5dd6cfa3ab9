//! The engine thread: one queue of events, all state in one place.
//!
//! Changes of layout are [`migrate`]'s, losses [`losses`]'s, questions [`measuring`]'s, over the same state.
//!
//! Events that wait are taken together, then steps are dispatched, then tokens are delivered: workers never wait
//! for clients.

mod loading;
mod losses;
mod measuring;
mod migrate;
mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{self, HandoverId, Record, Stamp};
use infercluster_serving::{Router, RouterPolicy};
use infercluster_spec::migration::Transfer;
use infercluster_spec::{Epoch, GpuId, Layout, ReplicaId, SequenceId, StepId, Term};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::CoordinatorOptions;
use super::error::{ExecutorError, RequestError};
use super::fleet::{Fleet, Joined};
use super::measure::{Measurements, Status};
use super::migration::{Migration, MigrationError, MigrationReport};
use super::records::{Recorded, Records, Reign};
use super::replica::Replica;
use super::request::{GenerationRequest, StreamEvent};
use crate::clock;
use crate::probe::ProbeTrace;
use crate::store::StoreError;
use crate::wire::handshake::Unwelcome;
use crate::wire::message::{FromWorker, StepOutput, ToWorker};
use losses::Suspicion;
use measuring::Collection;
use pools::{build_replicas, kv_pools};

/// How often workers are pinged and limits are looked at.
const TICK: Duration = Duration::from_secs(1);
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
        /// How a plan says that KV moves; worked out here where there is none.
        transfers: Option<Vec<Transfer>>,
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
            Event::Migrate { to, transfers, reply } => self.migrate(*to, transfers, reply),
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
            FromWorker::Switched { layout_id, times } => {
                if let Some(migration) = &mut self.migration
                    && migration.id() == layout_id
                {
                    migration.switched(times);
                }
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
}

/// The name of a layout: unique over all terms.
fn name_of(term: Term, attempt: u64) -> HandoverId {
    HandoverId(term.0 << 32 | attempt)
}
