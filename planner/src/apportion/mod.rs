//! How one tensor-parallel group shares its query heads, MLP columns, output rows and vocabulary rows.
//!
//! Between two synchronisations a group waits for its slowest rank, so the time of a step is the sum over
//! segments of a maximum over ranks. Every kind of unit is shared out on its own; the kinds meet only in the
//! memory of each rank. The order of ranks is given, since it decides which heads are neighbours.
//!
//! **Method.** Parametric search on the makespans: a vector of limits, one a segment, is feasible when some
//! shares keep every segment within its limit and every rank within its memory. Feasibility is monotone in
//! each limit, so each level of the search starts at the smallest feasible limit (bisection over the sorted
//! times of the tables) and ends where the limits chosen so far plus the smallest feasible limits of the rest
//! reach the best total known; a limit beside which the rest needs too much is skipped. The innermost level needs the bisection alone.
//!
//! **Exactness.** `oracle` answers feasibility by a fluid test (no: proven), a greedy (yes: with shares),
//! and between the two by dynamic programming over ranks with one dimension per kind of unit (`exact`).
//! [`GroupShares::exact`] says whether every answer was proven and the search ran to its end: always where
//! memory does not bind, and where the dynamic program fits `exact::STATE_LIMIT`. Where it does not,
//! [`GroupShares::bound`] is still valid: no integer shares are faster.
//!
//! **Ties.** Among shares of equal total the search keeps the first found. Heads: least sum of squared
//! times, then the later cut, so that the lower rank holds more. Counted units: each goes to the rank
//! that would end first with it, the lower rank on a tie.

mod exact;
mod oracle;
#[cfg(test)]
mod tests;

use infercluster_spec::layout::kv_heads_of;
use infercluster_spec::{Bytes, IndexRange, SimDuration};

use oracle::Oracle;

/// What one group has to share.
#[derive(Debug, Clone)]
pub struct GroupProblem {
    /// Query heads.
    pub heads: HeadShare,
    /// Everything that is shared by count alone; at least one kind.
    pub counts: Vec<CountShare>,
    /// Memory for shares by rank, `None` for no limit; as many as the tables have ranks, at least one.
    pub memory: Vec<Option<Bytes>>,
}

/// Query heads: a rank's time depends on its query heads and on the KV heads that their range touches.
#[derive(Debug, Clone)]
pub struct HeadShare {
    /// Query heads of the model.
    pub query_heads: u32,
    /// Query heads that share one KV head; divides `query_heads`.
    pub group_size: u32,
    /// Query heads of one unit: 1, or `group_size` for whole groups.
    pub unit: u32,
    /// Bytes that one query head brings to its rank.
    pub query_bytes: Bytes,
    /// Bytes that one KV head brings to every rank that touches it, its cache included.
    pub kv_bytes: Bytes,
    /// Times of the segments that heads decide.
    pub segments: Vec<HeadTimes>,
}

/// Time by rank, query heads and KV heads.
#[derive(Debug, Clone)]
pub struct HeadTimes {
    kv_heads: u32,
    /// By rank; inside by query heads, then KV heads. Combinations that no range has stay at the maximum.
    by_rank: Vec<Vec<u64>>,
}

impl HeadTimes {
    /// Asks `time(rank, query_heads, kv_heads)` for every combination that a range of whole units can have.
    pub fn tabulate<E>(
        ranks: usize,
        (query_heads, group_size, unit): (u32, u32, u32),
        mut time: impl FnMut(usize, u32, u32) -> Result<SimDuration, E>,
    ) -> Result<Self, E> {
        let kv_heads = query_heads / group_size;
        let width = kv_heads as usize + 1;
        let mut by_rank = vec![vec![u64::MAX; (query_heads as usize + 1) * width]; ranks];
        for (rank, table) in by_rank.iter_mut().enumerate() {
            for query in (0..=query_heads).step_by(unit as usize) {
                let fewest = query.div_ceil(group_size);
                // A range that starts inside a group touches one more.
                let most = if unit == group_size || query == 0 {
                    fewest
                } else {
                    ((query - 1).div_ceil(group_size) + 1).min(kv_heads)
                };
                for kv in fewest..=most {
                    table[query as usize * width + kv as usize] = time(rank, query, kv)?.0;
                }
            }
        }
        Ok(Self { kv_heads, by_rank })
    }

