//! What the replicas of a run share.

use infercluster_spec::Request;
use infercluster_spec::spans::SpanRuns;

use super::TokenTimes;

use crate::engine::step_times::StageTimes;
use crate::engine::table::RequestTable;

/// Requests, step times and records.
pub(super) struct World<'a> {
    pub(super) trace: &'a [Request],
    pub(super) table: RequestTable,
    /// Gaps between tokens of a request.
    pub(super) gaps: SpanRuns,
    /// Step times; replicas that are alike share theirs.
    pub(super) times: Vec<StageTimes<'a>>,
    /// Every token's time by position in the trace, where somebody asks for it.
    pub(super) token_times: Option<TokenTimes>,
}

impl World<'_> {
    /// A request has all its tokens.
    pub(super) fn finish(&mut self, request: u32) {
        let position = request as usize;
        let wanted = self.trace[position].output.0;
        let tokens = u64::from(self.table.tokens(position));
        assert_eq!(tokens, wanted, "request {position} ends with all its tokens");
        self.table.complete(position);
    }
}
