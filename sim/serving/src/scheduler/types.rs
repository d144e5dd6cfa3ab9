//! What goes into the scheduler and what comes out.

use infercluster_spec::{BatchShape, KvBlockId, SequenceId, StepId};
use serde::{Deserialize, Serialize};

/// A sequence that wants to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSequence {
    /// Its id, unique among the live ones.
    pub id: SequenceId,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens to generate, those that are known included.
    pub max_new_tokens: u32,
    /// Output tokens that are known already: a request that goes on after a loss. They are prefilled with
    /// the prompt.
    pub generated_tokens: u32,
}

impl NewSequence {
    /// A sequence with nothing generated.
    pub fn new(id: SequenceId, prompt_tokens: u32, max_new_tokens: u32) -> Self {
        Self {
            id,
            prompt_tokens,
            max_new_tokens,
            generated_tokens: 0,
        }
    }
}

/// Why a sequence can never run on this replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The id is in use.
    #[error("{sequence} is already there")]
    Duplicate {
        /// Which.
        sequence: SequenceId,
    },
    /// No prompt.
    #[error("{sequence} has an empty prompt, at least 1 token is needed")]
    EmptyPrompt {
        /// Which.
        sequence: SequenceId,
    },
    /// No output.
    #[error(
        "{sequence} asks for {max_new_tokens} new tokens and has {generated_tokens}: nothing is left to generate"
    )]
    NothingToGenerate {
        /// Which.
        sequence: SequenceId,
        /// What it asks for.
        max_new_tokens: u32,
        /// What it has.
        generated_tokens: u32,
    },
    /// Longer than the longest context.
    #[error("{sequence} needs a context of {context} tokens, the limit is {max_context}")]
    TooLong {
        /// Which.
        sequence: SequenceId,
        /// Prompt and output.
        context: u64,
        /// The limit.
        max_context: u32,
    },
    /// More KV than the whole pool.
    #[error("{sequence} needs {needed} KV blocks, the pool has {total}")]
    PoolTooSmall {
        /// Which.
        sequence: SequenceId,
        /// Blocks at its end.
        needed: u32,
        /// Blocks of the pool.
        total: u32,
    },
}

/// A call that does not fit the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchedulerError {
    /// Zero where a count is needed.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A completion that is not the oldest step's.
    #[error("{step} completed, but the oldest in flight is {}", oldest.map_or("none".to_owned(), |oldest| oldest.to_string()))]
    OutOfOrder {
        /// What completed.
        step: StepId,
        /// What should have.
        oldest: Option<StepId>,
    },
    /// A sequence that gets no token from a step cannot end with it.
    #[error("{sequence} is said to end with {step}, which gives it no token")]
    NoToken {
        /// Which.
        sequence: SequenceId,
        /// The step.
        step: StepId,
    },
}

/// The KV of a sequence between two preemptions: what a block belongs to and what a handover moves. Tokens
/// computed again after a preemption are another unit, in other blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KvUnit {
    /// Whose.
    pub sequence: SequenceId,
    /// How often the sequence had been preempted when it was admitted.
    pub incarnation: u32,
}

/// What an item's tokens are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Known tokens, also those computed again after a preemption, and also where it is a single one.
    Prefill,
    /// The token that the last step gave.
    Decode,
}

/// New tokens of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedItem {
    /// Whose.
    pub sequence: SequenceId,
    /// How often it was preempted: which of its KV units this is.
    pub incarnation: u32,
    /// Prefill or decode.
    pub phase: Phase,
    /// Position of the first new token: so many tokens are in the KV cache.
    pub start: u32,
    /// New tokens, at least 1.
    pub count: u32,
    /// Whether the item reaches the end of what is known, so that its last logits give a token.
    pub yields_token: bool,
    /// Blocks for `start + count` tokens; empty where the ledger only counts.
    pub block_table: Vec<KvBlockId>,
}

impl PlannedItem {
    /// Its KV unit.
    pub fn unit(&self) -> KvUnit {
        KvUnit {
            sequence: self.sequence,
            incarnation: self.incarnation,
        }
    }
}

/// A micro-batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlan {
    /// Its number in the replica's dispatch order.
    pub step: StepId,
    /// Its items, at least 1 unless it was planned empty, running sequences first, each kind in order of arrival.
    pub items: Vec<PlannedItem>,
    /// Sequences that lost their KV since the plan before, in the order in which they did.
    pub preempted: Vec<SequenceId>,
    /// KV units that gave their blocks back since the plan before: preempted, finished or cancelled. Their
    /// blocks may stand in a table of this step.
    pub released: Vec<KvUnit>,
}

impl StepPlan {
    /// What it computes, in the words of the cost model and of measured steps.
    pub fn shape(&self) -> BatchShape {
        let mut shape = BatchShape::default();
        for item in &self.items {
            match item.phase {
                Phase::Prefill => {
                    shape.add_prefill(u64::from(item.count), u64::from(item.start), item.yields_token);
                }
                Phase::Decode => shape.add_decode(u64::from(item.start + item.count)),
            }
        }
        shape
    }
}

/// A new token of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedToken {
    /// Whose.
    pub sequence: SequenceId,
    /// Which of its output tokens, from 0.
    pub index: u32,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It has all the tokens that it asked for.
    Length,
    /// Its driver said so.
    EndedEarly,
}

/// A sequence that ended; its blocks are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Which.
    pub sequence: SequenceId,
    /// Why.
    pub reason: FinishReason,
    /// Output tokens that it has.
    pub generated_tokens: u32,
    /// How often it was preempted.
    pub preemptions: u32,
}

/// What a completed step gave, in the order of its items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepOutcome {
    /// Which step.
    pub step: StepId,
    /// New tokens.
    pub tokens: Vec<CompletedToken>,
    /// Sequences that ended with their token in `tokens`.
    pub finished: Vec<Finished>,
    /// Cancelled sequences that are gone now.
    pub dropped: Vec<SequenceId>,
}

impl SequenceStatus {
    /// Its KV unit.
    pub fn unit(&self) -> KvUnit {
        KvUnit {
            sequence: self.sequence,
            incarnation: self.incarnation,
        }
    }
}

/// Where a live sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceStatus {
    /// Which.
    pub sequence: SequenceId,
    /// Prompt and generated tokens.
    pub known_tokens: u32,
    /// How often it was preempted.
    pub incarnation: u32,
    /// Tokens whose KV is in the cache: the mark up to which KV can be copied.
    pub computed_tokens: u32,
    /// Tokens whose KV is in the cache once what is in flight has completed.
    pub planned_tokens: u32,
}
