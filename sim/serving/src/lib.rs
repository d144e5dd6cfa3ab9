//! Pure state machines that the simulator and the executor both drive: continuous batching, KV block
//! accounting and routing. Events go in, actions come out; nothing here reads a clock or does I/O.
//!
//! ```
//! use infercluster_serving::{BlockLedger, NewSequence, Scheduler};
//! use infercluster_spec::{EngineOptions, SequenceId};
//!
//! let mut scheduler = Scheduler::new(EngineOptions::default(), 1, BlockLedger::identifying(64, 16)?)?;
//! scheduler.add(NewSequence::new(SequenceId(7), 20, 2))?;
//! let prefill = scheduler.plan_step().expect("a sequence waits");
//! assert_eq!((prefill.items[0].start, prefill.items[0].count), (0, 20));
//! let outcome = scheduler.complete_step(prefill.step, &[])?;
//! assert_eq!(outcome.tokens[0].index, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod handover;
pub mod ledger;
pub mod router;
pub mod scheduler;

pub use ledger::{BlockLedger, LedgerFault, Shortage};
pub use router::{Router, RouterPolicy};
pub use scheduler::{
    CompletedToken, FinishReason, Finished, KvUnit, NewSequence, Phase, PlannedItem, Refusal, Scheduler,
    SchedulerError, SchedulerFault, SequenceStatus, StepOutcome, StepPlan,
};
