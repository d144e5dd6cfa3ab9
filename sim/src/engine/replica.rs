//! One replica: its scheduler, its stages and the steps between them.

use std::collections::{BTreeMap, VecDeque};

use infercluster_serving::{BlockLedger, Scheduler, StepOutcome, StepPlan};
use infercluster_spec::layout::ReplicaRole;
use infercluster_spec::{EngineOptions, GpuId, ReplicaId, SimDuration, SimTime, StageId, StepId};
use infercluster_spec::{SequenceId, memory};

use super::step_times::StageTimes;
use crate::cost::ShareCost;
use crate::scenario::{ReplicaOutcome, Scenario, SimError};

/// Steps between two full checks of the scheduler; the ledger's sum is checked at every step.
const FULL_CHECK_EVERY: u64 = 64;

pub(super) struct ReplicaState<'a> {
    id: ReplicaId,
    pub(super) scheduler: Scheduler,
    pub(super) stages: Vec<StageState<'a>>,
    in_flight: BTreeMap<StepId, StepPlan>,
    /// Tokens of each live sequence that were computed since its last preemption.
    computed: BTreeMap<SequenceId, u64>,
    /// Whether a plan event of this instant is scheduled.
    pub(super) plans_soon: bool,
    steps: u64,
    computed_tokens: u64,
    kv_blocks_peak: u32,
    running_peak: u32,
}

pub(super) struct StageState<'a> {
    times: StageTimes<'a>,
    inputs: VecDeque<StepId>,
    computes: Option<StepId>,
    /// When the last input comes: a later one does not overtake it.
    last_input: SimTime,
    /// Time in which each rank computed.
    pub(super) busy: Vec<SimDuration>,
}

impl<'a> ReplicaState<'a> {
    pub(super) fn new(
        scenario: &Scenario<'a>,
        share: &ShareCost<'a>,
        id: ReplicaId,
    ) -> Result<Self, SimError> {
        let scheduler = scheduler(scenario, id)?;
        let stages = (0..scenario.layout.replicas[id.index()].stages.len())
            .map(|stage| StageState::new(scenario, share, id, StageId(stage as u32)))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            id,
            scheduler,
            stages,
            in_flight: BTreeMap::new(),
            computed: BTreeMap::new(),
            plans_soon: false,
            steps: 0,
            computed_tokens: 0,
            kv_blocks_peak: 0,
            running_peak: 0,
        })
    }

    /// What the router weighs it by.
    pub(super) fn reference_rate(&self) -> Result<u64, SimError> {
        reference_rate(self.stages.iter().map(|stage| &stage.times))
    }

    pub(super) fn stage_mut(&mut self, stage: StageId) -> &mut StageState<'a> {
        &mut self.stages[stage.index()]
    }

    /// Plans every step that can be in flight and queues it at the first stage.
    pub(super) fn plan(&mut self) {
        while let Some(plan) = self.scheduler.plan_step() {
            for unit in &plan.released {
                self.computed.remove(&unit.sequence);
            }
            let ledger = self.scheduler.ledger();
            self.kv_blocks_peak = self.kv_blocks_peak.max(ledger.total() - ledger.free());
            self.running_peak = self.running_peak.max(self.scheduler.running() as u32);
            self.stages[0].push(plan.step);
            self.in_flight.insert(plan.step, plan);
        }
    }

    /// Starts the stage's next step where the stage is free; answers how long it takes.
    pub(super) fn start(&mut self, stage: StageId) -> Result<Option<SimDuration>, SimError> {
        let state = &mut self.stages[stage.index()];
        if state.computes.is_some() {
            return Ok(None);
        }
        let Some(step) = state.inputs.pop_front() else {
            return Ok(None);
        };
        let span = state
            .times
            .step(&self.in_flight[&step].shape(), &mut state.busy)?;
        state.computes = Some(step);
        Ok(Some(span))
    }

    /// Where a step goes after that stage and how long the way is; `None` after the last stage.
    pub(super) fn handover(
        &self,
        stage: StageId,
        step: StepId,
    ) -> Result<Option<(StageId, SimDuration)>, SimError> {
        let state = &self.stages[stage.index()];
        let span = state.times.handover(&self.in_flight[&step].shape())?;
        Ok(span.map(|span| (StageId(stage.0 + 1), span)))
    }

    /// Completes a step that has passed the last stage.
    pub(super) fn complete(&mut self, step: StepId) -> StepOutcome {
        let plan = self
            .in_flight
            .remove(&step)
            .expect("a step that computes is in flight");
        for item in &plan.items {
            let computed = self.computed.entry(item.sequence).or_default();
            assert_eq!(
                *computed,
                u64::from(item.start),
                "{} starts where its KV ends",
                item.sequence
            );
            *computed += u64::from(item.count);
            self.computed_tokens += u64::from(item.count);
        }
        let outcome = self
            .scheduler
            .complete_step(step, &[])
            .expect("stages keep the dispatch order");
        self.steps += 1;
        if let Err(fault) = self.scheduler.ledger().check() {
            unreachable!("{} after {step}: {fault}", self.id);
        }
        if self.steps.is_multiple_of(FULL_CHECK_EVERY) {
            self.verify();
        }
        outcome
    }

    /// What it did.
    pub(super) fn outcome(&self) -> ReplicaOutcome {
        ReplicaOutcome {
            steps: self.steps,
            computed_tokens: self.computed_tokens,
            kv_blocks: self.scheduler.ledger().total(),
            kv_blocks_peak: self.kv_blocks_peak,
            running_peak: self.running_peak,
        }
    }

    /// Verifies the scheduler's invariants.
    pub(super) fn verify(&self) {
        if let Err(fault) = self.scheduler.check() {
            unreachable!("{} after {} steps: {fault}", self.id, self.steps);
        }
    }
}

