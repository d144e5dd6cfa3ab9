//! A KV connection to one peer: a thread that writes, a thread that reads.
//!
//! The step thread never waits for the network. What it sends waits in a queue that it keeps short by asking
//! [`KvLine::has_room`]; of what comes, about [`UNREAD_BYTES`] are read ahead of it, and the peer's socket holds
//! back the rest. Both bounds are bytes and not frames: the step thread looks up only between two steps, and a
//! frame may be one token of one sequence.
//!
//! The threads keep the usual priority, unlike what builds a shadow: the last tail, which a token waits for, goes
//! through them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use infercluster_serving::handover::HandoverId;
use infercluster_spec::GpuId;

use super::copying::peers;
use super::runtime::MESH_DEADLINE;
use super::steps::Command;
use super::switchboard::{Line, LineError, Switchboard};
use crate::wire::message::Prepare;
use crate::wire::{Connection, Kind, LaneFrame, LaneHeader, Purpose, WireError};

/// Bytes that may wait to be written before bulk copying pauses.
const QUEUE_BYTES: u64 = 16 << 20;
/// Bytes after which no further frame is read ahead of the step thread.
const UNREAD_BYTES: u64 = 16 << 20;
/// How long a handover's connection may be silent.
const IDLE_DEADLINE: Duration = Duration::from_secs(3600);

/// One end of a connection; dropping it closes both.
#[derive(Debug)]
pub(super) struct KvLine {
    connection: Connection,
    outgoing: Sender<Vec<u8>>,
    queued: Arc<AtomicU64>,
    unread: Arc<Unread>,
}

/// What was read and is not dealt with.
#[derive(Debug, Default)]
struct Unread {
    state: Mutex<UnreadState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct UnreadState {
    bytes: u64,
    /// Nobody deals with anything any more.
    closed: bool,
}

impl Unread {
    /// Waits until another frame may be read; `false` where none is wanted any more.
    fn wait_for_room(&self) -> bool {
        let state = self.lock();
        let is_full = |state: &mut UnreadState| state.bytes >= UNREAD_BYTES && !state.closed;
        let state = self
            .changed
            .wait_while(state, is_full)
            .unwrap_or_else(PoisonError::into_inner);
        !state.closed
    }

    fn add(&self, bytes: u64) {
        self.lock().bytes += bytes;
    }

