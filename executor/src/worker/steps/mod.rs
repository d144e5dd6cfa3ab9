//! The thread that computes: takes commands in order, feeds the rank's part of the handover protocol and carries
//! out what it says.
//!
//! A step is computed in place, before any later command is looked at: every rank of a stage sees the same orders
//! and steps in the same order, so none waits in a collective for one that has turned to something else. KV moves
//! between steps, a chunk at a time ([`moving`], [`super::copying`]).

mod computing;
mod layouts;
mod moving;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{
    self, HandoverId, KvUnit, Notice, Order, Participant, RankAction, RankEvent, RefusalReason,
};
use infercluster_spec::{GpuId, KvBlockId};

use self::computing::StepKey;
use super::copying::{Arrival, Copying, Work};
use super::kv_line::KvLine;
use super::preparing::{Account, Loaded};
use super::switchboard::Switchboard;
use crate::clock;
use crate::speed::{Pacer, Speed};
use crate::wire::message::{FromWorker, Prepare, StepOrder, StepTimes, WorkerTimes};
use crate::wire::{Connection, Kind, LaneFrame, WireError};

/// What reaches the thread that computes.
pub(super) enum Command {
    /// A layout that orders may name from now on.
    Describe(Box<Prepare>),
    Order(Order),
    Step(StepOrder),
    /// A runtime stands, or does not.
    Loaded {
        layout_id: HandoverId,
        speed: Speed,
        result: Result<Box<Loaded>, RefusalReason>,
    },
    /// A KV connection stands.
    LineUp {
        layout_id: HandoverId,
        peer: GpuId,
        line: KvLine,
    },
    /// A frame has come on it.
    Lane {
        layout_id: HandoverId,
        peer: GpuId,
        frame: LaneFrame,
    },
    /// A KV connection does not stand or has ended.
    LineFailed {
        layout_id: HandoverId,
        peer: GpuId,
        reason: String,
    },
    /// A frame was written: there may be room for another.
    LineDrained,
    /// Drop everything.
    GiveUp,
    TakeTimes,
    /// The worker ends.
    Stop,
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

/// State of the thread that computes.
pub(super) struct StepLoop {
    gpu: GpuId,
    answers: Answers,
    switchboard: Arc<Switchboard>,
    /// For the threads that this one starts.
    commands: Sender<Command>,
    account: Account,
    machine: Participant,
    known: BTreeMap<HandoverId, Box<Prepare>>,
    loading: BTreeSet<HandoverId>,
    /// A shadow that stands and of which the protocol has not heard, since a KV connection is missing.
    unsaid: Option<HandoverId>,
    runtimes: BTreeMap<HandoverId, Box<Loaded>>,
    /// The layout whose steps are computed.
    serving: Option<HandoverId>,
    /// Steps that wait to be computed.
    orders: BTreeMap<StepKey, StepOrder>,
    /// Blocks of every unit that a step has named.
    tables: BTreeMap<KvUnit, Vec<KvBlockId>>,
    copying: Option<Copying>,
    /// KV connections that came before their handover's order.
    early_lines: Vec<(HandoverId, GpuId, KvLine)>,
    pacer: Pacer,
    times: WorkerTimes,
    latest: VecDeque<StepTimes>,
    /// How long the last step took here, without waiting for the stage before.
    last_step: Duration,
    /// When the first step of a layout came, while it is not computed.
    first_step_since: Option<Instant>,
}

impl StepLoop {
    /// Made on the thread that runs it, since pacing sets that thread's timer.
    pub(super) fn new(
        gpu: GpuId,
        answers: Answers,
        switchboard: Arc<Switchboard>,
        commands: Sender<Command>,
    ) -> Self {
        Self {
            gpu,
            answers,
            switchboard,
            commands,
            account: Account::default(),
            machine: Participant::new(gpu),
            known: BTreeMap::new(),
            loading: BTreeSet::new(),
            unsaid: None,
            runtimes: BTreeMap::new(),
            serving: None,
            orders: BTreeMap::new(),
            tables: BTreeMap::new(),
            copying: None,
            early_lines: Vec::new(),
            pacer: Pacer::new(Speed::FULL),
            times: WorkerTimes::default(),
            latest: VecDeque::new(),
            last_step: Duration::ZERO,
            first_step_since: None,
        }
    }

