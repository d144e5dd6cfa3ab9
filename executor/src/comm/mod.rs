//! Collectives of one tensor-parallel group.

mod exchange;
pub mod local;
mod solo;
mod tcp;

pub use solo::Solo;
pub use tcp::{TcpCommunicator, TensorLink};

use infercluster_spec::Rank;

use crate::backend::Backend;
use crate::wire::WireError;

/// Why a collective did not end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer sent nothing in time.
    #[error("{peer} sent nothing for {waited_ms} ms in {what}")]
    Silent {
        /// Who.
        peer: Rank,
        /// How long was waited.
        waited_ms: u64,
        /// Which collective.
        what: &'static str,
    },
    /// A peer's connection ended.
    #[error("the connection to {peer} ended in {what}")]
    Closed {
        /// Who.
        peer: Rank,
        /// Which collective.
        what: &'static str,
    },
    /// A peer sent what this rank did not expect.
    #[error("{peer} sent {found} bytes where {expected} were expected in {what}")]
    Mismatch {
        /// Who.
        peer: Rank,
        /// Bytes found.
        found: u64,
        /// Bytes expected.
        expected: u64,
        /// Which collective.
        what: &'static str,
    },
    /// A peer is at another collective: the ranks did not issue the same calls.
    #[error("{peer} is at exchange {found} where this rank is at {expected} in {what}")]
    OutOfStep {
        /// Who.
        peer: Rank,
        /// Which collective.
        what: &'static str,
        /// The peer's number.
        found: u32,
        /// This rank's number.
        expected: u32,
    },
    /// A peer's frame cannot be used, or a tensor is too large for a frame.
    #[error("{peer} in {what}: {source}")]
    Damaged {
        /// Who.
        peer: Rank,
        /// Which collective.
        what: &'static str,
        /// What is wrong.
        source: WireError,
    },
}

impl CommError {
    /// The peer that the error is about.
    pub fn peer(&self) -> Rank {
        match self {
            Self::Silent { peer, .. }
            | Self::Closed { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::OutOfStep { peer, .. }
            | Self::Damaged { peer, .. } => *peer,
        }
    }
}

/// One rank's end of a tensor-parallel group. Every rank issues the same calls in the same order.
pub trait Communicator<B: Backend>: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Uneven gather: rank `r` gives its first `counts[r]` elements; `out` holds all of them in rank order
    /// on every rank. `mine` and `out` are different buffers.
    fn all_gather(
        &mut self,
        mine: &B::Buffer,
        counts: &[usize],
        out: &mut B::Buffer,
    ) -> Result<(), CommError>;

    /// Sum of the first `len` elements over ranks, added in rank order, the same bits on every rank.
    fn all_reduce(&mut self, data: &mut B::Buffer, len: usize) -> Result<(), CommError>;
}

#[cfg(test)]
mod tests;
