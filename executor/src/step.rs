//! What one step computes: the language between scheduler, wire and model.

use infercluster_spec::{Epoch, KvBlockId, SequenceId, StepId, Term};
use serde::{Deserialize, Serialize};

/// One step of one replica, in its dispatch order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDescriptor {
    /// The coordinator's reign.
    pub term: Term,
    /// The layout version that computes it.
    pub epoch: Epoch,
    /// Its number.
    pub step: StepId,
    /// The micro-batch, in a fixed order.
    pub items: Vec<StepItem>,
}

/// New tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepItem {
    /// Whose.
    pub sequence: SequenceId,
    /// Position of the first new token: so many tokens are in the KV cache already.
    pub start: u32,
    /// The new tokens, at least one.
    pub tokens: Vec<u32>,
    /// The sequence's KV blocks, enough for `start + tokens.len()` tokens.
    pub block_table: Vec<KvBlockId>,
    /// Whether the last new token's logits are wanted (the chunk reaches the end of what is known).
    pub wants_logits: bool,
}
