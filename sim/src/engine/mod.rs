//! The discrete-event engines. [`run`](run()) takes the fastest that covers a scenario; [`simulate`] is the
//! step-by-step engine, to which every step of every stage is an event and which keeps every token's time.
//!
//! Replicas batch with the scheduler that the executor drives. A step's time on a stage is a whole number of
//! picoseconds (`step_times`); from there on the clock is exact. A stage is busy only while
//! it computes; up to as many micro-batches as stages are in flight, and steps pass each stage in dispatch
//! order.
//!
//! Left out: links shared by hand-overs of several micro-batches (a hand-over is charged as if alone, but
//! never overtakes), prefix caching, and replicas of the roles `prefill` and `decode`.
//!
//! Every run verifies that requests, tokens and KV blocks are conserved and that no device holds more than
//! its memory; a breach is a bug and panics with the values.

mod checks;
mod coalesced;
mod outcome;
mod replica;
mod requests;
mod run;
mod step_times;
mod table;
#[cfg(test)]
mod tests;

use infercluster_serving::{NewSequence, Router};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{ReplicaId, SequenceId, SimDuration, SimTime, StageId};

use crate::cost::ShareCost;
use crate::events::{Event, EventQueue};
use crate::scenario::{Load, Scenario, SimError, SimulationOutcome};
pub use coalesced::Uncovered;
use replica::ReplicaState;
use requests::Requests;
pub use run::{EngineChoice, EngineUsed, RunOutcome, run};
pub use table::RequestTable;

/// Runs a scenario to the end of its last request.
///
/// Same scenario, same outcome, byte for byte.
pub fn simulate(scenario: &Scenario) -> Result<SimulationOutcome, SimError> {
    simulate_counting(scenario).map(|(outcome, _)| outcome)
}

/// The same with the number of events.
fn simulate_counting(scenario: &Scenario) -> Result<(SimulationOutcome, u64), SimError> {
    validate_layout(scenario.layout, scenario.model, Some(scenario.cluster))?;
    let mut engine = Engine::new(scenario)?;
    engine.start()?;
    while let Some(event) = engine.queue.pop() {
        engine.handle(event)?;
    }
    checks::verify_end(scenario, &engine.replicas, &engine.requests, engine.next);
    let events = engine.queue.scheduled();
    let outcome = outcome::outcome(scenario, &engine.replicas, engine.requests)?;
    Ok((outcome, events))
}

struct Engine<'a> {
    scenario: &'a Scenario<'a>,
    queue: EventQueue,
    router: Router,
    replicas: Vec<ReplicaState<'a>>,
    requests: Requests,
    /// Position of the next request that will be sent.
    next: usize,
}

