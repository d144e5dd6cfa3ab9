//! The thread that computes: takes commands in order, keeps the runtimes of all epochs, answers the coordinator.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infercluster_spec::{Epoch, StepId, Term};

use super::runtime::{Runtime, StepResult};
use super::sample::Choice;
use crate::clock;
use crate::speed::{Pacer, SegmentTimes, Speed, TimesByKind};
use crate::step::StepDescriptor;
use crate::wire::message::{FromWorker, StepOrder, StepOutput, StepTimes, WorkerTimes};
use crate::wire::{Connection, Kind, WireError};

/// Steps whose times are kept one by one.
const LATEST_STEPS: usize = 16 << 10;

/// What the control loop asks of the thread that computes.
pub(super) enum Command {
    /// A runtime stands beside the others from now on.
    Install(Box<Runtime>, Speed),
    Step(StepOrder),
    Probe(StepOrder),
    Release(Epoch),
    TakeTimes,
}

/// The sending half of the control connection, shared by the threads of a worker.
#[derive(Debug, Clone)]
pub(super) struct Answers(Arc<Mutex<Connection>>);

impl Answers {
    pub(super) fn new(connection: Connection) -> Self {
        Self(Arc::new(Mutex::new(connection)))
    }

    /// Sends a message whole.
    pub(super) fn send(&self, message: &FromWorker) -> Result<(), WireError> {
        let connection = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        connection.send(Kind::Control, message)
    }
}

/// Refuses what comes from an earlier reign, an earlier layout or out of order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Fence {
    term: Term,
    epoch: Epoch,
    step: Option<StepId>,
}

/// A step that must not be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Stale {
    #[error("it is of {found}, this worker serves {current}")]
    Term { found: Term, current: Term },
    #[error("it is of {found}, this worker has switched to {current}")]
    Epoch { found: Epoch, current: Epoch },
    #[error("{found} does not follow {current}")]
    Step { found: StepId, current: StepId },
}

impl Fence {
    /// Notes a term; a lower one than before is refused.
    pub(super) fn admit_term(&mut self, found: Term) -> Result<(), Stale> {
        if found < self.term {
            return Err(Stale::Term {
                found,
                current: self.term,
            });
        }
        self.term = found;
        Ok(())
    }

    /// Notes a step; `true` where it is the first of its epoch.
    pub(super) fn admit(&mut self, descriptor: &StepDescriptor) -> Result<bool, Stale> {
        self.admit_term(descriptor.term)?;
        if descriptor.epoch < self.epoch {
            return Err(Stale::Epoch {
                found: descriptor.epoch,
                current: self.epoch,
            });
        }
        let first = descriptor.epoch > self.epoch || self.step.is_none();
        if let Some(current) = self.step.filter(|current| descriptor.step <= *current) {
            return Err(Stale::Step {
                found: descriptor.step,
                current,
            });
        }
        self.epoch = descriptor.epoch;
        self.step = Some(descriptor.step);
        Ok(first)
    }
}

/// State of the thread that computes.
pub(super) struct StepLoop {
    answers: Answers,
    runtimes: BTreeMap<Epoch, Runtime>,
    fence: Fence,
    pacer: Pacer,
    times: WorkerTimes,
    latest: VecDeque<StepTimes>,
}

impl StepLoop {
    /// Made on the thread that runs it, since pacing sets that thread's timer.
    pub(super) fn new(answers: Answers) -> Self {
        Self {
            answers,
            runtimes: BTreeMap::new(),
            fence: Fence::default(),
            pacer: Pacer::new(Speed::FULL),
            times: WorkerTimes::default(),
            latest: VecDeque::new(),
        }
    }

    /// Works until the control loop ends or the coordinator cannot be answered.
    pub(super) fn run(mut self, commands: &Receiver<Command>) -> Result<(), WireError> {
        while let Ok(command) = commands.recv() {
            match command {
                Command::Install(runtime, speed) => {
                    self.pacer.set_speed(speed);
                    self.runtimes.insert(runtime.epoch, *runtime);
                }
                Command::Step(order) => self.step(&order)?,
                Command::Probe(order) => self.probe(&order)?,
                Command::Release(epoch) => {
                    self.runtimes.remove(&epoch);
                }
                Command::TakeTimes => self.report_times()?,
            }
        }
        Ok(())
    }

