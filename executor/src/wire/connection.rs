//! A connection that carries control messages: blocking, with deadlines.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::WireError;
use super::frame::{HEADER_BYTES, Header, Kind};
use crate::clock::Deadline;

/// How long the rest of a frame may take once its first byte is there, and how long a write may take.
const FRAME_DEADLINE: Duration = Duration::from_secs(20);
/// Memory that is set aside for a body before any of it arrived.
const FIRST_ALLOCATION: usize = 64 << 10;

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
}

impl Connection {
    /// Takes a connected socket over: small messages are sent at once.
    pub fn new(stream: TcpStream) -> Result<Self, WireError> {
        stream
            .set_nodelay(true)
            .map_err(|source| io("setting TCP_NODELAY", source))?;
        stream
            .set_write_timeout(Some(FRAME_DEADLINE))
            .map_err(|source| io("setting a write timeout", source))?;
        Ok(Self { stream })
    }

    /// Connects; `limit` bounds the time.
    pub fn dial(address: SocketAddr, limit: Duration) -> Result<Self, WireError> {
        let stream =
            TcpStream::connect_timeout(&address, limit).map_err(|source| io("connecting", source))?;
        Self::new(stream)
    }

    /// A second handle on the same connection, so that one thread reads while another writes.
    pub fn duplicate(&self) -> Result<Self, WireError> {
        let stream = self
            .stream
            .try_clone()
            .map_err(|source| io("duplicating a socket", source))?;
        Ok(Self { stream })
    }

    /// Ends the connection for every handle: blocked reads return.
    pub fn close(&self) {
        // A socket that is not connected any more is already what is asked for.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// How long a write may take, where the usual limit is too short.
    pub fn set_write_limit(&self, limit: Duration) -> Result<(), WireError> {
        self.stream
            .set_write_timeout(Some(limit))
            .map_err(|source| io("setting a write timeout", source))
    }

    /// The other end.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    /// The bare socket.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Sends a message as one frame.
    pub fn send<T: Serialize>(&self, kind: Kind, message: &T) -> Result<(), WireError> {
        let body = postcard::to_stdvec(message).map_err(|source| WireError::Undecodable { kind, source })?;
        self.send_bytes(kind, &body)
    }

    /// Sends a body as one frame.
    pub fn send_bytes(&self, kind: Kind, body: &[u8]) -> Result<(), WireError> {
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
        frame.extend_from_slice(&Header::of(kind, 0, body)?.encode());
        frame.extend_from_slice(body);
        (&self.stream)
            .write_all(&frame)
            .map_err(|source| match source.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => WireError::Deadline {
                    what: "sending a message",
                    waited_ms: FRAME_DEADLINE.as_millis() as u64,
                },
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => WireError::Closed {
                    what: "sending a message",
                },
                _ => io("sending a message", source),
            })
    }

    /// Waits for a message of one kind; `idle` bounds the wait for its first byte.
    pub fn receive<T: DeserializeOwned>(&self, expected: Kind, idle: Duration) -> Result<T, WireError> {
        let (kind, body) = self.receive_bytes(idle, expected.limit())?;
        match kind {
            found if found == expected => {
                postcard::from_bytes(&body).map_err(|source| WireError::Undecodable { kind, source })
            }
            Kind::Refused => Err(WireError::Refused {
                reason: printable(&body),
            }),
            found => Err(WireError::UnexpectedKind { found, expected }),
        }
    }

    /// Waits for any frame of at most `limit` bytes; `idle` bounds the wait for its first byte.
    pub fn receive_bytes(&self, idle: Duration, limit: u32) -> Result<(Kind, Vec<u8>), WireError> {
        let mut head = [0; HEADER_BYTES];
        self.read_exact(&mut head[..1], Deadline::after(idle), "waiting for a message")?;
        let deadline = Deadline::after(FRAME_DEADLINE.min(idle));
        self.read_exact(&mut head[1..], deadline, "reading a message header")?;
        let header = Header::decode(&head)?;
        if header.length > limit {
            return Err(WireError::TooLong {
                kind: header.kind,
                length: u64::from(header.length),
                limit: u64::from(limit),
            });
        }
        let body = self.read_body(header.length as usize, deadline)?;
        header.verify(&body)?;
        Ok((header.kind, body))
    }

    /// Memory grows with what arrives: a header alone makes nobody allocate its claim.
    fn read_body(&self, length: usize, deadline: Deadline) -> Result<Vec<u8>, WireError> {
        let mut body = Vec::new();
        while body.len() < length {
            let from = body.len();
            body.resize(length.min((2 * from).max(FIRST_ALLOCATION)), 0);
            self.read_exact(&mut body[from..], deadline, "reading a message")?;
        }
        Ok(body)
    }

    fn read_exact(&self, buffer: &mut [u8], deadline: Deadline, what: &'static str) -> Result<(), WireError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let expired = || WireError::Deadline {
                what,
                waited_ms: deadline.waited().as_millis() as u64,
            };
            let remaining = deadline.remaining().ok_or_else(expired)?;
            self.stream
                .set_read_timeout(Some(remaining))
                .map_err(|source| io(what, source))?;
            match (&self.stream).read(&mut buffer[filled..]) {
                Ok(0) => return Err(WireError::Closed { what }),
                Ok(count) => filled += count,
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => return Err(expired()),
                    ErrorKind::ConnectionReset => return Err(WireError::Closed { what }),
                    _ => return Err(io(what, error)),
                },
            }
        }
        Ok(())
    }
}

fn io(what: &'static str, source: std::io::Error) -> WireError {
    WireError::Io { what, source }
}

/// A peer's text, safe to print: control characters and what is no UTF-8 are replaced.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|letter| {
            if letter.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                letter
            }
        })
        .collect()
}
