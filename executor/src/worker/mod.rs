//! The role `worker`: one device. It joins a coordinator, takes seats in layouts, computes steps.
//!
//! Three kinds of threads: the control loop reads the coordinator and answers pings at once; the step thread
//! computes in dispatch order; a thread a `Prepare` builds the runtime of a new epoch beside those that run.
//! A worker never outlives its coordinator's connection.

pub mod lanes;
mod runtime;
mod sample;
mod steps;
mod switchboard;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use infercluster_spec::layout::CPU_F32;
use infercluster_spec::{Epoch, GpuId};

pub use runtime::PrepareError;
use runtime::Runtime;
use steps::{Answers, Command, Fence, StepLoop};
pub use switchboard::LineError;
use switchboard::Switchboard;

use crate::wire::handshake::{self, numerics_hash};
use crate::wire::message::{FromWorker, Prepare, ToWorker};
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
}

impl WorkerOptions {
    /// A worker on this machine's loopback.
    pub fn local(coordinator: SocketAddr, gpu: GpuId, token: Token) -> Self {
        Self {
            coordinator,
            gpu,
            token,
            bind: Ipv4Addr::LOCALHOST.into(),
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
        numerics: numerics_hash(CPU_F32),
    };
    let switchboard = Switchboard::new(options.gpu, admission.clone());
    let board = Arc::clone(&switchboard);
    let listener = Listener::start(
        options.bind,
        admission,
        Switchboard::expects,
        move |hello, connection| board.admit(&hello, connection),
    )
    .map_err(|source| WorkerError::Listen { source })?;
    let control = join(options, &listener).map_err(lost)?;
    let answers = Answers::new(control.duplicate().map_err(lost)?);
    let (commands, queue) = mpsc::channel();
    let stepper = {
        let (answers, control) = (answers.clone(), control.duplicate().map_err(lost)?);
        spawn("steps", move || {
            if let Err(error) = StepLoop::new(answers).run(&queue) {
                tracing::warn!("the coordinator cannot be answered: {error}");
            }
            // Without this thread the worker is of no use: the control loop ends too.
            control.close();
        })?
    };
    let worker = Worker {
        gpu: options.gpu,
        switchboard: Arc::clone(&switchboard),
        answers,
        commands,
        fence: Fence::default(),
    };
    let ended = worker.serve(&control);
    // Closing the peers' connections frees a step that waits for them.
    switchboard.close();
    control.close();
    // A panic of that thread was already printed.
    let _ = stepper.join();
    ended.map_err(lost)
}

/// Introduces this worker to its coordinator.
fn join(options: &WorkerOptions, listener: &Listener) -> Result<Connection, WireError> {
    let control = Connection::dial(options.coordinator, DIAL_DEADLINE)?;
    let hello = Hello {
        token: options.token.clone(),
        role: Role::Worker,
        gpu: options.gpu,
        epoch: Epoch(0),
        purpose: Purpose::Control,
        numerics: numerics_hash(CPU_F32),
    };
    handshake::introduce(&control, &hello)?;
    let joined = FromWorker::Joined {
        listen: listener.address(),
        process: std::process::id(),
    };
    control.send(Kind::Control, &joined)?;
    Ok(control)
}

/// The control loop.
struct Worker {
    gpu: GpuId,
    switchboard: Arc<Switchboard>,
    answers: Answers,
    commands: Sender<Command>,
    fence: Fence,
}

impl Worker {
    /// Reads the coordinator until it says stop (`Ok`) or is gone.
    fn serve(mut self, control: &Connection) -> Result<(), WireError> {
        loop {
            match control.receive(Kind::Control, COORDINATOR_SILENCE)? {
                ToWorker::Stop => return Ok(()),
                ToWorker::Ping => self.answers.send(&FromWorker::Pong)?,
                ToWorker::Step(order) => self.command(Command::Step(order))?,
                ToWorker::Probe(order) => self.command(Command::Probe(order))?,
                ToWorker::TakeTimes => self.command(Command::TakeTimes)?,
                ToWorker::Release { term, epoch } => {
                    if let Err(stale) = self.fence.admit_term(term) {
                        tracing::warn!("the release of {epoch} is refused: {stale}");
                        continue;
                    }
                    self.switchboard.close_epoch(epoch);
                    self.command(Command::Release(epoch))?;
                }
                ToWorker::Prepare(prepare) => {
                    if let Err(stale) = self.fence.admit_term(prepare.term) {
                        tracing::warn!("preparing {} is refused: {stale}", prepare.epoch);
                        continue;
                    }
                    self.prepare(*prepare)?;
                }
            }
        }
    }

    fn command(&self, command: Command) -> Result<(), WireError> {
        self.commands.send(command).map_err(|_| WireError::Closed {
            what: "handing a command to the step thread",
        })
    }

    /// Builds a runtime on a thread of its own; what runs goes on meanwhile.
    fn prepare(&self, prepare: Prepare) -> Result<(), WireError> {
        let (gpu, switchboard) = (self.gpu, Arc::clone(&self.switchboard));
        let (answers, commands) = (self.answers.clone(), self.commands.clone());
        let build = move || {
            let epoch = prepare.epoch;
            let answer = match Runtime::build(&prepare, gpu, &switchboard) {
                Ok(runtime) => {
                    let bytes = runtime.kv_bytes();
                    // Installed before READY is said, so that no step can come first.
                    match commands.send(Command::Install(Box::new(runtime), prepare.speed)) {
                        Ok(()) => FromWorker::Ready { epoch, bytes },
                        Err(_) => return,
                    }
                }
                Err(error) => {
                    switchboard.close_epoch(epoch);
                    FromWorker::PrepareFailed {
                        epoch,
                        reason: error.to_string(),
                    }
                }
            };
            if let Err(error) = answers.send(&answer) {
                tracing::warn!("the coordinator cannot be told about {epoch}: {error}");
            }
        };
        let thread = thread::Builder::new().name("prepare".to_owned()).spawn(build);
        thread.map(drop).map_err(|source| WireError::Io {
            what: "starting a thread",
            source,
        })
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>, WorkerError> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|source| WorkerError::Thread { source })
}
