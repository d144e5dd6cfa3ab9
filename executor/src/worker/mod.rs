//! The role `worker`: one device. It joins a coordinator, takes seats in layouts, computes steps.
//!
//! Kinds of threads: the control loop reads the coordinator and answers pings at once; the step thread computes
//! in dispatch order and moves KV between steps; a thread a layout builds its runtime beside those that run; two
//! threads a KV connection.
//! A worker never outlives its coordinator's connection.

mod copying;
mod kv_line;
mod preparing;
mod probe;
mod runtime;
mod sample;
mod steps;
mod switchboard;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use infercluster_serving::handover::HandoverId;
use infercluster_spec::layout::CPU_F32;
use infercluster_spec::{GpuId, Term};

pub use runtime::{PrepareError, StepError};
use steps::{Answers, Command, StepLoop};
pub use switchboard::LineError;
use switchboard::Switchboard;

use crate::cores::pin_this_thread;
use crate::model::rope_hash;
use crate::wire::handshake;
use crate::wire::message::{FromWorker, ToWorker};
use crate::wire::{Admission, Connection, Hello, Kind, Listener, Purpose, Role, Token, WireError};

/// How long connecting to the coordinator may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(10);
/// How long the coordinator, which pings every second, may be silent.
const COORDINATOR_SILENCE: Duration = Duration::from_secs(30);

/// What a worker is told by whoever starts it; everything else comes from the coordinator.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The coordinator's control port.
    pub coordinator: SocketAddr,
    /// The device.
    pub gpu: GpuId,
    /// The secret of the run.
    pub token: Token,
    /// Where peers reach this worker.
    pub bind: IpAddr,
    /// Whether the thread that computes stays on the core of the device's number, counted among those that this
    /// process may use.
    pub pin: bool,
}

impl WorkerOptions {
    /// A worker on this machine's loopback.
    pub fn local(coordinator: SocketAddr, gpu: GpuId, token: Token) -> Self {
        Self {
            coordinator,
            gpu,
            token,
            bind: Ipv4Addr::LOCALHOST.into(),
            pin: false,
        }
    }
}

/// Why a worker ended, other than on request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The coordinator could not be reached, refused, or is gone.
    #[error("coordinator at {coordinator}: {source}")]
    Coordinator {
        /// Where.
        coordinator: SocketAddr,
        /// Why.
        source: WireError,
    },
    /// The port for peers cannot be opened.
    #[error("port for peers: {source}")]
    Listen {
        /// Why.
        source: WireError,
    },
    /// A thread cannot be started.
    #[error("starting a thread: {source}")]
    Thread {
        /// What the system says.
        source: std::io::Error,
    },
}

/// Runs a worker until its coordinator says stop or is gone.
pub fn run(options: &WorkerOptions) -> Result<(), WorkerError> {
    let lost = |source| WorkerError::Coordinator {
        coordinator: options.coordinator,
        source,
    };
    let admission = Admission {
        token: options.token.clone(),
        numerics: CPU_F32.to_owned(),
        rotations: None,
    };
    let switchboard = Switchboard::new(options.gpu, admission.clone());
    let board = Arc::clone(&switchboard);
    let listener = Listener::start(
        options.bind,
        admission,
        Switchboard::expects,
        move |hello, admitted| {
            if let Ok(connection) = admitted {
                board.admit(&hello, connection);
            }
        },
    )
    .map_err(|source| WorkerError::Listen { source })?;
    let control = join(options, &listener).map_err(lost)?;
    let answers = Answers::new(control.duplicate().map_err(lost)?);
    let (commands, queue) = mpsc::channel();
    let stepper = {
        let (answers, control) = (answers.clone(), control.duplicate().map_err(lost)?);
        let (gpu, board, sender) = (options.gpu, Arc::clone(&switchboard), commands.clone());
        let pin = options.pin;
        spawn("steps", move || {
            if pin {
                stay_on_core(gpu);
            }
            let ended = StepLoop::new(gpu, answers, board, sender).run(&queue);
            // Without this thread the worker is of no use: the control loop ends too.
            control.close();
            ended
        })?
    };
    let worker = Worker {
        switchboard: Arc::clone(&switchboard),
        answers,
        commands: commands.clone(),
        term: Term(0),
    };
    let ended = worker.serve(&control);
    // Closing the peers' connections frees a step that waits for them.
    switchboard.close();
    control.close();
    // A step thread that has ended needs no word.
    let _ = commands.send(Command::Stop);
    // A panic of that thread was already printed.
    let stepped = stepper.join().unwrap_or(Ok(()));
    match ended {
        // Told to stop: a step that was under way has nobody to answer any more.
        Ok(()) => Ok(()),
        // Where the step thread could not answer, it closed the connection that the control loop then found closed.
        Err(error) => Err(lost(stepped.err().unwrap_or(error))),
    }
}

