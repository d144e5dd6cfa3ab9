//! Which sequence owns how much of a replica's KV pool.
//!
//! Two forms with the same counts: the counting form knows numbers only, which is all that a simulation
//! needs; the identifying form hands out [`KvBlockId`]s, which the executor writes into block tables.
//! Blocks come back last in, first out, and fresh ones follow in ascending order, so the same calls give
//! the same ids everywhere.
//!
//! Invariant ([`BlockLedger::check`]): every block is free or owned by exactly one sequence.
//!
//! Left out: sharing of equal prefixes. Every sequence owns its blocks alone.

use std::collections::BTreeMap;

use infercluster_spec::{KvBlockId, SequenceId};

/// The pool of one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLedger {
    block_size: u32,
    total: u32,
    free: u32,
    form: Form,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    Counting {
        held: BTreeMap<SequenceId, u32>,
    },
    Identifying {
        tables: BTreeMap<SequenceId, Vec<KvBlockId>>,
        /// Blocks that came back; the last one is handed out next.
        returned: Vec<KvBlockId>,
        /// Blocks from here up were never handed out.
        fresh: u32,
    },
}

/// A pool that cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a KV block of {block_size} tokens was asked for, at least 1 is needed")]
pub struct BadBlockSize {
    /// What was asked for.
    pub block_size: u32,
}

/// The pool is dry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{sequence} needs {wanted} more KV blocks but only {free} of {total} are free")]
pub struct Shortage {
    /// Who asked.
    pub sequence: SequenceId,
    /// Blocks that it lacks.
    pub wanted: u32,
    /// Blocks that are free.
    pub free: u32,
    /// Blocks of the pool.
    pub total: u32,
}

/// What [`BlockLedger::check`] found: a bug in this code, never in its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerFault {
    /// Free and owned blocks do not add up.
    #[error("{free} free and {owned} owned KV blocks do not make the pool's {total}")]
    Sum {
        /// Free blocks.
        free: u64,
        /// Owned blocks.
        owned: u64,
        /// Blocks of the pool.
        total: u32,
    },
    /// A block with two owners, or owned and free.
    #[error("{block} has more than one owner")]
    Twice {
        /// Which.
        block: KvBlockId,
    },
    /// A block that the pool does not have.
    #[error("{block} lies past the pool's {total} blocks")]
    Beyond {
        /// Which.
        block: KvBlockId,
        /// Blocks of the pool.
        total: u32,
    },
}

impl BlockLedger {
    /// A pool of `total` blocks that only counts.
    pub fn counting(total: u32, block_size: u32) -> Result<Self, BadBlockSize> {
        let held = BTreeMap::new();
        Self::new(total, block_size, Form::Counting { held })
    }

    /// A pool of `total` blocks that hands out block ids.
    pub fn identifying(total: u32, block_size: u32) -> Result<Self, BadBlockSize> {
        let form = Form::Identifying {
            tables: BTreeMap::new(),
            returned: Vec::new(),
            fresh: 0,
        };
        Self::new(total, block_size, form)
    }

