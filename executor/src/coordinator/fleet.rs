//! The workers of a coordinator: started, joined, heard and spoken to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use infercluster_spec::{GpuId, Layout, Model};

use super::ExecutorError;
use super::engine::Event;
use crate::clock::{self, Deadline};
use crate::launch::{WorkerCommand, WorkerProcess, describe_exit};
use crate::model::rope_hash;
use crate::wire::handshake::{Admission, Rotations, Unwelcome, refuse};
use crate::wire::{Connection, FromWorker, Hello, Kind, Listener, Purpose, Role, ToWorker, Token, WireError};
use crate::worker::{self, WorkerOptions};

/// How long an ended worker may take to be reaped, so that an error can say how it ended.
const REAP_DEADLINE: Duration = Duration::from_millis(500);
/// How long the reading thread of a connection waits for a word; silence is judged by the engine, sooner.
const READ_DEADLINE: Duration = Duration::from_secs(600);

/// How workers are started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// A process a device.
    Processes(WorkerCommand),
    /// A thread a device of this process: the same code and the same sockets, without the isolation.
    Threads,
}

/// A worker that joined.
struct Member {
    control: Connection,
    listen: SocketAddr,
    process: u32,
    heard: Instant,
}

/// What runs the code of a worker.
enum Body {
    Process(WorkerProcess),
    Thread(Option<JoinHandle<()>>),
}

/// All workers.
pub(super) struct Fleet {
    /// Dropped first: nobody joins an ending fleet.
    _listener: Listener,
    members: BTreeMap<GpuId, Member>,
    bodies: BTreeMap<GpuId, Body>,
    lost: BTreeMap<GpuId, String>,
}

impl Fleet {
    /// Starts a worker a device and waits until all have joined, computing what layout and model ask for.
    pub(super) fn start(
        launch: &Launch,
        layout: &Layout,
        model: &Model,
        events: &Sender<Event>,
        queue: &Receiver<Event>,
        limit: Duration,
    ) -> Result<Self, ExecutorError> {
        let gpus = &layout.gpus;
        let token = Token::random().map_err(|source| ExecutorError::Token { source })?;
        let admission = Admission {
            token: token.clone(),
            numerics: layout.numerics.clone(),
            rotations: Some(Rotations::new(model.rope, model.head_dim)),
        };
        let listener = listen(gpus, admission, events.clone())?;
        let address = listener.address();
        let mut fleet = Self {
            _listener: listener,
            members: BTreeMap::new(),
            bodies: BTreeMap::new(),
            lost: BTreeMap::new(),
        };
        for &gpu in gpus {
            let body = start_body(launch, gpu, address, &token)
                .map_err(|source| ExecutorError::Spawn { gpu, source })?;
            fleet.bodies.insert(gpu, body);
        }
        fleet.gather(gpus, queue, limit)?;
        Ok(fleet)
    }

