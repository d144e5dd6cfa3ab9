//! The scheduler's invariants, verified by tests after every call and by the engines after every run.

use infercluster_spec::SequenceId;

use super::Scheduler;
use crate::ledger::LedgerFault;

/// A broken invariant: a bug in this code, never in its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchedulerFault {
    /// The pool's books are wrong.
    #[error(transparent)]
    Ledger(#[from] LedgerFault),
    /// A sequence is in no queue or in two, or its id leads elsewhere.
    #[error("{sequence} is not in exactly one of the queues")]
    Queue {
        /// Which.
        sequence: SequenceId,
    },
    /// Blocks held by nobody who runs.
    #[error("{sequence} owns KV blocks but does not run")]
    Owner {
        /// Which.
        sequence: SequenceId,
    },
    /// Fewer blocks than tokens.
    #[error("{sequence} has {held} KV blocks, its {tokens} tokens need {needed}")]
    Short {
        /// Which.
        sequence: SequenceId,
        /// Blocks that it has.
        held: u32,
        /// Tokens in the cache or on the way there.
        tokens: u32,
        /// Blocks that they need.
        needed: u32,
    },
    /// A sequence in flight twice, or marked so without a step.
    #[error("{sequence} is in {steps} steps in flight and says {says}")]
    InFlight {
        /// Which.
        sequence: SequenceId,
        /// Steps in flight that hold it.
        steps: usize,
        /// Its own mark.
        says: bool,
    },
    /// A limit is exceeded.
    #[error("{found} {what}, the limit is {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many may be.
        limit: u64,
    },
}

impl Scheduler {
    /// Verifies every invariant.
    pub fn check(&self) -> Result<(), SchedulerFault> {
        self.ledger.check()?;
        for (&arrival, live) in &self.live {
            let sequence = live.id;
            let (runs, waits) = (self.running.contains(&arrival), self.waiting.contains(&arrival));
            if runs == waits || self.arrivals.get(&sequence) != Some(&arrival) {
                return Err(SchedulerFault::Queue { sequence });
            }
            let pending = || self.in_flight.iter().flat_map(|step| &step.items);
            let mine: Vec<u32> = pending()
                .filter(|item| item.arrival == arrival)
                .map(|item| item.count)
                .collect();
            if mine != Vec::from_iter(live.in_flight) {
                let (steps, says) = (mine.len(), live.in_flight.is_some());
                return Err(SchedulerFault::InFlight {
                    sequence,
                    steps,
                    says,
                });
            }
            let tokens = live.computed + mine.iter().sum::<u32>();
            let (held, needed) = (self.ledger.held(sequence), self.ledger.blocks_for(tokens));
            if held < needed || tokens > live.known() {
                return Err(SchedulerFault::Short {
                    sequence,
                    held,
                    tokens,
                    needed,
                });
            }
        }
        self.check_owners()?;
        self.check_limits()
    }

    fn check_owners(&self) -> Result<(), SchedulerFault> {
        let runs = |sequence: &SequenceId| {
            self.arrivals
                .get(sequence)
                .is_some_and(|arrival| self.running.contains(arrival))
        };
        match self.ledger.owners().into_iter().find(|sequence| !runs(sequence)) {
            Some(sequence) => Err(SchedulerFault::Owner { sequence }),
            None => Ok(()),
        }
    }

    fn check_limits(&self) -> Result<(), SchedulerFault> {
        let queued = self.running.len() + self.waiting.len();
        let limits = [
            (
                "running sequences",
                self.running.len(),
                self.options.max_sequences as usize,
            ),
            ("queued sequences", queued, self.live.len()),
        ];
        let tokens = |items: &[super::Pending]| items.iter().map(|item| u64::from(item.count)).sum::<u64>();
        let steps = self.in_flight.iter().map(|step| {
            let budget = u64::from(self.options.token_budget);
            ("tokens in a step", tokens(&step.items), budget)
        });
        let limits = limits
            .into_iter()
            .map(|(what, found, limit)| (what, found as u64, limit as u64));
        match limits.chain(steps).find(|(_, found, limit)| found > limit) {
            Some((what, found, limit)) => Err(SchedulerFault::Limit { what, found, limit }),
            None => Ok(()),
        }
    }
}
