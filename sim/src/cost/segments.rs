//! One step of a stage: segments between synchronisations, each paced by its slowest rank.
//!
//! `fast`: attention, all-reduce, MLP, all-reduce. `invariant`: attention, gather, output rows, gather, MLP,
//! gather, down rows, gather. The last stage adds the head and a gather of logits. Seconds of a step are
//!
//! `host + sum over layers and segments of (max over ranks of compute + collective)`.
//!
//! Host time is a floor per stage step plus, on the last stage, a cost a sampled row.

use infercluster_spec::ids::Rank;
use infercluster_spec::layout::{Reduction, Stage};
use infercluster_spec::{
    BatchShape, Bytes, GpuId, IndexRange, Layout, Model, Operator, ReplicaId, SegmentKind, StageId,
};

use super::{CostError, CostModel, SegmentCorrection, ShareCost};
use crate::topology::CollectiveGroup;

/// Bytes of one logit: they are single precision in every profile.
const LOGIT_BYTES: u64 = 4;

/// Seconds of one step of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTime {
    /// All of it, seconds: the next stage or the sampler has its input after this and the hand-over.
    pub total_s: f64,
    /// Host part of it, seconds.
    pub host_s: f64,
    /// Collective part of it, seconds.
    pub collective_s: f64,
    /// Compute seconds by rank; the rest of `total_s` a rank waits.
    pub rank_compute_s: Vec<f64>,
    /// Where the time goes, in the order of a step.
    pub segments: Vec<SegmentTime>,
}

/// Seconds of one kind of segment in a run of equal layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentTime {
    /// The layers; those of the last run for the head.
    pub layers: IndexRange,
    /// Which segment.
    pub kind: SegmentKind,
    /// How often it runs: once a layer, the head once.
    pub repeats: u32,
    /// Compute seconds of the slowest rank, once.
    pub compute_s: f64,
    /// That rank, the lowest where several are.
    pub slowest: Rank,
    /// Seconds of the collective that follows, once.
    pub collective_s: f64,
}

/// A stage with everything resolved that does not depend on the batch.
#[derive(Clone)]
pub struct StageCost<'a> {
    pub(super) share: ShareCost<'a>,
    gpus: Vec<GpuId>,
    pub(super) runs: Vec<LayerRun>,
    group: CollectiveGroup,
    /// By rank, then by position in [`SegmentKind::ALL`].
    corrections: Vec<[SegmentCorrection; SegmentKind::ALL.len()]>,
    is_last: bool,
    handovers: Vec<CollectiveGroup>,
}

#[derive(Clone, PartialEq)]
pub(super) struct LayerRun {
    layers: IndexRange,
    pub(super) ranks: Vec<RankShare>,
    pub(super) has_head: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct RankShare {
    pub(super) query_heads: u32,
    pub(super) kv_heads: u32,
    columns: u32,
    output_rows: u32,
    vocab: u32,
}

/// Uncorrected work of one kind of segment in a run of equal layers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SegmentWork {
    pub(crate) layers: IndexRange,
    pub(crate) kind: SegmentKind,
    pub(crate) repeats: u32,
    /// Seconds of the operators by rank, once.
    pub(crate) operators_s: Vec<f64>,
    /// What follows, once.
    pub(crate) collective: Operator,
}

/// Seconds of one step of one stage. For many steps build a [`StageCost`] once.
pub fn stage_step_time(
    cost: &dyn CostModel,
    layout: &Layout,
    model: &Model,
    replica: ReplicaId,
    stage: StageId,
    shape: &BatchShape,
) -> Result<StageTime, CostError> {
    StageCost::new(cost, layout, model, replica, stage)?.step(shape)
}

impl<'a> StageCost<'a> {
    /// Resolves a stage of a valid layout. For many stages of one layout resolve its shares once:
    /// [`StageCost::of_share`].
    pub fn new(
        cost: &'a dyn CostModel,
        layout: &Layout,
        model: &'a Model,
        replica: ReplicaId,
        stage: StageId,
    ) -> Result<Self, CostError> {
        Self::of_share(ShareCost::of_layout(cost, layout, model)?, layout, replica, stage)
    }

