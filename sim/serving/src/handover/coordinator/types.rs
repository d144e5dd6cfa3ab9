//! What goes into the coordinator's machine and what comes out.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::{GpuId, StepId, Term};

use crate::handover::{Answer, HandoverId, KvUnit, LaneId, Order, Record, RefusalReason, Stamp};

/// What happens to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoordinatorEvent {
    /// A rank speaks.
    Answer {
        /// Which.
        from: GpuId,
        /// What it says.
        answer: Answer,
    },
    /// The record of [`CoordinatorAction::Write`] that made this layout is durable.
    Written(HandoverId),
    /// The store has refused a record that was written in this term, since a later term holds: this
    /// coordinator's own, or another one's that reigns now.
    WriteRefused(Term),
    /// The store has refused a term above this one: another coordinator has taken it.
    TermRefused(Term),
    /// A rank has died or restarted.
    RankLost(GpuId),
    /// The store has given a higher term, and this is the record that holds in it.
    TermTaken {
        /// The term.
        term: Term,
        /// The record.
        record: Record,
    },
    /// Preparing and copying have taken longer than they may.
    Deadline,
    /// Time passes: what may be lost is said again.
    Tick,
}

/// What the coordinator's driver is to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoordinatorAction {
    /// Tell a rank.
    Tell {
        /// Which.
        to: GpuId,
        /// What.
        order: Order,
    },
    /// Swap the record in where the store's term is this record's and its epoch the one before; answer with
    /// [`CoordinatorEvent::Written`] or [`CoordinatorEvent::WriteRefused`].
    Write(Record),
    /// Take a term above this one; answer with [`CoordinatorEvent::TermTaken`] or
    /// [`CoordinatorEvent::TermRefused`].
    TakeTerm {
        /// The term that was in force.
        above: Term,
    },
    /// All KV of the replica is void: every live sequence is prefilled again, steps in flight will not come.
    LoseKv,
    /// Hold waiting sequences back, or let them in.
    Throttle(bool),
    /// A handover has ended.
    Ended(HandoverEnd),
}

/// How a handover ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverEnd {
    /// The new layout is in force and the old one is gone.
    Committed {
        /// The attempt.
        handover: HandoverId,
        /// Whether a rank was lost on the way, so that KV is computed again.
        with_loss: bool,
    },
    /// The old layout stays.
    Aborted {
        /// The attempt.
        handover: HandoverId,
        /// Why.
        reason: AbortReason,
    },
}

/// Why a handover was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AbortReason {
    /// A rank cannot take its part.
    #[error("{gpu} refuses: {reason}")]
    Refused {
        /// Which.
        gpu: GpuId,
        /// Why.
        reason: RefusalReason,
    },
    /// A rank is gone.
    #[error("a rank was lost before the commit")]
    RankLost,
    /// It took too long.
    #[error("the handover was not ready to commit in time")]
    Deadline,
}

/// Why a handover does not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// Another one is under way, or a recovery.
    #[error("a handover or a recovery is under way")]
    Busy,
    /// The plan starts elsewhere.
    #[error("the plan leaves devices that are not those of the layout in force")]
    WrongStart,
    /// The plan leads nowhere.
    #[error("the plan leads to a layout without devices")]
    Empty,
    /// The id is not above that of the layout in force.
    #[error("the id of the plan is not above {}, that of the layout in force", layout.0)]
    UsedId {
        /// The id.
        layout: HandoverId,
    },
    /// A lane that starts outside the old layout or ends outside the new one.
    #[error("lane {} does not lead from a device of the old layout to another of the new one", lane.0)]
    BadLane {
        /// Which.
        lane: LaneId,
    },
}

/// What the scheduler looks like now.
#[derive(Debug, Clone, Copy)]
pub struct ServingView<'a> {
    /// The number of the next step.
    pub next_step: StepId,
    /// Every step below this one has completed: its results are here.
    pub completed_below: StepId,
    /// Steps that are planned while a record is written: how far ahead a commit names its step.
    pub lead: u64,
    /// Whether nobody has work: a commit then names the very next step, and the driver sends it empty.
    pub is_idle: bool,
    /// Tokens in the cache of each live unit, completed steps only.
    pub computed: &'a BTreeMap<KvUnit, u32>,
    /// Tokens that one step adds: how far marks may be behind when mirroring begins.
    pub step_tokens: u64,
}

/// Whether and how a step may leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// Not yet.
    Hold,
    /// To these ranks.
    Go {
        /// The stamp of its header.
        stamp: Stamp,
        /// Whether it is the first of its layout, so that its header says what is carried.
        is_first: bool,
        /// Who computes it.
        roster: BTreeSet<GpuId>,
    },
}