    fn gather(
        &mut self,
        gpus: &[GpuId],
        queue: &Receiver<Event>,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let deadline = Deadline::after(limit);
        while let Some(&gpu) = gpus.iter().find(|gpu| !self.members.contains_key(gpu)) {
            let missing = ExecutorError::Missing {
                gpu,
                waited_ms: deadline.waited().as_millis() as u64,
            };
            let Some(remaining) = deadline.remaining() else {
                return Err(missing);
            };
            // A process that ends before it joins says nothing: look at it now and then.
            match queue.recv_timeout(remaining.min(Duration::from_millis(100))) {
                Ok(Event::Joined(joined)) => self.admit(*joined),
                Ok(Event::Lost { gpu, reason }) => return Err(self.lost_error(gpu, &reason)),
                Ok(Event::Unwelcome { gpu, source }) => return Err(ExecutorError::Unwelcome { gpu, source }),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(status) = self.exit_of(gpu, Duration::ZERO) {
                        let reason = format!("{} before it joined", describe_exit(status));
                        return Err(self.lost_error(gpu, &reason));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(missing),
            }
        }
        Ok(())
    }

    fn lost_error(&mut self, gpu: GpuId, reason: &str) -> ExecutorError {
        let description = self.note_lost(gpu, reason);
        ExecutorError::Lost { gpu, description }
    }

    /// Takes a worker in.
    pub(super) fn admit(&mut self, joined: Joined) {
        let Joined {
            gpu,
            control,
            listen,
            process,
        } = joined;
        let heard = clock::now();
        self.members.insert(
            gpu,
            Member {
                control,
                listen,
                process,
                heard,
            },
        );
    }

    /// Notes that a worker said something.
    pub(super) fn hear(&mut self, gpu: GpuId) {
        if let Some(member) = self.members.get_mut(&gpu) {
            member.heard = clock::now();
        }
    }

    /// Workers that have said nothing for `limit`.
    pub(super) fn silent(&self, limit: Duration) -> Vec<GpuId> {
        let silent = self
            .members
            .iter()
            .filter(|(_, member)| member.heard.elapsed() > limit);
        silent.map(|(gpu, _)| *gpu).collect()
    }

    /// Where peers reach each worker.
    pub(super) fn addresses(&self) -> BTreeMap<GpuId, SocketAddr> {
        self.members
            .iter()
            .map(|(gpu, member)| (*gpu, member.listen))
            .collect()
    }

    /// Every device with its process, where it lives.
    pub(super) fn processes(&self) -> BTreeMap<GpuId, Option<u32>> {
        let living = self
            .members
            .iter()
            .map(|(gpu, member)| (*gpu, Some(member.process)));
        let lost = self.lost.keys().map(|gpu| (*gpu, None));
        lost.chain(living).collect()
    }

    /// Sends one message to several workers, encoded once; answers those that could not be reached.
    pub(super) fn send<'a>(
        &self,
        gpus: impl IntoIterator<Item = &'a GpuId>,
        message: &ToWorker,
    ) -> Vec<(GpuId, WireError)> {
        let body = match postcard::to_stdvec(message) {
            Ok(body) => body,
            Err(source) => panic!("messages of this program encode: {source}"),
        };
        gpus.into_iter()
            .filter_map(|gpu| {
                let member = self.members.get(gpu)?;
                let sent = member.control.send_bytes(Kind::Control, &body);
                sent.err().map(|error| (*gpu, error))
            })
            .collect()
    }

    /// Sends a message to every living worker.
    pub(super) fn broadcast(&self, message: &ToWorker) -> Vec<(GpuId, WireError)> {
        self.send(self.members.keys(), message)
    }

    /// Living workers.
    pub(super) fn living(&self) -> BTreeSet<GpuId> {
        self.members.keys().copied().collect()
    }

    /// A worker is gone: closes what is left of it and says who it was and how it ended.
    pub(super) fn note_lost(&mut self, gpu: GpuId, reason: &str) -> String {
        if let Some(known) = self.lost.get(&gpu) {
            return known.clone();
        }
        let member = self.members.remove(&gpu);
        let process = member
            .as_ref()
            .map(|member| format!(" (process {})", member.process));
        if let Some(member) = member {
            member.control.close();
        }
        let end = match self.exit_of(gpu, REAP_DEADLINE) {
            Some(status) => describe_exit(status),
            None => reason.to_owned(),
        };
        if let Some(Body::Process(process)) = self.bodies.get(&gpu) {
            process.kill();
        }
        let description = format!("the worker of {gpu}{} {end}", process.unwrap_or_default());
        tracing::error!("{description}");
        self.lost.insert(gpu, description.clone());
        description
    }

    /// Workers that are lost.
    pub(super) fn lost(&self) -> Vec<GpuId> {
        self.lost.keys().copied().collect()
    }

    /// How a lost worker was described.
    pub(super) fn description_of_lost(&self, gpu: GpuId) -> Option<&str> {
        self.lost.get(&gpu).map(String::as_str)
    }

