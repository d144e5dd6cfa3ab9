//! How a replica changes its layout while tokens flow: one [`Coordinator`] and one [`Participant`] a device,
//! both pure. Events go in, actions come out; the simulator and the executor carry the actions out.
//!
//! 1. **Prepare.** Ranks of the new layout load shadow shards and verify them before they say ready.
//! 2. **KV.** Each [`Lane`] carries one KV slice from a holder to a rank that lacks it, unit by unit
//!    ([`KvUnit`]), as token ranges above a high-water mark: first in rounds, then mirrored step by step.
//! 3. **Commit.** Once every mark is within a step the coordinator names a future step S and makes one
//!    [`Record`] durable by compare-and-swap. That record is the only decision. No step from S on leaves
//!    before it is durable.
//! 4. **Switch in band.** Headers from S on carry the new epoch. The header of S says up to which mark each
//!    live unit must arrive; a rank computes an item when its marks are complete.
//! 5. **Release** once every rank of the new layout has computed S and has every mark, since a unit that sits
//!    idle at S still owes its tail, and once the coordinator has the results of S and all before, since an
//!    old rank that is gone cannot repeat a result that was lost on its way.
//!
//! Before the record anything may abort, and the old epoch stays. After it nothing goes back: a lost rank is a
//! loss in the new epoch. Recovery always takes a new term from the store, reads the record, has the ranks of
//! its layout adopt it and drops their KV, which the scheduler has computed again from the tokens. Every
//! message carries (term, epoch), and lower ones are refused.
//!
//! What the machines rely on: control messages may be lost, doubled and reordered; data of one lane may be
//! lost and doubled but stays in order, as on one connection. A restarted rank comes up empty and is
//! reported to the coordinator as lost, sooner or later.
//!
//! Left out: recovery that keeps the KV of the ranks that live, and more than one replica in one record.

mod coordinator;
mod fault;
mod marks;
mod movement;
mod rank;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use infercluster_spec::{Epoch, GpuId, StepId, Term};
use serde::{Deserialize, Serialize};

pub use crate::scheduler::KvUnit;
pub use coordinator::{
    AbortReason, Coordinator, CoordinatorAction, CoordinatorEvent, Gate, HandoverEnd, HandoverError,
    ServingView,
};
pub use marks::{carried_marks, computed_marks};
pub use rank::{Participant, RankAction, RankEvent};

/// Who speaks: the reign and the layout version in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp {
    /// The coordinator's reign.
    pub term: Term,
    /// The layout version.
    pub epoch: Epoch,
}

/// One attempt to change the layout, and the layout that it makes; a later attempt has a higher id, over all
/// terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HandoverId(pub u64);

/// One KV slice on its way: its position in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u32);

/// A KV slice (some layers and heads of every unit) that a device lacks and another has. A lane from a device to
/// itself carries what it keeps from the old shard's cache into the shadow's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lane {
    /// Which.
    pub id: LaneId,
    /// Who has it.
    pub from: GpuId,
    /// Who will need it.
    pub to: GpuId,
}

/// What moves from the layout in force to the next one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoverPlan {
    /// The attempt.
    pub id: HandoverId,
    /// Devices of the layout in force.
    pub old: BTreeSet<GpuId>,
    /// Devices of the next one.
    pub new: BTreeSet<GpuId>,
    /// KV that moves.
    pub lanes: Vec<Lane>,
}

/// The one durable decision: which layout is in force from which step on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Who wrote it; the swap fails where a later term reigns.
    pub term: Term,
    /// The layout version; the swap fails where it is not the next one.
    pub epoch: Epoch,
    /// The attempt that made the layout.
    pub layout: HandoverId,
    /// Its devices.
    pub roster: BTreeSet<GpuId>,
    /// The first step of that layout.
    pub first_step: StepId,
}

/// A unit and how many of its tokens are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KvMark {
    /// Which unit.
    pub unit: KvUnit,
    /// Tokens from its start.
    pub tokens: u32,
}

/// What a step means for KV: the part of its descriptor that the handover reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepHeader {
    /// Who sends it and which layout computes it.
    pub stamp: Stamp,
    /// Its number.
    pub step: StepId,
    /// Its items.
    pub items: Vec<ItemMark>,
    /// Units that gave their blocks back before it.
    pub released: Vec<KvUnit>,
    /// Present on the first step of a layout: the marks of every unit with KV, as of all steps before.
    pub carried: Option<Vec<KvMark>>,
}

