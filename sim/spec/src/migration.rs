//! How to get from one layout to another: phases, each ending in a valid layout.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, LinkId, ReplicaId};
use crate::json::Document;
use crate::layout::Layout;
use crate::range::IndexRange;
use crate::units::{Bytes, SimDuration};

/// A migration as the planner made it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationPlan {
    /// Where it starts.
    pub from: Layout,
    /// The way, at least one phase.
    pub phases: Vec<MigrationPhase>,
}

impl Document for MigrationPlan {
    const SCHEMA: &'static str = "infercluster-migration/1";
}

/// One step of the way, committed on its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationPhase {
    /// The layout that runs after it.
    pub to: Layout,
    /// What moves.
    pub transfers: Vec<Transfer>,
    /// Largest memory in use on each device while it runs: old and shadow shards, KV excluded.
    pub memory_peak: BTreeMap<GpuId, Bytes>,
    /// Lower bound on its time: the busiest link, port or cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_bound: Option<SimDuration>,
    /// Predicted time from prepare to commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<SimDuration>,
    /// Predicted gap that a stream sees at the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<SimDuration>,
}

/// A matrix of a layer that is cut along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightKind {
    /// Query projection, by query heads.
    Query,
    /// Key and value projections, by KV heads.
    KeyValue,
    /// Output projection, by query heads (`fast`) or output rows (`invariant`).
    Output,
    /// Gate and up projections, by MLP columns.
    GateUp,
    /// Down projection, by MLP columns (`fast`) or output rows (`invariant`).
    Down,
    /// Both norms of a layer, never cut.
    Norms,
    /// LM head, by vocabulary rows, with the final norm.
    LmHead,
}

/// What one transfer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case", deny_unknown_fields)]
pub enum TransferItem {
    /// A slice of the weights.
    Weights {
        /// Which matrix.
        kind: WeightKind,
        /// Which layers.
        layers: IndexRange,
        /// Which indices of the cut axis.
        indices: IndexRange,
    },
    /// Keys and values of every live sequence of a replica.
    Kv {
        /// Which copy of the model.
        replica: ReplicaId,
        /// Which layers.
        layers: IndexRange,
        /// Which KV heads.
        kv_heads: IndexRange,
    },
}

/// Where a transfer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferSource {
    /// The checkpoint on the target's own host.
    Disk,
    /// Another device.
    Gpu(GpuId),
}

/// One piece on its way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// What it carries.
    pub item: TransferItem,
    /// Where it reads.
    pub from: TransferSource,
    /// Who receives.
    pub to: GpuId,
    /// Links that it crosses; empty inside a host without a topology.
    #[serde(default)]
    pub route: Vec<LinkId>,
    /// Bytes that move. For KV: of one token, since the number of live tokens is known at run time only.
    pub bytes: Bytes,
}
