//! What happened to each request so far.

use infercluster_serving::{Finished, StepOutcome};
use infercluster_spec::report::RequestRecord;
use infercluster_spec::{ReplicaId, Request, SequenceId, SimTime};

/// The records of a run, by position in the trace.
pub(super) struct Requests {
    records: Vec<Option<RequestRecord>>,
    skipped: u64,
}

impl Requests {
    pub(super) fn new(count: usize) -> Self {
        Self {
            records: vec![None; count],
            skipped: 0,
        }
    }

    /// A request went to a replica.
    pub(super) fn send(&mut self, position: usize, request: &Request, now: SimTime, replica: ReplicaId) {
        let record = RequestRecord {
            id: request.id,
            arrival: now,
            input: request.input,
            token_times: Vec::new(),
            preemptions: 0,
            completed: false,
        };
        let before = self.records[position].replace(record);
        assert!(
            before.is_none(),
            "{} goes to {replica} and went somewhere before",
            request.id
        );
    }

    /// A request fits nowhere.
    pub(super) fn skip(&mut self) {
        self.skipped += 1;
    }

    /// Tokens are out.
    pub(super) fn tokens(&mut self, now: SimTime, outcome: &StepOutcome) {
        for token in &outcome.tokens {
            let record = self.record_mut(token.sequence);
            let known = record.token_times.len();
            assert_eq!(
                known, token.index as usize,
                "{} gets each token once, in order",
                record.id
            );
            record.token_times.push(now);
        }
    }

    /// A request has all its tokens.
    pub(super) fn finish(&mut self, finished: Finished) {
        let record = self.record_mut(finished.sequence);
        record.preemptions = finished.preemptions;
        record.completed = true;
    }

    fn record_mut(&mut self, sequence: SequenceId) -> &mut RequestRecord {
        self.records[sequence.index()]
            .as_mut()
            .expect("a sequence that runs was sent")
    }

    /// Requests that fit nowhere.
    pub(super) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Records by position in the trace; `None` where a request was not sent.
    pub(super) fn by_position(&self) -> &[Option<RequestRecord>] {
        &self.records
    }

    /// The records of those that were sent.
    pub(super) fn into_records(self) -> Vec<RequestRecord> {
        self.records.into_iter().flatten().collect()
    }
}