    /// The same for that many repetitions.
    pub fn repeated(&self, times: u64) -> Self {
        Self {
            kv_heads: self.kv_heads,
            by_rank: repeated(&self.by_rank, times),
        }
    }

    /// Time of rank 0 for a range that touches as few KV heads as it can.
    pub fn fewest_kv(&self, query_heads: u32, group_size: u32) -> SimDuration {
        SimDuration(self.of(0, query_heads, query_heads.div_ceil(group_size)))
    }

    fn of(&self, rank: usize, query: u32, kv: u32) -> u64 {
        self.by_rank[rank][query as usize * (self.kv_heads as usize + 1) + kv as usize]
    }
}

/// A kind of unit that is shared by count: column quanta, row units, vocabulary units.
#[derive(Debug, Clone)]
pub struct CountShare {
    /// How many units there are.
    pub units: u32,
    /// Bytes that one unit brings to its rank.
    pub unit_bytes: Bytes,
    /// Times of the segments that this kind decides.
    pub segments: Vec<CountTimes>,
}

/// Time by rank and count; a larger count is never faster.
#[derive(Debug, Clone)]
pub struct CountTimes {
    by_rank: Vec<Vec<u64>>,
}

impl CountTimes {
    /// Asks `time(rank, count)` for every count. A count that comes out faster than a smaller one is charged
    /// what the smaller one costs: it could compute the difference and throw it away.
    pub fn tabulate<E>(
        ranks: usize,
        units: u32,
        mut time: impl FnMut(usize, u32) -> Result<SimDuration, E>,
    ) -> Result<Self, E> {
        let by_rank = (0..ranks).map(|rank| {
            let mut slowest = 0;
            (0..=units)
                .map(|count| {
                    slowest = time(rank, count)?.0.max(slowest);
                    Ok(slowest)
                })
                .collect()
        });
        Ok(Self {
            by_rank: by_rank.collect::<Result<_, E>>()?,
        })
    }

    /// The same for that many repetitions.
    pub fn repeated(&self, times: u64) -> Self {
        Self {
            by_rank: repeated(&self.by_rank, times),
        }
    }

    /// Time of a rank for a count.
    pub fn of(&self, rank: usize, count: u32) -> SimDuration {
        SimDuration(self.by_rank[rank][count as usize])
    }

    /// The most units that a rank computes within a limit; `None` where even none takes longer.
    fn most_within(&self, rank: usize, limit: u64) -> Option<u32> {
        let within = self.by_rank[rank].partition_point(|time| *time <= limit);
        (within as u32).checked_sub(1)
    }
}

fn repeated(by_rank: &[Vec<u64>], times: u64) -> Vec<Vec<u64>> {
    let repeat = |row: &Vec<u64>| row.iter().map(|time| time.saturating_mul(times)).collect();
    by_rank.iter().map(repeat).collect()
}

/// Shares of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupShares {
    /// Query heads by rank.
    pub heads: Vec<IndexRange>,
    /// Units by kind, then by rank.
    pub counts: Vec<Vec<u32>>,
    /// Sum over segments of the slowest rank.
    pub time: SimDuration,
    /// No integer shares are faster than this; equals `time` where `exact`.
    pub bound: SimDuration,
    /// Whether the shares are proven to be the fastest.
    pub exact: bool,
}

/// No shares fit the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that fit nowhere. An estimate from below: cutting into whole units may need more.
    pub missing: Bytes,
    /// Whether it is proven that nothing fits.
    pub exact: bool,
}

/// Feasibility questions that one search asks before it settles for what it has, where each is answered
/// exactly; a fiftieth of that where a "no" may be wrong and going on proves nothing.
pub const QUESTION_LIMIT: usize = 5_000;

