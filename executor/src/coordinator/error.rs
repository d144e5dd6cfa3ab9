//! What can go wrong at the start, and what a request can hear.

use infercluster_serving::Refusal;
use infercluster_spec::validate::LayoutViolations;
use infercluster_spec::{Bytes, Epoch, GpuId, ReplicaId};

use crate::store::StoreError;
use crate::wire::{Unwelcome, WireError};

/// Why a coordinator does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// The layout breaks its rules.
    #[error(transparent)]
    Layout(#[from] LayoutViolations),
    /// Batching options that cannot work.
    #[error(transparent)]
    Scheduler(#[from] infercluster_serving::SchedulerError),
    /// A KV block without tokens.
    #[error(transparent)]
    BlockSize(#[from] infercluster_serving::ledger::BadBlockSize),
    /// No memory for KV beside the weights.
    #[error("{replica} has room for {blocks} KV blocks within {memory} a worker, at least 1 is needed")]
    Memory {
        /// Which copy of the model.
        replica: ReplicaId,
        /// Blocks that fit.
        blocks: u64,
        /// What a worker may use.
        memory: Bytes,
    },
    /// The record of the first layout cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The control port cannot be opened.
    #[error("control port: {source}")]
    Listen {
        /// Why.
        source: WireError,
    },
    /// The system gave no random bytes for the token.
    #[error("no randomness for the token: {source}")]
    Token {
        /// What the system says.
        source: getrandom::Error,
    },
    /// A worker cannot be started.
    #[error("the worker of {gpu} cannot be started: {source}")]
    Spawn {
        /// Its device.
        gpu: GpuId,
        /// What the system says.
        source: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("starting a thread: {source}")]
    Thread {
        /// What the system says.
        source: std::io::Error,
    },
    /// Workers that did not come.
    #[error("the worker of {gpu} did not join within {waited_ms} ms")]
    Missing {
        /// The first missing device.
        gpu: GpuId,
        /// How long was waited.
        waited_ms: u64,
    },
    /// A worker that does not compute what the layout asks for.
    #[error("a worker was refused: {source}")]
    Unwelcome {
        /// Its device.
        gpu: GpuId,
        /// Why.
        source: Unwelcome,
    },
    /// A worker that ended before it was ready.
    #[error("{description}")]
    Lost {
        /// Its device.
        gpu: GpuId,
        /// Who and how.
        description: String,
    },
    /// A worker that cannot take its seat.
    #[error("{gpu} cannot take its seat in {epoch}: {reason}")]
    Prepare {
        /// Its device.
        gpu: GpuId,
        /// Which layout.
        epoch: Epoch,
        /// Why, in the worker's words.
        reason: String,
    },
    /// Ranks or replicas that compute different numbers.
    #[error("the probe of {gpu} differs from that of the others, first in layer {layer}")]
    Probe {
        /// Which device.
        gpu: GpuId,
        /// The first layer that differs; one past the last for the LM head.
        layer: u32,
    },
    /// A layout that took too long to load.
    #[error("{gpu} did not load its part of {epoch} within {waited_ms} ms")]
    Load {
        /// The first device that is not ready.
        gpu: GpuId,
        /// Which layout.
        epoch: Epoch,
        /// How long was waited.
        waited_ms: u64,
    },
}

/// What a request can hear instead of tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// It can never run here.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A token that the model does not have.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// A worker is gone.
    #[error("{description}")]
    WorkerLost {
        /// Its device.
        gpu: GpuId,
        /// Who and how.
        description: String,
    },
    /// The service ends.
    #[error("the service is stopping")]
    Stopped,
}

impl RequestError {
    /// Whether the request itself is at fault.
    pub fn is_bad_request(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::UnknownToken { .. })
    }
}
