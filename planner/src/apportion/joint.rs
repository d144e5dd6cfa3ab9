//! All kinds together, where memory does not hold what each would like.

use infercluster_spec::SimDuration;

use super::oracle::{Limits, Oracle};
use super::search::{Least, Level, Search, first_feasible};
use super::{GroupProblem, GroupShares, Shortage, alone};

/// Elementary steps of the oracle that one search spends before it settles for what it has, where each
/// answer is exact; a fiftieth of that where a "no" may be wrong and going on proves nothing.
const WORK_LIMIT: u64 = 40_000_000;

/// Steps of the bisection for the factor by which limits are raised from what the kinds would like.
const FACTOR_STEPS: u32 = 12;

/// The fastest shares within memory; `alone` is what each kind would like.
pub(super) fn least(
    problem: &GroupProblem,
    oracle: Oracle,
    alone: &[Least],
) -> Result<GroupShares, Shortage> {
    let mut joint = Joint {
        levels: levels(problem),
        least_of_kind: alone.iter().map(|least| least.bound).collect(),
        oracle,
    };
    let unlimited = vec![u64::MAX; joint.levels.len()];
    if !joint.is_feasible(&unlimited) {
        let limits = joint.by_kind(&unlimited);
        return Err(joint.oracle.shortage(&limits));
    }
    let start = joint.start(alone);
    let found = joint.search(start);
    let limits = joint.by_kind(&found.limits);
    let shares = joint.oracle.ask(&limits).expect("limits were found feasible");
    let time = problem.time(&shares.heads, &shares.counts);
    // An unproven "no" may have cut off better shares: only the fluid bound counts.
    let bound = if joint.oracle.all_proven {
        found.bound.min(time.0)
    } else {
        joint.proven_bound()
    };
    Ok(GroupShares {
        heads: shares.heads,
        counts: shares.counts,
        time,
        bound: SimDuration(bound),
        exact: time.0 == bound,
    })
}

/// The levels of all kinds; kinds and levels with the most values stand innermost.
fn levels(problem: &GroupProblem) -> Vec<Level> {
    let mut kinds: Vec<Vec<Level>> = (0..problem.kinds())
        .map(|kind| {
            let mut levels = alone::levels(problem, kind);
            levels.sort_by_key(|level| level.values.len());
            levels
        })
        .collect();
    kinds.sort_by_key(|levels| levels.iter().map(|level| level.values.len()).max());
    kinds.into_iter().flatten().collect()
}

struct Joint<'a> {
    oracle: Oracle<'a>,
    levels: Vec<Level>,
    /// By kind: what it needs alone.
    least_of_kind: Vec<u64>,
}

