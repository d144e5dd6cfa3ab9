//! The rank's side of a handover.

use std::collections::BTreeMap;

use infercluster_spec::{Epoch, GpuId, StepId, Term};

use super::fault::{Fault, Planted};
use super::movement::Movement;
use super::{
    Answer, Command, HandoverId, KvUnit, LaneAck, LaneData, Notice, Order, RefusalReason, StepHeader,
};

/// What happens to a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankEvent {
    /// The coordinator speaks.
    Order(Order),
    /// A step comes.
    Step(StepHeader),
    /// KV comes.
    Data(LaneData),
    /// KV has arrived elsewhere.
    Ack(LaneAck),
    /// A shard that [`RankAction::Load`] asked for is loaded and verified, or not.
    Loaded {
        /// The layout it belongs to.
        layout: HandoverId,
        /// Why not.
        result: Result<(), RefusalReason>,
    },
    /// The step that [`RankAction::Compute`] asked for is done.
    StepDone(StepId),
    /// Time passes: what may be lost is said again.
    Tick,
}

/// What a rank's driver is to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankAction {
    /// Tell the coordinator.
    Tell(Answer),
    /// Load a shard beside what is there, verify it by checksum and probe, and answer with
    /// [`RankEvent::Loaded`].
    Load(HandoverId),
    /// Drop a shard, and its loading.
    Free(HandoverId),
    /// Read that KV and send it on its lane.
    Ship(LaneData),
    /// Write that KV, which has come on its lane, into the blocks of its unit.
    Apply(LaneData),
    /// Tell the sender of a lane.
    Confirm(LaneAck),
    /// Compute a step with the shards of that layout, and answer with [`RankEvent::StepDone`].
    Compute {
        /// Which shards.
        layout: HandoverId,
        /// Which step.
        header: StepHeader,
    },
    /// Forget every KV block and give up the step that computes.
    DropKv,
}

/// The state of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Participant {
    gpu: GpuId,
    term: Term,
    seat: Option<Seat>,
    /// An order to adopt a layout whose shard is being loaded, and its term.
    adopting: Option<(Term, Seat)>,
    /// Whether the order of this term to adopt or retire is carried out.
    adopted: bool,
    queue: BTreeMap<StepId, StepHeader>,
    computing: Option<StepHeader>,
    /// Tokens of each unit that this rank has computed, or received by the switch.
    computed: BTreeMap<KvUnit, u32>,
    movement: Option<Movement>,
    /// The latest attempt that is over for this rank.
    ended: Option<HandoverId>,
    planted: Planted,
}

/// What a rank serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seat {
    epoch: Epoch,
    layout: HandoverId,
    next_step: StepId,
}