impl<'a> Engine<'a> {
    fn new(scenario: &'a Scenario<'a>) -> Result<Self, SimError> {
        let share = ShareCost::of_layout(scenario.cost, scenario.layout, scenario.model)?;
        let replicas = (0..scenario.layout.replicas.len())
            .map(|index| ReplicaState::new(scenario, &share, ReplicaId(index as u32)))
            .collect::<Result<Vec<_>, _>>()?;
        let capacities = replicas
            .iter()
            .map(ReplicaState::reference_rate)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            scenario,
            queue: EventQueue::default(),
            router: Router::new(scenario.router, &capacities),
            replicas,
            requests: Requests::new(scenario.trace.requests.len()),
            next: 0,
        })
    }

    /// Schedules the first arrivals: the first of an open loop, one a client of a closed one.
    fn start(&mut self) -> Result<(), SimError> {
        match self.scenario.load {
            Load::Open => self.send_next(SimDuration::ZERO),
            Load::Closed { clients: 0, .. } => Err(SimError::NoClients),
            Load::Closed { clients, .. } => (0..clients).try_for_each(|_| self.send_next(SimDuration::ZERO)),
        }
    }

    /// Schedules the next request of the trace, where there is one: at its arrival, or in a closed loop so long
    /// from now.
    fn send_next(&mut self, wait: SimDuration) -> Result<(), SimError> {
        let position = self.next;
        let Some(request) = self.scenario.trace.requests.get(position) else {
            return Ok(());
        };
        let at = match self.scenario.load {
            Load::Closed { duration, .. } => {
                let at = after(self.queue.now(), wait)?;
                if duration.is_some_and(|duration| at.since(SimTime::ZERO) >= duration) {
                    return Ok(());
                }
                at
            }
            Load::Open => request
                .arrival
                .ok_or(SimError::NoArrival { request: request.id })?,
        };
        if at < self.queue.now() {
            return Err(SimError::ArrivalOrder { request: request.id });
        }
        self.next += 1;
        self.queue.push(at, Event::Arrival { position });
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        match event {
            Event::Arrival { position } => self.arrive(position),
            Event::Plan { replica } => self.plan(replica),
            Event::StageInput { replica, stage, step } => {
                self.replicas[replica.index()].stage_mut(stage).push(step);
                self.start_stage(replica, stage)
            }
            Event::StageDone { replica, stage } => self.finish_stage(replica, stage),
        }
    }

    /// Routes a request among the replicas that could ever run it.
    fn arrive(&mut self, position: usize) -> Result<(), SimError> {
        let request = &self.scenario.trace.requests[position];
        let lengths = u32::try_from(request.input.0)
            .ok()
            .zip(u32::try_from(request.output.0).ok());
        let new = lengths.map(|(input, output)| NewSequence::new(SequenceId(position as u64), input, output));
        let replicas = &self.replicas;
        let routed = new.and_then(|new| {
            let fits = |replica: ReplicaId| replicas[replica.index()].scheduler.check_fit(&new).is_ok();
            Some((new, self.router.route_where(fits)?))
        });
        match routed {
            None => {
                self.requests.skip();
                // A client goes on to its next request at once.
                return self.send_next(SimDuration::ZERO);
            }
            Some((new, replica)) => {
                self.requests.send(position, request, self.queue.now(), replica);
                let added = self.replicas[replica.index()].scheduler.add(new);
                assert_eq!(added, Ok(()), "the fit was checked");
                self.plan_soon(replica);
            }
        }
        match self.scenario.load {
            Load::Open => self.send_next(SimDuration::ZERO),
            Load::Closed { .. } => Ok(()),
        }
    }

    /// Lets a replica look for steps once everything of this instant has happened.
    fn plan_soon(&mut self, replica: ReplicaId) {
        let state = &mut self.replicas[replica.index()];
        if !std::mem::replace(&mut state.plans_soon, true) {
            self.queue.push(self.queue.now(), Event::Plan { replica });
        }
    }

    fn plan(&mut self, replica: ReplicaId) -> Result<(), SimError> {
        let state = &mut self.replicas[replica.index()];
        state.plans_soon = false;
        state.plan();
        self.start_stage(replica, StageId(0))
    }

    /// Starts a stage's next step where the stage is free and has one.
    fn start_stage(&mut self, replica: ReplicaId, stage: StageId) -> Result<(), SimError> {
        if let Some(span) = self.replicas[replica.index()].start(stage)? {
            let at = after(self.queue.now(), span)?;
            self.queue.push(at, Event::StageDone { replica, stage });
        }
        Ok(())
    }

    fn finish_stage(&mut self, replica: ReplicaId, stage: StageId) -> Result<(), SimError> {
        let now = self.queue.now();
        let state = &mut self.replicas[replica.index()];
        let step = state.stage_mut(stage).finish();
        match state.handover(stage, step)? {
            Some((next, span)) => {
                let at = state.stage_mut(next).input_at(after(now, span)?);
                let input = Event::StageInput {
                    replica,
                    stage: next,
                    step,
                };
                self.queue.push(at, input);
            }
            None => {
                let outcome = state.complete(step);
                self.requests.tokens(now, &outcome);
                for finished in outcome.finished {
                    self.router.finished(replica);
                    self.requests.finish(finished);
                    if let Load::Closed { turnaround, .. } = self.scenario.load {
                        self.send_next(turnaround)?;
                    }
                }
                self.plan_soon(replica);
            }
        }
        self.start_stage(replica, stage)
    }
}

fn after(now: SimTime, span: SimDuration) -> Result<SimTime, SimError> {
    now.0.checked_add(span.0).map(SimTime).ok_or(SimError::ClockEnds)
}
