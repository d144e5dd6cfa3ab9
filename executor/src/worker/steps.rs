//! The thread that computes: takes commands in order, feeds the rank's part of the handover protocol and carries
//! out what it says.
//!
//! A step is computed in place, before any later command is looked at: every rank of a stage sees the same orders
//! and steps in the same order, so none waits in a collective for one that has turned to something else. KV moves
//! between steps, a chunk at a time ([`super::copying`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use infercluster_serving::handover::{
    self, HandoverId, ItemMark, KvUnit, LaneData, Notice, Order, Participant, RankAction, RankEvent,
    RefusalReason, Stamp, StepHeader,
};
use infercluster_spec::{Epoch, GpuId, KvBlockId, Model, StepId, Term};

use super::copying::{Arrival, CopyError, Copying, Work};
use super::kv_line::{self, KvLine};
use super::preparing::{Account, Loaded, Preparation};
use super::runtime::StepResult;
use super::switchboard::Switchboard;
use crate::clock::{self, Deadline};
use crate::speed::{Pacer, SegmentTimes, Speed, TimesByKind};
use crate::step::StepDescriptor;
use crate::wire::message::{FromWorker, Prepare, StepOrder, StepOutput, StepTimes, WorkerTimes};
use crate::wire::{Connection, Kind, LaneFrame, LaneHeader, WireError};

/// Steps whose times are kept one by one.
const LATEST_STEPS: usize = 16 << 10;
/// The share of a step's time that copying may add to it while more steps wait.
const GAP_SHARE: f64 = 0.1;

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

/// Which step of which reign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct StepKey {
    step: StepId,
    term: Term,
    epoch: Epoch,
}