    fn new(total: u32, block_size: u32, form: Form) -> Result<Self, BadBlockSize> {
        if block_size == 0 {
            return Err(BadBlockSize { block_size });
        }
        Ok(Self {
            block_size,
            total,
            free: total,
            form,
        })
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Blocks of the pool.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Blocks that nobody owns.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that hold so many tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks that a sequence owns.
    pub fn held(&self, sequence: SequenceId) -> u32 {
        match &self.form {
            Form::Counting { held } => held.get(&sequence).copied().unwrap_or(0),
            Form::Identifying { tables, .. } => tables.get(&sequence).map_or(0, |table| table.len() as u32),
        }
    }

    /// The blocks of a sequence in order of position; empty in the counting form.
    pub fn table(&self, sequence: SequenceId) -> &[KvBlockId] {
        match &self.form {
            Form::Counting { .. } => &[],
            Form::Identifying { tables, .. } => tables.get(&sequence).map_or(&[], Vec::as_slice),
        }
    }

    /// Whether a sequence can grow to so many tokens.
    pub fn fits(&self, sequence: SequenceId, tokens: u32) -> bool {
        self.blocks_for(tokens).saturating_sub(self.held(sequence)) <= self.free
    }

    /// Grows a sequence to blocks for `tokens` tokens, all or nothing; never shrinks it.
    pub fn grow(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), Shortage> {
        let wanted = self.blocks_for(tokens).saturating_sub(self.held(sequence));
        if wanted > self.free {
            return Err(Shortage {
                sequence,
                wanted,
                free: self.free,
                total: self.total,
            });
        }
        self.free -= wanted;
        match &mut self.form {
            Form::Counting { held } => *held.entry(sequence).or_default() += wanted,
            Form::Identifying {
                tables,
                returned,
                fresh,
            } => {
                let table = tables.entry(sequence).or_default();
                table.extend((0..wanted).map(|_| {
                    returned.pop().unwrap_or_else(|| {
                        let block = KvBlockId(*fresh);
                        *fresh += 1;
                        block
                    })
                }));
            }
        }
        Ok(())
    }

    /// Takes every block of a sequence back and says how many there were.
    pub fn release(&mut self, sequence: SequenceId) -> u32 {
        let blocks = match &mut self.form {
            Form::Counting { held } => held.remove(&sequence).unwrap_or(0),
            Form::Identifying { tables, returned, .. } => {
                let mut table = tables.remove(&sequence).unwrap_or_default();
                let blocks = table.len() as u32;
                // The first block of the sequence is the first to be handed out again.
                table.reverse();
                returned.append(&mut table);
                blocks
            }
        };
        self.free += blocks;
        blocks
    }

    /// Sequences that own blocks, in order of id.
    pub fn owners(&self) -> Vec<SequenceId> {
        match &self.form {
            Form::Counting { held } => held.keys().copied().collect(),
            Form::Identifying { tables, .. } => tables.keys().copied().collect(),
        }
    }

    /// Verifies that every block is free or owned exactly once.
    pub fn check(&self) -> Result<(), LedgerFault> {
        let owned: u64 = self
            .owners()
            .iter()
            .map(|sequence| u64::from(self.held(*sequence)))
            .sum();
        if u64::from(self.free) + owned != u64::from(self.total) {
            return Err(LedgerFault::Sum {
                free: u64::from(self.free),
                owned,
                total: self.total,
            });
        }
        match &self.form {
            Form::Counting { .. } => Ok(()),
            Form::Identifying {
                tables,
                returned,
                fresh,
            } => self.check_ids(tables.values().flatten().chain(returned), *fresh),
        }
    }

    /// Blocks ever handed out are exactly `0..fresh`, each seen once.
    fn check_ids<'a>(
        &self,
        blocks: impl Iterator<Item = &'a KvBlockId>,
        fresh: u32,
    ) -> Result<(), LedgerFault> {
        let total = self.total;
        let mut seen = vec![false; fresh as usize];
        for &block in blocks {
            match seen.get_mut(block.index()) {
                None => return Err(LedgerFault::Beyond { block, total }),
                Some(true) => return Err(LedgerFault::Twice { block }),
                Some(slot) => *slot = true,
            }
        }
        let lost = seen.iter().filter(|seen| !**seen).count();
        if lost > 0 || fresh > total {
            let owned = u64::from(fresh) - lost as u64;
            let free = u64::from(total.saturating_sub(fresh));
            return Err(LedgerFault::Sum { free, owned, total });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: SequenceId = SequenceId(1);
    const B: SequenceId = SequenceId(2);

    #[test]
    fn blocks_come_back_last_in_first_out() {
        let mut ledger = BlockLedger::identifying(4, 16).unwrap();
        ledger.grow(A, 17).unwrap();
        ledger.grow(B, 16).unwrap();
        assert_eq!(ledger.table(A), [KvBlockId(0), KvBlockId(1)]);
        assert_eq!(ledger.table(B), [KvBlockId(2)]);
        // The second block has 15 free places.
        ledger.grow(A, 32).unwrap();
        assert_eq!((ledger.held(A), ledger.free()), (2, 1));
        let shortage = ledger.grow(B, 16 * 3 + 1).unwrap_err();
        assert_eq!((shortage.wanted, shortage.free), (3, 1));
        assert_eq!(ledger.held(B), 1, "all or nothing");
        assert_eq!(ledger.release(A), 2);
        ledger.grow(B, 48).unwrap();
        assert_eq!(ledger.table(B), [KvBlockId(2), KvBlockId(0), KvBlockId(1)]);
        assert_eq!(ledger.check(), Ok(()));
    }

    #[test]
    fn a_block_holds_at_least_one_token() {
        assert!(BlockLedger::counting(4, 0).is_err());
    }

    #[derive(Debug, Clone, Copy)]
    enum Call {
        Grow(u64, u32),
        Release(u64),
    }

    fn call() -> impl Strategy<Value = Call> {
        prop_oneof![
            3 => (0_u64..6, 0_u32..90).prop_map(|(sequence, tokens)| Call::Grow(sequence, tokens)),
            1 => (0_u64..6).prop_map(Call::Release),
        ]
    }

    proptest! {
        #[test]
        fn both_forms_count_alike(total in 0_u32..24, block_size in 1_u32..20, calls in prop::collection::vec(call(), 0..200)) {
            let mut counting = BlockLedger::counting(total, block_size).unwrap();
            let mut identifying = BlockLedger::identifying(total, block_size).unwrap();
            for call in calls {
                match call {
                    Call::Grow(id, tokens) => {
                        let id = SequenceId(id);
                        let before = identifying.table(id).to_vec();
                        let grown = identifying.grow(id, tokens);
                        prop_assert_eq!(grown, counting.grow(id, tokens));
                        prop_assert!(identifying.table(id).starts_with(&before), "a table only grows at its end");
                        prop_assert!(grown.is_err() || u64::from(identifying.held(id)) * u64::from(block_size) >= u64::from(tokens));
                    }
                    Call::Release(id) => {
                        prop_assert_eq!(identifying.release(SequenceId(id)), counting.release(SequenceId(id)));
                    }
                }
                prop_assert_eq!(identifying.free(), counting.free());
                prop_assert_eq!(identifying.check(), Ok(()));
                prop_assert_eq!(counting.check(), Ok(()));
            }
        }
    }
}
