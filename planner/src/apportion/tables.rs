//! Times by rank and share, as the search reads them.

use infercluster_spec::SimDuration;

/// Time by rank, query heads and KV heads.
#[derive(Debug, Clone)]
pub struct HeadTimes {
    kv_heads: u32,
    /// By rank; inside by query heads, then KV heads. Combinations that no range has stay at the maximum.
    pub(super) by_rank: Vec<Vec<u64>>,
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

    /// One table of tables for some ranks each, all of the same model.
    ///
    /// # Panics
    /// Where there is none.
    pub fn side_by_side<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut all = parts.next().expect("there is a table").clone();
        all.by_rank
            .extend(parts.flat_map(|part| part.by_rank.iter().cloned()));
        all
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

    pub(super) fn of(&self, rank: usize, query: u32, kv: u32) -> u64 {
        self.by_rank[rank][query as usize * (self.kv_heads as usize + 1) + kv as usize]
    }
}

/// Time by rank and count; a larger count is never faster.
#[derive(Debug, Clone)]
pub struct CountTimes {
    pub(super) by_rank: Vec<Vec<u64>>,
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

    /// One table of tables for some ranks each, all of the same units.
    pub fn side_by_side<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let rows = parts.into_iter().flat_map(|part| part.by_rank.iter().cloned());
        Self {
            by_rank: rows.collect(),
        }
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
    pub(super) fn most_within(&self, rank: usize, limit: u64) -> Option<u32> {
        let within = self.by_rank[rank].partition_point(|time| *time <= limit);
        (within as u32).checked_sub(1)
    }
}

fn repeated(by_rank: &[Vec<u64>], times: u64) -> Vec<Vec<u64>> {
    let repeat = |row: &Vec<u64>| row.iter().map(|time| time.saturating_mul(times)).collect();
    by_rank.iter().map(repeat).collect()
}