impl Participant {
    /// A rank that has just started: it has no shard and serves nothing until it is told.
    pub fn new(gpu: GpuId) -> Self {
        Self {
            gpu,
            term: Term(0),
            seat: None,
            adopting: None,
            adopted: false,
            queue: BTreeMap::new(),
            computing: None,
            computed: BTreeMap::new(),
            movement: None,
            ended: None,
            planted: Planted::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn with_fault(gpu: GpuId, planted: Planted) -> Self {
        Self {
            planted,
            ..Self::new(gpu)
        }
    }

    /// The device.
    pub fn gpu(&self) -> GpuId {
        self.gpu
    }

    /// The layout version that it serves.
    pub fn epoch(&self) -> Option<Epoch> {
        self.seat.map(|seat| seat.epoch)
    }

    /// Takes an event in and answers what to do.
    pub fn handle(&mut self, event: RankEvent) -> Vec<RankAction> {
        let mut actions = Vec::new();
        match event {
            RankEvent::Order(order) => self.obey(order, &mut actions),
            RankEvent::Step(header) => self.enqueue(header, &mut actions),
            RankEvent::Data(data) => self.receive(&data, &mut actions),
            RankEvent::Ack(ack) => {
                if let Some(movement) = self.movement_of(ack.handover) {
                    movement.confirm(&ack);
                }
            }
            RankEvent::Loaded { layout, result } => self.loaded(layout, result, &mut actions),
            RankEvent::StepDone(step) => self.step_done(step, &mut actions),
            RankEvent::Tick => self.tick(&mut actions),
        }
        actions
    }

    fn obey(&mut self, order: Order, actions: &mut Vec<RankAction>) {
        let Order { stamp, command } = order;
        let is_stale = stamp.term < self.term || self.seat.is_some_and(|seat| stamp.epoch < seat.epoch);
        if is_stale && !self.planted.is(Fault::AcceptStaleTerm) {
            return;
        }
        if stamp.term != self.term && !self.open_term(stamp.term, &command) {
            return;
        }
        match command {
            Command::Adopt { layout, next_step } => {
                let seat = Seat {
                    epoch: stamp.epoch,
                    layout,
                    next_step,
                };
                self.adopt(Some(seat), actions);
            }
            Command::Retire => self.adopt(None, actions),
            Command::Prepare {
                handover,
                leaves_or_stays,
                joins,
                incoming,
                outgoing,
            } => {
                if self.seat.is_some() != leaves_or_stays {
                    let reason = RefusalReason::NotServing;
                    return self.tell(Notice::Refused { handover, reason }, actions);
                }
                let to = Epoch(stamp.epoch.0 + 1);
                let planned = Movement::new(handover, to, joins, &incoming, &outgoing, self.planted);
                self.prepare(planned, actions);
            }
            Command::Copy { handover } => self.send(handover, actions),
            Command::Mirror { handover } => {
                if let Some(movement) = self.movement_of(handover) {
                    movement.mirrors = true;
                    self.send(handover, actions);
                    self.tell(Notice::Mirrors { handover }, actions);
                }
            }
            Command::Abort { handover } => self.abort(handover, actions),
            Command::Release { handover } => self.release(handover, actions),
        }
    }

    /// A reign begins with its adoption, or with a handover where nothing is served; what overtakes that is said
    /// again.
    fn open_term(&mut self, term: Term, command: &Command) -> bool {
        let is_idle = self.seat.is_none() && self.adopting.is_none();
        let adopted = match command {
            Command::Adopt { .. } | Command::Retire => false,
            Command::Prepare { .. } | Command::Abort { .. } if is_idle => true,
            _ => return false,
        };
        self.term = term;
        self.adopted = adopted;
        true
    }

    /// Starts a term: the KV is void, the shard of the layout is kept where it is there.
    fn adopt(&mut self, seat: Option<Seat>, actions: &mut Vec<RankAction>) {
        if self.adopted {
            return self.tell(Notice::Adopted, actions);
        }
        if self.adopting.is_some_and(|(term, _)| term == self.term) {
            return;
        }
        let loading = self.adopting.take().map(|(_, seat)| seat.layout);
        self.queue.clear();
        self.computing = None;
        self.computed.clear();
        actions.push(RankAction::DropKv);
        let wanted = seat.map(|seat| seat.layout);
        self.ended = self.ended.max(self.movement.as_ref().map(|movement| movement.id));
        let mut held = Vec::from_iter(self.seat.map(|seat| (seat.layout, true)));
        if let Some(movement) = self.movement.take().filter(|movement| movement.joins) {
            held.retain(|(layout, _)| *layout != movement.id);
            // A switched rank holds the old shards beside the new ones until the release.
            held.push((movement.id, movement.prepared));
            held.extend(movement.leaves.map(|layout| (layout, true)));
        }
        held.sort_unstable();
        held.dedup();
        for (layout, _) in held
            .iter()
            .filter(|(layout, usable)| Some(*layout) != wanted || !usable)
        {
            actions.push(RankAction::Free(*layout));
        }
        if let Some(layout) = loading.filter(|layout| Some(*layout) != wanted) {
            actions.push(RankAction::Free(layout));
        }
        self.seat = None;
        match seat {
            Some(seat) if !held.contains(&(seat.layout, true)) => {
                self.adopting = Some((self.term, seat));
                // A load that an earlier term asked for goes on.
                actions.extend((loading != wanted).then_some(RankAction::Load(seat.layout)));
            }
            _ => self.take_seat(seat, actions),
        }
    }

    fn take_seat(&mut self, seat: Option<Seat>, actions: &mut Vec<RankAction>) {
        self.seat = seat;
        self.adopting = None;
        self.adopted = true;
        self.tell(Notice::Adopted, actions);
    }

    fn prepare(&mut self, mut planned: Movement, actions: &mut Vec<RankAction>) {
        let handover = planned.id;
        let current = self.movement.as_ref().map(|movement| movement.id);
        if Some(handover) <= self.ended || Some(handover) < current {
            // An order of an earlier attempt that was long on its way.
            return;
        }
        if let Some(known) = self.movement_of(handover) {
            if known.prepared {
                self.tell(Notice::Ready { handover }, actions);
            }
            return;
        }
        if let Some(before) = self.movement.take().filter(|before| before.joins) {
            actions.push(RankAction::Free(before.id));
        }
        let joins = planned.joins;
        planned.prepared = !joins || self.planted.is(Fault::ReadyBeforeVerify);
        planned.leaves = self.seat.map(|seat| seat.layout);
        let is_ready = planned.prepared;
        self.movement = Some(planned);
        if joins {
            actions.push(RankAction::Load(handover));
        }
        if is_ready {
            self.tell(Notice::Ready { handover }, actions);
        }
    }

    fn loaded(
        &mut self,
        layout: HandoverId,
        result: Result<(), RefusalReason>,
        actions: &mut Vec<RankAction>,
    ) {
        if let Some((_, seat)) = self.adopting.filter(|(_, seat)| seat.layout == layout) {
            match result {
                Ok(()) => self.take_seat(Some(seat), actions),
                // There is no other layout to fall back to: try again.
                Err(_) => actions.push(RankAction::Load(layout)),
            }
            return;
        }
        let Some(movement) = self.movement_of(layout).filter(|movement| !movement.prepared) else {
            return;
        };
        match result {
            Ok(()) => {
                movement.prepared = true;
                self.tell(Notice::Ready { handover: layout }, actions);
            }
            Err(reason) => {
                self.movement = None;
                actions.push(RankAction::Free(layout));
                self.tell(
                    Notice::Refused {
                        handover: layout,
                        reason,
                    },
                    actions,
                );
            }
        }
    }

    fn send(&mut self, handover: HandoverId, actions: &mut Vec<RankAction>) {
        let computed = &self.computed;
        if let Some(movement) = self.movement.as_mut().filter(|movement| movement.id == handover) {
            movement.start_sending();
            actions.extend(movement.ship(computed).into_iter().map(RankAction::Ship));
        }
    }

    fn abort(&mut self, handover: HandoverId, actions: &mut Vec<RankAction>) {
        let is_switched = |movement: &&mut Movement| movement.switched.is_some();
        if self.movement_of(handover).as_ref().is_some_and(is_switched) {
            return;
        }
        self.ended = self.ended.max(Some(handover));
        if self.movement_of(handover).is_some() {
            let movement = self.movement.take();
            actions.extend(
                movement
                    .filter(|movement| movement.joins)
                    .map(|_| RankAction::Free(handover)),
            );
        }
        self.tell(Notice::Aborted { handover }, actions);
    }

    fn release(&mut self, handover: HandoverId, actions: &mut Vec<RankAction>) {
        if let Some(movement) = self.movement_of(handover) {
            if movement.joins && movement.switched.is_none() {
                return;
            }
            let (joins, leaves) = (movement.joins, movement.leaves);
            self.movement = None;
            self.ended = self.ended.max(Some(handover));
            actions.extend(leaves.map(RankAction::Free));
            if !joins {
                self.seat = None;
                self.queue.clear();
                self.computing = None;
                self.computed.clear();
                actions.push(RankAction::DropKv);
            }
        }
        self.tell(Notice::Released { handover }, actions);
    }

    fn enqueue(&mut self, header: StepHeader, actions: &mut Vec<RankAction>) {
        let is_stale = header.stamp.term != self.term || !self.adopted;
        if is_stale && !self.planted.is(Fault::AcceptStaleTerm) {
            return;
        }
        let step = header.step;
        let waits_for = self.computing.as_ref().map(|header| header.step);
        match self.seat {
            Some(seat) if step < seat.next_step => self.tell(Notice::Computed { step }, actions),
            _ if waits_for == Some(step) => {}
            _ => {
                self.queue.insert(step, header);
                self.compute_next(actions);
            }
        }
    }

    /// Starts the next step where it is there, in this rank's layout, and has all that it reads.
    fn compute_next(&mut self, actions: &mut Vec<RankAction>) {
        if self.computing.is_some() {
            return;
        }
        let next = match self.seat {
            Some(seat) => self.queue.get(&seat.next_step),
            None => self.queue.values().find(|header| header.carried.is_some()),
        };
        let Some(header) = next.cloned() else { return };
        if self.seat.is_none_or(|seat| header.stamp.epoch != seat.epoch) && !self.switch(&header) {
            return;
        }
        let Some(seat) = self.seat else { return };
        if self
            .movement
            .as_ref()
            .is_some_and(|movement| !movement.allows(&header))
        {
            return;
        }
        self.queue.remove(&header.step);
        for unit in &header.released {
            self.computed.remove(unit);
            if let Some(movement) = &mut self.movement {
                movement.forget(*unit);
            }
        }
        self.computing = Some(header.clone());
        actions.push(RankAction::Compute {
            layout: seat.layout,
            header,
        });
    }

    /// Goes over to the new layout where this is its first step and the shadow is ready.
    fn switch(&mut self, header: &StepHeader) -> bool {
        let (Some(movement), Some(carried)) = (&mut self.movement, &header.carried) else {
            return false;
        };
        if !movement.joins || !movement.prepared || header.stamp.epoch != movement.to {
            return false;
        }
        movement.switch(header, carried, &self.computed);
        if self.seat.is_none() {
            self.computed = carried.iter().map(|mark| (mark.unit, mark.tokens)).collect();
        }
        self.seat = Some(Seat {
            epoch: movement.to,
            layout: movement.id,
            next_step: header.step,
        });
        // What is left of the old layout is below this step and done.
        self.queue.retain(|step, _| *step >= header.step);
        true
    }

    fn step_done(&mut self, step: StepId, actions: &mut Vec<RankAction>) {
        let Some(header) = self.computing.take_if(|header| header.step == step) else {
            return;
        };
        for item in &header.items {
            self.computed.insert(item.unit, item.start + item.count);
        }
        if let Some(seat) = &mut self.seat {
            seat.next_step = StepId(step.0 + 1);
        }
        self.tell(Notice::Computed { step }, actions);
        if let Some(movement) = &mut self.movement {
            movement.computed(step);
            if movement.mirrors {
                let data = movement.mirror(&self.computed);
                actions.extend(data.into_iter().map(RankAction::Ship));
            }
        }
        self.tell_settled(actions);
        self.compute_next(actions);
    }

    fn receive(&mut self, data: &LaneData, actions: &mut Vec<RankAction>) {
        let Some(movement) = self.movement_of(data.handover) else {
            return;
        };
        let Some((fresh, ack)) = movement.receive(data) else {
            return;
        };
        actions.extend(fresh.map(RankAction::Apply));
        actions.push(RankAction::Confirm(ack));
        let LaneAck { handover, lane, mark } = ack;
        self.tell(Notice::Arrived { handover, lane, mark }, actions);
        self.tell_settled(actions);
        self.compute_next(actions);
    }

    fn tick(&mut self, actions: &mut Vec<RankAction>) {
        let Some(movement) = &mut self.movement else {
            return;
        };
        let handover = movement.id;
        let data = movement.resend(&self.computed);
        actions.extend(data.into_iter().map(RankAction::Ship));
        let arrived: Vec<_> = movement.arrived().collect();
        for (lane, mark) in arrived {
            self.tell(Notice::Arrived { handover, lane, mark }, actions);
        }
        self.tell_settled(actions);
    }

    fn tell_settled(&self, actions: &mut Vec<RankAction>) {
        if let Some(movement) = self.movement.as_ref().filter(|movement| movement.is_settled()) {
            self.tell(
                Notice::Settled {
                    handover: movement.id,
                },
                actions,
            );
        }
    }

    fn tell(&self, notice: Notice, actions: &mut Vec<RankAction>) {
        actions.push(RankAction::Tell(Answer {
            term: self.term,
            notice,
        }));
    }

    fn movement_of(&mut self, handover: HandoverId) -> Option<&mut Movement> {
        self.movement.as_mut().filter(|movement| movement.id == handover)
    }
}
