//! One replica over given devices: which of them form a stage, in which order, with how many layers and which
//! shares.
//!
//! **Search.** Devices of one type, speed, memory and node are interchangeable. Every way to deal them out to
//! ordered stages is a *structure* (`structures`), up to [`STRUCTURE_LIMIT`] of them, taken in the order of a
//! bound from below until that bound reaches the best plan (`search`). For a stage the shares come from
//! [`crate::apportion`] under the memory of its devices (`stage`); layer cuts come from a dynamic program over
//! those (`cuts`). Ranks of a group stand in the order in which the problem lists the devices.
//!
//! **Objective.** The time in which every sequence of the workload advances by one token, prefill work in its
//! steady proportion included. With as many micro-batches as stages (fewer where there are fewer sequences) it
//! is the slowest stage times the micro-batches, or the way of one micro-batch through all stages where that is
//! longer ([`Objective::Throughput`]);
//! with one micro-batch it is the way of the whole batch ([`Objective::Latency`]).
//!
//! **Memory.** A device holds its weights, the KV of all sequences of the workload at their mean context, and
//! the reserve. What a longer than average moment needs is not known here: the simulator judges that.
//!
//! All devices are used: leaving one out is the caller's choice of `gpus`.

mod baseline;
mod build;
mod bytes;
mod cuts;
mod explain;
mod ideal;
mod infeasible;
mod search;
mod stage;
mod structures;
mod tables;
#[cfg(test)]
mod tests;
mod workload;

use infercluster_sim::cost::{CostError, CostModel};
use infercluster_spec::layout::{KvCache, Reduction};
use infercluster_spec::{Bytes, Cluster, GpuId, Layout, Model, SimDuration};

pub use baseline::{Baseline, BaselineKind};
pub use explain::{BindingConstraint, StagePlan};
pub use ideal::ShareBounds;
pub use infeasible::{Infeasible, InfeasibleConstraint};
pub use workload::Workload;

/// What a replica is planned for.
#[derive(Clone)]
pub struct PlanProblem<'a> {
    /// Prices operators and collectives.
    pub cost: &'a dyn CostModel,
    /// The model.
    pub model: &'a Model,
    /// Where memory and types of the devices stand.
    pub cluster: &'a Cluster,
    /// The devices to use, in the order in which ranks may stand.
    pub gpus: Vec<GpuId>,
    /// How partial results become one.
    pub reduction: Reduction,
    /// Numerics profile of the layout.
    pub numerics: String,
    /// Unit of column cuts.
    pub quantum: u32,
    /// Shape of the KV cache.
    pub kv: KvCache,
    /// Whether a KV group may be cut where that pays.
    pub split_groups: bool,
    /// How many stages, where that is given: 1 forces one tensor-parallel group.
    pub stages: Option<usize>,
    /// What the replica has to serve.
    pub workload: Workload,
    /// What counts.
    pub objective: Objective,
    /// Memory of every device that stays free of weights and KV: activations and the runtime.
    pub reserve: Bytes,
}

/// What counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// Tokens per second with one micro-batch a stage in flight.
    Throughput,
    /// Time between two tokens of a sequence, one micro-batch.
    Latency,
}

/// The answer to a [`PlanProblem`].
#[derive(Debug, Clone, PartialEq)]
pub enum PlanOutcome {
    /// The best layout found.
    Plan(Box<ReplicaPlan>),
    /// No layout holds the model and the workload's KV.
    Infeasible(Infeasible),
}

/// A layout for one replica, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaPlan {
    /// The layout.
    pub layout: Layout,
    /// Time in which every sequence advances by one token.
    pub step_time: SimDuration,
    /// Output tokens per second that follow.
    pub output_tokens_per_s: f64,
    /// By stage: what it does and what binds it.
    pub stages: Vec<StagePlan>,
    /// What the same cost model says of layouts that engines make today, fastest first; none that fits the
    /// memory is left out.
    pub baselines: Vec<Baseline>,
    /// What ideal shares of this structure would reach.
    pub bounds: ShareBounds,
    /// Structures that were priced or ruled out by a bound.
    pub structures: usize,
    /// Whether every structure was looked at, with proven shares: then no layout of one replica over these
    /// devices in this rank order is faster, where a last unit of columns, rows or words that is short counts
    /// as a whole one.
    pub exact: bool,
}

