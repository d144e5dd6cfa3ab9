//! Options of the serving engine, shared by simulator and executor.

use serde::{Deserialize, Serialize};

/// How a replica batches. Defaults follow current vLLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineOptions {
    /// Tokens that one step may compute, prefill and decode together.
    pub token_budget: u32,
    /// Sequences that one step may hold.
    pub max_sequences: u32,
    /// Longest context that is accepted; `None` for the model's own limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_context: Option<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            token_budget: 2048,
            max_sequences: 256,
            max_context: None,
        }
    }
}
