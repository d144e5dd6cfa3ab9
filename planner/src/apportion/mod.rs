//! How one tensor-parallel group shares its query heads, MLP columns, output rows and vocabulary rows.
//!
//! Between two synchronisations a group waits for its slowest rank, so the time of a step is the sum over
//! segments of a maximum over ranks. Every kind of unit is shared out on its own; the kinds meet only in the
//! memory of each rank. The order of ranks is given, since it decides which heads are neighbours.
//!
//! **Method.** Parametric search on the makespans: a vector of limits, one a segment, is feasible when some
//! shares keep every segment within its limit and every rank within its memory. Feasibility is monotone in
//! each limit, which `search` uses to find the feasible limits of least sum. It runs first for each kind
//! alone, as if memory had no end (`alone`): a kind of several segments (compute and gather; output and down
//! rows, which are cut alike, and their gathers) is solved exactly there. Where what every kind would like
//! fits together, that is the answer. Where it does not, all kinds are searched together (`joint`) from good
//! shares on, with the sums of the kinds alone as bounds.
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

mod alone;
mod exact;
mod fluid;
mod joint;
mod oracle;
mod search;
mod tables;
#[cfg(test)]
mod tests;

use infercluster_spec::layout::kv_heads_of;
use infercluster_spec::{Bytes, IndexRange, SimDuration};

use std::cell::Cell;

use oracle::{Limits, Oracle};
use search::Least;

pub use fluid::continuous_bound;
pub use tables::{CountTimes, HeadTimes};

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

/// The fastest shares, see the module.
///
/// # Panics
/// Where tables and `memory` differ in their number of ranks, or there is none, or no counted kind.
pub fn apportion(problem: &GroupProblem) -> Result<GroupShares, Shortage> {
    problem.check();
    let work = Cell::new(0);
    let mut oracle = Oracle::new(problem, &work);
    let alone: Vec<Least> = (0..problem.kinds())
        .map(|kind| alone::least(problem, kind))
        .collect();
    let limits = Limits(alone.iter().map(|least| least.limits.clone()).collect());
    if let Some(shares) = oracle.ask(&limits) {
        let bound = SimDuration(alone.iter().map(|least| least.bound).sum());
        let time = problem.time(&shares.heads, &shares.counts);
        return Ok(GroupShares {
            heads: shares.heads,
            counts: shares.counts,
            time,
            bound,
            exact: time == bound,
        });
    }
    joint::least(problem, oracle, &alone)
}

/// Whether it is proven, by the fluid test alone, that memory does not hold the units.
pub fn is_refuted(problem: &GroupProblem) -> bool {
    problem.check();
    Oracle::new(problem, &Cell::new(0)).refuted(&Limits::none(problem))
}

/// Whether memory certainly holds the units: some shares were found.
pub fn is_held(problem: &GroupProblem) -> bool {
    problem.check();
    Oracle::new(problem, &Cell::new(0)).is_feasible(&Limits::none(problem))
}

impl GroupProblem {
    /// Kinds of units: heads, which are kind 0, and the counted ones.
    fn kinds(&self) -> usize {
        1 + self.counts.len()
    }

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

/// Shares that keep within some limits.
#[derive(Debug, Clone)]
struct Feasible {
    heads: Vec<IndexRange>,
    counts: Vec<Vec<u32>>,
}