impl<'a> StageState<'a> {
    fn new(
        scenario: &Scenario<'a>,
        share: &ShareCost<'a>,
        replica: ReplicaId,
        stage: StageId,
    ) -> Result<Self, SimError> {
        let times = StageTimes::new(scenario, share, replica, stage)?;
        let busy = vec![SimDuration::ZERO; times.gpus().len()];
        Ok(Self {
            times,
            inputs: VecDeque::new(),
            computes: None,
            last_input: SimTime::ZERO,
            busy,
        })
    }

    /// Its devices in rank order.
    pub(super) fn gpus(&self) -> &[GpuId] {
        self.times.gpus()
    }

    /// A step's input is there.
    pub(super) fn push(&mut self, step: StepId) {
        let last = self.inputs.back().copied().or(self.computes);
        assert!(last.is_none_or(|last| last < step), "{step} overtakes {last:?}");
        self.inputs.push_back(step);
    }

    /// When an input that could come at `at` comes.
    pub(super) fn input_at(&mut self, at: SimTime) -> SimTime {
        self.last_input = self.last_input.max(at);
        self.last_input
    }

    /// The step that it computed.
    pub(super) fn finish(&mut self) -> StepId {
        self.computes.take().expect("only a stage that computes finishes")
    }
}

/// The batching of a replica with nobody there yet.
pub(super) fn scheduler(scenario: &Scenario, id: ReplicaId) -> Result<Scheduler, SimError> {
    let replica = &scenario.layout.replicas[id.index()];
    if replica.role != ReplicaRole::Mixed {
        return Err(SimError::Role {
            replica: id,
            role: replica.role,
        });
    }
    let max_context = scenario.options.max_context;
    let options = EngineOptions {
        max_context: Some(max_context.unwrap_or(scenario.model.max_positions)),
        ..scenario.options
    };
    let ledger = BlockLedger::counting(kv_blocks(scenario, id)?, scenario.layout.kv.block_size)
        .expect("a valid layout has blocks of at least one token");
    Ok(Scheduler::new(options, replica.stages.len() as u32, ledger)?)
}

/// Steps an hour of a reference batch at the slowest stage: what the router weighs replicas by.
pub(super) fn reference_rate<'a, 'b: 'a>(
    stages: impl Iterator<Item = &'a StageTimes<'b>>,
) -> Result<u64, SimError> {
    let mut slowest = 0.0_f64;
    for stage in stages {
        slowest = slowest.max(stage.reference_seconds()?);
    }
    // A free step makes an infinite rate, which the cast turns into the largest weight.
    Ok((3600.0 / slowest) as u64)
}

/// The pool that memory and the limit leave.
fn kv_blocks(scenario: &Scenario, replica: ReplicaId) -> Result<u32, SimError> {
    let cluster = scenario.cluster;
    let usable = |gpu| cluster.gpu(gpu).and_then(|device| cluster.memory(device));
    let (layout, model) = (scenario.layout, scenario.model);
    let by_memory = memory::kv_capacity_blocks(layout, model, replica, scenario.memory_reserve, usable);
    let limit = scenario.kv_blocks_limit.map(u64::from);
    let blocks = match (by_memory, limit) {
        (None, None) => return Err(SimError::NoCapacity { replica }),
        (Some(blocks), None) | (None, Some(blocks)) => blocks,
        (Some(blocks), Some(limit)) => blocks.min(limit),
    };
    Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
}