    /// Works until the control loop ends or the coordinator cannot be answered.
    pub(super) fn run(mut self, queue: &Receiver<Command>) -> Result<(), WireError> {
        loop {
            let command = match queue.try_recv() {
                Ok(command) => Some(command),
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => match self.work() {
                    Work::Now => None,
                    Work::At(instant) => {
                        let wait = instant.saturating_duration_since(clock::now());
                        match queue.recv_timeout(wait) {
                            Ok(command) => Some(command),
                            Err(RecvTimeoutError::Timeout) => None,
                            Err(RecvTimeoutError::Disconnected) => return Ok(()),
                        }
                    }
                    Work::None => match queue.recv() {
                        Ok(command) => Some(command),
                        Err(_) => return Ok(()),
                    },
                },
            };
            match command {
                Some(Command::Stop) => return Ok(()),
                Some(command) => self.handle(command)?,
                None => self.copy_chunk()?,
            }
        }
    }

    fn handle(&mut self, command: Command) -> Result<(), WireError> {
        match command {
            Command::Describe(prepare) => self.describe(prepare),
            Command::Order(order) => self.obey(order),
            Command::Step(order) => self.step(order),
            Command::Loaded {
                layout_id,
                speed,
                result,
            } => self.loaded(layout_id, speed, result),
            Command::LineUp {
                layout_id,
                peer,
                line,
            } => match self.copying_of(layout_id) {
                Some(copying) => {
                    copying.line_up(peer, line);
                    self.say_loaded(layout_id)
                }
                None => {
                    self.early_lines.push((layout_id, peer, line));
                    Ok(())
                }
            },
            Command::Lane {
                layout_id,
                peer,
                frame,
            } => self.lane(layout_id, peer, frame),
            Command::LineFailed {
                layout_id,
                peer,
                reason,
            } => {
                if self.copying_of(layout_id).is_none() {
                    return Ok(());
                }
                self.answers.send(&FromWorker::LaneFailed {
                    layout_id,
                    peer,
                    reason,
                })
            }
            Command::LineDrained | Command::Stop => Ok(()),
            Command::GiveUp => {
                self.copying = None;
                self.orders.clear();
                self.runtimes.clear();
                Ok(())
            }
            Command::TakeTimes => self.report_times(),
        }
    }

    fn obey(&mut self, order: Order) -> Result<(), WireError> {
        match order.command {
            handover::Command::Prepare { handover, .. } => self.start_copying(handover),
            handover::Command::Mirror { handover } => {
                if let Some(copying) = self.copying_of(handover) {
                    copying.is_bulk = false;
                }
            }
            handover::Command::Adopt { layout, .. } => self.serving = Some(layout),
            _ => {}
        }
        self.feed(RankEvent::Order(order))
    }

    fn feed(&mut self, event: RankEvent) -> Result<(), WireError> {
        self.feed_with(event, None)
    }

    /// Gives the protocol an event and does what it says; `arrival` is the KV that the event is about.
    fn feed_with(&mut self, event: RankEvent, arrival: Option<&Arrival>) -> Result<(), WireError> {
        let mut actions = VecDeque::from(self.machine.handle(event));
        while let Some(action) = actions.pop_front() {
            match action {
                RankAction::Tell(answer) => {
                    match answer.notice {
                        // The answering rank's outputs say it.
                        Notice::Computed { .. } => continue,
                        Notice::Aborted { handover } | Notice::Released { handover } => {
                            self.end_copying(handover);
                        }
                        _ => {}
                    }
                    self.answers.send(&FromWorker::Answer(answer))?;
                }
                RankAction::Load(layout) => self.load(layout)?,
                RankAction::Free(layout) => self.free(layout),
                RankAction::Ship(data) => {
                    if let Some(copying) = self.copying_of(data.handover) {
                        copying.ship(data);
                    }
                }
                RankAction::Apply(fresh) => {
                    let applied = self.apply(&fresh, arrival);
                    self.report_copy(applied)?;
                }
                RankAction::Confirm(ack) => {
                    let confirmed = match self.copying_of(ack.handover) {
                        Some(copying) => copying.confirm(ack),
                        None => Ok(None),
                    };
                    match confirmed {
                        Ok(Some(ack)) => actions.extend(self.machine.handle(RankEvent::Ack(ack))),
                        Ok(None) => {}
                        Err(error) => self.report_copy(Err(error))?,
                    }
                }
                RankAction::Compute { layout, header } => {
                    actions.extend(self.compute(layout, &header)?);
                }
                RankAction::DropKv => {
                    self.tables.clear();
                    self.orders.clear();
                    if let Some(copying) = &mut self.copying {
                        copying.clear();
                    }
                }
            }
        }
        Ok(())
    }
}