impl Joint<'_> {
    fn by_kind(&self, limits: &[u64]) -> Limits {
        by_kind(self.oracle.problem, &self.levels, limits)
    }

    fn is_feasible(&mut self, limits: &[u64]) -> bool {
        let limits = self.by_kind(limits);
        self.oracle.is_feasible(&limits)
    }

    /// Good shares to start from: what the kinds would like, raised by one factor for all kinds or for one
    /// of them until memory holds it, and then limit by limit lowered again.
    fn start(&mut self, alone: &[Least]) -> Vec<u64> {
        let liked: Vec<u64> = self
            .levels
            .iter()
            .map(|level| alone[level.kind].limits[level.segment])
            .collect();
        let kinds = self.least_of_kind.len();
        let mut best: Option<Vec<u64>> = None;
        for raised in std::iter::once(None).chain((0..kinds).map(Some)) {
            let Some(limits) = self.raise(&liked, raised) else {
                continue;
            };
            let limits = self.lower(limits);
            let sum = |limits: &[u64]| limits.iter().sum::<u64>();
            if best.as_ref().is_none_or(|best| sum(&limits) < sum(best)) {
                best = Some(limits);
            }
        }
        best.unwrap_or_else(|| self.largest())
    }

    /// Every level at its last value: no limit at all.
    fn largest(&self) -> Vec<u64> {
        let last = |level: &Level| level.values.last().copied().unwrap_or(u64::MAX);
        self.levels.iter().map(last).collect()
    }

    /// Raises the limits of one kind, or of all, by the smallest factor that is feasible.
    fn raise(&mut self, liked: &[u64], kind: Option<usize>) -> Option<Vec<u64>> {
        let largest = self.largest();
        let raised = |levels: &[Level], share: f64| -> Vec<u64> {
            let level = |level: usize| {
                let (liked, largest) = (liked[level], largest[level]);
                if kind.is_some_and(|kind| levels[level].kind != kind) {
                    return liked;
                }
                // From what is liked to what the slowest rank would need for everything, in equal factors.
                let factor = (largest as f64 / liked.max(1) as f64).max(1.0).powf(share);
                ((liked.max(1) as f64 * factor) as u64).clamp(liked, largest)
            };
            (0..levels.len()).map(level).collect()
        };
        let top: Vec<u64> = largest
            .iter()
            .zip(&self.levels)
            .zip(liked)
            .map(|((largest, level), liked)| match kind {
                Some(kind) if level.kind != kind => *liked,
                _ => *largest,
            })
            .collect();
        if !self.is_feasible(&top) {
            return None;
        }
        let (mut low, mut high, mut best) = (0.0_f64, 1.0_f64, top);
        for _ in 0..FACTOR_STEPS {
            let middle = (low + high) / 2.0;
            let limits = raised(&self.levels, middle);
            if self.is_feasible(&limits) {
                (high, best) = (middle, limits);
            } else {
                low = middle;
            }
        }
        Some(best)
    }

    /// Lowers each limit in turn as far as the others allow.
    fn lower(&mut self, mut limits: Vec<u64>) -> Vec<u64> {
        for level in (0..self.levels.len()).rev() {
            let values = self.levels[level].values.clone();
            let within = values.partition_point(|value| *value <= limits[level]);
            let ceiling = within.saturating_sub(1);
            let first = first_feasible(&values, ceiling, |limit| {
                limits[level] = limit;
                self.is_feasible(&limits)
            });
            limits[level] = values[first];
        }
        limits
    }

    fn search(&mut self, start: Vec<u64>) -> Least {
        let work = self.oracle.work;
        let from = work.get();
        let limit = if self.oracle.all_proven {
            WORK_LIMIT
        } else {
            WORK_LIMIT / 50
        };
        let (problem, levels) = (self.oracle.problem, &self.levels);
        let oracle = &mut self.oracle;
        let mut feasible = |limits: &[u64]| oracle.is_feasible(&by_kind(problem, levels, limits));
        let spent = || work.get() - from >= limit;
        Search::new(levels, &self.least_of_kind, &mut feasible, &spent, Some(start)).run()
    }

    /// Sum of the smallest limits of every level that the fluid test alone does not refute, by kind no less
    /// than it needs alone.
    fn proven_bound(&mut self) -> u64 {
        let mut by_kind = vec![0_u64; self.least_of_kind.len()];
        let mut limits = vec![u64::MAX; self.levels.len()];
        for level in 0..self.levels.len() {
            let values = self.levels[level].values.clone();
            let first = first_feasible(&values, values.len() - 1, |limit| {
                limits[level] = limit;
                let limits = self.by_kind(&limits);
                !self.oracle.refuted(&limits)
            });
            limits[level] = u64::MAX;
            by_kind[self.levels[level].kind] += values[first];
        }
        let kinds = by_kind.iter().zip(&self.least_of_kind);
        kinds.map(|(own, least)| *own.max(least)).sum()
    }
}

/// Limits of levels as the oracle reads them.
fn by_kind(problem: &GroupProblem, levels: &[Level], limits: &[u64]) -> Limits {
    let mut by_kind = vec![vec![u64::MAX; problem.heads.segments.len()]];
    by_kind.extend(
        problem
            .counts
            .iter()
            .map(|share| vec![u64::MAX; share.segments.len()]),
    );
    for (level, limit) in levels.iter().zip(limits) {
        by_kind[level.kind][level.segment] = *limit;
    }
    Limits(by_kind)
}