    /// Resolves a stage of the valid layout whose shares those are.
    pub fn of_share(
        share: ShareCost<'a>,
        layout: &Layout,
        replica: ReplicaId,
        stage: StageId,
    ) -> Result<Self, CostError> {
        let missing = || CostError::NoStage { replica, stage };
        let stages = &layout.replicas.get(replica.index()).ok_or_else(missing)?.stages;
        let here = stages.get(stage.index()).ok_or_else(missing)?;
        let gpus: Vec<GpuId> = here.gpus().collect();
        if gpus.is_empty() {
            return Err(missing());
        }
        let corrections = gpus
            .iter()
            .map(|gpu| corrections(&share, *gpu))
            .collect::<Result<_, _>>()?;
        let next = stages.get(stage.index() + 1);
        let cost = share.cost();
        Ok(Self {
            runs: layer_runs(here, share.model()),
            group: cost.group(&gpus)?,
            handovers: handovers(cost, &gpus, next)?,
            is_last: next.is_none(),
            share,
            gpus,
            corrections,
        })
    }

    /// Its devices in rank order.
    pub fn gpus(&self) -> &[GpuId] {
        &self.gpus
    }

    /// Whether a stage of the same layout costs the same as this one, step for step.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let mut pairs = self.gpus.iter().zip(&other.gpus);
        let cost = self.share.cost();
        self.gpus.len() == other.gpus.len()
            && self.is_last == other.is_last
            && self.runs == other.runs
            && self.group == other.group
            && self.corrections == other.corrections
            && self.handovers == other.handovers
            && pairs.all(|(one, other)| cost.is_alike(*one, *other))
    }

    /// Seconds of one step.
    pub fn step(&self, shape: &BatchShape) -> Result<StageTime, CostError> {
        let host_s = self.host_seconds(shape)?;
        let mut time = StageTime {
            total_s: host_s,
            host_s,
            collective_s: 0.0,
            rank_compute_s: vec![0.0; self.gpus.len()],
            segments: Vec::new(),
        };
        for work in self.work(shape)? {
            let repeats = f64::from(work.repeats);
            let (mut compute_s, mut slowest) = (0.0, Rank(0));
            for (rank, operators_s) in work.operators_s.iter().enumerate() {
                let seconds = self.corrected(rank, work.kind, *operators_s);
                time.rank_compute_s[rank] += repeats * seconds;
                if seconds > compute_s {
                    (compute_s, slowest) = (seconds, Rank(rank as u32));
                }
            }
            let collective_s = self.collective(&work.collective)?;
            time.total_s += repeats * (compute_s + collective_s);
            time.collective_s += repeats * collective_s;
            time.segments.push(SegmentTime {
                layers: work.layers,
                kind: work.kind,
                repeats: work.repeats,
                compute_s,
                slowest,
                collective_s,
            });
        }
        Ok(time)
    }

    /// Compute seconds by rank of one kind of segment, over all layers: what a rank of a real run reports.
    pub fn kind_seconds(&self, shape: &BatchShape, kind: SegmentKind) -> Result<Vec<f64>, CostError> {
        let mut seconds = vec![0.0; self.gpus.len()];
        for work in self.work(shape)?.iter().filter(|work| work.kind == kind) {
            for (rank, operators_s) in work.operators_s.iter().enumerate() {
                seconds[rank] += f64::from(work.repeats) * self.corrected(rank, kind, *operators_s);
            }
        }
        Ok(seconds)
    }

    /// Seconds from the end of a step here until every rank of the next stage has its input; `None` on the
    /// last stage. Every rank holds the whole activation after its collective, so rank `j` of the next
    /// stage is fed by rank `j mod ranks` of this one.
    pub fn handover_seconds(&self, shape: &BatchShape) -> Result<Option<f64>, CostError> {
        let hidden = u64::from(self.share.model().hidden);
        let bytes = self
            .share
            .activation_bytes(shape.new_tokens.saturating_mul(hidden));
        let operator = Operator::Transfer { bytes };
        let mut slowest: Option<f64> = None;
        for pair in &self.handovers {
            let seconds = pair.seconds(&operator).ok_or(CostError::WrongOperator {
                operator,
                wanted: "collective",
            })?;
            slowest = Some(slowest.map_or(seconds, |so_far| so_far.max(seconds)));
        }
        Ok(slowest)
    }

    /// Host seconds of one step: the slowest of the ranks' hosts.
    pub(crate) fn host_seconds(&self, shape: &BatchShape) -> Result<f64, CostError> {
        let operator = Operator::HostStep {
            sequences: self.sampled_rows(shape),
        };
        let dtype = self.share.model().dtype;
        self.gpus.iter().try_fold(0.0_f64, |slowest, gpu| {
            let seconds = self.share.cost().operator_seconds(*gpu, dtype, &operator)?;
            Ok(slowest.max(seconds))
        })
    }

    /// Rows that the host samples: on the last stage only.
    pub(crate) fn sampled_rows(&self, shape: &BatchShape) -> u64 {
        if self.is_last { shape.logits_rows } else { 0 }
    }

    pub(crate) fn group(&self) -> &CollectiveGroup {
        &self.group
    }

    pub(crate) fn is_shared(&self, gpu: GpuId) -> bool {
        self.share.is_shared(gpu)
    }

    /// Seconds of a segment on a rank whose operators take so many.
    pub(super) fn corrected(&self, rank: usize, kind: SegmentKind, operators_s: f64) -> f64 {
        self.corrections[rank][position(kind)].apply(operators_s)
    }

    /// Operators and collectives of a step, uncorrected, in order.
    pub(crate) fn work(&self, shape: &BatchShape) -> Result<Vec<SegmentWork>, CostError> {
        let mut work = Vec::with_capacity(4 * self.runs.len() + 1);
        if shape.new_tokens == 0 {
            return Ok(work);
        }
        for run in &self.runs {
            for kind in kinds(self.share.reduction()) {
                work.push(self.segment(run, *kind, shape)?);
            }
            if run.has_head && shape.logits_rows > 0 {
                work.push(self.segment(run, SegmentKind::Head, shape)?);
            }
        }
        Ok(work)
    }

    fn segment(
        &self,
        run: &LayerRun,
        kind: SegmentKind,
        shape: &BatchShape,
    ) -> Result<SegmentWork, CostError> {
        let operators_s = self
            .gpus
            .iter()
            .zip(&run.ranks)
            .map(|(gpu, rank)| self.operators_s(*gpu, rank, kind, shape))
            .collect::<Result<_, _>>()?;
        Ok(SegmentWork {
            layers: run.layers,
            kind,
            repeats: run.repeats(kind),
            operators_s,
            collective: self.collective_after(run, kind, shape),
        })
    }

    pub(super) fn operators_s(
        &self,
        gpu: GpuId,
        rank: &RankShare,
        kind: SegmentKind,
        shape: &BatchShape,
    ) -> Result<f64, CostError> {
        let share = &self.share;
        match kind {
            SegmentKind::Attention => {
                share.attention_operators_s(gpu, shape, rank.query_heads, rank.kv_heads)
            }
            SegmentKind::OutputRows => share.output_rows_operators_s(gpu, shape, rank.output_rows),
            SegmentKind::Mlp => share.mlp_operators_s(gpu, shape, rank.columns),
            SegmentKind::DownRows => share.down_rows_operators_s(gpu, shape, rank.output_rows),
            SegmentKind::Head => share.head_operators_s(gpu, shape, rank.vocab),
        }
    }

    pub(super) fn collective_after(&self, run: &LayerRun, kind: SegmentKind, shape: &BatchShape) -> Operator {
        let model = self.share.model();
        let (tokens, head_dim) = (shape.new_tokens, u64::from(model.head_dim));
        let activations = |count: u64| self.share.activation_bytes(tokens.saturating_mul(count));
        let logits = |rows: u64| Bytes(shape.logits_rows.saturating_mul(rows).saturating_mul(LOGIT_BYTES));
        let gather = |share: &dyn Fn(&RankShare) -> u64, bytes: &dyn Fn(u64) -> Bytes| {
            let largest = run.ranks.iter().map(share).max().unwrap_or(0);
            let total = run.ranks.iter().map(share).sum();
            Operator::AllGather {
                ranks: run.ranks.len() as u32,
                largest: bytes(largest),
                total: bytes(total),
            }
        };
        let rows = |rank: &RankShare| u64::from(rank.output_rows);
        match (kind, self.share.reduction()) {
            (SegmentKind::Head, _) => gather(&|rank| u64::from(rank.vocab), &logits),
            (_, Reduction::Fast) => Operator::AllReduce {
                ranks: run.ranks.len() as u32,
                bytes: activations(u64::from(model.hidden)),
            },
            (SegmentKind::Attention, _) => {
                gather(&|rank| u64::from(rank.query_heads) * head_dim, &activations)
            }
            (SegmentKind::Mlp, _) => gather(&|rank| u64::from(rank.columns), &activations),
            (SegmentKind::OutputRows | SegmentKind::DownRows, _) => gather(&rows, &activations),
        }
    }

    pub(super) fn collective(&self, operator: &Operator) -> Result<f64, CostError> {
        self.group.seconds(operator).ok_or(CostError::WrongOperator {
            operator: *operator,
            wanted: "collective",
        })
    }
}

