//! Frames between coordinator, workers and ranks over TCP.
//!
//! Every connection opens with a handshake ([`handshake`]) that proves the shared token; after it, each side
//! sends frames ([`frame`]): a fixed header with magic, version, kind, length and checksum, then the body.
//! Control messages ([`message`]) are encoded with postcard, tensors are raw little-endian f32.
//!
//! Invariants: no length from a peer is used before it was compared with a limit, memory grows only with bytes
//! that really arrived, and every read and write has a deadline.

pub mod connection;
pub mod frame;
pub mod handshake;
pub mod lane;
pub mod listener;
pub mod message;

pub use connection::Connection;
pub use frame::{Header, Kind, VERSION};
pub use handshake::{Admission, Hello, Purpose, Role, Rotations, Token, Unwelcome};
pub use lane::{LaneFrame, LaneHeader};
pub use listener::Listener;
pub use message::{FromWorker, ToWorker};

/// Why a frame or a handshake was not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The system refused a read or write.
    #[error("{what} failed: {source}")]
    Io {
        /// What was done.
        what: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// The peer closed the connection.
    #[error("the connection ended in {what}")]
    Closed {
        /// What was done.
        what: &'static str,
    },
    /// The peer was silent for too long.
    #[error("nothing came for {waited_ms} ms in {what}")]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        waited_ms: u64,
    },
    /// The first bytes are not those of a frame.
    #[error("the peer does not speak this protocol: it sent {found:02x?} where a frame begins")]
    Magic {
        /// What was found.
        found: [u8; 4],
    },
    /// A frame of another version.
    #[error("the peer speaks wire version {found}, this program speaks {expected}")]
    Version {
        /// The peer's version.
        found: u16,
        /// This program's version.
        expected: u16,
    },
    /// A kind that this version does not have.
    #[error("frame kind {found} is unknown")]
    UnknownKind {
        /// What was found.
        found: u16,
    },
    /// A frame that does not belong here.
    #[error("a {found} frame came where a {expected} frame belongs")]
    UnexpectedKind {
        /// What was found.
        found: Kind,
        /// What belongs here.
        expected: Kind,
    },
    /// A frame past the limit of its kind.
    #[error("a {kind} frame of {length} bytes is longer than the limit of {limit}")]
    TooLong {
        /// Its kind.
        kind: Kind,
        /// Its length.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// Damaged bytes.
    #[error("a {kind} frame of {length} bytes is damaged: its checksum does not hold")]
    Checksum {
        /// Its kind.
        kind: Kind,
        /// Its length.
        length: u32,
    },
    /// A body that is no message.
    #[error("a {kind} frame holds no message of this version: {source}")]
    Undecodable {
        /// Its kind.
        kind: Kind,
        /// What the decoder says.
        source: postcard::Error,
    },
    /// The acceptor said no.
    #[error("the peer refused the connection: {reason}")]
    Refused {
        /// Why, in the peer's words.
        reason: String,
    },
    /// This side said no.
    #[error(transparent)]
    Unwelcome(#[from] handshake::Unwelcome),
}
