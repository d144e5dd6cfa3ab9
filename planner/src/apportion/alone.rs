//! One kind of unit as if memory had no end: the limits of least sum within which the ranks hold it.

use std::cell::Cell;

use infercluster_spec::IndexRange;
use infercluster_spec::layout::kv_heads_of;

use super::search::{Least, Level, Search};
use super::{CountShare, GroupProblem, HeadShare};

/// Questions after which a kind of several segments settles for what it has.
const QUESTION_LIMIT: usize = 20_000;

/// The segments of a kind as levels.
pub(super) fn levels(problem: &GroupProblem, kind: usize) -> Vec<Level> {
    let tables: Vec<&[Vec<u64>]> = match kind {
        0 => problem
            .heads
            .segments
            .iter()
            .map(|times| &times.by_rank[..])
            .collect(),
        _ => problem.counts[kind - 1]
            .segments
            .iter()
            .map(|times| &times.by_rank[..])
            .collect(),
    };
    let levels = tables.iter().enumerate();
    levels
        .map(|(segment, times)| Level::new(kind, segment, times))
        .collect()
}

/// The limits of least sum of one kind, by segment.
pub(super) fn least(problem: &GroupProblem, kind: usize) -> Least {
    let ranks = problem.memory.len();
    let mut levels = levels(problem, kind);
    // Those with the most values stand innermost, where bisection is enough.
    levels.sort_by_key(|level| level.values.len());
    for level in &mut levels {
        level.kind = 0;
    }
    let questions = Cell::new(0);
    let mut feasible = |limits: &[u64]| {
        questions.set(questions.get() + 1);
        let mut by_segment = vec![0; limits.len()];
        for (level, limit) in levels.iter().zip(limits) {
            by_segment[level.segment] = *limit;
        }
        match kind {
            0 => holds_heads(&problem.heads, ranks, &by_segment),
            _ => holds_units(&problem.counts[kind - 1], ranks, &by_segment),
        }
    };
    let spent = || questions.get() >= QUESTION_LIMIT;
    let least = Search::new(&levels, &[0], &mut feasible, &spent, None).run();
    let mut limits = vec![0; levels.len()];
    for (level, limit) in levels.iter().zip(&least.limits) {
        limits[level.segment] = *limit;
    }
    Least { limits, ..least }
}

fn holds_units(share: &CountShare, ranks: usize, limits: &[u64]) -> bool {
    let most = |rank| {
        share
            .segments
            .iter()
            .zip(limits)
            .try_fold(share.units, |most, (times, limit)| {
                Some(most.min(times.most_within(rank, *limit)?))
            })
    };
    let mut held = 0_u64;
    for rank in 0..ranks {
        let Some(most) = most(rank) else { return false };
        held += u64::from(most);
    }
    held >= u64::from(share.units)
}

/// Whether the ranks, in their order, hold all heads within the limits.
fn holds_heads(heads: &HeadShare, ranks: usize, limits: &[u64]) -> bool {
    let units = (heads.query_heads / heads.unit) as usize;
    let mut reached = vec![false; units + 1];
    reached[0] = true;
    for rank in 0..ranks {
        let mut next = vec![false; units + 1];
        for start in (0..=units).filter(|start| reached[*start]) {
            for (end, next) in next.iter_mut().enumerate().skip(start) {
                *next = *next || heads.keeps_within(rank, heads.range(start, end), limits);
            }
        }
        reached = next;
    }
    reached[units]
}

impl HeadShare {
    /// Whether a rank keeps every segment within its limit with those heads.
    pub(super) fn keeps_within(&self, rank: usize, range: IndexRange, limits: &[u64]) -> bool {
        let kv = kv_heads_of(range, self.group_size).len();
        let mut segments = self.segments.iter().zip(limits);
        segments.all(|(times, limit)| times.of(rank, range.len(), kv) <= *limit)
    }
}