    fn step(&mut self, order: &StepOrder) -> Result<(), WireError> {
        let StepDescriptor { epoch, step, .. } = order.descriptor;
        let first = match self.fence.admit(&order.descriptor) {
            Ok(first) => first,
            Err(stale) => {
                tracing::warn!("{step} is refused: {stale}");
                return Ok(());
            }
        };
        let Some(runtime) = self.runtimes.get_mut(&epoch) else {
            return self.answers.send(&FromWorker::StepFailed {
                epoch,
                step,
                reason: format!("{epoch} is not prepared here"),
                peer: None,
            });
        };
        let started = clock::now();
        match runtime.run(order, &mut self.pacer) {
            Ok(result) => {
                self.count(step, started.elapsed(), result.upstream);
                if first {
                    self.answers.send(&FromWorker::Switched { epoch, step })?;
                }
                self.answer(order, result)
            }
            Err(error) => {
                // Dropping the runtime closes its connections, so that peers fail at once and not by deadline.
                self.runtimes.remove(&epoch);
                self.answers.send(&FromWorker::StepFailed {
                    epoch,
                    step,
                    reason: error.to_string(),
                    peer: error.peer(),
                })
            }
        }
    }

    /// A probe passes no fence and is not counted.
    fn probe(&mut self, order: &StepOrder) -> Result<(), WireError> {
        let StepDescriptor { epoch, step, .. } = order.descriptor;
        let failed = |reason: String, peer| FromWorker::StepFailed {
            epoch,
            step,
            reason,
            peer,
        };
        let Some(runtime) = self.runtimes.get_mut(&epoch) else {
            return self
                .answers
                .send(&failed(format!("{epoch} is not prepared here"), None));
        };
        let result = runtime.run(order, &mut self.pacer);
        self.pacer.take();
        match result.map(|result| result.choices) {
            Ok(None) => Ok(()),
            Ok(Some(choices)) => self.answers.send(&FromWorker::Probed {
                epoch,
                outputs: outputs_of(order, choices),
            }),
            Err(error) => {
                self.runtimes.remove(&epoch);
                self.answers.send(&failed(error.to_string(), error.peer()))
            }
        }
    }

    fn answer(&self, order: &StepOrder, result: StepResult) -> Result<(), WireError> {
        let Some(choices) = result.choices else {
            return Ok(());
        };
        let StepDescriptor {
            term, epoch, step, ..
        } = order.descriptor;
        self.answers.send(&FromWorker::StepDone {
            term,
            epoch,
            step,
            outputs: outputs_of(order, choices),
        })
    }

    fn count(&mut self, step: StepId, took: Duration, upstream: Duration) {
        let by_kind = self.pacer.take();
        let compute_s = by_kind
            .iter()
            .map(|(kind, times)| (*kind, times.paced_s()))
            .collect();
        add(&mut self.times.segments, &by_kind);
        self.times.steps += 1;
        self.times.step_s += took.as_secs_f64();
        self.times.upstream_s += upstream.as_secs_f64();
        if self.latest.len() == LATEST_STEPS {
            self.latest.pop_front();
        }
        let wall_s = took.saturating_sub(upstream).as_secs_f64();
        self.latest.push_back(StepTimes {
            step,
            wall_s,
            compute_s,
        });
    }

    fn report_times(&mut self) -> Result<(), WireError> {
        let mut times = std::mem::take(&mut self.times);
        times.latest = std::mem::take(&mut self.latest).into();
        self.answers.send(&FromWorker::Times(times))
    }
}

/// One output an item that wanted logits.
fn outputs_of(order: &StepOrder, choices: Vec<Choice>) -> Vec<StepOutput> {
    let items = order.descriptor.items.iter().filter(|item| item.wants_logits);
    items
        .zip(choices)
        .map(|(item, choice)| StepOutput {
            sequence: item.sequence,
            token: choice.token,
            logits_hash: choice.logits_hash,
            logits: choice.logits,
        })
        .collect()
}

fn add(sums: &mut TimesByKind, more: &TimesByKind) {
    for (kind, times) in more {
        let sum: &mut SegmentTimes = sums.entry(*kind).or_default();
        sum.count += times.count;
        sum.compute_s += times.compute_s;
        sum.padding_s += times.padding_s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(term: u64, epoch: u64, step: u64) -> StepDescriptor {
        StepDescriptor {
            term: Term(term),
            epoch: Epoch(epoch),
            step: StepId(step),
            items: Vec::new(),
        }
    }

    #[test]
    fn the_fence_only_goes_forward() {
        let mut fence = Fence::default();
        assert_eq!(fence.admit(&descriptor(2, 1, 0)), Ok(true));
        assert_eq!(fence.admit(&descriptor(2, 1, 1)), Ok(false));
        // Another epoch goes on in the same numbering.
        assert_eq!(fence.admit(&descriptor(2, 2, 2)), Ok(true));
        let before = fence;
        for stale in [descriptor(1, 2, 3), descriptor(2, 1, 3), descriptor(2, 2, 2)] {
            assert!(fence.admit(&stale).is_err(), "{stale:?}");
            assert_eq!(fence, before, "a refused step changes nothing");
        }
        assert_eq!(fence.admit(&descriptor(3, 2, 9)), Ok(false));
    }
}
