//! What happened to each request, without each of its tokens.

use infercluster_spec::report::{RequestRecord, RequestSummary};
use infercluster_spec::{SimDuration, SimTime, Tokens, Trace};

/// One row a request of the trace, by position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestTable {
    rows: Vec<Row>,
    /// Longest gap by position, where somebody asks for it.
    longest_gaps: Option<Vec<SimDuration>>,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Progress {
    /// Skipped, or never had its turn.
    #[default]
    NotSent,
    Sent,
    Completed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Row {
    arrival: SimTime,
    /// Meaningless without tokens, as is `last_token`.
    first_token: SimTime,
    last_token: SimTime,
    tokens: u32,
    preemptions: u32,
    progress: Progress,
}

impl RequestTable {
    pub(super) fn new(count: usize, keeps_longest_gaps: bool) -> Self {
        Self {
            rows: vec![Row::default(); count],
            longest_gaps: keeps_longest_gaps.then(|| vec![SimDuration::ZERO; count]),
        }
    }

    /// Rows of records with every token; `records` are of requests of the trace, in its order.
    pub(super) fn of_records(trace: &Trace, records: &[RequestRecord]) -> Self {
        let mut table = Self::new(trace.requests.len(), true);
        let mut positions = trace.requests.iter().enumerate();
        for record in records {
            let position = positions.find(|(_, request)| request.id == record.id);
            let (position, _) = position.expect("records follow the trace");
            let summary = record.summary();
            table.rows[position] = Row {
                arrival: record.arrival,
                first_token: summary.first_token.unwrap_or_default(),
                last_token: summary.last_token.unwrap_or_default(),
                tokens: record.token_times.len() as u32,
                preemptions: record.preemptions,
                progress: if record.completed {
                    Progress::Completed
                } else {
                    Progress::Sent
                },
            };
            table.widen_gap(position, summary.longest_gap);
        }
        table
    }

    /// The requests that were sent, in the order of the trace; longest gaps are zero where nobody asked for
    /// them (they are known where there is a limit on `itl`).
    pub fn summaries<'a>(&'a self, trace: &'a Trace) -> impl Iterator<Item = RequestSummary> + 'a {
        let sent = |(_, (row, _)): &(usize, (&Row, _))| row.progress != Progress::NotSent;
        let rows = self.rows.iter().zip(&trace.requests).enumerate();
        rows.filter(sent)
            .map(|(position, (row, request))| RequestSummary {
                id: request.id,
                arrival: row.arrival,
                input: request.input,
                output: Tokens(u64::from(row.tokens)),
                first_token: (row.tokens > 0).then_some(row.first_token),
                last_token: (row.tokens > 0).then_some(row.last_token),
                longest_gap: self
                    .longest_gaps
                    .as_ref()
                    .map_or(SimDuration::ZERO, |gaps| gaps[position]),
                preemptions: row.preemptions,
                completed: row.progress == Progress::Completed,
            })
    }

    /// Output tokens of all requests.
    pub fn output_tokens(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.tokens)).sum()
    }

    pub(super) fn keeps_longest_gaps(&self) -> bool {
        self.longest_gaps.is_some()
    }

    pub(super) fn widen_gap(&mut self, position: usize, gap: SimDuration) {
        if let Some(gaps) = &mut self.longest_gaps {
            gaps[position] = gaps[position].max(gap);
        }
    }

    pub(super) fn send(&mut self, position: usize, now: SimTime) {
        let row = &mut self.rows[position];
        assert_eq!(row.progress, Progress::NotSent, "request {position} is sent once");
        (row.arrival, row.progress) = (now, Progress::Sent);
    }

    /// Tokens that are out.
    pub(super) fn tokens(&self, position: usize) -> u32 {
        self.rows[position].tokens
    }

    /// A token that follows prefill is out; answers the gap before it.
    pub(super) fn token(&mut self, position: usize, now: SimTime) -> Option<SimDuration> {
        let row = &mut self.rows[position];
        row.tokens += 1;
        let gap = (row.tokens > 1).then(|| now.since(row.last_token));
        if row.tokens == 1 {
            row.first_token = now;
        }
        row.last_token = now;
        gap
    }

    /// So many tokens are out by now, the last at this instant.
    pub(super) fn decoded(&mut self, position: usize, tokens: u32, now: SimTime) {
        let row = &mut self.rows[position];
        assert!(
            tokens > row.tokens || now == row.last_token,
            "request {position} only gains tokens"
        );
        (row.tokens, row.last_token) = (tokens, now);
    }

    pub(super) fn preempt(&mut self, position: usize) {
        self.rows[position].preemptions += 1;
    }

    pub(super) fn complete(&mut self, position: usize) {
        let row = &mut self.rows[position];
        assert_eq!(row.progress, Progress::Sent, "request {position} ends once");
        row.progress = Progress::Completed;
    }

    /// Requests that were sent, and whether all of them completed.
    pub(super) fn sent(&self) -> (u64, bool) {
        let sent = self.rows.iter().filter(|row| row.progress != Progress::NotSent);
        let all = self.rows.iter().all(|row| row.progress != Progress::Sent);
        (sent.count() as u64, all)
    }

    /// First arrival and last token of those that were sent.
    pub(super) fn window(&self) -> Option<(SimTime, SimTime)> {
        let sent = self.rows.iter().filter(|row| row.progress != Progress::NotSent);
        let first = sent.clone().map(|row| row.arrival).min()?;
        let last = sent
            .filter(|row| row.tokens > 0)
            .map(|row| row.last_token)
            .max()?;
        Some((first, last))
    }
}
