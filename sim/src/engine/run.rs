//! Runs a scenario with the fastest engine that covers it.

use infercluster_spec::Report;

use super::coalesced::{self, Uncovered};
use super::simulate_counting;
use super::table::RequestTable;
use crate::scenario::{ReplicaOutcome, Scenario, SimError};

/// Which engine is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The one that takes runs of steps at once, where it covers the scenario.
    #[default]
    Fastest,
    /// The one that takes every step by itself.
    StepByStep,
}

/// Which engine ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineUsed {
    /// The one that takes runs of steps at once.
    Coalesced,
    /// The one that takes every step by itself.
    StepByStep {
        /// What the other does not cover; `None` where this one was asked for.
        uncovered: Option<Uncovered>,
    },
}

/// What a run gave. The same for every engine, but for `events` and `engine`.
#[derive(Debug, Clone, PartialEq)]
pub struct RunOutcome {
    /// Latencies, rates and busy fractions.
    pub report: Report,
    /// What happened to each request.
    pub requests: RequestTable,
    /// What each replica did.
    pub replicas: Vec<ReplicaOutcome>,
    /// Events that the engine took.
    pub events: u64,
    /// Which engine it was.
    pub engine: EngineUsed,
}

/// Runs a scenario to the end of its last request, without keeping every token's time.
///
/// Same scenario, same report, byte for byte, whichever engine runs it.
pub fn run(scenario: &Scenario, choice: EngineChoice) -> Result<RunOutcome, SimError> {
    let uncovered = match choice {
        EngineChoice::StepByStep => None,
        EngineChoice::Fastest => match coalesced::uncovered(scenario) {
            None => return coalesced::run(scenario, false).map(|(outcome, _)| outcome),
            uncovered => uncovered,
        },
    };
    let (outcome, events) = simulate_counting(scenario)?;
    Ok(RunOutcome {
        requests: RequestTable::of_records(scenario.trace, &outcome.requests),
        report: outcome.report,
        replicas: outcome.replicas,
        events,
        engine: EngineUsed::StepByStep { uncovered },
    })
}
