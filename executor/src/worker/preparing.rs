//! Builds the runtime of a layout beside those that run, on a thread of its own.
//!
//! A shadow is built at idle priority: it takes what serving leaves. The runtime then belongs to the thread that
//! computes, which has the usual priority.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use infercluster_serving::handover::RefusalReason;
use infercluster_spec::{Bytes, GpuId, Layout, Model, memory};

use super::runtime::{PrepareError, Runtime};
use super::steps::{Answers, Command};
use super::switchboard::Switchboard;
use crate::wire::WireError;
use crate::wire::message::{FromWorker, Prepare};

/// How long memory that is being given back is waited for.
const RELEASE_DEADLINE: Duration = Duration::from_secs(30);

/// What the layouts of a device take together.
#[derive(Debug, Clone, Default)]
pub(super) struct Account(Arc<Books>);

#[derive(Debug, Default)]
struct Books {
    balance: Mutex<Balance>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Balance {
    held: Bytes,
    /// The part of it that is on its way back.
    leaving: Bytes,
}

/// A layout's part of an account; it is given back when this value goes.
#[derive(Debug)]
pub(super) struct Lease {
    account: Account,
    bytes: Bytes,
    leaves: bool,
}

impl Account {
    /// Takes `needed` where all together stay within `limit`, once what is being given back is there.
    fn take(&self, gpu: GpuId, needed: Bytes, limit: Option<Bytes>) -> Result<Lease, PrepareError> {
        let sum = |held: Bytes| held.checked_add(needed).unwrap_or(Bytes(u64::MAX));
        let fits = |held: Bytes| limit.is_none_or(|limit| sum(held) <= limit);
        let waits =
            |balance: &mut Balance| !fits(balance.held) && fits(balance.held.saturating_sub(balance.leaving));
        let balance = self.lock();
        let (mut balance, _) = self
            .0
            .returned
            .wait_timeout_while(balance, RELEASE_DEADLINE, waits)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(limit) = limit.filter(|_| !fits(balance.held)) {
            return Err(PrepareError::Memory {
                gpu,
                held: balance.held,
                limit,
                needed,
                missing: sum(balance.held).saturating_sub(limit),
            });
        }
        balance.held = sum(balance.held);
        Ok(Lease {
            account: self.clone(),
            bytes: needed,
            leaves: false,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Balance> {
        self.0.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Whoever needs memory may count on it: it will be given back soon.
    fn leave(&mut self) {
        if !std::mem::replace(&mut self.leaves, true) {
            self.account.lock().leaving += self.bytes;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut balance = self.account.lock();
        balance.held = balance.held.saturating_sub(self.bytes);
        if self.leaves {
            balance.leaving = balance.leaving.saturating_sub(self.bytes);
        }
        drop(balance);
        self.account.0.returned.notify_all();
    }
}

/// A runtime and the memory that it holds.
pub(super) struct Loaded {
    pub(super) runtime: Runtime,
    /// Given back after the runtime is gone.
    lease: Lease,
}

impl Loaded {
    /// Gives it back on a thread of its own: for gigabytes that takes a while, which the next step does not wait for
    /// and the next layout does.
    pub(super) fn free(mut self: Box<Self>) {
        self.lease.leave();
        let dropped = thread::Builder::new()
            .name("free".to_owned())
            .spawn(move || drop(self));
        if let Err(error) = dropped {
            tracing::warn!("a layout was freed in place: {error}");
        }
    }
}

/// What the thread needs.
pub(super) struct Preparation {
    pub(super) prepare: Prepare,
    pub(super) gpu: GpuId,
    pub(super) switchboard: Arc<Switchboard>,
    pub(super) account: Account,
    pub(super) answers: Answers,
    pub(super) commands: Sender<Command>,
}

impl Preparation {
    /// Starts the thread; the step thread hears the end as [`Command::Loaded`].
    pub(super) fn start(self) -> Result<(), WireError> {
        let thread = thread::Builder::new()
            .name("prepare".to_owned())
            .spawn(move || self.run());
        thread.map(drop).map_err(|source| WireError::Io {
            what: "starting a thread",
            source,
        })
    }

    fn run(self) {
        let layout_id = self.prepare.layout_id;
        if self.prepare.shadow.is_some() {
            take_idle_priority();
        }
        let (message, result) = match self.build() {
            Ok((loaded, message)) => (message, Ok(Box::new(loaded))),
            Err(error) => {
                let refusal = refusal(&error);
                let message = FromWorker::LoadFailed {
                    layout_id,
                    refusal,
                    reason: error.to_string(),
                };
                (message, Err(refusal))
            }
        };
        // Said before the step thread goes on, so that the coordinator has the text before the refusal.
        if let Err(error) = self.answers.send(&message) {
            tracing::warn!(
                "the coordinator cannot be told about layout {}: {error}",
                layout_id.0
            );
        }
        if result.is_err() {
            // Peers that build the same layout fail at once and not by deadline.
            self.switchboard.close_layout(layout_id);
        }
        let speed = self.prepare.speed;
        // A step thread that is gone needs no runtime.
        let _ = self.commands.send(Command::Loaded {
            layout_id,
            speed,
            result,
        });
    }

    fn build(&self) -> Result<(Loaded, FromWorker), PrepareError> {
        let needed = needed_bytes(&self.prepare, self.gpu)?;
        let lease = self.account.take(self.gpu, needed, self.prepare.memory)?;
        let (runtime, trace) = Runtime::build(&self.prepare, self.gpu, &self.switchboard)?;
        let message = FromWorker::Loaded {
            layout_id: self.prepare.layout_id,
            bytes: needed,
            trace,
        };
        Ok((Loaded { runtime, lease }, message))
    }
}

/// Weights and KV pool of this device's seat.
fn needed_bytes(prepare: &Prepare, gpu: GpuId) -> Result<Bytes, PrepareError> {
    let model: Model = prepare.model.read()?;
    let layout: Layout = prepare.layout.read()?;
    let seats = memory::seats(&layout, &model).into_iter();
    let needed = seats.filter(|seats| seats.gpu == gpu).map(|seats| {
        let pool = seats.memory.kv_block.checked_mul(u64::from(prepare.kv_blocks));
        pool.and_then(|pool| pool.checked_add(seats.memory.weights))
            .unwrap_or(Bytes(u64::MAX))
    });
    // Without a seat nothing is needed, and building says so.
    Ok(needed.max().unwrap_or(Bytes::ZERO))
}

fn refusal(error: &PrepareError) -> RefusalReason {
    match error {
        PrepareError::Memory { missing, .. } => RefusalReason::Memory { missing: *missing },
        PrepareError::ProbeDiffers { layer, .. } => RefusalReason::Probe { layer: *layer },
        _ => RefusalReason::Load,
    }
}

/// From now on this thread runs only where nothing else wants the core.
fn take_idle_priority() {
    #[cfg(target_os = "linux")]
    {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: the call reads one structure that lives through it and changes the calling thread only. Where
        // the kernel refuses, the thread keeps its priority.
        unsafe {
            libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_refused_with_the_shortage_and_comes_back() {
        let account = Account::default();
        let take = |needed| account.take(GpuId(3), Bytes(needed), Some(Bytes(100)));
        let first = take(60).unwrap();
        let error = take(50).unwrap_err();
        assert!(
            matches!(
                error,
                PrepareError::Memory {
                    missing: Bytes(10),
                    ..
                }
            ),
            "{error}"
        );
        assert!(matches!(
            refusal(&error),
            RefusalReason::Memory { missing: Bytes(10) }
        ));
        assert!(matches!(take(u64::MAX), Err(PrepareError::Memory { .. })));
        drop(first);
        take(100).unwrap();
    }

    #[test]
    fn memory_on_its_way_back_is_waited_for() {
        let account = Account::default();
        let take = |needed| account.take(GpuId(3), Bytes(needed), Some(Bytes(100)));
        let (mut leaving, _stays) = (take(60).unwrap(), take(30).unwrap());
        leaving.leave();
        // More than will ever be there is refused at once.
        assert!(matches!(take(71), Err(PrepareError::Memory { .. })));
        let taken = thread::scope(|scope| {
            let waiting = scope.spawn(|| take(70));
            drop(leaving);
            waiting.join().unwrap()
        });
        assert_eq!(account.lock().held, Bytes(100));
        drop(taken.unwrap());
        let balance = account.lock();
        assert_eq!((balance.held, balance.leaving), (Bytes(30), Bytes::ZERO));
    }

    #[test]
    fn without_a_limit_nothing_is_short() {
        let account = Account::default();
        assert!(account.take(GpuId(3), Bytes(1 << 60), None).is_ok());
    }
}
