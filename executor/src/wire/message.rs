//! Control messages between coordinator and worker.
//!
//! Everything that changes a worker carries (term, epoch); a worker refuses lower ones. Documents travel as
//! their JSON text, since it is the one form that every version can read and name the fault in.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use infercluster_serving::handover::{Answer, HandoverId, KvMark, KvUnit, Order, RefusalReason};
use infercluster_spec::json::{self, Document, DocumentError};
use infercluster_spec::{Bytes, BytesPerSec, Epoch, GpuId, SegmentKind, SequenceId, StepId, Term};
use serde::{Deserialize, Serialize};

use crate::lanes::KvLane;
use crate::probe::ProbeTrace;
use crate::speed::{Speed, TimesByKind};
use crate::step::StepDescriptor;

/// A document as JSON text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentText(String);

impl DocumentText {
    /// Writes a document.
    pub fn of<T: Document>(document: &T) -> Self {
        Self(json::write(document))
    }

    /// Reads it back.
    pub fn read<T: Document>(&self) -> Result<T, DocumentError> {
        json::read("message", &self.0)
    }
}

/// What a worker needs to know of a layout before it is ordered to load it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepare {
    /// The coordinator's reign.
    pub term: Term,
    /// The attempt that makes the layout: the name that orders use.
    pub layout_id: HandoverId,
    /// The layout version that it is to be.
    pub epoch: Epoch,
    /// The model.
    pub model: DocumentText,
    /// The whole layout; the worker finds its seat by its device.
    pub layout: DocumentText,
    /// Where the checkpoint is, on every worker's host.
    pub model_dir: PathBuf,
    /// Blocks of the replica's KV pool.
    pub kv_blocks: u32,
    /// Most tokens of one step.
    pub token_budget: u32,
    /// Where each device's worker listens for its peers.
    pub peers: BTreeMap<GpuId, SocketAddr>,
    /// How long a peer may be silent inside a collective.
    pub peer_deadline: Duration,
    /// The share of its speed at which an emulated device runs.
    pub speed: Speed,
    /// What weights and KV of all its layouts together may take, where it is limited.
    pub memory: Option<Bytes>,
    /// What is there only where the layout replaces one that serves.
    pub shadow: Option<Shadow>,
}

/// What a layout has to know of the one that it replaces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shadow {
    /// What its probe must give.
    pub expected: ProbeTrace,
    /// KV that moves to it.
    pub lanes: Vec<KvLane>,
    /// How fast a device gives KV while it serves, until marks are within a step.
    pub copy_rate: Option<BytesPerSec>,
}

/// What the coordinator wants back for one item beside its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Wants {
    /// The logits of the last position.
    pub logits: bool,
    /// The hash of the logits' bits.
    pub hash: bool,
}

/// One step for every rank of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOrder {
    /// What to compute.
    pub descriptor: StepDescriptor,
    /// What to answer, one an item.
    pub wants: Vec<Wants>,
    /// How often each item's sequence was preempted: with its id, its KV unit. One an item.
    pub incarnations: Vec<u32>,
    /// Units that gave their blocks back before this step.
    pub released: Vec<KvUnit>,
    /// On the first step of a layout: the marks of every unit with KV, as of all steps before.
    pub carried: Option<Vec<KvMark>>,
}

/// What one item gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Whose.
    pub sequence: SequenceId,
    /// The token with the highest logit, ties to the lowest id.
    pub token: u32,
    /// xxh3 over the logits' bits, where it was asked for.
    pub logits_hash: Option<u64>,
    /// The logits, where they were asked for.
    pub logits: Option<Vec<f32>>,
}

/// Where one step's time went on one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// The step.
    pub step: StepId,
    /// Seconds of the step on this worker, without waiting for the stage before.
    pub wall_s: f64,
    /// Paced compute seconds by kind of segment.
    pub compute_s: BTreeMap<SegmentKind, f64>,
}

