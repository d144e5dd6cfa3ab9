//! One stage: the best shares for every number of layers.

use std::collections::BTreeMap;

use infercluster_sim::cost::{CostError, ShareCost};
use infercluster_sim::topology::CollectiveGroup;
use infercluster_spec::layout::Reduction;
use infercluster_spec::migration::WeightKind;
use infercluster_spec::{BatchShape, Bytes, GpuId, Operator, SimDuration};

use super::{Candidate, Objective, PlanProblem, ReplicaError};
use crate::apportion::{
    CountShare, CountTimes, GroupProblem, GroupShares, HeadShare, HeadTimes, apportion, continuous_bound,
};
use crate::migrate::slice_bytes;

/// Most units that rows and vocabulary are cut into: finer cuts change a stage by less than the model knows.
pub(super) const ROW_UNITS: u32 = 256;
/// Bytes of one logit.
const LOGIT_BYTES: u64 = 4;

/// Shares of one stage with some number of layers.
#[derive(Debug, Clone)]
pub(super) struct StageOption {
    /// One micro-batch through the stage.
    pub(super) time: SimDuration,
    /// The same with memory without end.
    pub(super) free_time: SimDuration,
    pub(super) shares: GroupShares,
}

/// What ideal shares of a plan's structure and layer cuts would reach: no memory limit, and every collective
/// paced by an even share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareBounds {
    /// With whole heads, quanta and rows.
    pub integer: SimDuration,
    /// With any fraction.
    pub continuous: SimDuration,
}

