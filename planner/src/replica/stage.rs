//! Stages solved when asked and remembered: the best shares for every number of layers.

use std::collections::BTreeMap;

use infercluster_sim::cost::CostError;
use infercluster_spec::{Bytes, GpuId, Operator, SimDuration};

use super::cuts::Pace;
use super::tables::{GroupTables, Pricer, collective};
use super::{Objective, PlanProblem, ReplicaError};
use crate::apportion::{GroupShares, apportion, is_refuted};

/// Shares of one stage with some number of layers.
#[derive(Debug, Clone)]
pub(super) struct StageOption {
    /// One micro-batch through the stage.
    pub(super) time: SimDuration,
    /// The same with memory without end.
    pub(super) free_time: SimDuration,
    pub(super) shares: GroupShares,
}

/// What is known of a stage with some number of layers.
#[derive(Debug, Clone)]
enum Entry {
    /// It takes at least this long: the time without memory limits.
    AtLeast(SimDuration),
    /// Solved.
    Solved(StageOption),
    /// Memory does not hold it.
    TooLarge,
}

/// The time of a stage without memory limits, and how many layers its memory may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outline {
    /// Once.
    pub(super) fixed: u64,
    /// A layer.
    pub(super) per_layer: u64,
    /// No more layers than these fit; fewer may not fit either.
    pub(super) most_layers: u32,
}

/// One group of devices as a stage.
struct GroupState {
    tables: GroupTables,
    memory: Vec<Bytes>,
    is_last: bool,
    outline: Outline,
    /// Best shares without memory limits, for any number of layers.
    free: GroupShares,
    /// By number of layers.
    entries: Vec<Entry>,
}

/// Names a [`GroupState`] of its solver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupIndex(usize);

/// Solves stages when asked and remembers them. Groups of interchangeable devices are one.
pub(super) struct StageSolver<'a> {
    problem: &'a PlanProblem<'a>,
    pricer: Pricer<'a>,
    index: BTreeMap<(Vec<usize>, u32, bool), Option<GroupIndex>>,
    groups: Vec<GroupState>,
    /// Time of a hand-over by classes of sender and receiver and sequences; `None` where no link carries it.
    handovers: BTreeMap<(usize, usize, u32), Option<u64>>,
    all_exact: bool,
}

impl<'a> StageSolver<'a> {
    /// `classes` says which devices are interchangeable.
    pub(super) fn new(
        problem: &'a PlanProblem<'a>,
        classes: BTreeMap<GpuId, usize>,
    ) -> Result<Self, ReplicaError> {
        Ok(Self {
            problem,
            pricer: Pricer::new(problem, classes)?,
            index: BTreeMap::new(),
            groups: Vec::new(),
            handovers: BTreeMap::new(),
            all_exact: true,
        })
    }

    /// Whether all shares so far are proven to be the fastest.
    pub(super) fn all_exact(&self) -> bool {
        self.all_exact
    }

    /// The group of a stage; `None` without links between its devices.
    pub(super) fn group(
        &mut self,
        gpus: &[GpuId],
        stages: usize,
        is_last: bool,
    ) -> Result<Option<GroupIndex>, ReplicaError> {
        let sequences = sequences_of_step(self.problem, stages);
        let classes = gpus.iter().map(|gpu| self.pricer.class(*gpu)).collect();
        let key = (classes, sequences, is_last);
        if let Some(known) = self.index.get(&key) {
            return Ok(*known);
        }
        let index = match self.problem.cost.group(gpus) {
            Ok(group) => {
                let tables = self.pricer.tables(&group, gpus, sequences, is_last)?;
                let state = self.open(gpus, tables, is_last)?;
                self.groups.push(state);
                Some(GroupIndex(self.groups.len() - 1))
            }
            Err(CostError::Topology(_)) => None,
            Err(error) => return Err(error.into()),
        };
        self.index.insert(key, index);
        Ok(index)
    }

    fn open(
        &mut self,
        gpus: &[GpuId],
        tables: GroupTables,
        is_last: bool,
    ) -> Result<GroupState, ReplicaError> {
        // Without limits kinds do not meet, so the shares of one layer are those of any number.
        let one = tables.group_problem(1, vec![None; gpus.len()]);
        let free = apportion(&one).expect("without limits something fits");
        self.all_exact &= free.exact;
        let per_layer = tables.layer_time(&one, &free).0;
        let head = one.time(&free.heads, &free.counts).0 - (per_layer - tables.per_layer);
        let memory = usable_memory(self.problem, gpus)?;
        let layers = self.problem.model.layers;
        let outline = Outline {
            fixed: tables.fixed.saturating_add(head),
            per_layer,
            most_layers: self
                .pricer
                .bytes()
                .most_layers(layers, is_last, &memory, |stage| !is_refuted(stage)),
        };
        let entry = |count: u32| {
            if count > outline.most_layers {
                Entry::TooLarge
            } else {
                Entry::AtLeast(SimDuration(outline.at_least(count)))
            }
        };
        Ok(GroupState {
            entries: (0..=layers).map(entry).collect(),
            memory,
            is_last,
            outline,
            tables,
            free,
        })
    }

    /// What the group needs at least.
    pub(super) fn outline(&self, group: GroupIndex) -> Outline {
        self.groups[group.0].outline
    }