/// The fastest shares, see the module.
///
/// # Panics
/// Where tables and `memory` differ in their number of ranks, or there is none, or no counted kind.
pub fn apportion(problem: &GroupProblem) -> Result<GroupShares, Shortage> {
    problem.check();
    let mut search = Search::new(problem)?;
    let mut limits = search.unlimited();
    search.descend(0, 0, &mut limits);
    let (total, shares) = search
        .best
        .take()
        .expect("the first descent ends in feasible limits");
    let (exact, bound) = if search.oracle.all_proven {
        let exact = search.questions < search.question_limit || total == search.rest_bound[0];
        (exact, if exact { total } else { search.rest_bound[0] })
    } else {
        // An unproven "no" may have cut off better shares: only the fluid bound counts.
        let bound = search.proven_bound();
        (total == bound, bound)
    };
    Ok(GroupShares {
        heads: shares.heads,
        counts: shares.counts,
        time: SimDuration(total),
        bound: SimDuration(bound),
        exact,
    })
}

/// The best total time if every unit could be cut at will and memory did not bind: the bound that
/// continuous shares set. For each segment, the smallest limit within which the ranks' piecewise linear
/// tables hold all units. Segments that share a kind are bounded one by one, so the bound stays valid.
pub fn continuous_bound(problem: &GroupProblem) -> SimDuration {
    let ranks = problem.memory.len();
    let counted = problem.counts.iter().flat_map(|share| {
        share
            .segments
            .iter()
            .map(move |times| continuous_makespan(&times.by_rank, f64::from(share.units)))
    });
    // Fewest KV heads for a count of query heads: what no range undercuts.
    let heads = problem.heads.segments.iter().map(|times| {
        let (unit, group) = (problem.heads.unit, problem.heads.group_size);
        let by_rank: Vec<Vec<u64>> = (0..ranks)
            .map(|rank| {
                let mut fastest: Vec<u64> = (0..=problem.heads.query_heads)
                    .step_by(unit as usize)
                    .map(|query| times.of(rank, query, query.div_ceil(group)))
                    .collect();
                for index in (1..fastest.len()).rev() {
                    fastest[index - 1] = fastest[index - 1].min(fastest[index]);
                }
                fastest
            })
            .collect();
        continuous_makespan(&by_rank, f64::from(problem.heads.query_heads / unit))
    });
    SimDuration(heads.chain(counted).sum())
}

