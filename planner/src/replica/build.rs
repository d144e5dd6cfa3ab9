//! A candidate as a layout.

use infercluster_spec::layout::{LayerGroup, Layout, Reduction, Shard, Stage};
use infercluster_spec::{GpuId, IndexRange};

use super::bytes::row_units;
use super::{Candidate, CandidateStage, PlanProblem};
use crate::frame::Frame;

/// The layout of a candidate.
pub(super) fn layout(problem: &PlanProblem, candidate: &Candidate) -> Layout {
    let mut start = 0;
    let last = candidate.stages.len() - 1;
    let stages = candidate.stages.iter().enumerate().map(|(position, stage)| {
        let layers = IndexRange::new(start, start + stage.layers).expect("layers go up");
        start = layers.end();
        Stage {
            layer_groups: vec![LayerGroup {
                layers,
                shards: shards(problem, stage, position == last),
            }],
        }
    });
    let stages = stages.collect();
    layout_of(problem, stages)
}

/// A layout of one replica with the problem's fields.
pub(super) fn layout_of(problem: &PlanProblem, stages: Vec<Stage>) -> Layout {
    let frame = Frame {
        model: problem.model,
        reduction: problem.reduction,
        numerics: &problem.numerics,
        quantum: problem.quantum,
        kv: problem.kv,
    };
    frame.one_replica(stages)
}

fn shards(problem: &PlanProblem, stage: &CandidateStage, is_last: bool) -> Vec<Shard> {
    let model = problem.model;
    let shares = &stage.option.shares;
    let mut kinds = shares.counts.iter();
    let mut next = |total: u32, unit: u32| ranges(kinds.next().map_or(&[], Vec::as_slice), unit, total);
    let columns = next(model.ffn, problem.quantum);
    let rows =
        (problem.reduction == Reduction::Invariant).then(|| next(model.hidden, row_units(model.hidden).0));
    let vocab = is_last.then(|| next(model.vocab, row_units(model.vocab).0));
    let shard = |(rank, gpu): (usize, &GpuId)| Shard {
        gpu: *gpu,
        query_heads: shares.heads[rank],
        mlp_columns: columns[rank],
        output_rows: rows.as_ref().map(|rows| rows[rank]),
        vocab: vocab.as_ref().map(|vocab| vocab[rank]),
        experts: Vec::new(),
    };
    stage.gpus.iter().enumerate().map(shard).collect()
}

fn ranges(counts: &[u32], unit: u32, total: u32) -> Vec<IndexRange> {
    let mut start = 0;
    let range = |count: &u32| {
        let end = (u64::from(start) + u64::from(*count) * u64::from(unit)).min(u64::from(total)) as u32;
        let range = IndexRange::new(start, end).expect("ranges go up");
        start = end;
        range
    };
    counts.iter().map(range).collect()
}
