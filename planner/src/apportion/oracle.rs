//! Whether some shares keep within limits on time and memory.

use std::cell::Cell;

use infercluster_spec::layout::kv_heads_of;
use infercluster_spec::{Bytes, IndexRange};

use super::{Feasible, GroupProblem, HeadShare, Shortage, exact};

/// Limits by kind, heads first, and segment.
#[derive(Debug, Clone)]
pub(super) struct Limits(pub(super) Vec<Vec<u64>>);

impl Limits {
    /// No limit at all.
    pub(super) fn none(problem: &GroupProblem) -> Self {
        let heads = problem.heads.segments.len();
        let counts = problem.counts.iter().map(|share| share.segments.len());
        Self(
            std::iter::once(heads)
                .chain(counts)
                .map(|segments| vec![u64::MAX; segments])
                .collect(),
        )
    }
}

pub(super) struct Oracle<'a> {
    pub(super) problem: &'a GroupProblem,
    /// Elementary steps that answers took so far.
    pub(super) work: &'a Cell<u64>,
    /// Whether every "no" so far was proven.
    pub(super) all_proven: bool,
}

/// What limits leave of a group.
pub(super) struct Room<'a> {
    pub(super) problem: &'a GroupProblem,
    pub(super) head_limits: &'a [u64],
    /// Most units by kind and rank.
    pub(super) caps: Vec<Vec<u32>>,
}

/// The best way to cut the heads for what follows.
struct HeadPath {
    cuts: Vec<IndexRange>,
    /// Bytes of counted units that fit beside the heads.
    capacity: u128,
}

impl<'a> Oracle<'a> {
    pub(super) fn new(problem: &'a GroupProblem, work: &'a Cell<u64>) -> Self {
        Self {
            problem,
            work,
            all_proven: true,
        }
    }

    /// Shares within the limits; `None` where there are none, or, with `all_proven` cleared, none were found.
    pub(super) fn ask(&mut self, limits: &Limits) -> Option<Feasible> {
        self.charge(1);
        let room = Room::new(self.problem, limits)?;
        let path = room.head_path()?;
        self.charge(room.steps());
        if path.capacity < room.counted_bytes() {
            return None;
        }
        let heads = path.cuts;
        let greedy = room
            .place(&heads, Order::EndsFirst)
            .or_else(|| room.place(&heads, Order::MostMemory));
        if let Some(counts) = greedy {
            return Some(Feasible { heads, counts });
        }
        if let Some(steps) = exact::steps(&room) {
            self.charge(steps);
            return exact::solve(&room);
        }
        self.all_proven = false;
        None
    }

    /// Whether there are shares within the limits, with the doubt of [`Self::ask`]. Where every rank has
    /// memory for all that time allows it, nothing has to be placed to know.
    pub(super) fn is_feasible(&mut self, limits: &Limits) -> bool {
        self.charge(1);
        let Some(room) = Room::new(self.problem, limits) else {
            return false;
        };
        self.charge(room.steps());
        let Some(path) = room.head_path() else {
            return false;
        };
        let has_memory = |(rank, range): (usize, &IndexRange)| {
            let left = room.beside(rank, *range);
            left.is_some_and(|left| room.full_bytes(rank) <= u128::from(left))
        };
        path.cuts.iter().enumerate().all(has_memory) || self.ask(limits).is_some()
    }

    /// Whether it is proven, by the fluid test alone, that nothing keeps within the limits.
    pub(super) fn refuted(&self, limits: &Limits) -> bool {
        let room = Room::new(self.problem, limits);
        room.is_none_or(|room| {
            room.head_path()
                .is_none_or(|path| path.capacity < room.counted_bytes())
        })
    }

    fn charge(&self, steps: u64) {
        self.work.set(self.work.get().saturating_add(steps));
    }