/// The smallest limit at which the ranks hold `units` fractional units; the time between two counts is
/// the lower convex hull of the table, so that jumps (launch floors, wave steps) keep the bound valid.
fn continuous_makespan(by_rank: &[Vec<u64>], units: f64) -> u64 {
    let hulls: Vec<Vec<(f64, f64)>> = by_rank.iter().map(|table| lower_hull(table)).collect();
    let held = |limit: f64| hulls.iter().map(|hull| units_within(hull, limit)).sum::<f64>();
    let slowest = by_rank.iter().filter_map(|table| table.last()).max();
    let (mut low, mut high) = (0_u64, slowest.copied().unwrap_or(0));
    while low < high {
        let middle = low + (high - low) / 2;
        // A billionth of a unit absorbs rounding on the side that keeps the bound valid.
        if held(middle as f64) + 1e-9 * units.max(1.0) >= units {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

fn lower_hull(table: &[u64]) -> Vec<(f64, f64)> {
    let mut hull: Vec<(f64, f64)> = Vec::new();
    for (count, time) in table.iter().enumerate() {
        let point = (count as f64, *time as f64);
        while let [.., before, last] = hull[..] {
            let slope_to_last = (last.1 - before.1) * (point.0 - before.0);
            if slope_to_last < (point.1 - before.1) * (last.0 - before.0) {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

fn units_within(hull: &[(f64, f64)], limit: f64) -> f64 {
    let after = hull.partition_point(|(_, time)| *time <= limit);
    match (after.checked_sub(1).map(|index| hull[index]), hull.get(after)) {
        (None, _) => 0.0,
        (Some((count, _)), None) => count,
        (Some((count, time)), Some(next)) => count + (next.0 - count) * (limit - time) / (next.1 - time),
    }
}

impl GroupProblem {
    fn check(&self) {
        let ranks = self.memory.len();
        assert!(ranks > 0, "a group has at least one rank");
        assert!(
            !self.counts.is_empty(),
            "a group shares at least one counted kind"
        );
        let heads = self.heads.segments.iter().map(|times| times.by_rank.len());
        let counts = self
            .counts
            .iter()
            .flat_map(|share| share.segments.iter().map(|times| times.by_rank.len()));
        for found in heads.chain(counts) {
            assert_eq!(found, ranks, "every table has one row a rank");
        }
    }

    /// Time of shares: sum over segments of the slowest rank.
    pub fn time(&self, heads: &[IndexRange], counts: &[Vec<u32>]) -> SimDuration {
        let of_heads = self.heads.segments.iter().map(|times| {
            let slowest = heads.iter().enumerate().map(|(rank, range)| {
                times.of(
                    rank,
                    range.len(),
                    kv_heads_of(*range, self.heads.group_size).len(),
                )
            });
            slowest.max().unwrap_or(0)
        });
        let of_counts = self.counts.iter().zip(counts).flat_map(|(share, counts)| {
            share.segments.iter().map(|times| {
                let slowest = counts.iter().enumerate();
                slowest
                    .map(|(rank, count)| times.by_rank[rank][*count as usize])
                    .max()
                    .unwrap_or(0)
            })
        });
        SimDuration(of_heads.chain(of_counts).sum())
    }

    /// Bytes that shares bring to each rank.
    pub fn bytes(&self, heads: &[IndexRange], counts: &[Vec<u32>]) -> Vec<Bytes> {
        let of_rank = |(rank, range): (usize, &IndexRange)| {
            let counted = self.counts.iter().zip(counts);
            let counted = counted.map(|(share, counts)| share.unit_bytes * u64::from(counts[rank]));
            Bytes(self.heads.bytes(*range)) + counted.sum()
        };
        heads.iter().enumerate().map(of_rank).collect()
    }
}

impl HeadShare {
    fn bytes(&self, range: IndexRange) -> u64 {
        let kv = kv_heads_of(range, self.group_size);
        (self.query_bytes * u64::from(range.len()) + self.kv_bytes * u64::from(kv.len())).0
    }
}

/// One limit of the search: a segment of the heads or of a counted kind.
#[derive(Debug, Clone, Copy)]
enum SegmentRef {
    Heads(usize),
    Count { share: usize, segment: usize },
}

/// Limits by kind and segment, as the oracle reads them.
#[derive(Debug, Clone)]
struct Limits {
    heads: Vec<u64>,
    counts: Vec<Vec<u64>>,
}

impl Limits {
    fn set(&mut self, segment: SegmentRef, limit: u64) {
        match segment {
            SegmentRef::Heads(segment) => self.heads[segment] = limit,
            SegmentRef::Count { share, segment } => self.counts[share][segment] = limit,
        }
    }
}

/// Shares that keep within some limits.
#[derive(Debug, Clone)]
struct Feasible {
    heads: Vec<IndexRange>,
    counts: Vec<Vec<u32>>,
}

struct Search<'a> {
    oracle: Oracle<'a>,
    levels: Vec<(SegmentRef, Vec<u64>)>,
    /// By level: sum of the smallest feasible limits of this level and those below, each on its own.
    rest_bound: Vec<u64>,
    best: Option<(u64, Feasible)>,
    questions: usize,
    question_limit: usize,
}

impl<'a> Search<'a> {
    fn new(problem: &'a GroupProblem) -> Result<Self, Shortage> {
        let mut search = Self {
            oracle: Oracle::new(problem),
            levels: levels(problem),
            rest_bound: Vec::new(),
            best: None,
            questions: 0,
            question_limit: QUESTION_LIMIT,
        };
        let mut limits = search.unlimited();
        if search.oracle.ask(&limits).is_none() {
            return Err(search.oracle.shortage(&limits));
        }
        search.rest_bound = vec![0; search.levels.len() + 1];
        for level in (0..search.levels.len()).rev() {
            let index = search.first_feasible(level, &mut limits);
            search.rest_bound[level] = search.rest_bound[level + 1] + search.levels[level].1[index];
        }
        search.questions = 0;
        if !search.oracle.all_proven {
            search.question_limit = QUESTION_LIMIT / 50;
        }
        Ok(search)
    }

    fn unlimited(&self) -> Limits {
        let problem = self.oracle.problem;
        Limits {
            heads: vec![u64::MAX; problem.heads.segments.len()],
            counts: problem
                .counts
                .iter()
                .map(|share| vec![u64::MAX; share.segments.len()])
                .collect(),
        }
    }

    /// Tries the limits of one level from the smallest feasible one up, and the levels below for each.
    fn descend(&mut self, level: usize, spent: u64, limits: &mut Limits) {
        if level == self.levels.len() {
            let shares = self.oracle.ask(limits).expect("limits were found feasible");
            let total = self.oracle.problem.time(&shares.heads, &shares.counts).0;
            if self.best.as_ref().is_none_or(|(best, _)| total < *best) {
                self.best = Some((total, shares));
            }
            return;
        }
        let segment = self.levels[level].0;
        let mut index = self.first_feasible(level, limits);
        while let Some(limit) = self.levels[level].1.get(index).copied() {
            let bound = spent + limit + self.rest_bound[level + 1];
            let worse = self.best.as_ref().is_some_and(|(best, _)| bound >= *best);
            if worse || self.best.is_some() && self.questions >= self.question_limit {
                break;
            }
            limits.set(segment, limit);
            if !self.is_hopeless(level + 1, spent + limit, limits) {
                self.descend(level + 1, spent + limit, limits);
            }
            if level + 1 == self.levels.len() {
                break;
            }
            index += 1;
        }
        limits.set(segment, u64::MAX);
    }

    /// Whether the levels from `level` on, each alone beside the limits chosen so far, already need too much.
    fn is_hopeless(&mut self, level: usize, spent: u64, limits: &mut Limits) -> bool {
        let Some(best) = self.best.as_ref().map(|(best, _)| *best) else {
            return false;
        };
        let mut bound = spent + self.rest_bound[level];
        for later in level..self.levels.len() {
            if bound >= best {
                return true;
            }
            let index = self.first_feasible(later, limits);
            let alone = self.rest_bound[later] - self.rest_bound[later + 1];
            bound += self.levels[later].1[index] - alone;
        }
        bound >= best
    }

    /// Position of the smallest feasible limit of a level, with the limits of the other levels as they are.
    fn first_feasible(&mut self, level: usize, limits: &mut Limits) -> usize {
        self.first(level, limits, Oracle::is_feasible)
    }

    /// Sum of the smallest limits of every level that the fluid test alone does not refute.
    fn proven_bound(&mut self) -> u64 {
        let mut limits = self.unlimited();
        let mut bound = 0;
        for level in 0..self.levels.len() {
            let index = self.first(level, &mut limits, |oracle, limits| !oracle.refuted(limits));
            bound += self.levels[level].1[index];
        }
        bound
    }

    fn first(
        &mut self,
        level: usize,
        limits: &mut Limits,
        mut holds: impl FnMut(&mut Oracle<'a>, &Limits) -> bool,
    ) -> usize {
        let segment = self.levels[level].0;
        let (mut low, mut high) = (0, self.levels[level].1.len() - 1);
        while low < high {
            let middle = low + (high - low) / 2;
            limits.set(segment, self.levels[level].1[middle]);
            self.questions += 1;
            if holds(&mut self.oracle, limits) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        limits.set(segment, u64::MAX);
        low
    }
}

/// Every segment with its possible makespans; those with the most stand innermost, where bisection is enough.
fn levels(problem: &GroupProblem) -> Vec<(SegmentRef, Vec<u64>)> {
    let distinct = |times: &[Vec<u64>]| {
        let mut values: Vec<u64> = times.iter().flatten().copied().collect();
        values.retain(|time| *time != u64::MAX);
        values.sort_unstable();
        values.dedup();
        values
    };
    let heads = problem.heads.segments.iter().enumerate();
    let mut levels: Vec<(SegmentRef, Vec<u64>)> = heads
        .map(|(segment, times)| (SegmentRef::Heads(segment), distinct(&times.by_rank)))
        .collect();
    for (share, kind) in problem.counts.iter().enumerate() {
        for (segment, times) in kind.segments.iter().enumerate() {
            levels.push((SegmentRef::Count { share, segment }, distinct(&times.by_rank)));
        }
    }
    levels.sort_by_key(|(_, values)| values.len());
    levels
}