/// New tokens of a unit in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemMark {
    /// Which unit.
    pub unit: KvUnit,
    /// Tokens in its cache before.
    pub start: u32,
    /// New tokens.
    pub count: u32,
}

/// From the coordinator to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Who speaks.
    pub stamp: Stamp,
    /// What to do.
    pub command: Command,
}

/// What a rank is told to do. Each may come twice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Get ready for a new layout.
    Prepare {
        /// The attempt.
        handover: HandoverId,
        /// Whether the rank is in the layout in force.
        leaves_or_stays: bool,
        /// Whether it is in the next one and so needs a shadow shard.
        joins: bool,
        /// Lanes that it receives.
        incoming: Vec<LaneId>,
        /// Lanes that it feeds.
        outgoing: Vec<LaneId>,
    },
    /// Send what was computed so far.
    Copy {
        /// The attempt.
        handover: HandoverId,
    },
    /// From now on send what each step adds with that step.
    Mirror {
        /// The attempt.
        handover: HandoverId,
    },
    /// Drop the shadow.
    Abort {
        /// The attempt.
        handover: HandoverId,
    },
    /// Drop the old layout's shards.
    Release {
        /// The attempt.
        handover: HandoverId,
    },
    /// Serve the layout of that attempt with an empty KV cache.
    Adopt {
        /// The attempt that made the layout.
        layout: HandoverId,
        /// The first step that will come.
        next_step: StepId,
    },
    /// Serve nothing: the layout in force has no seat for this rank.
    Retire,
}

/// From a rank to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The reign that the rank knows.
    pub term: Term,
    /// What it says.
    pub notice: Notice,
}

/// What a rank says. Each may come twice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// The shadow is there and verified.
    Ready {
        /// The attempt.
        handover: HandoverId,
    },
    /// It cannot be.
    Refused {
        /// The attempt.
        handover: HandoverId,
        /// Why.
        reason: RefusalReason,
    },
    /// So much of a unit has arrived.
    Arrived {
        /// The attempt.
        handover: HandoverId,
        /// On which lane.
        lane: LaneId,
        /// How much.
        mark: KvMark,
    },
    /// Every step is mirrored from now on.
    Mirrors {
        /// The attempt.
        handover: HandoverId,
    },
    /// The shadow is gone.
    Aborted {
        /// The attempt.
        handover: HandoverId,
    },
    /// The first step of the new layout is computed and every mark is complete.
    Settled {
        /// The attempt.
        handover: HandoverId,
    },
    /// The old shards are gone.
    Released {
        /// The attempt.
        handover: HandoverId,
    },
    /// The layout of this term is served, or nothing is, as ordered.
    Adopted,
    /// A step is computed.
    Computed {
        /// Which.
        step: StepId,
    },
}

/// Why a rank is not ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum RefusalReason {
    /// No room for the shadow.
    #[error("{missing} are missing for the shadow shard")]
    Memory {
        /// How much.
        missing: infercluster_spec::Bytes,
    },
    /// The probe through the shadow gave other logits.
    #[error("the probe differs from the layout in force, first in layer {layer}")]
    Probe {
        /// The first layer that differs.
        layer: u32,
    },
    /// The shadow cannot be loaded: weights, connections or the probe's run failed.
    #[error("the shadow shard cannot be loaded")]
    Load,
    /// The rank does not serve what it should keep: it has restarted.
    #[error("the rank does not serve the layout in force")]
    NotServing,
}

/// KV on its way between ranks: tokens `from..to` of a unit's slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneData {
    /// The attempt.
    pub handover: HandoverId,
    /// Which slice.
    pub lane: LaneId,
    /// Whose KV.
    pub unit: KvUnit,
    /// First token.
    pub from: u32,
    /// One past the last token.
    pub to: u32,
}

/// How much of a unit has arrived, told to who sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneAck {
    /// The attempt.
    pub handover: HandoverId,
    /// Which slice.
    pub lane: LaneId,
    /// How much.
    pub mark: KvMark,
}