    /// A bound from below on the time of the group by number of layers; none where it is known not to fit.
    pub(super) fn times(&self, group: GroupIndex) -> Vec<Option<u64>> {
        let time = |entry: &Entry| match entry {
            Entry::AtLeast(time) => Some(time.0),
            Entry::Solved(option) => Some(option.time.0),
            Entry::TooLarge => None,
        };
        self.groups[group.0].entries.iter().map(time).collect()
    }

    /// The shares of the group with that many layers, where they are solved.
    pub(super) fn solved(&self, group: GroupIndex, layers: u32) -> Option<&StageOption> {
        match &self.groups[group.0].entries[layers as usize] {
            Entry::Solved(option) => Some(option),
            Entry::AtLeast(_) | Entry::TooLarge => None,
        }
    }

    /// Solves the group with that many layers.
    pub(super) fn solve(&mut self, group: GroupIndex, layers: u32) {
        let state = &mut self.groups[group.0];
        let room = self.pricer.bytes().room(layers, state.is_last, &state.memory);
        let Some(limited) = room else {
            state.entries[layers as usize..].fill(Entry::TooLarge);
            return;
        };
        let problem = state.tables.group_problem(layers, limited);
        let used = problem.bytes(&state.free.heads, &state.free.counts);
        let mut limits = used.iter().zip(&problem.memory);
        let free_fits = limits.all(|(used, limit)| limit.is_none_or(|limit| *used <= limit));
        let shares = if free_fits {
            Ok(state.free.clone())
        } else {
            apportion(&problem)
        };
        match shares {
            Ok(shares) => {
                self.all_exact &= shares.exact;
                let fixed = state.tables.fixed + u64::from(layers) * state.tables.per_layer;
                let time_of =
                    |shares: &GroupShares| SimDuration(fixed + problem.time(&shares.heads, &shares.counts).0);
                state.entries[layers as usize] = Entry::Solved(StageOption {
                    time: time_of(&shares),
                    free_time: time_of(&state.free),
                    shares,
                });
            }
            // More layers need more of everything.
            Err(shortage) if shortage.exact => state.entries[layers as usize..].fill(Entry::TooLarge),
            Err(_) => {
                self.all_exact = false;
                state.entries[layers as usize] = Entry::TooLarge;
            }
        }
    }

    /// Time of each hand-over between stages; `None` where no link carries one.
    pub(super) fn handovers(&mut self, structure: &[Vec<GpuId>]) -> Result<Option<Vec<u64>>, ReplicaError> {
        let sequences = sequences_of_step(self.problem, structure.len());
        let mut times = Vec::new();
        for pair in structure.windows(2) {
            let mut slowest = 0;
            for (rank, receiver) in pair[1].iter().enumerate() {
                let sender = pair[0][rank % pair[0].len()];
                match self.handover(sender, *receiver, sequences)? {
                    Some(time) => slowest = slowest.max(time),
                    None => return Ok(None),
                }
            }
            times.push(slowest);
        }
        Ok(Some(times))
    }

    fn handover(&mut self, from: GpuId, to: GpuId, sequences: u32) -> Result<Option<u64>, ReplicaError> {
        let key = (self.pricer.class(from), self.pricer.class(to), sequences);
        if let Some(known) = self.handovers.get(&key) {
            return Ok(*known);
        }
        let operator = Operator::Transfer {
            bytes: self.pricer.activation_bytes(sequences),
        };
        let time = match self.problem.cost.group(&[from, to]) {
            Ok(group) => Some(collective(&group, &operator)?.0),
            Err(CostError::Topology(_)) => None,
            Err(error) => return Err(error.into()),
        };
        self.handovers.insert(key, time);
        Ok(time)
    }
}

impl Outline {
    /// No stage of the group with that many layers is faster.
    pub(super) fn at_least(&self, layers: u32) -> u64 {
        self.fixed
            .saturating_add(self.per_layer.saturating_mul(u64::from(layers)))
    }
}

/// Sequences of one micro-batch.
pub(super) fn sequences_of_step(problem: &PlanProblem, stages: usize) -> u32 {
    match problem.objective {
        Objective::Latency => problem.workload.sequences,
        Objective::Throughput => problem.workload.sequences.div_ceil(stages as u32),
    }
}

/// What a step of a replica of that many stages is made of; `handover` is the time of all hand-overs.
pub(super) fn pace(problem: &PlanProblem, stages: usize, handover: u64) -> Pace {
    Pace {
        objective: problem.objective,
        handover,
        micro_batches: micro_batches(problem, stages),
    }
}

/// Micro-batches in flight: one a stage, and no more than the sequences fill.
pub(super) fn micro_batches(problem: &PlanProblem, stages: usize) -> u64 {
    u64::from(
        problem
            .workload
            .sequences
            .div_ceil(sequences_of_step(problem, stages)),
    )
}

/// Memory of devices beside the reserve.
pub(super) fn usable_memory(problem: &PlanProblem, gpus: &[GpuId]) -> Result<Vec<Bytes>, ReplicaError> {
    let of = |id: &GpuId| {
        let memory = problem
            .cluster
            .gpu(*id)
            .and_then(|gpu| problem.cluster.memory(gpu));
        memory
            .map(|memory| memory.saturating_sub(problem.reserve))
            .ok_or_else(|| ReplicaError::UnknownMemory {
                gpu: *id,
                cluster: problem.cluster.name.clone(),
            })
    };
    gpus.iter().map(of).collect()
}
