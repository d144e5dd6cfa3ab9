//! The role `coordinator`: starts the workers of a layout, drives the shared scheduler over them and delivers
//! tokens.
//!
//! One engine thread owns all state; everything reaches it as an event in one queue: what workers say, new
//! requests, cancellations, questions. A lost worker fails the requests of its replica with an error that names
//! it; the coordinator lives on and answers later requests with the same error.

mod engine;
mod error;
mod fleet;
mod measure;
mod migration;
mod plan;
mod records;
mod replica;
mod request;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use infercluster_spec::migration::Transfer;
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{Bytes, EngineOptions, Epoch, GpuId, Layout, MigrationPlan, Model, SequenceId};

pub use error::{ExecutorError, RequestError};
pub use fleet::Launch;
pub use measure::{Measurements, ReplicaStatus, Status, WorkerStatus};
pub use migration::{FirstStepTimes, MigrationError, MigrationPhase, MigrationReport};
pub use plan::{PlanContent, PlanError, PlanPlace, PlanSlice, needed_transfers};
pub use request::{FinishReason, GenerationRequest, StreamEvent, TokenStream};

use crate::speed::Speed;
use engine::{Engine, Event};
use migration::check_layouts;
use plan::check_plan;

/// What a coordinator serves and how.
#[derive(Debug, Clone)]
pub struct CoordinatorOptions {
    /// The model.
    pub model: Model,
    /// What runs where; its KV block size is the pool's.
    pub layout: Layout,
    /// The checkpoint.
    pub model_dir: PathBuf,
    /// Batching.
    pub engine: EngineOptions,
    /// Blocks of each replica's KV pool; `None` sizes it by memory.
    pub kv_blocks: Option<u32>,
    /// Memory that each worker may use, where it is limited.
    pub memory: Option<Bytes>,
    /// Emulated speeds; a device that is not named runs as fast as it can.
    pub speeds: BTreeMap<GpuId, Speed>,
    /// Token ids that end a sequence.
    pub eos: Vec<u32>,
    /// How workers are started.
    pub launch: Launch,
    /// Time limits.
    pub limits: Limits,
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Starting and joining of a worker.
    pub join: Duration,
    /// Loading of a layout.
    pub load: Duration,
    /// One step; a worker that is silent inside a collective for so long is lost.
    pub step: Duration,
    /// Silence of a worker, which answers a ping every second.
    pub silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(30),
            load: Duration::from_secs(600),
            step: Duration::from_secs(120),
            silence: Duration::from_secs(20),
        }
    }
}

type MigrationAnswer = tokio::sync::oneshot::Receiver<Result<MigrationReport, MigrationError>>;

/// A running coordinator; its workers end when it is dropped.
#[derive(Debug)]
pub struct Coordinator {
    model: Model,
    events: Sender<Event>,
    next_sequence: Arc<AtomicU64>,
    engine: Option<JoinHandle<()>>,
}

impl Coordinator {
    /// Starts workers and loads the layout on them; returns when the first request can run. The record of the
    /// layout in force lives as long as the service.
    pub fn start(options: CoordinatorOptions) -> Result<Self, ExecutorError> {
        Self::start_recorded(options, None)
    }

    /// [`Self::start`] with the record log in a folder that outlives the service.
    pub fn start_in(options: CoordinatorOptions, state_dir: &Path) -> Result<Self, ExecutorError> {
        Self::start_recorded(options, Some(state_dir))
    }