/// Introduces this worker to its coordinator.
fn join(options: &WorkerOptions, listener: &Listener) -> Result<Connection, WireError> {
    let control = Connection::dial(options.coordinator, DIAL_DEADLINE)?;
    let hello = Hello {
        token: options.token.clone(),
        role: Role::Worker,
        gpu: options.gpu,
        layout: HandoverId(0),
        purpose: Purpose::Control,
        numerics: CPU_F32.to_owned(),
    };
    let rotations = handshake::introduce(&control, &hello)?;
    let joined = FromWorker::Joined {
        listen: listener.address(),
        process: std::process::id(),
        rotations: rotations.map_or(0, |rotations| rope_hash(rotations.rope(), rotations.head_dim())),
    };
    control.send(Kind::Control, &joined)?;
    Ok(control)
}

/// The control loop.
struct Worker {
    switchboard: Arc<Switchboard>,
    answers: Answers,
    commands: Sender<Command>,
    /// The highest term that was heard of; what comes from a lower one is refused.
    term: Term,
}

impl Worker {
    /// Reads the coordinator until it says stop (`Ok`) or is gone.
    fn serve(mut self, control: &Connection) -> Result<(), WireError> {
        loop {
            let message = control.receive(Kind::Control, COORDINATOR_SILENCE)?;
            if let Some(found) = term_of(&message) {
                if found < self.term {
                    tracing::warn!("a message of {found} is refused: {} reigns", self.term);
                    continue;
                }
                self.term = found;
            }
            let command = match message {
                ToWorker::Stop => return Ok(()),
                ToWorker::Ping => {
                    self.answers.send(&FromWorker::Pong)?;
                    continue;
                }
                ToWorker::Step(order) => Command::Step(order),
                ToWorker::TakeTimes => Command::TakeTimes,
                ToWorker::Prepare(prepare) => Command::Describe(prepare),
                ToWorker::Order(order) => Command::Order(order),
                ToWorker::GiveUp { .. } => {
                    // Frees a step that waits for a peer.
                    self.switchboard.close();
                    Command::GiveUp
                }
            };
            self.commands.send(command).map_err(|_| WireError::Closed {
                what: "handing a command to the step thread",
            })?;
        }
    }
}

/// Keeps the calling thread on the core of the device's number.
fn stay_on_core(gpu: GpuId) {
    match pin_this_thread(gpu.index()) {
        Ok(true) => {}
        Ok(false) => tracing::warn!("{gpu} has no core of its own: this machine has fewer"),
        Err(error) => tracing::warn!("{gpu} cannot be kept on one core: {error}"),
    }
}

/// The reign that a message belongs to, where it belongs to one.
fn term_of(message: &ToWorker) -> Option<Term> {
    match message {
        ToWorker::Prepare(prepare) => Some(prepare.term),
        ToWorker::Order(order) => Some(order.stamp.term),
        ToWorker::Step(order) => Some(order.descriptor.term),
        ToWorker::GiveUp { term } => Some(*term),
        ToWorker::TakeTimes | ToWorker::Ping | ToWorker::Stop => None,
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<thread::JoinHandle<T>, WorkerError> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|source| WorkerError::Thread { source })
}
