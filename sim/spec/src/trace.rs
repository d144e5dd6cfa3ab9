//! Requests as a trace holds them.

use serde::{Deserialize, Serialize};

use crate::ids::RequestId;
use crate::json::Document;
use crate::units::{SimTime, Tokens};

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its position in the trace.
    pub id: RequestId,
    /// When it arrives; `None` in a trace of lengths only.
    pub arrival: Option<SimTime>,
    /// Prompt tokens, at least 1.
    pub input: Tokens,
    /// Tokens to generate, at least 1.
    pub output: Tokens,
    /// Hashes of the prompt's blocks, where the trace carries them; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block_hashes: Vec<u64>,
}

/// Requests in arrival order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// A name for reports.
    pub name: String,
    /// The requests; arrivals, where there are any, do not go back.
    pub requests: Vec<Request>,
    /// Tokens that one of the block hashes covers, where there are hashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_block: Option<u32>,
}

impl Document for Trace {
    const SCHEMA: &'static str = "infercluster-trace/1";
}
