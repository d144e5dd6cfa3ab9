//! The KV pool of one replica, which knows decoding sequences only by how full their last blocks are.
//!
//! A sequence takes a block in the step that computes the first token of it. With `decoded` the replica's
//! count of decode steps, `(computed - decoded) mod block size` never changes while a sequence decodes, so a
//! ring of counts by it says what every step to come will take: in as many steps as a block has tokens each
//! sequence takes exactly one block, and fewer steps are a stretch of the ring.

/// Blocks, and the decoding sequences by phase.
#[derive(Debug)]
pub(super) struct Pool {
    block_size: u32,
    total: u32,
    free: u32,
    peak: u32,
    /// Decoding sequences by `(computed - decoded) mod block_size`.
    ring: Vec<u32>,
    /// `decoded mod block_size`.
    phase: u32,
    sequences: u32,
}

impl Pool {
    pub(super) fn new(total: u32, block_size: u32) -> Self {
        Self {
            block_size,
            total,
            free: total,
            peak: 0,
            ring: vec![0; block_size as usize],
            phase: 0,
            sequences: 0,
        }
    }

    pub(super) fn total(&self) -> u32 {
        self.total
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    /// Most blocks in use when a step was planned.
    pub(super) fn peak(&self) -> u32 {
        self.peak
    }

    /// Blocks that hold so many tokens.
    pub(super) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Takes blocks for prefill.
    pub(super) fn take(&mut self, blocks: u32) {
        self.free = self
            .free
            .checked_sub(blocks)
            .expect("the blocks were counted before");
    }

    /// Takes back what holds so many tokens.
    pub(super) fn give(&mut self, tokens: u32) {
        self.free += self.blocks_for(tokens);
        assert!(
            self.free <= self.total,
            "{} of {} KV blocks are free",
            self.free,
            self.total
        );
    }

    /// A sequence with blocks for `computed` tokens begins to decode.
    pub(super) fn join(&mut self, computed: u32) {
        let slot = self.slot(computed);
        self.ring[slot] += 1;
        self.sequences += 1;
    }

    /// A decoding sequence with `computed` tokens gives its blocks back.
    pub(super) fn leave(&mut self, computed: u32) {
        let slot = self.slot(computed);
        self.ring[slot] -= 1;
        self.sequences -= 1;
        self.give(computed);
    }

    fn slot(&self, computed: u32) -> usize {
        let ahead = computed % self.block_size + self.block_size - self.phase;
        (ahead % self.block_size) as usize
    }

    /// Blocks that the next decode step takes: one for each sequence whose blocks are full.
    pub(super) fn demand(&self) -> u32 {
        self.ring[self.slot(0)]
    }

    /// How many decode steps find their blocks, at most `limit`.
    pub(super) fn steps_that_fit(&self, limit: u32) -> u32 {
        let (free, sequences) = (u64::from(self.free), u64::from(self.sequences));
        if sequences * u64::from(limit.div_ceil(self.block_size)) <= free {
            return limit;
        }
        // The bound above would have held without sequences.
        let rounds = free / sequences;
        let mut rest = (free % sequences) as u32;
        let mut steps = rounds * u64::from(self.block_size);
        let mut slot = self.slot(0);
        // A whole round takes more than the rest, so this ends within one.
        while self.ring[slot] <= rest {
            rest -= self.ring[slot];
            steps += 1;
            slot = slot.checked_sub(1).unwrap_or(self.ring.len() - 1);
        }
        u32::try_from(steps).map_or(limit, |steps| steps.min(limit))
    }

    /// Decodes so many steps; their blocks are there.
    pub(super) fn advance(&mut self, steps: u32) {
        let (rounds, rest) = (steps / self.block_size, steps % self.block_size);
        let taken = u64::from(rounds) * u64::from(self.sequences) + u64::from(self.stretch(rest));
        let free = u64::from(self.free).checked_sub(taken);
        self.free = free.expect("a run ends before the pool does") as u32;
        self.phase = (self.phase + rest) % self.block_size;
        self.peak = self.peak.max(self.total - self.free);
    }

    /// Blocks of the next `steps` decode steps, fewer than a block has tokens.
    fn stretch(&self, steps: u32) -> u32 {
        let (steps, end) = (steps as usize, self.slot(0) + 1);
        if steps <= end {
            return self.ring[end - steps..end].iter().sum();
        }
        let wrapped = &self.ring[self.ring.len() - (steps - end)..];
        self.ring[..end].iter().chain(wrapped).sum()
    }

    /// Nobody decodes and every block is free.
    pub(super) fn is_whole(&self) -> bool {
        self.free == self.total && self.sequences == 0 && self.ring.iter().all(|count| *count == 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_ring_knows_when_blocks_are_due() {
        // Blocks of 4. With 4 and 6 tokens computed, of 1 and 2 blocks, blocks are due at steps 0, 4, 8 and
        // 2, 6, 10.
        let mut pool = Pool::new(6, 4);
        pool.take(3);
        pool.join(4);
        pool.join(6);
        assert_eq!((pool.demand(), pool.steps_that_fit(100)), (1, 6));
        pool.advance(3);
        assert_eq!((pool.free(), pool.demand(), pool.peak()), (1, 0, 5));
        assert_eq!(pool.steps_that_fit(100), 3);
        assert_eq!(pool.steps_that_fit(2), 2);
        // The first ends with 7 tokens in 2 blocks, the other has 9 in 3.
        pool.leave(7);
        assert_eq!((pool.free(), pool.steps_that_fit(100)), (3, 15));
        pool.leave(9);
        assert!(pool.is_whole());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn runs_take_what_their_steps_take(
            block_size in 1_u32..20,
            sequences in prop::collection::vec(1_u32..60, 1..8),
            spare in 0_u32..30,
            runs in prop::collection::vec(1_u32..50, 1..10),
        ) {
            let blocks = |tokens: &u32| tokens.div_ceil(block_size);
            let held: u32 = sequences.iter().map(blocks).sum();
            let mut pool = Pool::new(held + spare, block_size);
            pool.take(held);
            sequences.iter().for_each(|computed| pool.join(*computed));
            let mut computed = sequences;
            for limit in runs {
                // By hand: step after step until one finds too few blocks.
                let mut steps = 0;
                let mut now: u32 = computed.iter().map(blocks).sum();
                let fits = pool.steps_that_fit(limit);
                while steps < limit {
                    let next: Vec<u32> = computed.iter().map(|tokens| tokens + 1).collect();
                    let wanted = next.iter().map(blocks).sum();
                    prop_assert!(steps > 0 || pool.demand() == wanted - now);
                    if wanted > pool.total() {
                        break;
                    }
                    (computed, now, steps) = (next, wanted, steps + 1);
                }
                prop_assert_eq!(fits, steps);
                pool.advance(steps);
                prop_assert_eq!(pool.free(), pool.total() - now);
            }
            computed.iter().for_each(|computed| pool.leave(*computed));
            prop_assert!(pool.is_whole());
        }
    }
}
