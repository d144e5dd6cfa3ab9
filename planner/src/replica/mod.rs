//! One replica over given devices: which of them form a stage, in which order, with how many layers and which
//! shares.
//!
//! **Search.** Devices of one type, speed, memory and node are interchangeable. Every way to deal them out to
//! ordered stages is a *structure* (`structures`), up to [`STRUCTURE_LIMIT`] of them. For a stage the shares
//! come from [`crate::apportion`] under the memory of its devices (`stage`); layer cuts come from a dynamic program over those (`cuts`). Ranks of a group stand
//! in the order in which the problem lists the devices.
//!
//! **Objective.** The time in which every sequence of the workload advances by one token, prefill work in its
//! steady proportion included. With as many micro-batches as stages it is the slowest stage times the number of
//! stages, or the way of one micro-batch through all stages where that is longer ([`Objective::Throughput`]);
//! with one micro-batch it is the way of the whole batch ([`Objective::Latency`]).
//!
//! **Memory.** A device holds its weights, the KV of all sequences of the workload at their mean context, and
//! the reserve. What a longer than average moment needs is not known here: the simulator judges that.
//!
//! All devices are used: leaving one out is the caller's choice of `gpus`.

mod baseline;
mod build;
mod cuts;
mod explain;
mod stage;
mod structures;
#[cfg(test)]
mod tests;
mod workload;

use infercluster_sim::cost::{CostError, CostModel};
use infercluster_spec::layout::{KvCache, Reduction};
use infercluster_spec::{Bytes, Cluster, GpuId, Layout, Model, SimDuration};

pub use baseline::{Baseline, BaselineKind};
pub use explain::{BindingConstraint, StagePlan};
pub use stage::ShareBounds;
pub use workload::Workload;

use stage::StageSolver;

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
    /// Structures that were priced.
    pub structures: usize,
    /// Whether every structure was priced with proven shares: then no layout of one replica over these devices
    /// in this rank order is faster.
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

/// Why no layout holds the workload, and what would fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Infeasible {
    /// Bytes of weights and KV beyond the memory of all devices together; zero where the sum would fit, but no
    /// way to cut it does.
    pub missing: Bytes,
    /// The most sequences of the same mean context that fit; `None` where not one does.
    pub nearest_sequences: Option<u32>,
    /// The longest mean context at which the same number of sequences fits; `None` where no context does.
    pub nearest_context: Option<u64>,
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
    /// A model whose heads do not form groups.
    #[error("{kv_heads} KV heads do not divide the model's {query_heads} query heads")]
    HeadGroups {
        /// Query heads.
        query_heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
}

/// Structures that one search prices.
pub const STRUCTURE_LIMIT: usize = 2_000;