    fn remove(&self, bytes: u64) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, UnreadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvLine {
    fn start(connection: Connection, threads: &Threads) -> Result<Self, WireError> {
        let (writer, reader) = (connection.duplicate()?, connection.duplicate()?);
        let (outgoing, bodies) = mpsc::channel();
        let unread = Arc::new(Unread::default());
        let queued = Arc::new(AtomicU64::new(0));
        let (threads_writing, counter) = (threads.clone(), Arc::clone(&queued));
        spawn("kv write", move || {
            let written = write(&writer, &bodies, &counter, &threads_writing);
            threads_writing.report(written);
        })?;
        let (threads_reading, ahead) = (threads.clone(), Arc::clone(&unread));
        spawn("kv read", move || {
            let read = read(&reader, &ahead, &threads_reading);
            threads_reading.report(read);
        })?;
        Ok(Self {
            connection,
            outgoing,
            queued,
            unread,
        })
    }

    /// Whether bulk data may be queued.
    pub(super) fn has_room(&self) -> bool {
        self.queued.load(Ordering::Relaxed) < QUEUE_BYTES
    }

    /// Queues a frame; a line that has failed drops it, and has said so.
    pub(super) fn send(&self, header: &LaneHeader, payload: &[u8]) -> Result<(), WireError> {
        let body = LaneFrame::encode(header, payload)?;
        self.queued.fetch_add(body.len() as u64, Ordering::Relaxed);
        // The writing thread reported why it ended.
        let _ = self.outgoing.send(body);
        Ok(())
    }

    /// A frame that was read is dealt with: another may be read.
    pub(super) fn note_consumed(&self, frame: &LaneFrame) {
        self.unread.remove(frame.body_bytes());
    }
}

impl Drop for KvLine {
    fn drop(&mut self) {
        self.unread.close();
        self.connection.close();
    }
}

fn write(
    connection: &Connection,
    bodies: &Receiver<Vec<u8>>,
    queued: &AtomicU64,
    threads: &Threads,
) -> Result<(), WireError> {
    while let Ok(body) = bodies.recv() {
        connection.send_bytes(Kind::Kv, &body)?;
        queued.fetch_sub(body.len() as u64, Ordering::Relaxed);
        if threads.commands.send(Command::LineDrained).is_err() {
            break;
        }
    }
    Ok(())
}

fn read(connection: &Connection, unread: &Unread, threads: &Threads) -> Result<(), WireError> {
    while unread.wait_for_room() {
        let (kind, body) = connection.receive_bytes(IDLE_DEADLINE, Kind::Kv.limit())?;
        if kind != Kind::Kv {
            return Err(WireError::UnexpectedKind {
                found: kind,
                expected: Kind::Kv,
            });
        }
        let frame = LaneFrame::decode(body)?;
        unread.add(frame.body_bytes());
        let command = Command::Lane {
            layout_id: threads.layout_id,
            peer: threads.peer,
            frame,
        };
        if threads.commands.send(command).is_err() {
            break;
        }
    }
    Ok(())
}

/// What the threads of a line know.
#[derive(Clone)]
struct Threads {
    layout_id: HandoverId,
    peer: GpuId,
    commands: Sender<Command>,
}

impl Threads {
    fn report(&self, ended: Result<(), WireError>) {
        if let Err(error) = ended {
            self.fail(error.to_string());
        }
    }

    fn fail(&self, reason: String) {
        // A step thread that is gone needs no news.
        let _ = self.commands.send(Command::LineFailed {
            layout_id: self.layout_id,
            peer: self.peer,
            reason,
        });
    }
}

/// Makes the connections of this device's lanes on a thread of its own: each arrives at the step thread as
/// [`Command::LineUp`].
pub(super) fn connect(
    prepare: &Prepare,
    gpu: GpuId,
    switchboard: &Arc<Switchboard>,
    commands: &Sender<Command>,
) -> Result<(), WireError> {
    let lanes = prepare.shadow.as_ref().map_or(&[][..], |shadow| &shadow.lanes);
    let peers = peers(lanes, gpu);
    let (layout_id, addresses, deadline) = (prepare.layout_id, prepare.peers.clone(), prepare.peer_deadline);
    for peer in peers {
        let (switchboard, addresses) = (Arc::clone(switchboard), addresses.clone());
        let threads = Threads {
            layout_id,
            peer,
            commands: commands.clone(),
        };
        spawn("kv connect", move || {
            match dial(&switchboard, &addresses, deadline, &threads) {
                Ok(line) => {
                    // A step thread that is gone needs no line.
                    let _ = threads.commands.send(Command::LineUp {
                        layout_id,
                        peer,
                        line,
                    });
                }
                Err(error) => threads.fail(error.to_string()),
            }
        })?;
    }
    Ok(())
}

fn dial(
    switchboard: &Switchboard,
    addresses: &std::collections::BTreeMap<GpuId, SocketAddr>,
    write_limit: Duration,
    threads: &Threads,
) -> Result<KvLine, LineError> {
    let line = Line {
        layout: threads.layout_id,
        purpose: Purpose::Kv,
        peer: threads.peer,
    };
    let connection = switchboard.connect(line, addresses, MESH_DEADLINE)?;
    // The peer reads between its steps, so a frame may take as long as a step does.
    connection
        .set_write_limit(write_limit)
        .and_then(|()| KvLine::start(connection, threads))
        .map_err(|source| LineError::Threads {
            peer: threads.peer,
            source,
        })
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), WireError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    thread.map(drop).map_err(|source| WireError::Io {
        what: "starting a thread",
        source,
    })
}