/// Tables of one group for one layer and for the head, at one micro-batch.
struct GroupTables {
    heads: HeadShare,
    columns: CountShare,
    rows: Option<CountShare>,
    vocab: Option<CountShare>,
    /// Once a stage and once a layer, whatever the shares.
    fixed: u64,
    per_layer: u64,
    /// Norms, which every rank holds: bytes once a stage and once a layer.
    fixed_bytes: Bytes,
    layer_bytes: Bytes,
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

/// One group of devices as a stage.
struct GroupState {
    tables: GroupTables,
    memory: Vec<Bytes>,
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
    share: ShareCost<'a>,
    classes: BTreeMap<GpuId, usize>,
    index: BTreeMap<(Vec<usize>, u32, bool), Option<GroupIndex>>,
    groups: Vec<GroupState>,
    all_exact: bool,
}

impl<'a> StageSolver<'a> {
    pub(super) fn new(
        problem: &'a PlanProblem<'a>,
        classes: BTreeMap<GpuId, usize>,
    ) -> Result<Self, ReplicaError> {
        Ok(Self {
            problem,
            share: share_cost(problem)?,
            classes,
            index: BTreeMap::new(),
            groups: Vec::new(),
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
        let classes = gpus.iter().map(|gpu| self.classes[gpu]).collect();
        let key = (classes, sequences, is_last);
        if let Some(known) = self.index.get(&key) {
            return Ok(*known);
        }
        let index = match self.problem.cost.group(gpus) {
            Ok(group) => {
                let state = self.open(gpus, &group, sequences, is_last)?;
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
        group: &CollectiveGroup,
        sequences: u32,
        is_last: bool,
    ) -> Result<GroupState, ReplicaError> {
        let shape = self.problem.workload.shape(sequences);
        let tables = group_tables(self.problem, &self.share, group, gpus, &shape, is_last)?;
        // Without limits segments do not meet, so the shares of one layer are those of any number.
        let one = tables.group_problem(1, vec![None; gpus.len()]);
        let free = apportion(&one).expect("without limits something fits");
        self.all_exact &= free.exact;
        let layer_time = tables.layer_time(&one, &free);
        let head_time = one.time(&free.heads, &free.counts).0 - (layer_time.0 - tables.per_layer);
        let at_least = |count: u64| SimDuration(tables.fixed + head_time + count * layer_time.0);
        let layers = u64::from(self.problem.model.layers);
        Ok(GroupState {
            entries: (0..=layers)
                .map(|count| Entry::AtLeast(at_least(count)))
                .collect(),
            memory: usable_memory(self.problem, gpus)?,
            tables,
            free,
        })
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
        let held = state.tables.held_bytes(layers);
        let limited = state
            .memory
            .iter()
            .map(|memory| memory.0.checked_sub(held.0).map(Bytes));
        let Some(limited) = limited.collect::<Option<Vec<Bytes>>>() else {
            state.entries[layers as usize..].fill(Entry::TooLarge);
            return;
        };
        let problem = state
            .tables
            .group_problem(layers, limited.into_iter().map(Some).collect());
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
    pub(super) fn handovers(&self, structure: &[Vec<GpuId>]) -> Result<Option<Vec<u64>>, ReplicaError> {
        let shape = self
            .problem
            .workload
            .shape(sequences_of_step(self.problem, structure.len()));
        let hidden = u64::from(self.problem.model.hidden);
        let bytes = self
            .share
            .activation_bytes(shape.new_tokens.saturating_mul(hidden));
        let operator = Operator::Transfer { bytes };
        let mut times = Vec::new();
        for pair in structure.windows(2) {
            let mut slowest = 0;
            for (rank, receiver) in pair[1].iter().enumerate() {
                let sender = pair[0][rank % pair[0].len()];
                let group = match self.problem.cost.group(&[sender, *receiver]) {
                    Ok(group) => group,
                    Err(CostError::Topology(_)) => return Ok(None),
                    Err(error) => return Err(error.into()),
                };
                slowest = slowest.max(collective(&group, &operator)?.0);
            }
            times.push(slowest);
        }
        Ok(Some(times))
    }
}

fn share_cost<'a>(problem: &PlanProblem<'a>) -> Result<ShareCost<'a>, CostError> {
    ShareCost::new(
        problem.cost,
        problem.model,
        problem.reduction,
        &problem.numerics,
        problem.kv.dtype,
        problem.gpus.iter().copied(),
    )
}

/// Sequences of one micro-batch.
pub(super) fn sequences_of_step(problem: &PlanProblem, stages: usize) -> u32 {
    match problem.objective {
        Objective::Latency => problem.workload.sequences,
        Objective::Throughput => problem.workload.sequences.div_ceil(stages as u32),
    }
}

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

/// Indices of one unit of rows, and how many units there are.
pub(super) fn row_units(total: u32) -> (u32, u32) {
    let unit = total.div_ceil(ROW_UNITS).max(1);
    (unit, total.div_ceil(unit))
}

/// Ideal shares for the stages of a candidate.
pub(super) fn bounds(problem: &PlanProblem, candidate: &Candidate) -> Result<ShareBounds, ReplicaError> {
    let solver = StageSolver::new(problem, BTreeMap::new())?;
    let count = candidate.stages.len();
    let shape = problem.workload.shape(sequences_of_step(problem, count));
    let structure: Vec<Vec<GpuId>> = candidate.stages.iter().map(|stage| stage.gpus.clone()).collect();
    let handover: u64 = solver.handovers(&structure)?.into_iter().flatten().sum();
    let (mut integer, mut continuous) = (Vec::new(), Vec::new());
    for (position, stage) in candidate.stages.iter().enumerate() {
        let group = problem.cost.group(&stage.gpus)?;
        let is_last = position + 1 == count;
        let mut tables = group_tables(problem, &solver.share, &group, &stage.gpus, &shape, is_last)?;
        tables.pace_evenly(stage.gpus.len());
        let fixed = tables.fixed + u64::from(stage.layers) * tables.per_layer;
        let ideal = tables.group_problem(stage.layers, vec![None; stage.gpus.len()]);
        let shares = apportion(&ideal).expect("without limits something fits");
        integer.push(fixed + shares.bound.0);
        continuous.push(fixed + continuous_bound(&ideal).0);
    }
    let value = |times: &[u64]| {
        let way = times.iter().sum::<u64>() + handover;
        SimDuration(match problem.objective {
            Objective::Latency => way,
            Objective::Throughput => way.max(times.len() as u64 * times.iter().max().copied().unwrap_or(0)),
        })
    };
    Ok(ShareBounds {
        integer: value(&integer),
        continuous: value(&continuous),
    })
}

impl GroupTables {
    fn group_problem(&self, layers: u32, memory: Vec<Option<Bytes>>) -> GroupProblem {
        let times = u64::from(layers);
        let heads = HeadShare {
            query_bytes: self.heads.query_bytes * times,
            kv_bytes: self.heads.kv_bytes * times,
            segments: self
                .heads
                .segments
                .iter()
                .map(|table| table.repeated(times))
                .collect(),
            ..self.heads.clone()
        };
        let repeated = |share: &CountShare| CountShare {
            units: share.units,
            unit_bytes: share.unit_bytes * times,
            segments: share.segments.iter().map(|table| table.repeated(times)).collect(),
        };
        let counts = std::iter::once(repeated(&self.columns))
            .chain(self.rows.as_ref().map(repeated))
            .chain(self.vocab.clone());
        GroupProblem {
            heads,
            counts: counts.collect(),
            memory,
        }
    }

    /// Time of one layer with the shares of a problem of one layer, collectives included.
    fn layer_time(&self, one: &GroupProblem, shares: &GroupShares) -> SimDuration {
        let without_head = GroupProblem {
            counts: one.counts[..one.counts.len() - usize::from(self.vocab.is_some())].to_vec(),
            ..one.clone()
        };
        SimDuration(self.per_layer + without_head.time(&shares.heads, &shares.counts).0)
    }

    fn held_bytes(&self, layers: u32) -> Bytes {
        self.fixed_bytes + self.layer_bytes * u64::from(layers)
    }

    /// Takes gathers out of the tables and charges each at an even share instead: the second segment of a
    /// kind is its gather, which is the same on every rank.
    fn pace_evenly(&mut self, ranks: usize) {
        let ranks = ranks as u32;
        let mut even_layer = 0;
        if self.heads.segments.len() > 1 {
            let share = self
                .heads
                .query_heads
                .div_ceil(ranks)
                .next_multiple_of(self.heads.unit);
            let gather = self.heads.segments.pop().expect("there are two");
            even_layer += gather
                .fewest_kv(share.min(self.heads.query_heads), self.heads.group_size)
                .0;
        }
        let even = |share: &mut CountShare, own: usize| match share.segments.len() > own {
            true => {
                let gather = share.segments.pop().expect("there are more");
                gather.of(0, share.units.div_ceil(ranks)).0
            }
            false => 0,
        };
        even_layer += even(&mut self.columns, 1);
        even_layer += self.rows.as_mut().map_or(0, |rows| even(rows, 2));
        self.per_layer += even_layer;
        self.fixed += self.vocab.as_mut().map_or(0, |vocab| even(vocab, 1));
    }
}

fn rounded(seconds: f64) -> SimDuration {
    SimDuration::from_seconds(seconds).unwrap_or(SimDuration(u64::MAX >> 20))
}

fn collective(group: &CollectiveGroup, operator: &Operator) -> Result<SimDuration, CostError> {
    let seconds = group.seconds(operator).ok_or(CostError::WrongOperator {
        operator: *operator,
        wanted: "collective",
    })?;
    Ok(rounded(seconds))
}

fn group_tables(
    problem: &PlanProblem,
    share: &ShareCost,
    group: &CollectiveGroup,
    gpus: &[GpuId],
    shape: &BatchShape,
    is_last: bool,
) -> Result<GroupTables, ReplicaError> {
    let model = problem.model;
    let tables = Tabulator {
        problem,
        share,
        group,
        gpus,
        shape,
    };
    let activations = |count: u64| share.activation_bytes(shape.new_tokens.saturating_mul(count));
    let reduce = Operator::AllReduce {
        ranks: gpus.len() as u32,
        bytes: activations(u64::from(model.hidden)),
    };
    let fast = problem.reduction == Reduction::Fast;
    let per_layer = if fast {
        2 * collective(group, &reduce)?.0
    } else {
        0
    };
    let vocab = if is_last { Some(tables.vocab()?) } else { None };
    let norms = slice_bytes(model, problem.reduction, WeightKind::Norms, model.hidden, false);
    let final_norm = slice_bytes(model, problem.reduction, WeightKind::LmHead, 0, true);
    Ok(GroupTables {
        heads: tables.heads()?,
        columns: tables.columns()?,
        rows: if fast { None } else { Some(tables.rows()?) },
        vocab,
        fixed: tables.host(is_last)?.0,
        per_layer,
        fixed_bytes: if is_last { final_norm } else { Bytes::ZERO },
        layer_bytes: norms,
    })
}

/// Fills the tables of one group.
struct Tabulator<'a> {
    problem: &'a PlanProblem<'a>,
    share: &'a ShareCost<'a>,
    group: &'a CollectiveGroup,
    gpus: &'a [GpuId],
    shape: &'a BatchShape,
}

impl Tabulator<'_> {
    fn unit_bytes(&self, kind: WeightKind) -> Bytes {
        slice_bytes(self.problem.model, self.problem.reduction, kind, 1, false)
    }

    fn invariant(&self) -> bool {
        self.problem.reduction == Reduction::Invariant
    }

    /// A gather whose largest share is `largest` of `total` numbers a token.
    fn gather(&self, largest: u64, total: u64) -> Result<SimDuration, CostError> {
        let bytes = |count: u64| {
            self.share
                .activation_bytes(self.shape.new_tokens.saturating_mul(count))
        };
        self.gather_bytes(bytes(largest), bytes(total))
    }

    fn gather_bytes(&self, largest: Bytes, total: Bytes) -> Result<SimDuration, CostError> {
        let ranks = self.gpus.len() as u32;
        collective(
            self.group,
            &Operator::AllGather {
                ranks,
                largest,
                total,
            },
        )
    }

    fn heads(&self) -> Result<HeadShare, CostError> {
        let model = self.problem.model;
        let group_size = model.group_size();
        let unit = if self.problem.split_groups { 1 } else { group_size };
        let cut = (model.query_heads, group_size, unit);
        let compute = |rank: usize, query, kv| {
            self.share
                .attention_seconds(self.gpus[rank], self.shape, query, kv)
                .map(rounded)
        };
        let mut segments = vec![HeadTimes::tabulate(self.gpus.len(), cut, compute)?];
        if self.invariant() {
            let width = u64::from(model.head_dim);
            let total = u64::from(model.query_heads) * width;
            let gather = |_, query: u32, _| self.gather(u64::from(query) * width, total);
            segments.push(HeadTimes::tabulate(self.gpus.len(), cut, gather)?);
        }
        let output = if self.invariant() {
            Bytes::ZERO
        } else {
            self.unit_bytes(WeightKind::Output)
        };
        let kv_token = model.kv_bytes_per_token_layer(1, self.problem.kv.dtype);
        let kv_tokens = self.problem.workload.kv_tokens(self.problem.kv.block_size);
        // A workload past 64 bits fits nowhere, which is what the largest number says.
        let cache = kv_token.checked_mul(kv_tokens).unwrap_or(Bytes(u64::MAX >> 20));
        Ok(HeadShare {
            query_heads: model.query_heads,
            group_size,
            unit,
            query_bytes: self.unit_bytes(WeightKind::Query) + output,
            kv_bytes: self.unit_bytes(WeightKind::KeyValue) + cache.min(Bytes(u64::MAX >> 20)),
            segments,
        })
    }

    fn columns(&self) -> Result<CountShare, CostError> {
        let (ffn, quantum) = (self.problem.model.ffn, self.problem.quantum);
        let units = ffn.div_ceil(quantum);
        let columns = |count: u32| (u64::from(count) * u64::from(quantum)).min(u64::from(ffn)) as u32;
        let compute = |rank: usize, count| {
            self.share
                .mlp_seconds(self.gpus[rank], self.shape, columns(count))
                .map(rounded)
        };
        let mut segments = vec![CountTimes::tabulate(self.gpus.len(), units, compute)?];
        if self.invariant() {
            let gather = |_, count| self.gather(u64::from(columns(count)), u64::from(ffn));
            segments.push(CountTimes::tabulate(self.gpus.len(), units, gather)?);
        }
        let down = if self.invariant() {
            Bytes::ZERO
        } else {
            self.unit_bytes(WeightKind::Down)
        };
        Ok(CountShare {
            units,
            unit_bytes: (self.unit_bytes(WeightKind::GateUp) + down) * u64::from(quantum.min(ffn)),
            segments,
        })
    }

    fn rows(&self) -> Result<CountShare, CostError> {
        let hidden = self.problem.model.hidden;
        let (unit, units) = row_units(hidden);
        let rows = |count: u32| (count * unit).min(hidden);
        let (gpus, ranks) = (self.gpus, self.gpus.len());
        let output = |rank: usize, count| {
            self.share
                .output_rows_seconds(gpus[rank], self.shape, rows(count))
                .map(rounded)
        };
        let down = |rank: usize, count| {
            self.share
                .down_rows_seconds(gpus[rank], self.shape, rows(count))
                .map(rounded)
        };
        let gathers = |_, count| {
            let one = self.gather(u64::from(rows(count)), u64::from(hidden))?;
            Ok(SimDuration(2 * one.0))
        };
        let segments = vec![
            CountTimes::tabulate(ranks, units, output)?,
            CountTimes::tabulate(ranks, units, down)?,
            CountTimes::tabulate::<CostError>(ranks, units, gathers)?,
        ];
        let row = self.unit_bytes(WeightKind::Output) + self.unit_bytes(WeightKind::Down);
        Ok(CountShare {
            units,
            unit_bytes: row * u64::from(unit),
            segments,
        })
    }

    fn vocab(&self) -> Result<CountShare, CostError> {
        let vocab = self.problem.model.vocab;
        let (unit, units) = row_units(vocab);
        let rows = |count: u32| (count * unit).min(vocab);
        let compute = |rank: usize, count| {
            self.share
                .head_seconds(self.gpus[rank], self.shape, rows(count))
                .map(rounded)
        };
        let bytes = |rows: u32| {
            Bytes(
                self.shape
                    .logits_rows
                    .saturating_mul(u64::from(rows))
                    .saturating_mul(LOGIT_BYTES),
            )
        };
        let gather = |_, count| self.gather_bytes(bytes(rows(count)), bytes(vocab));
        let segments = vec![
            CountTimes::tabulate(self.gpus.len(), units, compute)?,
            CountTimes::tabulate(self.gpus.len(), units, gather)?,
        ];
        Ok(CountShare {
            units,
            unit_bytes: self.unit_bytes(WeightKind::LmHead) * u64::from(unit),
            segments,
        })
    }

    fn host(&self, is_last: bool) -> Result<SimDuration, CostError> {
        let sequences = if is_last { self.shape.logits_rows } else { 0 };
        let operator = Operator::HostStep { sequences };
        let dtype = self.problem.model.dtype;
        let slowest = self.gpus.iter().try_fold(0.0_f64, |slowest, gpu| {
            let seconds = self.problem.cost.operator_seconds(*gpu, dtype, &operator)?;
            Ok::<_, CostError>(slowest.max(seconds))
        })?;
        Ok(rounded(slowest))
    }
}