impl StepKey {
    fn of(step: StepId, stamp: Stamp) -> Self {
        Self {
            step,
            term: stamp.term,
            epoch: stamp.epoch,
        }
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

    fn work(&self) -> Work {
        self.copying.as_ref().map_or(Work::None, Copying::work)
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
            } => {
                match self.copying_of(layout_id) {
                    Some(copying) => copying.line_up(peer, line),
                    None => self.early_lines.push((layout_id, peer, line)),
                }
                Ok(())
            }
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

    fn copying_of(&mut self, handover: HandoverId) -> Option<&mut Copying> {
        self.copying
            .as_mut()
            .filter(|copying| copying.handover == handover)
    }

    /// Notes a layout, and makes the KV connections that lead to it.
    fn describe(&mut self, prepare: Box<Prepare>) -> Result<(), WireError> {
        let (layout_id, wanted) = (prepare.layout_id, prepare.shadow.is_some());
        if wanted {
            kv_line::connect(&prepare, self.gpu, &self.switchboard, &self.commands)?;
        }
        // What is neither served nor loading will not be asked for again.
        let (runtimes, loading) = (&self.runtimes, &self.loading);
        self.known
            .retain(|known, _| runtimes.contains_key(known) || loading.contains(known));
        self.known.insert(layout_id, prepare);
        Ok(())
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

    /// Gets ready to move KV for a handover.
    fn start_copying(&mut self, handover: HandoverId) {
        if self.copying_of(handover).is_some() {
            return;
        }
        let described = self.known.get(&handover);
        let Some(shadow) = described.and_then(|prepare| prepare.shadow.as_ref()) else {
            return;
        };
        let model = described.and_then(|prepare| prepare.model.read::<Model>().ok());
        let head_dim = model.map_or(0, |model| model.head_dim);
        let source = self.serving.unwrap_or(handover);
        let mut copying = Copying::new(handover, source, shadow, head_dim);
        for (layout_id, peer, line) in std::mem::take(&mut self.early_lines) {
            if layout_id == handover {
                copying.line_up(peer, line);
            }
        }
        self.copying = Some(copying);
    }

    fn step(&mut self, order: StepOrder) -> Result<(), WireError> {
        let Some(header) = header_of(&order) else {
            let StepDescriptor { epoch, step, .. } = order.descriptor;
            return self.answers.send(&FromWorker::StepFailed {
                epoch,
                step,
                reason: "its lists differ in length".to_owned(),
                peer: None,
            });
        };
        self.orders.insert(StepKey::of(header.step, header.stamp), order);
        self.feed(RankEvent::Step(header))?;
        self.copy_in_gap()
    }

    /// Copies in the gap after a step: a chunk, and more as long as they take a small share of the step's time.
    fn copy_in_gap(&mut self) -> Result<(), WireError> {
        let budget = Deadline::after(self.last_step.mul_f64(GAP_SHARE));
        while self.work() == Work::Now {
            self.copy_chunk()?;
            if budget.remaining().is_none() {
                break;
            }
        }
        Ok(())
    }

    fn loaded(
        &mut self,
        layout_id: HandoverId,
        speed: Speed,
        result: Result<Box<Loaded>, RefusalReason>,
    ) -> Result<(), WireError> {
        if !self.loading.remove(&layout_id) {
            // It was given up meanwhile.
            return Ok(());
        }
        let is_shadow = self
            .known
            .get(&layout_id)
            .is_some_and(|prepare| prepare.shadow.is_some());
        let result = match result {
            Ok(loaded) => {
                self.pacer.set_speed(speed);
                self.runtimes.insert(layout_id, loaded);
                Ok(())
            }
            Err(reason) => Err(reason),
        };
        if result.is_err() && !is_shadow {
            // There is nothing to fall back to, and another try would fail alike: the coordinator knows why.
            return Ok(());
        }
        self.feed(RankEvent::Loaded {
            layout: layout_id,
            result,
        })
    }

    fn lane(&mut self, layout_id: HandoverId, peer: GpuId, frame: LaneFrame) -> Result<(), WireError> {
        let Some(copying) = self.copying_of(layout_id) else {
            return Ok(());
        };
        match frame.header.clone() {
            LaneHeader::Data { data, blocks } => copying.arrive(peer, data, blocks, frame),
            LaneHeader::Ack(ack) => {
                copying.note_consumed(peer);
                return self.feed(RankEvent::Ack(ack));
            }
        }
        Ok(())
    }

    /// Takes one chunk in, or sends one.
    fn copy_chunk(&mut self) -> Result<(), WireError> {
        let Some(copying) = &mut self.copying else {
            return Ok(());
        };
        if let Some(arrival) = copying.take_arrival() {
            let event = RankEvent::Data(arrival.data);
            return self.feed_with(event, Some(&arrival));
        }
        if copying.work() == Work::Now {
            let sent = self.send_chunk();
            return self.report_copy(sent.map(drop));
        }
        Ok(())
    }

    /// Sends a chunk; `false` where nothing can be sent.
    fn send_chunk(&mut self) -> Result<bool, CopyError> {
        let Some(copying) = &mut self.copying else {
            return Ok(false);
        };
        match self.runtimes.get(&copying.source) {
            Some(loaded) => copying.send_chunk(loaded.runtime.kv(), &self.tables),
            None => Ok(false),
        }
    }

    /// A device that cannot move KV is of no use to the handover.
    fn report_copy(&mut self, copied: Result<(), CopyError>) -> Result<(), WireError> {
        let (Err(error), Some(copying)) = (copied, &self.copying) else {
            return Ok(());
        };
        self.answers.send(&FromWorker::LaneFailed {
            layout_id: copying.handover,
            peer: self.gpu,
            reason: error.to_string(),
        })
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

    fn load(&mut self, layout: HandoverId) -> Result<(), WireError> {
        let Some(prepare) = self.known.get(&layout) else {
            // An order about a layout that was never described.
            return self.answers.send(&FromWorker::LoadFailed {
                layout_id: layout,
                refusal: RefusalReason::Load,
                reason: format!("layout {} is not known here", layout.0),
            });
        };
        self.loading.insert(layout);
        let preparation = Preparation {
            prepare: Prepare::clone(prepare),
            gpu: self.gpu,
            switchboard: Arc::clone(&self.switchboard),
            account: self.account.clone(),
            answers: self.answers.clone(),
            commands: self.commands.clone(),
        };
        preparation.start()
    }

    fn free(&mut self, layout: HandoverId) {
        self.loading.remove(&layout);
        self.known.remove(&layout);
        self.switchboard.close_layout(layout);
        if let Some(loaded) = self.runtimes.remove(&layout) {
            // Giving gigabytes back takes a while; the next step does not wait for it.
            let dropped = thread::Builder::new()
                .name("free".to_owned())
                .spawn(move || drop(loaded));
            if let Err(error) = dropped {
                tracing::warn!("layout {} was freed in place: {error}", layout.0);
            }
        }
    }

    fn end_copying(&mut self, handover: HandoverId) {
        if self.copying_of(handover).is_some() {
            self.copying = None;
        }
        self.early_lines.retain(|(layout, _, _)| *layout != handover);
    }

    fn apply(&mut self, fresh: &LaneData, arrival: Option<&Arrival>) -> Result<(), CopyError> {
        let (Some(copying), Some(arrival)) = (&self.copying, arrival) else {
            return Ok(());
        };
        match self.runtimes.get_mut(&fresh.handover) {
            Some(loaded) => copying.apply(arrival, fresh, loaded.runtime.kv_mut()),
            None => Ok(()),
        }
    }

    /// Computes a step; answers what the protocol says next.
    fn compute(&mut self, layout: HandoverId, header: &StepHeader) -> Result<Vec<RankAction>, WireError> {
        let (step, epoch) = (header.step, header.stamp.epoch);
        for unit in &header.released {
            self.tables.remove(unit);
            if let Some(copying) = &mut self.copying {
                copying.forget(*unit);
            }
        }
        // A step of the new layout may wait elsewhere for what this rank still has to send.
        while self.copying.as_ref().is_some_and(|copying| !copying.is_bulk) {
            match self.send_chunk() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.report_copy(Err(error))?;
                    break;
                }
            }
        }
        let order = self.orders.remove(&StepKey::of(step, header.stamp));
        self.orders.retain(|key, _| key.step > step);
        self.serving = Some(layout);
        let failed = |reason, peer| FromWorker::StepFailed {
            epoch,
            step,
            reason,
            peer,
        };
        let (Some(order), Some(loaded)) = (order, self.runtimes.get_mut(&layout)) else {
            let reason = format!("layout {} is not prepared here", layout.0);
            self.answers.send(&failed(reason, None))?;
            return Ok(Vec::new());
        };
        for (item, mark) in order.descriptor.items.iter().zip(&header.items) {
            let table = self.tables.entry(mark.unit).or_default();
            if table.len() != item.block_table.len() {
                table.clone_from(&item.block_table);
            }
        }
        let started = clock::now();
        match loaded.runtime.run(&order, &mut self.pacer) {
            Ok(result) => {
                self.count(step, started.elapsed(), result.upstream);
                self.answer(&order, result)?;
                Ok(self.machine.handle(RankEvent::StepDone(step)))
            }
            Err(error) => {
                // Closing its connections lets peers fail at once and not by deadline.
                self.switchboard.close_layout(layout);
                self.runtimes.remove(&layout);
                self.answers.send(&failed(error.to_string(), error.peer()))?;
                Ok(Vec::new())
            }
        }
    }

    fn answer(&self, order: &StepOrder, result: StepResult) -> Result<(), WireError> {
        let Some(choices) = result.choices else {
            return Ok(());
        };
        let items = order.descriptor.items.iter().filter(|item| item.wants_logits);
        let outputs = items
            .zip(choices)
            .map(|(item, choice)| StepOutput {
                sequence: item.sequence,
                token: choice.token,
                logits_hash: choice.logits_hash,
                logits: choice.logits,
            })
            .collect();
        let StepDescriptor {
            term, epoch, step, ..
        } = order.descriptor;
        self.answers.send(&FromWorker::StepDone {
            term,
            epoch,
            step,
            outputs,
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
        self.last_step = took.saturating_sub(upstream);
        let wall_s = self.last_step.as_secs_f64();
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

fn add(sums: &mut TimesByKind, more: &TimesByKind) {
    for (kind, times) in more {
        let sum: &mut SegmentTimes = sums.entry(*kind).or_default();
        sum.count += times.count;
        sum.compute_s += times.compute_s;
        sum.padding_s += times.padding_s;
    }
}

/// What the protocol reads of a step; `None` where the order's lists differ in length.
fn header_of(order: &StepOrder) -> Option<StepHeader> {
    let StepDescriptor {
        term,
        epoch,
        step,
        items,
    } = &order.descriptor;
    if order.incarnations.len() != items.len() || order.wants.len() != items.len() {
        return None;
    }
    let marks = items.iter().zip(&order.incarnations).map(|(item, &incarnation)| {
        Some(ItemMark {
            unit: KvUnit {
                sequence: item.sequence,
                incarnation,
            },
            start: item.start,
            count: u32::try_from(item.tokens.len())
                .ok()
                .filter(|count| item.start.checked_add(*count).is_some())?,
        })
    });
    Some(StepHeader {
        stamp: Stamp {
            term: *term,
            epoch: *epoch,
        },
        step: *step,
        items: marks.collect::<Option<_>>()?,
        released: order.released.clone(),
        carried: order.carried.clone(),
    })
}
