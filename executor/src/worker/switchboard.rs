//! Connections between workers: accepted ones wait here until a runtime asks for them, and every connection of
//! a layout can be closed at once, which frees a step that is blocked in a collective.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infercluster_serving::handover::HandoverId;
use infercluster_spec::GpuId;

use crate::clock::Deadline;
use crate::wire::{Admission, Connection, Hello, Purpose, Role, WireError, handshake};

/// Connections that may wait to be asked for.
const WAITING_LIMIT: usize = 1024;

/// Which connection: the peer, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) layout: HandoverId,
    pub(super) purpose: Purpose,
    pub(super) peer: GpuId,
}

/// Why a connection to a peer is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// The peer could not be reached or refused.
    #[error("connecting to {peer} at {address}: {source}")]
    Dial {
        /// Who.
        peer: GpuId,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: WireError,
    },
    /// The peer did not call.
    #[error("{peer} did not connect within {waited_ms} ms")]
    Missing {
        /// Who.
        peer: GpuId,
        /// How long was waited.
        waited_ms: u64,
    },
    /// The coordinator named no address for the peer.
    #[error("no address of {peer} is known")]
    Unknown {
        /// Who.
        peer: GpuId,
    },
    /// A connection's threads cannot be started.
    #[error("the connection to {peer}: {source}")]
    Threads {
        /// Who.
        peer: GpuId,
        /// Why.
        source: WireError,
    },
    /// The layout, or the worker, ends.
    #[error("layout {} was given up while its connections were made", layout.0)]
    Ended {
        /// Which.
        layout: HandoverId,
    },
}

/// Shared between the listener, the threads that build runtimes and the control loop.
#[derive(Debug)]
pub(super) struct Switchboard {
    gpu: GpuId,
    admission: Admission,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<Line, Connection>,
    /// Handles of what is in use, for closing.
    in_use: BTreeMap<HandoverId, Vec<Connection>>,
    /// Layouts that were closed: none of them comes back.
    ended: BTreeSet<HandoverId>,
    closed: bool,
}

impl State {
    fn has_ended(&self, layout: HandoverId) -> bool {
        self.closed || self.ended.contains(&layout)
    }
}

impl Switchboard {
    pub(super) fn new(gpu: GpuId, admission: Admission) -> Arc<Self> {
        Arc::new(Self {
            gpu,
            admission,
            state: Mutex::default(),
            arrived: Condvar::new(),
        })
    }

    /// Whether a peer's hello belongs on this board.
    pub(super) fn expects(hello: &Hello) -> bool {
        hello.role == Role::Worker && hello.purpose != Purpose::Control
    }

    /// Takes an accepted connection.
    pub(super) fn admit(&self, hello: &Hello, connection: Connection) {
        let line = Line {
            layout: hello.layout,
            purpose: hello.purpose,
            peer: hello.gpu,
        };
        let mut state = self.lock();
        if state.has_ended(line.layout) || state.waiting.len() >= WAITING_LIMIT {
            tracing::warn!(
                "connection of {} for layout {} closed: the layout has ended or {WAITING_LIMIT} wait already",
                line.peer,
                line.layout.0
            );
            return;
        }
        state.waiting.insert(line, connection);
        self.arrived.notify_all();
    }

    /// The connection of a line: the lower device dials, the higher one waits for the call.
    pub(super) fn connect(
        &self,
        line: Line,
        addresses: &BTreeMap<GpuId, SocketAddr>,
        limit: Duration,
    ) -> Result<Connection, LineError> {
        let connection = if self.gpu < line.peer {
            let address = *addresses
                .get(&line.peer)
                .ok_or(LineError::Unknown { peer: line.peer })?;
            self.dial(line, address, limit)
                .map_err(|source| LineError::Dial {
                    peer: line.peer,
                    address,
                    source,
                })?
        } else {
            self.wait_for(line, limit)?
        };
        let mut state = self.lock();
        let ended = LineError::Ended { layout: line.layout };
        if state.has_ended(line.layout) {
            return Err(ended);
        }
        // Without a second handle the connection could not be closed from outside; then it is not used at all.
        let handle = connection.duplicate().map_err(|_| ended)?;
        state.in_use.entry(line.layout).or_default().push(handle);
        Ok(connection)
    }

    fn dial(&self, line: Line, address: SocketAddr, limit: Duration) -> Result<Connection, WireError> {
        let connection = Connection::dial(address, limit)?;
        let hello = Hello {
            token: self.admission.token.clone(),
            role: Role::Worker,
            gpu: self.gpu,
            layout: line.layout,
            purpose: line.purpose,
            numerics: self.admission.numerics.clone(),
        };
        handshake::introduce(&connection, &hello)?;
        Ok(connection)
    }

    fn wait_for(&self, line: Line, limit: Duration) -> Result<Connection, LineError> {
        let deadline = Deadline::after(limit);
        let mut state = self.lock();
        loop {
            if let Some(connection) = state.waiting.remove(&line) {
                return Ok(connection);
            }
            if state.has_ended(line.layout) {
                return Err(LineError::Ended { layout: line.layout });
            }
            let Some(remaining) = deadline.remaining() else {
                return Err(LineError::Missing {
                    peer: line.peer,
                    waited_ms: deadline.waited().as_millis() as u64,
                });
            };
            state = self
                .arrived
                .wait_timeout(state, remaining)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Closes every connection of a layout for good.
    pub(super) fn close_layout(&self, layout: HandoverId) {
        let mut state = self.lock();
        state.ended.insert(layout);
        state.waiting.retain(|line, _| line.layout != layout);
        for connection in state.in_use.remove(&layout).unwrap_or_default() {
            connection.close();
        }
        self.arrived.notify_all();
    }

    /// Closes everything and lets nothing new in.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        for connection in std::mem::take(&mut state.in_use).into_values().flatten() {
            connection.close();
        }
        self.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