    fn start_recorded(options: CoordinatorOptions, state_dir: Option<&Path>) -> Result<Self, ExecutorError> {
        validate_layout(&options.layout, &options.model, None)?;
        let model = options.model.clone();
        let engine = Engine::start(options, state_dir)?;
        let events = engine.sender();
        let thread = thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || engine.run())
            .map_err(|source| ExecutorError::Thread { source })?;
        Ok(Self {
            model,
            events,
            next_sequence: Arc::new(AtomicU64::new(0)),
            engine: Some(thread),
        })
    }

    /// Submits a request; its tokens come from the stream, and dropping the stream cancels it.
    pub fn submit(&self, request: GenerationRequest) -> TokenStream {
        let sequence = SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let submission = Event::Submit {
            sequence,
            request,
            stream: sender.clone(),
        };
        if self.events.send(submission).is_err() {
            // The receiver is at hand: this cannot fail.
            let _ = sender.send(StreamEvent::Failed(RequestError::Stopped));
        }
        TokenStream::new(sequence, receiver, self.events.clone())
    }

    /// What the coordinator does right now.
    pub async fn status(&self) -> Result<Status, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Status(reply))?;
        answer.await.map_err(|_| RequestError::Stopped)
    }

    /// Where the workers' time went since the last call. Answered once the steps dispatched before are done.
    pub async fn measurements(&self) -> Result<Measurements, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Measure(reply))?;
        answer.await.map_err(|_| RequestError::Stopped)
    }

    /// [`Self::status`] for threads outside a runtime.
    pub fn status_blocking(&self) -> Result<Status, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Status(reply))?;
        answer.blocking_recv().map_err(|_| RequestError::Stopped)
    }

    /// [`Self::measurements`] for threads outside a runtime.
    pub fn measurements_blocking(&self) -> Result<Measurements, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Measure(reply))?;
        answer.blocking_recv().map_err(|_| RequestError::Stopped)
    }

    /// Changes the layout while requests run; answers when the old one is gone, or why it stays.
    pub async fn migrate(&self, to: Layout) -> Result<MigrationReport, MigrationError> {
        self.begin_migration(to, None)?
            .await
            .unwrap_or(Err(MigrationError::Stopped))
    }

    /// Takes a plan's phases one after another, each as it says; a report a phase. A plan that starts elsewhere or
    /// carries something else than its layouts need is refused before anything moves.
    pub async fn migrate_along(&self, plan: MigrationPlan) -> Result<Vec<MigrationReport>, MigrationError> {
        let (_, in_force) = self.layout().await.map_err(|_| MigrationError::Stopped)?;
        if plan.from.replicas != in_force.replicas {
            return Err(PlanError::Start.into());
        }
        // Layouts first: what a transfer means is only defined between valid ones.
        let mut from = &in_force;
        for phase in &plan.phases {
            check_layouts(&self.model, from, &phase.to)?;
            from = &phase.to;
        }
        check_plan(&self.model, &plan)?;
        let mut reports = Vec::new();
        for phase in plan.phases {
            let ended = self.begin_migration(phase.to, Some(phase.transfers))?.await;
            reports.push(ended.unwrap_or(Err(MigrationError::Stopped))?);
        }
        Ok(reports)
    }

    /// [`Self::migrate`] for threads outside a runtime.
    pub fn migrate_blocking(&self, to: Layout) -> Result<MigrationReport, MigrationError> {
        self.begin_migration(to, None)?
            .blocking_recv()
            .unwrap_or(Err(MigrationError::Stopped))
    }

    fn begin_migration(
        &self,
        to: Layout,
        transfers: Option<Vec<Transfer>>,
    ) -> Result<MigrationAnswer, MigrationError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let to = Box::new(to);
        self.ask(Event::Migrate { to, transfers, reply })
            .map_err(|_| MigrationError::Stopped)?;
        Ok(answer)
    }

    /// The migration under way, else the last one, else none.
    pub async fn migration(&self) -> Result<Option<MigrationReport>, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Migration(reply))?;
        answer.await.map_err(|_| RequestError::Stopped)
    }

    /// [`Self::migration`] for threads outside a runtime.
    pub fn migration_blocking(&self) -> Result<Option<MigrationReport>, RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Migration(reply))?;
        answer.blocking_recv().map_err(|_| RequestError::Stopped)
    }

    /// The layout in force and its version.
    pub async fn layout(&self) -> Result<(Epoch, Layout), RequestError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.ask(Event::Layout(reply))?;
        answer.await.map_err(|_| RequestError::Stopped)
    }

    fn ask(&self, event: Event) -> Result<(), RequestError> {
        self.events.send(event).map_err(|_| RequestError::Stopped)
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        // An engine that ended already has no use for it.
        let _ = self.events.send(Event::Stop);
        if let Some(engine) = self.engine.take() {
            // A panic of the engine was already printed; its workers went with it.
            let _ = engine.join();
        }
    }
}
