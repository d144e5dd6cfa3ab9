//! What engines make of the same devices today, on the same cost model.

use infercluster_sim::cost::{CostError, StageCost};
use infercluster_spec::layout::Stage;
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{GpuId, Layout, ReplicaId, SimDuration, StageId, memory};

use super::stage::{micro_batches, sequences_of_step, usable_memory};
use super::{Objective, PlanProblem, ReplicaError, build};
use crate::proportional::{ProportionalRequest, proportional_layout};
use crate::proportions::Proportions;

/// A layout to compare with.
#[derive(Debug, Clone, PartialEq)]
pub struct Baseline {
    /// How it was made.
    pub kind: BaselineKind,
    /// The layout.
    pub layout: Layout,
    /// Time in which every sequence advances by one token.
    pub step_time: SimDuration,
}

/// How a baseline is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BaselineKind {
    /// Equal tensor-parallel shares and equal layer counts: what engines do. The fastest of all ways to write
    /// the number of devices as ranks times stages.
    Even,
    /// Equal tensor-parallel shares, layers in proportion to the memory of each stage.
    MemoryProportional,
}

/// Every baseline that fits its memory, fastest first.
pub(super) fn baselines(problem: &PlanProblem) -> Result<Vec<Baseline>, ReplicaError> {
    let mut all = Vec::new();
    for kind in [BaselineKind::Even, BaselineKind::MemoryProportional] {
        let mut fastest: Option<Baseline> = None;
        for layout in layouts(problem, kind)? {
            let Some(step_time) = layout_time(problem, &layout)? else {
                continue;
            };
            if fastest.as_ref().is_none_or(|best| step_time < best.step_time) {
                fastest = Some(Baseline {
                    kind,
                    layout,
                    step_time,
                });
            }
        }
        all.extend(fastest);
    }
    all.sort_by_key(|baseline| (baseline.step_time, baseline.kind));
    Ok(all)
}

fn layouts(problem: &PlanProblem, kind: BaselineKind) -> Result<Vec<Layout>, ReplicaError> {
    let devices = problem.gpus.len();
    let memory = usable_memory(problem, &problem.gpus)?;
    let mut found = Vec::new();
    for stages in (1..=devices).filter(|stages| devices.is_multiple_of(*stages)) {
        if problem.stages.is_some_and(|asked| asked != stages) {
            continue;
        }
        let by_stage = memory.chunks(devices / stages).map(|stage| {
            // In MiB, so that the weights fit 32 bits.
            let mebibytes: u64 = stage.iter().map(|bytes| bytes.0 >> 20).sum();
            u32::try_from(mebibytes).unwrap_or(u32::MAX)
        });
        let layers = match kind {
            BaselineKind::Even => Proportions::equal(stages),
            BaselineKind::MemoryProportional => Proportions::new(by_stage.collect()).ok(),
        };
        let request = ProportionalRequest {
            stages: layers,
            split_groups: problem.split_groups,
            quantum: problem.quantum,
            reduction: problem.reduction,
            kv: problem.kv,
            ..ProportionalRequest::equal(devices as u32)
        };
        // Proportions that leave a stage without layers are no layout to compare with.
        if let Ok(layout) = proportional_layout(problem.model, &request) {
            found.push(on_devices(problem, layout));
        }
    }
    Ok(found)
}

fn on_devices(problem: &PlanProblem, layout: Layout) -> Layout {
    let replica = layout.replicas.into_iter().next();
    let mut stages: Vec<Stage> = replica.map(|replica| replica.stages).unwrap_or_default();
    let groups = stages.iter_mut().flat_map(|stage| &mut stage.layer_groups);
    for shard in groups.flat_map(|group| &mut group.shards) {
        let position: GpuId = shard.gpu;
        shard.gpu = problem.gpus[position.index()];
    }
    build::layout_of(problem, stages)
}

/// Time in which every sequence advances by one token under a layout of one replica; `None` where memory or
/// links rule it out.
pub(super) fn layout_time(
    problem: &PlanProblem,
    layout: &Layout,
) -> Result<Option<SimDuration>, ReplicaError> {
    if validate_layout(layout, problem.model, None).is_err() || !fits(problem, layout)? {
        return Ok(None);
    }
    let stages = layout.replicas[0].stages.len();
    let shape = problem.workload.shape(sequences_of_step(problem, stages));
    let (mut way, mut slowest) = (0.0_f64, 0.0_f64);
    for stage in 0..stages {
        let id = StageId(stage as u32);
        let cost = match StageCost::new(problem.cost, layout, problem.model, ReplicaId(0), id) {
            Ok(cost) => cost,
            Err(CostError::Topology(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let seconds = cost.step(&shape)?.total_s;
        way += seconds + cost.handover_seconds(&shape)?.unwrap_or(0.0);
        slowest = slowest.max(seconds);
    }
    let seconds = match problem.objective {
        Objective::Latency => way,
        Objective::Throughput => way.max(micro_batches(problem, stages) as f64 * slowest),
    };
    Ok(SimDuration::from_seconds(seconds))
}

fn fits(problem: &PlanProblem, layout: &Layout) -> Result<bool, ReplicaError> {
    let blocks = problem.workload.kv_tokens(problem.kv.block_size) / u64::from(problem.kv.block_size);
    for seat in memory::seats(layout, problem.model) {
        let free = usable_memory(problem, &[seat.gpu])?[0];
        let kv = seat.memory.kv_block.checked_mul(blocks);
        let used = kv.and_then(|kv| kv.checked_add(seat.memory.weights));
        if used.is_none_or(|used| used > free) {
            return Ok(false);
        }
    }
    Ok(true)
}
