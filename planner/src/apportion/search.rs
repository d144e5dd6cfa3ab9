//! The feasible limits of least sum, where raising a limit never makes feasible limits infeasible.
//!
//! Levels are nested: each starts at its smallest limit that is feasible beside those chosen before it
//! (bisection) and ends where a bound from below on the sum reaches the best sum known; the innermost needs
//! the bisection alone. The larger an outer limit, the smaller the first feasible inner one, so an inner
//! bisection starts where the one before ended.

/// One limit of the search: a segment of a kind of unit, and its possible makespans in ascending order.
#[derive(Debug, Clone)]
pub(super) struct Level {
    pub(super) kind: usize,
    pub(super) segment: usize,
    pub(super) values: Vec<u64>,
}

impl Level {
    /// A level over the distinct times of a table; times at the maximum are none.
    pub(super) fn new(kind: usize, segment: usize, times: &[Vec<u64>]) -> Self {
        let mut values: Vec<u64> = times.iter().flatten().copied().collect();
        values.retain(|time| *time != u64::MAX);
        values.sort_unstable();
        values.dedup();
        Self {
            kind,
            segment,
            values,
        }
    }
}

/// Limits and what is known of their sum.
#[derive(Debug, Clone)]
pub(super) struct Least {
    /// By segment of a kind where one kind was searched, by level where several were.
    pub(super) limits: Vec<u64>,
    /// No feasible limits have a smaller sum; that of `limits` where the search ran to its end.
    pub(super) bound: u64,
}

/// A search over levels; levels of one kind stand together.
pub(super) struct Search<'a> {
    levels: &'a [Level],
    /// By kind: no feasible limits of that kind sum to less.
    least_of_kind: &'a [u64],
    feasible: &'a mut dyn FnMut(&[u64]) -> bool,
    /// Whether what the questions may cost is spent.
    spent: &'a dyn Fn() -> bool,
    /// By level: the smallest feasible limit with no other limit.
    alone: Vec<u64>,
    best: Option<(u64, Vec<u64>)>,
    complete: bool,
}

impl<'a> Search<'a> {
    /// Starts from feasible limits where some are known; no limit at all must be feasible.
    pub(super) fn new(
        levels: &'a [Level],
        least_of_kind: &'a [u64],
        feasible: &'a mut dyn FnMut(&[u64]) -> bool,
        spent: &'a dyn Fn() -> bool,
        start: Option<Vec<u64>>,
    ) -> Self {
        let mut search = Self {
            levels,
            least_of_kind,
            feasible,
            spent,
            alone: Vec::new(),
            best: start.map(|limits| (limits.iter().sum(), limits)),
            complete: true,
        };
        let mut limits = vec![u64::MAX; levels.len()];
        search.alone = (0..levels.len())
            .map(|level| {
                let first = search.first(level, &mut limits, levels[level].values.len() - 1);
                levels[level].values[first]
            })
            .collect();
        search
    }

    /// Runs to the end or until what questions may cost is spent; at least one descent is made.
    pub(super) fn run(mut self) -> Least {
        let mut limits = vec![u64::MAX; self.levels.len()];
        if let Some(outermost) = self.levels.first() {
            let needed = self.alone[1..].to_vec();
            self.descend(0, &mut limits, &needed, outermost.values.len() - 1);
        }
        let bound = self.bound(&[], &self.alone);
        let (total, limits) = self.best.unwrap_or_default();
        Least {
            limits,
            bound: if self.complete { total } else { bound },
        }
    }

    /// Tries the limits of one level from the smallest feasible one up, and the levels below for each.
    /// `needed` are limits that the levels below need at least beside those chosen so far. Answers the position
    /// of the smallest feasible one.
    fn descend(&mut self, level: usize, limits: &mut Vec<u64>, needed: &[u64], ceiling: usize) -> usize {
        let first = self.first(level, limits, ceiling);
        let below = level + 1;
        let mut ceiling_below = self.levels.get(below).map_or(0, |level| level.values.len() - 1);
        for index in first..self.levels[level].values.len() {
            limits[level] = self.levels[level].values[index];
            let bound = self.bound(&limits[..below], needed);
            if self.is_beaten(bound) {
                break;
            }
            if below == self.levels.len() {
                // Answers of an oracle that may miss shares need not be monotone: make sure.
                if (self.feasible)(limits) {
                    self.best = Some((bound, limits.clone()));
                }
                break;
            }
            if self.best.is_some() && (self.spent)() {
                self.complete = false;
                break;
            }
            if let Some(needed) = self.needed(below, limits) {
                ceiling_below = self.descend(below, limits, &needed[1..], ceiling_below);
            }
        }
        limits[level] = u64::MAX;
        first
    }

    fn is_beaten(&self, bound: u64) -> bool {
        self.best.as_ref().is_some_and(|(best, _)| bound >= *best)
    }

    /// What the levels from `level` on need, each alone beside the limits chosen so far; `None` where that is
    /// already too much.
    fn needed(&mut self, level: usize, limits: &mut [u64]) -> Option<Vec<u64>> {
        let mut needed = self.alone[level..].to_vec();
        if level + 1 == self.levels.len() {
            return Some(needed);
        }
        for later in level..self.levels.len() {
            let index = self.first(later, limits, self.levels[later].values.len() - 1);
            needed[later - level] = self.levels[later].values[index];
            if self.is_beaten(self.bound(&limits[..level], &needed)) {
                return None;
            }
        }
        Some(needed)
    }

    /// Sum of chosen limits and of `needed` for the levels after them, by kind no less than its least.
    fn bound(&self, chosen: &[u64], needed: &[u64]) -> u64 {
        let mut by_kind = vec![0_u64; self.least_of_kind.len()];
        for (level, limit) in self.levels.iter().zip(chosen.iter().chain(needed)) {
            by_kind[level.kind] = by_kind[level.kind].saturating_add(*limit);
        }
        let kinds = by_kind.iter().zip(self.least_of_kind);
        kinds.fold(0, |sum: u64, (own, least)| sum.saturating_add(*own.max(least)))
    }

    /// Position of the smallest feasible limit of a level, with the limits of the other levels as they are,
    /// where the one at `ceiling` is feasible.
    fn first(&mut self, level: usize, limits: &mut [u64], ceiling: usize) -> usize {
        let before = limits[level];
        let first = first_feasible(&self.levels[level].values, ceiling, |limit| {
            limits[level] = limit;
            (self.feasible)(limits)
        });
        limits[level] = before;
        first
    }
}

/// Position of the smallest value that holds, where the one at `ceiling` does.
pub(super) fn first_feasible(values: &[u64], ceiling: usize, mut holds: impl FnMut(u64) -> bool) -> usize {
    let (mut low, mut high) = (0, ceiling);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(values[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}
