//! The engine below every tensor message: several sends and receives at once on non-blocking sockets.
//!
//! Sending and receiving advance together, so two ranks that send large messages to each other never wait for
//! one another's receive buffer. Waiting spins, then parks in `poll`: spinning alone starves a short machine, and a
//! core that idles in every layer wakes late, most of all under a hypervisor. A wait spins longer, giving its core
//! to whoever else wants it, where this machine has a core for every rank of the exchange.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::CommError;
use crate::clock::Deadline;
use crate::cores;
use crate::wire::WireError;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use infercluster_spec::Rank;

/// How long a wait spins before it parks or yields.
const SPIN: Duration = Duration::from_micros(20);
/// How long it yields before it parks, where there are cores enough: about a segment of a small model.
const YIELD: Duration = Duration::from_micros(1500);

/// What one exchange does on one socket.
pub(super) struct Lane<'a> {
    pub(super) peer: Rank,
    pub(super) stream: &'a TcpStream,
    outgoing: Option<Outgoing<'a>>,
    incoming: Option<Incoming<'a>>,
}

struct Outgoing<'a> {
    head: [u8; HEADER_BYTES],
    body: &'a [u8],
    sent: usize,
}

struct Incoming<'a> {
    head: [u8; HEADER_BYTES],
    body: &'a mut [u8],
    received: usize,
    tag: u32,
}

impl<'a> Lane<'a> {
    /// A socket with nothing to do yet.
    pub(super) fn new(peer: Rank, stream: &'a TcpStream) -> Self {
        Self {
            peer,
            stream,
            outgoing: None,
            incoming: None,
        }
    }

    /// Adds a tensor to send.
    pub(super) fn send(&mut self, tag: u32, body: &'a [u8], what: &'static str) -> Result<(), CommError> {
        let head = Header::of(Kind::Tensor, tag, body)
            .map_err(|source| CommError::Damaged {
                peer: self.peer,
                what,
                source,
            })?
            .encode();
        self.outgoing = Some(Outgoing { head, body, sent: 0 });
        Ok(())
    }

    /// Adds a tensor to receive: exactly as many bytes as `body` has.
    pub(super) fn receive(&mut self, tag: u32, body: &'a mut [u8]) {
        self.incoming = Some(Incoming {
            head: [0; HEADER_BYTES],
            body,
            received: 0,
            tag,
        });
    }

    fn is_done(&self) -> bool {
        self.outgoing.is_none() && self.incoming.is_none()
    }

    /// Moves what moves without waiting; whether anything did.
    fn advance(&mut self, what: &'static str) -> Result<bool, CommError> {
        let mut moved = false;
        if let Some(outgoing) = &mut self.outgoing {
            moved |= outgoing.advance(self.stream, self.peer, what)?;
            if outgoing.sent == HEADER_BYTES + outgoing.body.len() {
                self.outgoing = None;
            }
        }
        if let Some(incoming) = &mut self.incoming {
            moved |= incoming.advance(self.stream, self.peer, what)?;
            if incoming.received == HEADER_BYTES + incoming.body.len() {
                incoming.verify(self.peer, what)?;
                self.incoming = None;
            }
        }
        Ok(moved)
    }

    fn interest(&self) -> libc::pollfd {
        let mut events = 0;
        if self.outgoing.is_some() {
            events |= libc::POLLOUT;
        }
        if self.incoming.is_some() {
            events |= libc::POLLIN;
        }
        libc::pollfd {
            fd: self.stream.as_raw_fd(),
            events,
            revents: 0,
        }
    }
}

impl Outgoing<'_> {
    fn advance(&mut self, mut stream: &TcpStream, peer: Rank, what: &'static str) -> Result<bool, CommError> {
        let mut moved = false;
        while self.sent < HEADER_BYTES + self.body.len() {
            let head = &self.head[self.sent.min(HEADER_BYTES)..];
            let body = &self.body[self.sent.saturating_sub(HEADER_BYTES)..];
            match stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
                Ok(0) => return Err(CommError::Closed { peer, what }),
                Ok(count) => {
                    self.sent += count;
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(CommError::Closed { peer, what }),
            }
        }
        Ok(moved)
    }
}

