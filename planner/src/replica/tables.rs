//! Times and bytes of the shares of one group, as [`crate::apportion`] reads them.

use std::collections::BTreeMap;

use infercluster_sim::cost::{CostError, ShareCost};
use infercluster_sim::topology::CollectiveGroup;
use infercluster_spec::layout::Reduction;
use infercluster_spec::{BatchShape, Bytes, GpuId, Operator, SimDuration};

use super::bytes::{ShareBytes, row_units};
use super::{PlanProblem, ReplicaError};
use crate::apportion::{CountShare, CountTimes, GroupProblem, GroupShares, HeadShare, HeadTimes};

/// Bytes of one logit.
const LOGIT_BYTES: u64 = 4;
/// Longest operator, in picoseconds (2.5 hours): a thousand layers of it stay within the clock.
const LONGEST_OPERATOR: u64 = 1 << 53;

/// Tables of one group for one layer and for the head, at one micro-batch.
pub(super) struct GroupTables {
    pub(super) heads: HeadShare,
    pub(super) columns: CountShare,
    pub(super) rows: Option<CountShare>,
    pub(super) vocab: Option<CountShare>,
    /// Once a stage and once a layer, whatever the shares.
    pub(super) fixed: u64,
    pub(super) per_layer: u64,
}

impl GroupTables {
    /// What the group shares with that many layers.
    pub(super) fn group_problem(&self, layers: u32, memory: Vec<Option<Bytes>>) -> GroupProblem {
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
    pub(super) fn layer_time(&self, one: &GroupProblem, shares: &GroupShares) -> SimDuration {
        let without_head = GroupProblem {
            counts: one.counts[..one.counts.len() - usize::from(self.vocab.is_some())].to_vec(),
            ..one.clone()
        };
        SimDuration(self.per_layer + without_head.time(&shares.heads, &shares.counts).0)
    }
}

/// The first of `count` units of `unit` indices each, of `total` indices.
fn indices(count: u32, unit: u32, total: u32) -> u32 {
    (u64::from(count) * u64::from(unit)).min(u64::from(total)) as u32
}

/// A time as the clock counts it.
fn counted(seconds: f64) -> Result<SimDuration, ReplicaError> {
    SimDuration::from_seconds(seconds)
        .filter(|time| time.0 <= LONGEST_OPERATOR)
        .ok_or(ReplicaError::TooLong {
            seconds,
            limit: SimDuration(LONGEST_OPERATOR),
        })
}

/// Time of a collective.
pub(super) fn collective(group: &CollectiveGroup, operator: &Operator) -> Result<SimDuration, ReplicaError> {
    let seconds = group.seconds(operator).ok_or(CostError::WrongOperator {
        operator: *operator,
        wanted: "collective",
    })?;
    counted(seconds)
}

/// Kinds of unit that are shared by count, by the segment whose compute they decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Counted {
    Columns,
    OutputRows,
    DownRows,
    Vocab,
}

/// Prices shares and remembers them: interchangeable devices have equal times.
pub(super) struct Pricer<'a> {
    problem: &'a PlanProblem<'a>,
    share: ShareCost<'a>,
    bytes: ShareBytes,
    classes: BTreeMap<GpuId, usize>,
    /// By class and sequences of a step.
    heads: BTreeMap<(usize, u32), HeadTimes>,
    counts: BTreeMap<(Counted, usize, u32), CountTimes>,
}

/// A group at work on one micro-batch.
struct Step<'a> {
    group: &'a CollectiveGroup,
    gpus: &'a [GpuId],
    sequences: u32,
    shape: BatchShape,
}

impl<'a> Pricer<'a> {
    /// `classes` says which devices are interchangeable.
    pub(super) fn new(
        problem: &'a PlanProblem<'a>,
        classes: BTreeMap<GpuId, usize>,
    ) -> Result<Self, CostError> {
        let share = ShareCost::new(
            problem.cost,
            problem.model,
            problem.reduction,
            &problem.numerics,
            problem.kv.dtype,
            problem.gpus.iter().copied(),
        )?;
        Ok(Self {
            problem,
            share,
            bytes: ShareBytes::new(problem),
            classes,
            heads: BTreeMap::new(),
            counts: BTreeMap::new(),
        })
    }