impl ReplicaPlan {
    /// How much longer the fastest even layout takes, as a factor; `None` where none fits.
    pub fn gain_over_even(&self) -> Option<f64> {
        let even = self
            .baselines
            .iter()
            .find(|baseline| baseline.kind == BaselineKind::Even)?;
        Some(even.step_time.as_seconds() / self.step_time.as_seconds())
    }
}

/// Why a problem cannot be searched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The cost model has no answer.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// A device that the cluster does not have, or without a known memory.
    #[error("{gpu} has no known memory in cluster `{cluster}`")]
    UnknownMemory {
        /// The device.
        gpu: GpuId,
        /// The cluster.
        cluster: String,
    },
    /// No device, or one twice.
    #[error("a replica needs each of its devices once and at least one, found {gpus:?}")]
    Devices {
        /// What was asked for.
        gpus: Vec<GpuId>,
    },
    /// A number of stages that devices or layers cannot make.
    #[error("{stages} stages were asked for, but there are {devices} devices and {layers} layers")]
    StageCount {
        /// Asked for.
        stages: usize,
        /// Devices there are.
        devices: usize,
        /// Layers of the model.
        layers: u32,
    },
    /// Zero where a count is needed.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// Which value.
        field: &'static str,
    },
    /// An operator that a cost model says takes longer than a plan counts.
    #[error("one operator takes {seconds} s, {limit} is the longest that a plan counts")]
    TooLong {
        /// What the cost model said.
        seconds: f64,
        /// The longest that is counted.
        limit: SimDuration,
    },
    /// A model whose heads do not form groups.
    #[error("{kv_heads} KV heads do not divide the model's {query_heads} query heads")]
    HeadGroups {
        /// Query heads.
        query_heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
}

/// Structures that one search looks at.
pub const STRUCTURE_LIMIT: usize = 20_000;

/// The best layout of one replica over the problem's devices.
pub fn plan_replica(problem: &PlanProblem) -> Result<PlanOutcome, ReplicaError> {
    check(problem)?;
    let list = structures::structures(problem)?;
    let search::Found { best, exact } = search::search(problem, &list)?;
    let Some(best) = best else {
        return Ok(PlanOutcome::Infeasible(infeasible::nearest(problem, &list)?));
    };
    let layout = build::layout(problem, &best);
    let seconds = best.value.as_seconds();
    Ok(PlanOutcome::Plan(Box::new(ReplicaPlan {
        step_time: best.value,
        output_tokens_per_s: f64::from(problem.workload.sequences) / seconds,
        stages: explain::stages(problem, &best, &layout)?,
        baselines: baseline::baselines(problem)?,
        bounds: ideal::bounds(problem, &best, &list.classes)?,
        layout,
        structures: list.structures.len(),
        exact,
    })))
}

/// A structure with its cuts and shares.
#[derive(Debug, Clone)]
struct Candidate {
    value: SimDuration,
    stages: Vec<CandidateStage>,
}

#[derive(Debug, Clone)]
struct CandidateStage {
    gpus: Vec<GpuId>,
    layers: u32,
    option: stage::StageOption,
}

fn check(problem: &PlanProblem) -> Result<(), ReplicaError> {
    let model = problem.model;
    let fields = [
        ("quantum", problem.quantum),
        ("KV block size", problem.kv.block_size),
        ("sequences of the workload", problem.workload.sequences),
        ("query heads of the model", model.query_heads),
        ("KV heads of the model", model.kv_heads),
        ("layers of the model", model.layers),
    ];
    if let Some((field, _)) = fields.into_iter().find(|(_, value)| *value == 0) {
        return Err(ReplicaError::Zero { field });
    }
    if !model.query_heads.is_multiple_of(model.kv_heads) {
        return Err(ReplicaError::HeadGroups {
            query_heads: model.query_heads,
            kv_heads: model.kv_heads,
        });
    }
    let distinct: std::collections::BTreeSet<GpuId> = problem.gpus.iter().copied().collect();
    if distinct.is_empty() || distinct.len() != problem.gpus.len() {
        return Err(ReplicaError::Devices {
            gpus: problem.gpus.clone(),
        });
    }
    let devices = problem.gpus.len();
    let possible = 1..=devices.min(model.layers as usize);
    if let Some(stages) = problem.stages.filter(|stages| !possible.contains(stages)) {
        return Err(ReplicaError::StageCount {
            stages,
            devices,
            layers: model.layers,
        });
    }
    Ok(())
}