pub(super) fn kinds(reduction: Reduction) -> &'static [SegmentKind] {
    match reduction {
        Reduction::Fast => &[SegmentKind::Attention, SegmentKind::Mlp],
        Reduction::Invariant => &SegmentKind::ALL[..4],
    }
}

impl LayerRun {
    /// How often a segment runs: once a layer, the head once.
    pub(super) fn repeats(&self, kind: SegmentKind) -> u32 {
        if kind == SegmentKind::Head {
            1
        } else {
            self.layers.len()
        }
    }
}

fn position(kind: SegmentKind) -> usize {
    kind as usize
}

fn layer_runs(stage: &Stage, model: &Model) -> Vec<LayerRun> {
    let length = |range: Option<IndexRange>| range.map_or(0, IndexRange::len);
    let runs = stage.layer_groups.iter().map(|group| LayerRun {
        layers: group.layers,
        has_head: group.shards.iter().any(|shard| shard.vocab.is_some()),
        ranks: group
            .shards
            .iter()
            .map(|shard| RankShare {
                query_heads: shard.query_heads.len(),
                kv_heads: shard.kv_heads(model.group_size()).len(),
                columns: shard.mlp_columns.len(),
                output_rows: length(shard.output_rows),
                vocab: length(shard.vocab),
            })
            .collect(),
    });
    runs.collect()
}

fn corrections(
    share: &ShareCost,
    gpu: GpuId,
) -> Result<[SegmentCorrection; SegmentKind::ALL.len()], CostError> {
    let mut corrections = [SegmentCorrection::NONE; SegmentKind::ALL.len()];
    for kind in SegmentKind::ALL {
        corrections[position(kind)] = share.cost().segment_correction(gpu, kind, share.is_shared(gpu))?;
    }
    Ok(corrections)
}

fn handovers(
    cost: &dyn CostModel,
    gpus: &[GpuId],
    next: Option<&Stage>,
) -> Result<Vec<CollectiveGroup>, CostError> {
    let receivers = next.into_iter().flat_map(Stage::gpus);
    receivers
        .enumerate()
        .map(|(rank, receiver)| cost.group(&[gpus[rank % gpus.len()], receiver]))
        .collect()
}