    /// The class of a device.
    pub(super) fn class(&self, gpu: GpuId) -> usize {
        self.classes[&gpu]
    }

    /// Bytes of the activations of all tokens of a micro-batch.
    pub(super) fn activation_bytes(&self, sequences: u32) -> Bytes {
        let tokens = self.problem.workload.shape(sequences).new_tokens;
        self.share
            .activation_bytes(tokens.saturating_mul(u64::from(self.problem.model.hidden)))
    }

    /// The tables of a group with that many sequences a micro-batch.
    pub(super) fn tables(
        &mut self,
        group: &CollectiveGroup,
        gpus: &[GpuId],
        sequences: u32,
        is_last: bool,
    ) -> Result<GroupTables, ReplicaError> {
        let step = Step {
            group,
            gpus,
            sequences,
            shape: self.problem.workload.shape(sequences),
        };
        let reduce = Operator::AllReduce {
            ranks: gpus.len() as u32,
            bytes: self.activation_bytes(sequences),
        };
        let fast = !self.invariant();
        Ok(GroupTables {
            heads: self.head_share(&step)?,
            columns: self.columns(&step)?,
            rows: if fast { None } else { Some(self.rows(&step)?) },
            vocab: if is_last { Some(self.vocab(&step)?) } else { None },
            fixed: self.host(&step, is_last)?.0,
            per_layer: if fast {
                2 * collective(group, &reduce)?.0
            } else {
                0
            },
        })
    }

    /// What shares weigh.
    pub(super) fn bytes(&self) -> &ShareBytes {
        &self.bytes
    }

    fn invariant(&self) -> bool {
        self.problem.reduction == Reduction::Invariant
    }

    /// A gather whose largest share is `largest` of `total` numbers a token.
    fn gather(&self, step: &Step, largest: u64, total: u64) -> Result<SimDuration, ReplicaError> {
        let tokens = step.shape.new_tokens;
        let bytes = |count: u64| self.share.activation_bytes(tokens.saturating_mul(count));
        gather_bytes(step, bytes(largest), bytes(total))
    }

    fn head_share(&mut self, step: &Step) -> Result<HeadShare, ReplicaError> {
        let model = self.problem.model;
        let heads = &self.bytes.heads;
        let cut = (heads.query_heads, heads.group_size, heads.unit);
        let mut segments = vec![self.head_times(step, cut)?];
        if self.invariant() {
            let width = u64::from(model.head_dim);
            let total = u64::from(model.query_heads) * width;
            let gather = |_, query: u32, _| self.gather(step, u64::from(query) * width, total);
            let one = HeadTimes::tabulate(1, cut, gather)?;
            segments.push(HeadTimes::side_by_side(step.gpus.iter().map(|_| &one)));
        }
        Ok(HeadShare {
            segments,
            ..self.bytes.heads.clone()
        })
    }

    fn head_times(&mut self, step: &Step, cut: (u32, u32, u32)) -> Result<HeadTimes, ReplicaError> {
        for gpu in step.gpus {
            let key = (self.class(*gpu), step.sequences);
            if !self.heads.contains_key(&key) {
                let time =
                    |_, query, kv| counted(self.share.attention_seconds(*gpu, &step.shape, query, kv)?);
                let times = HeadTimes::tabulate(1, cut, time)?;
                self.heads.insert(key, times);
            }
        }
        let parts = step
            .gpus
            .iter()
            .map(|gpu| &self.heads[&(self.class(*gpu), step.sequences)]);
        Ok(HeadTimes::side_by_side(parts))
    }

    /// Compute times of a kind whose units are `unit` of `total` indices each.
    fn count_times(
        &mut self,
        kind: Counted,
        step: &Step,
        (unit, total): (u32, u32),
    ) -> Result<CountTimes, ReplicaError> {
        let units = total.div_ceil(unit);
        for gpu in step.gpus {
            let key = (kind, self.class(*gpu), step.sequences);
            if !self.counts.contains_key(&key) {
                let time =
                    |_, count| self.count_seconds(kind, *gpu, &step.shape, indices(count, unit, total));
                let times = CountTimes::tabulate(1, units, time)?;
                self.counts.insert(key, times);
            }
        }
        let parts = step
            .gpus
            .iter()
            .map(|gpu| &self.counts[&(kind, self.class(*gpu), step.sequences)]);
        Ok(CountTimes::side_by_side(parts))
    }