impl Incoming<'_> {
    fn advance(&mut self, mut stream: &TcpStream, peer: Rank, what: &'static str) -> Result<bool, CommError> {
        let mut moved = false;
        while self.received < HEADER_BYTES + self.body.len() {
            let target = if self.received < HEADER_BYTES {
                &mut self.head[self.received..]
            } else {
                &mut self.body[self.received - HEADER_BYTES..]
            };
            match stream.read(target) {
                Ok(0) => return Err(CommError::Closed { peer, what }),
                Ok(count) => {
                    self.received += count;
                    moved = true;
                    if self.received == HEADER_BYTES {
                        self.expect(peer, what)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(CommError::Closed { peer, what }),
            }
        }
        Ok(moved)
    }

    /// Compares the header with what this rank waits for, before a byte of the body is read.
    fn expect(&self, peer: Rank, what: &'static str) -> Result<(), CommError> {
        let header =
            Header::decode(&self.head).map_err(|source| CommError::Damaged { peer, what, source })?;
        if header.kind != Kind::Tensor {
            let source = WireError::UnexpectedKind {
                found: header.kind,
                expected: Kind::Tensor,
            };
            return Err(CommError::Damaged { peer, what, source });
        }
        if header.tag != self.tag {
            return Err(CommError::OutOfStep {
                peer,
                what,
                found: header.tag,
                expected: self.tag,
            });
        }
        if header.length as usize != self.body.len() {
            return Err(CommError::Mismatch {
                peer,
                found: u64::from(header.length),
                expected: self.body.len() as u64,
                what,
            });
        }
        Ok(())
    }

    fn verify(&self, peer: Rank, what: &'static str) -> Result<(), CommError> {
        Header::decode(&self.head)
            .and_then(|header| header.verify(self.body))
            .map_err(|source| CommError::Damaged { peer, what, source })
    }
}

/// Runs every lane to its end; the first peer that is not done at the deadline is named.
pub(super) fn run(lanes: &mut [Lane], limit: Duration, what: &'static str) -> Result<(), CommError> {
    let deadline = Deadline::after(limit);
    // One lane a peer, and this rank.
    let patience = if lanes.len() < cores::of_this_process() {
        YIELD
    } else {
        SPIN
    };
    let mut idle = Deadline::after(patience);
    loop {
        let mut moved = false;
        for lane in lanes.iter_mut().filter(|lane| !lane.is_done()) {
            moved |= lane.advance(what)?;
        }
        let Some(waiting) = lanes.iter().find(|lane| !lane.is_done()) else {
            return Ok(());
        };
        if moved {
            idle = Deadline::after(patience);
        } else if idle.waited() < SPIN {
            std::hint::spin_loop();
        } else if idle.remaining().is_some() {
            std::thread::yield_now();
        } else {
            let Some(remaining) = deadline.remaining() else {
                return Err(CommError::Silent {
                    peer: waiting.peer,
                    waited_ms: deadline.waited().as_millis() as u64,
                    what,
                });
            };
            park(lanes, remaining);
        }
    }
}

/// Sleeps until a socket is ready or the time is over; a spurious return is harmless.
fn park(lanes: &[Lane], limit: Duration) {
    let mut interests: Vec<libc::pollfd> = lanes
        .iter()
        .filter(|lane| !lane.is_done())
        .map(Lane::interest)
        .collect();
    let milliseconds = limit.as_millis().clamp(1, 60_000) as libc::c_int;
    // SAFETY: the pointer and length describe a live vector of `pollfd`, and its file descriptors belong to
    // streams that the lanes borrow for the whole call. A failing call changes nothing, and `run` looks again.
    unsafe {
        libc::poll(
            interests.as_mut_ptr(),
            interests.len() as libc::nfds_t,
            milliseconds,
        );
    }
}