    pub(super) fn shortage(&self, limits: &Limits) -> Shortage {
        let room = Room::new(self.problem, limits).expect("no limit leaves room for every unit");
        let missing = match room.head_path() {
            Some(path) => room.counted_bytes().saturating_sub(path.capacity),
            None => {
                // Not even the heads fit: everything but what there is.
                let all = IndexRange::new(0, self.problem.heads.query_heads).expect("zero is lowest");
                let memory = self.problem.memory.iter().flatten();
                let there: u128 = memory.map(|bytes| u128::from(bytes.0)).sum();
                (u128::from(self.problem.heads.bytes(all)) + room.counted_bytes()).saturating_sub(there)
            }
        };
        Shortage {
            missing: Bytes(u64::try_from(missing).unwrap_or(u64::MAX)),
            exact: self.all_proven,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Each unit to the rank that would end first with it.
    EndsFirst,
    /// Each unit to the rank with the most memory left.
    MostMemory,
}

impl<'a> Room<'a> {
    /// `None` where some kind has more units than the ranks compute within its limits.
    fn new(problem: &'a GroupProblem, limits: &'a Limits) -> Option<Self> {
        let ranks = problem.memory.len();
        let mut caps = Vec::with_capacity(problem.counts.len());
        for (share, limits) in problem.counts.iter().zip(&limits.0[1..]) {
            let segments = || share.segments.iter().zip(limits);
            let most = |rank| {
                segments().try_fold(share.units, |most, (times, limit)| {
                    Some(most.min(times.most_within(rank, *limit)?))
                })
            };
            let caps_of_share: Vec<u32> = (0..ranks).map(most).collect::<Option<_>>()?;
            if caps_of_share.iter().map(|cap| u64::from(*cap)).sum::<u64>() < u64::from(share.units) {
                return None;
            }
            caps.push(caps_of_share);
        }
        Some(Self {
            problem,
            head_limits: &limits.0[0],
            caps,
        })
    }

    /// Memory left beside a range of heads; `None` where the range breaks a limit.
    pub(super) fn beside(&self, rank: usize, range: IndexRange) -> Option<u64> {
        let heads = &self.problem.heads;
        if !heads.keeps_within(rank, range, self.head_limits) {
            return None;
        }
        match self.problem.memory[rank] {
            None => Some(u64::MAX),
            Some(memory) => memory.0.checked_sub(heads.bytes(range)),
        }
    }

    fn counted_bytes(&self) -> u128 {
        let shares = self.problem.counts.iter();
        shares
            .map(|share| u128::from(share.units) * u128::from(share.unit_bytes.0))
            .sum()
    }

    /// Cuts that leave the most capacity, then the least sum of squared times, then the later cut.
    fn head_path(&self) -> Option<HeadPath> {
        let heads = &self.problem.heads;
        let units = (heads.query_heads / heads.unit) as usize;
        let full: Vec<u128> = (0..self.problem.memory.len())
            .map(|rank| self.full_bytes(rank))
            .collect();
        // By number of units held by the ranks so far: capacity, squares, and where the last rank starts.
        let mut reached: Vec<Option<(u128, u128)>> = vec![None; units + 1];
        reached[0] = Some((0, 0));
        let mut starts = Vec::with_capacity(full.len());
        for (rank, full) in full.iter().enumerate() {
            let mut next: Vec<Option<(u128, u128)>> = vec![None; units + 1];
            let mut start_of = vec![0_usize; units + 1];
            for end in 0..=units {
                for start in (0..=end).rev() {
                    let Some((capacity, squares)) = reached[start] else {
                        continue;
                    };
                    let Some(left) = self.beside(rank, self.range(start, end)) else {
                        continue;
                    };
                    let found = (
                        capacity + (*full).min(u128::from(left)),
                        squares.saturating_add(self.squared_times(rank, self.range(start, end))),
                    );
                    let better = next[end].is_none_or(|(best_capacity, best_squares)| {
                        (found.0, std::cmp::Reverse(found.1))
                            > (best_capacity, std::cmp::Reverse(best_squares))
                    });
                    if better {
                        next[end] = Some(found);
                        start_of[end] = start;
                    }
                }
            }
            reached = next;
            starts.push(start_of);
        }
        let (capacity, _) = reached[units]?;
        let mut end = units;
        let mut cuts: Vec<IndexRange> = starts
            .iter()
            .rev()
            .map(|start_of| {
                let start = start_of[end];
                let range = self.range(start, end);
                end = start;
                range
            })
            .collect();
        cuts.reverse();
        Some(HeadPath { cuts, capacity })
    }

    pub(super) fn range(&self, start: usize, end: usize) -> IndexRange {
        self.problem.heads.range(start, end)
    }

    /// Elementary steps of the fluid test and the greedy.
    fn steps(&self) -> u64 {
        let heads = &self.problem.heads;
        let head_units = u64::from(heads.query_heads / heads.unit);
        let counted: u64 = self
            .problem
            .counts
            .iter()
            .map(|share| u64::from(share.units))
            .sum();
        self.problem.memory.len() as u64 * (head_units * head_units / 2 + counted)
    }

    /// Bytes of a rank that holds as many counted units as time allows.
    fn full_bytes(&self, rank: usize) -> u128 {
        let shares = self.problem.counts.iter().zip(&self.caps);
        shares
            .map(|(share, caps)| u128::from(caps[rank]) * u128::from(share.unit_bytes.0))
            .sum()
    }

    fn squared_times(&self, rank: usize, range: IndexRange) -> u128 {
        let heads = &self.problem.heads;
        let kv = kv_heads_of(range, heads.group_size).len();
        let segments = heads.segments.iter();
        segments
            .map(|times| u128::from(times.of(rank, range.len(), kv)).pow(2))
            .fold(0, u128::saturating_add)
    }

    /// Places counted units one by one, those of the largest unit first.
    fn place(&self, heads: &[IndexRange], order: Order) -> Option<Vec<Vec<u32>>> {
        let ranks = heads.len();
        let mut left: Vec<u64> = (0..ranks)
            .map(|rank| self.beside(rank, heads[rank]))
            .collect::<Option<_>>()?;
        let mut counts = vec![vec![0_u32; ranks]; self.caps.len()];
        let mut largest_first: Vec<usize> = (0..self.caps.len()).collect();
        largest_first.sort_by_key(|&kind| (std::cmp::Reverse(self.problem.counts[kind].unit_bytes), kind));
        for kind in largest_first {
            let share = &self.problem.counts[kind];
            for _ in 0..share.units {
                let open = |rank: &usize| {
                    counts[kind][*rank] < self.caps[kind][*rank] && left[*rank] >= share.unit_bytes.0
                };
                let key = |rank: &usize| match order {
                    Order::MostMemory => (u64::MAX - left[*rank], *rank),
                    Order::EndsFirst => {
                        let count = counts[kind][*rank] as usize + 1;
                        let ends = share.segments.iter().map(|times| times.by_rank[*rank][count]);
                        (ends.max().unwrap_or(0), *rank)
                    }
                };
                let rank = (0..ranks).filter(open).min_by_key(key)?;
                counts[kind][rank] += 1;
                left[rank] -= if left[rank] == u64::MAX {
                    0
                } else {
                    share.unit_bytes.0
                };
            }
        }
        Some(counts)
    }
}

impl HeadShare {
    pub(super) fn range(&self, start: usize, end: usize) -> IndexRange {
        IndexRange::new(start as u32 * self.unit, end as u32 * self.unit).expect("ranges go up")
    }
}