/// The best layout of one replica over the problem's devices.
pub fn plan_replica(problem: &PlanProblem) -> Result<PlanOutcome, ReplicaError> {
    check(problem)?;
    let Found {
        best,
        structures,
        exact,
    } = search(problem)?;
    let Some(best) = best else {
        return Ok(PlanOutcome::Infeasible(Infeasible {
            missing: missing(problem)?,
            nearest_sequences: nearest_sequences(problem)?,
            nearest_context: nearest_context(problem)?,
        }));
    };
    let layout = build::layout(problem, &best);
    let seconds = best.value.as_seconds();
    Ok(PlanOutcome::Plan(Box::new(ReplicaPlan {
        step_time: best.value,
        output_tokens_per_s: f64::from(problem.workload.sequences) / seconds,
        stages: explain::stages(problem, &best, &layout)?,
        baselines: baseline::baselines(problem)?,
        bounds: stage::bounds(problem, &best)?,
        layout,
        structures,
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

struct Found {
    best: Option<Candidate>,
    structures: usize,
    exact: bool,
}

fn search(problem: &PlanProblem) -> Result<Found, ReplicaError> {
    let list = structures::structures(problem)?;
    let mut solver = StageSolver::new(problem, list.classes)?;
    let mut best: Option<Candidate> = None;
    for structure in &list.structures {
        let beat = best.as_ref().map(|best| best.value);
        if let Some(candidate) = price(problem, &mut solver, structure, beat)? {
            best = Some(candidate);
        }
    }
    Ok(Found {
        best,
        structures: list.structures.len(),
        exact: list.all && solver.all_exact(),
    })
}

/// The best cuts of one structure; `None` where memory or links rule it out or it does not beat `beat`.
///
/// Shares are solved only for the numbers of layers that a cut takes: others stand with a bound from below,
/// so that a cut whose every stage is solved is the best.
fn price(
    problem: &PlanProblem,
    solver: &mut StageSolver,
    structure: &[Vec<GpuId>],
    beat: Option<SimDuration>,
) -> Result<Option<Candidate>, ReplicaError> {
    let count = structure.len();
    let mut groups = Vec::with_capacity(count);
    for (position, gpus) in structure.iter().enumerate() {
        match solver.group(gpus, count, position + 1 == count)? {
            Some(group) => groups.push(group),
            None => return Ok(None),
        }
    }
    let Some(handovers) = solver.handovers(structure)? else {
        return Ok(None);
    };
    let handover: u64 = handovers.iter().sum();
    loop {
        let times: Vec<Vec<Option<u64>>> = groups.iter().map(|group| solver.times(*group)).collect();
        let cut = cuts::best(&times, handover, problem.objective, problem.model.layers);
        let Some(cut) = cut.filter(|cut| beat.is_none_or(|beat| cut.value < beat.0)) else {
            return Ok(None);
        };
        let chosen = || groups.iter().copied().zip(cut.layers.iter().copied());
        let options = chosen().map(|(group, layers)| solver.solved(group, layers).cloned());
        if let Some(options) = options.collect::<Option<Vec<_>>>() {
            let stages = structure.iter().zip(&cut.layers).zip(options);
            let stages = stages.map(|((gpus, layers), option)| CandidateStage {
                gpus: gpus.clone(),
                layers: *layers,
                option,
            });
            return Ok(Some(Candidate {
                value: SimDuration(cut.value),
                stages: stages.collect(),
            }));
        }
        for (group, layers) in chosen() {
            if solver.solved(group, layers).is_none() {
                solver.solve(group, layers);
            }
        }
    }
}

/// Bytes of weights and KV beyond the memory of all devices together.
fn missing(problem: &PlanProblem) -> Result<Bytes, ReplicaError> {
    let model = problem.model;
    let head = (u64::from(model.vocab) + 1) * u64::from(model.hidden);
    let params = u64::from(model.layers) * model.layer_params() + head;
    let kv_tokens = problem.workload.kv_tokens(problem.kv.block_size);
    let kv = u128::from(model.kv_bytes_per_token(problem.kv.dtype).0) * u128::from(kv_tokens);
    let needed = u128::from(model.dtype.bytes(params).0) + kv;
    let memory = stage::usable_memory(problem, &problem.gpus)?;
    let there: u128 = memory.iter().map(|bytes| u128::from(bytes.0)).sum();
    Ok(Bytes(
        u64::try_from(needed.saturating_sub(there)).unwrap_or(u64::MAX),
    ))
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

fn fits(problem: &PlanProblem, workload: Workload) -> Result<bool, ReplicaError> {
    let problem = PlanProblem {
        workload,
        ..problem.clone()
    };
    Ok(search(&problem)?.best.is_some())
}

/// The largest value in `1..limit` that fits, for something that fits less the larger it is.
fn largest_fitting(
    limit: u64,
    mut fits: impl FnMut(u64) -> Result<bool, ReplicaError>,
) -> Result<Option<u64>, ReplicaError> {
    let (mut low, mut high) = (0, limit);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low).filter(|largest| *largest > 0))
}

fn nearest_sequences(problem: &PlanProblem) -> Result<Option<u32>, ReplicaError> {
    let asked = problem.workload;
    let largest = largest_fitting(u64::from(asked.sequences), |sequences| {
        let sequences = sequences as u32;
        fits(problem, Workload { sequences, ..asked })
    })?;
    Ok(largest.map(|sequences| sequences as u32))
}

fn nearest_context(problem: &PlanProblem) -> Result<Option<u64>, ReplicaError> {
    let asked = problem.workload;
    let block = u64::from(problem.kv.block_size);
    let blocks = asked.mean_context.div_ceil(block);
    let largest = largest_fitting(blocks, |blocks| {
        let mean_context = blocks * block;
        fits(
            problem,
            Workload {
                mean_context,
                ..asked
            },
        )
    })?;
    Ok(largest.map(|blocks| blocks * block))
}