    fn count_seconds(
        &self,
        kind: Counted,
        gpu: GpuId,
        shape: &BatchShape,
        count: u32,
    ) -> Result<SimDuration, ReplicaError> {
        let seconds = match kind {
            Counted::Columns => self.share.mlp_seconds(gpu, shape, count),
            Counted::OutputRows => self.share.output_rows_seconds(gpu, shape, count),
            Counted::DownRows => self.share.down_rows_seconds(gpu, shape, count),
            Counted::Vocab => self.share.head_seconds(gpu, shape, count),
        };
        counted(seconds?)
    }

    fn columns(&mut self, step: &Step) -> Result<CountShare, ReplicaError> {
        let (ffn, quantum) = (self.problem.model.ffn, self.problem.quantum);
        let units = self.bytes.columns.units;
        let mut segments = vec![self.count_times(Counted::Columns, step, (quantum, ffn))?];
        if self.invariant() {
            let gather = |count| self.gather(step, u64::from(indices(count, quantum, ffn)), u64::from(ffn));
            segments.push(on_every_rank(step, units, gather)?);
        }
        Ok(CountShare {
            segments,
            ..self.bytes.columns.clone()
        })
    }

    fn rows(&mut self, step: &Step) -> Result<CountShare, ReplicaError> {
        let hidden = self.problem.model.hidden;
        let (unit, units) = row_units(hidden);
        let output = self.count_times(Counted::OutputRows, step, (unit, hidden))?;
        let down = self.count_times(Counted::DownRows, step, (unit, hidden))?;
        let gathers = on_every_rank(step, units, |count| {
            let one = self.gather(step, u64::from(indices(count, unit, hidden)), u64::from(hidden))?;
            Ok(SimDuration(2 * one.0))
        })?;
        Ok(CountShare {
            segments: vec![output, down, gathers],
            ..self.bytes.rows.clone()
        })
    }

    fn vocab(&mut self, step: &Step) -> Result<CountShare, ReplicaError> {
        let vocab = self.problem.model.vocab;
        let (unit, units) = row_units(vocab);
        let bytes = |rows: u32| {
            let numbers = step.shape.logits_rows.saturating_mul(u64::from(rows));
            Bytes(numbers.saturating_mul(LOGIT_BYTES))
        };
        let compute = self.count_times(Counted::Vocab, step, (unit, vocab))?;
        let gather = |count| gather_bytes(step, bytes(indices(count, unit, vocab)), bytes(vocab));
        let gathers = on_every_rank(step, units, gather)?;
        Ok(CountShare {
            segments: vec![compute, gathers],
            ..self.bytes.vocab.clone()
        })
    }

    fn host(&self, step: &Step, is_last: bool) -> Result<SimDuration, ReplicaError> {
        let sequences = if is_last { step.shape.logits_rows } else { 0 };
        let operator = Operator::HostStep { sequences };
        let dtype = self.problem.model.dtype;
        let slowest = step.gpus.iter().try_fold(0.0_f64, |slowest, gpu| {
            let seconds = self.problem.cost.operator_seconds(*gpu, dtype, &operator)?;
            Ok::<_, CostError>(slowest.max(seconds))
        })?;
        counted(slowest)
    }
}

fn gather_bytes(step: &Step, largest: Bytes, total: Bytes) -> Result<SimDuration, ReplicaError> {
    let ranks = step.gpus.len() as u32;
    collective(
        step.group,
        &Operator::AllGather {
            ranks,
            largest,
            total,
        },
    )
}

/// A collective's times, which are those of its largest share whichever rank has it.
fn on_every_rank(
    step: &Step,
    units: u32,
    mut time: impl FnMut(u32) -> Result<SimDuration, ReplicaError>,
) -> Result<CountTimes, ReplicaError> {
    let one = CountTimes::tabulate(1, units, |_, count| time(count))?;
    Ok(CountTimes::side_by_side(step.gpus.iter().map(|_| &one)))
}