    fn exit_of(&self, gpu: GpuId, limit: Duration) -> Option<std::process::ExitStatus> {
        match self.bodies.get(&gpu)? {
            Body::Process(process) => process.wait(limit),
            Body::Thread(_) => None,
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // Whoever cannot be told is gone, and what still runs is killed or sees its connection end.
        let _ = self.broadcast(&ToWorker::Stop);
        for member in std::mem::take(&mut self.members).into_values() {
            member.control.close();
        }
        for body in self.bodies.values_mut() {
            if let Body::Thread(thread) = body {
                // A panic of that thread was already printed.
                let _ = thread.take().map(JoinHandle::join);
            }
        }
    }
}

/// A worker at the control port.
#[derive(Debug)]
pub(super) struct Joined {
    gpu: GpuId,
    control: Connection,
    listen: SocketAddr,
    process: u32,
}

/// Opens the control port. Each device may join once, and only if it computes the bits of this run.
fn listen(gpus: &[GpuId], admission: Admission, events: Sender<Event>) -> Result<Listener, ExecutorError> {
    let open: Arc<Mutex<BTreeSet<GpuId>>> = Arc::new(Mutex::new(gpus.iter().copied().collect()));
    let expected = move |hello: &Hello| {
        hello.role == Role::Worker
            && hello.purpose == Purpose::Control
            && open
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&hello.gpu)
    };
    let expected_hash = admission
        .rotations
        .map(|rotations| rope_hash(rotations.rope(), rotations.head_dim()));
    let events = Mutex::new(events);
    Listener::start(
        Ipv4Addr::LOCALHOST.into(),
        admission,
        expected,
        move |hello, admitted| {
            let events = events.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let gpu = hello.gpu;
            let attended = admitted
                .map_err(WireError::from)
                .and_then(|connection| attend(gpu, connection, expected_hash, &events));
            let event = match attended {
                // A stranger to this run, or a second worker of a device: nothing here waits for it.
                Ok(()) | Err(WireError::Unwelcome(Unwelcome::Unexpected { .. })) => return,
                Err(WireError::Unwelcome(source)) => Event::Unwelcome { gpu, source },
                Err(error) => Event::Lost {
                    gpu,
                    reason: format!("is gone: {error}"),
                },
            };
            // The engine may have ended first.
            let _ = events.send(event);
        },
    )
    .map_err(|source| ExecutorError::Listen { source })
}

/// Reads one worker's connection to its end, on the thread of its handshake.
fn attend(
    gpu: GpuId,
    connection: Connection,
    expected_hash: Option<u64>,
    events: &Sender<Event>,
) -> Result<(), WireError> {
    let unexpected = || WireError::Closed {
        what: "waiting for the worker's first message",
    };
    let FromWorker::Joined {
        listen,
        process,
        rotations: found,
    } = connection.receive(Kind::Control, Duration::from_secs(10))?
    else {
        return Err(unexpected());
    };
    if let Some(expected) = expected_hash.filter(|expected| *expected != found) {
        let unwelcome = Unwelcome::Rotations { gpu, found, expected };
        refuse(&connection, &unwelcome.to_string());
        return Err(unwelcome.into());
    }
    let joined = Joined {
        gpu,
        control: connection.duplicate()?,
        listen,
        process,
    };
    if events.send(Event::Joined(Box::new(joined))).is_err() {
        return Ok(());
    }
    loop {
        let message = connection.receive(Kind::Control, READ_DEADLINE)?;
        let event = Event::Worker {
            gpu,
            message,
            at: clock::now(),
        };
        if events.send(event).is_err() {
            return Ok(());
        }
    }
}

fn start_body(launch: &Launch, gpu: GpuId, coordinator: SocketAddr, token: &Token) -> std::io::Result<Body> {
    match launch {
        Launch::Processes(command) => command.start(gpu, coordinator, token).map(Body::Process),
        Launch::Threads => {
            let options = WorkerOptions::local(coordinator, gpu, token.clone());
            let body = move || {
                if let Err(error) = worker::run(&options) {
                    tracing::debug!("the worker of {gpu} ended: {error}");
                }
            };
            let thread = thread::Builder::new()
                .name(format!("worker {}", gpu.0))
                .spawn(body)?;
            Ok(Body::Thread(Some(thread)))
        }
    }
}
