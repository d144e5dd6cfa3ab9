//! The engine that takes runs of steps at once.
//!
//! While a batch is constant its steps are an arithmetic progression (`step_times`) and each of its sequences
//! gets a token in each, so a run of them is one event with sums in closed form. A run ends where a sequence
//! ends, the pool runs dry, the progression does, or a request arrives that could be admitted. Gaps between
//! tokens are counted by run, so percentiles are as exact as with every token kept.
//!
//! The step-by-step engine is the oracle: for every scenario that this one covers, both give the same report
//! and the same time for every token. What it does not cover is [`Uncovered`].

mod decoding;
mod drive;
mod gaps;
mod pool;
mod replica;
#[cfg(test)]
mod tests;
mod world;

use infercluster_serving::{Router, Scheduler};
use infercluster_spec::spans::SpanRuns;
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{ReplicaId, Report, SimTime, StageId};

use super::outcome::busy_fraction;
use super::run::{EngineUsed, RunOutcome};
use super::step_times::StageTimes;
use super::table::RequestTable;
use super::{checks, replica as step_by_step};
use crate::cost::ShareCost;
use crate::scenario::{Load, Scenario, SimError};
use replica::Replica;
use world::World;

/// Why a scenario is run step by step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Uncovered {
    /// A pipeline, whose micro-batches pass each other.
    #[error("{replica} has {stages} pipeline stages")]
    Pipeline {
        /// Which replica.
        replica: ReplicaId,
        /// Its stages.
        stages: usize,
    },
    /// A step may be too small for a token of every running sequence.
    #[error("{max_sequences} sequences may run, but a step computes at most {token_budget} tokens")]
    Starvation {
        /// Sequences that may run.
        max_sequences: u32,
        /// Tokens of a step.
        token_budget: u32,
    },
    /// More requests than positions have bits.
    #[error("the trace has {requests} requests, more than 2^32")]
    TraceLength {
        /// How many.
        requests: usize,
    },
}

/// Why the step-by-step engine must run a scenario; `None` where this one can.
pub(super) fn uncovered(scenario: &Scenario) -> Option<Uncovered> {
    let options = scenario.options;
    let requests = scenario.trace.requests.len();
    if options.max_sequences > options.token_budget {
        return Some(Uncovered::Starvation {
            max_sequences: options.max_sequences,
            token_budget: options.token_budget,
        });
    }
    if u32::try_from(requests).is_err() {
        return Some(Uncovered::TraceLength { requests });
    }
    let mut replicas = scenario.layout.replicas.iter().enumerate();
    let (index, replica) = replicas.find(|(_, replica)| replica.stages.len() > 1)?;
    Some(Uncovered::Pipeline {
        replica: ReplicaId(index as u32),
        stages: replica.stages.len(),
    })
}

/// Times of every token, by position in the trace.
pub(super) type TokenTimes = Vec<Vec<SimTime>>;

/// Runs a scenario that is covered; every token's time is kept where it is asked for.
pub(super) fn run(
    scenario: &Scenario,
    keep_tokens: bool,
) -> Result<(RunOutcome, Option<TokenTimes>), SimError> {
    validate_layout(scenario.layout, scenario.model, Some(scenario.cluster))?;
    let mut engine = Engine::new(scenario, keep_tokens)?;
    engine.drive()?;
    let token_times = engine.world.token_times.take();
    Ok((engine.outcome()?, token_times))
}

struct Engine<'a> {
    scenario: &'a Scenario<'a>,
    world: World<'a>,
    replicas: Vec<Replica>,
    /// An empty scheduler for each replica, which says what it could ever run.
    doors: Vec<Scheduler>,
    router: Router,
    skipped: u64,
    /// Position of the next request that has its turn.
    next: usize,
    events: u64,
}

impl<'a> Engine<'a> {
    fn new(scenario: &'a Scenario<'a>, keep_tokens: bool) -> Result<Self, SimError> {
        let count = scenario.trace.requests.len();
        let share = ShareCost::of_layout(scenario.cost, scenario.layout, scenario.model)?;
        // Replicas that are alike share their step times, so that each is asked of the cost model once.
        let (mut times, mut rates): (Vec<StageTimes>, Vec<u64>) = (Vec::new(), Vec::new());
        let (mut replicas, mut doors, mut capacities) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..scenario.layout.replicas.len() {
            let id = ReplicaId(index as u32);
            let door = step_by_step::scheduler(scenario, id)?;
            let stage = StageTimes::new(scenario, &share, id, StageId(0))?;
            let gpus = stage.gpus().to_vec();
            let class = match times.iter().position(|known| known.is_like(&stage)) {
                Some(class) => class,
                None => {
                    rates.push(step_by_step::reference_rate([&stage].into_iter())?);
                    times.push(stage);
                    times.len() - 1
                }
            };
            capacities.push(rates[class]);
            replicas.push(Replica::new(id, scenario.options, &door, class, gpus));
            doors.push(door);
        }
        Ok(Self {
            scenario,
            world: World {
                trace: &scenario.trace.requests,
                table: RequestTable::new(count, scenario.slo.is_some_and(|slo| slo.itl.is_some())),
                gaps: SpanRuns::default(),
                times,
                token_times: keep_tokens.then(|| vec![Vec::new(); count]),
            },
            replicas,
            doors,
            router: Router::new(scenario.router, &capacities),
            skipped: 0,
            next: 0,
            events: 0,
        })
    }

    fn outcome(self) -> Result<RunOutcome, SimError> {
        let (scenario, world) = (self.scenario, self.world);
        let is_limited = matches!(
            scenario.load,
            Load::Closed {
                duration: Some(_),
                ..
            }
        );
        let (sent, all_completed) = world.table.sent();
        assert!(all_completed, "every request that was sent completes");
        assert!(
            self.next == world.trace.len() || is_limited,
            "every request has its turn"
        );
        assert_eq!(
            sent + self.skipped,
            self.next as u64,
            "requests are sent or skipped"
        );
        let mut replicas = Vec::with_capacity(self.replicas.len());
        for replica in &self.replicas {
            replica.verify_end();
            replicas.push(replica.outcome());
        }
        checks::verify_memory(scenario, &replicas);
        let busy = self.replicas.iter().flat_map(Replica::busy);
        let report = Report {
            skipped: self.skipped,
            steps: Some(replicas.iter().map(|replica| replica.steps).sum()),
            busy_fraction: busy_fraction(scenario, busy, world.table.window())?,
            ..Report::from_summaries(
                world.table.summaries(scenario.trace),
                world.gaps.summary(),
                scenario.slo,
            )
        };
        Ok(RunOutcome {
            report,
            requests: world.table,
            replicas,
            events: self.events,
            engine: EngineUsed::Coalesced,
        })
    }
}