/// Where a worker's time went since it was last asked.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WorkerTimes {
    /// Steps.
    pub steps: u64,
    /// Compute and pacing by kind of segment.
    pub segments: TimesByKind,
    /// Seconds inside steps: compute, pacing, collectives and waiting for other stages.
    pub step_s: f64,
    /// Seconds of waiting for activations of the stage before.
    pub upstream_s: f64,
    /// The latest steps one by one, oldest first; a limited number.
    pub latest: Vec<StepTimes>,
}

/// From coordinator to worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Know a layout, and make the KV connections that lead to it.
    Prepare(Box<Prepare>),
    /// An order of the handover.
    Order(Order),
    /// Compute a step.
    Step(StepOrder),
    /// The replica is given up: drop everything.
    GiveUp {
        /// The coordinator's reign.
        term: Term,
    },
    /// Answer with [`FromWorker::Times`] once every earlier step is done, and count from zero.
    TakeTimes,
    /// Answer with [`FromWorker::Pong`] at once.
    Ping,
    /// End.
    Stop,
}

/// From worker to coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The first message: where peers reach it.
    Joined {
        /// Its listener.
        listen: SocketAddr,
        /// Its process.
        process: u32,
        /// Hash of the rotations that the welcome named, as this host computes them.
        rotations: u64,
    },
    /// A word of the handover.
    Answer(Answer),
    /// A layout's runtime stands, its peers are connected, its probe was as expected.
    Loaded {
        /// Which.
        layout_id: HandoverId,
        /// Bytes of weights and KV pool.
        bytes: Bytes,
        /// What the probe gave on this rank.
        trace: ProbeTrace,
    },
    /// A layout's runtime cannot be built; what runs goes on.
    LoadFailed {
        /// Which.
        layout_id: HandoverId,
        /// What the handover makes of it.
        refusal: RefusalReason,
        /// Why.
        reason: String,
    },
    /// A KV connection does not stand or has ended.
    LaneFailed {
        /// Which handover's.
        layout_id: HandoverId,
        /// The other end.
        peer: GpuId,
        /// Why.
        reason: String,
    },
    /// A step is done: sent by rank 0 of the last stage.
    StepDone {
        /// The coordinator's reign.
        term: Term,
        /// The layout version.
        epoch: Epoch,
        /// Its number.
        step: StepId,
        /// One an item that wanted logits, in the order of the items.
        outputs: Vec<StepOutput>,
    },
    /// A step cannot be computed; the runtime of its epoch is of no use any more.
    StepFailed {
        /// The layout version.
        epoch: Epoch,
        /// Its number.
        step: StepId,
        /// Why.
        reason: String,
        /// The device whose fault it is, where it is not this one.
        peer: Option<GpuId>,
    },
    /// Where its time went.
    Times(WorkerTimes),
    /// It lives.
    Pong,
    /// The first step of a layout is computed here; said once, before the handover hears of it.
    Switched {
        /// Which layout.
        layout_id: HandoverId,
        /// How long it took.
        times: SwitchTimes,
    },
}

/// What a rank did between its last step of the old layout and the end of its first of the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SwitchTimes {
    /// From having the step to having every mark that it needs.
    pub marks: Duration,
    /// Sending what others still lacked, before computing.
    pub tail: Duration,
    /// Computing, with the waits for other ranks and stages.
    pub compute: Duration,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn random_bytes_are_no_reason_to_panic(bytes: Vec<u8>) {
            // Whatever they decode to, decoding ends.
            let _ = postcard::from_bytes::<ToWorker>(&bytes);
            let _ = postcard::from_bytes::<FromWorker>(&bytes);
        }
    }

    #[test]
    fn messages_survive_the_wire() {
        let order = StepOrder {
            descriptor: StepDescriptor {
                term: Term(1),
                epoch: Epoch(2),
                step: StepId(3),
                items: Vec::new(),
            },
            wants: vec![Wants {
                logits: true,
                hash: false,
            }],
            incarnations: vec![1],
            released: Vec::new(),
            carried: None,
        };
        let message = ToWorker::Step(order);
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert_eq!(postcard::from_bytes::<ToWorker>(&bytes).unwrap(), message);
    }
}
