//! A store, a network that loses, doubles and reorders, workers with real block contents, and the checkers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use infercluster_spec::{EngineOptions, Epoch, GpuId, KvBlockId, SequenceId, StepId, Term};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::fault::Planted;
use super::super::*;
use crate::ledger::BlockLedger;
use crate::scheduler::Scheduler;

const BLOCK: u32 = 4;
pub(super) const SLICES: u32 = 4;
/// A token of a sequence, by position.
type Token = (SequenceId, u32);

/// How much goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    Storm,
    None,
}

/// What a run has seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    pub(super) tokens: u64,
    pub(super) preemptions: u64,
    pub(super) committed: u64,
    pub(super) committed_with_loss: u64,
    pub(super) aborted: u64,
    /// Units whose KV went over with a switch.
    pub(super) carried: u64,
    pub(super) events: u32,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.preemptions += other.preemptions;
        self.committed += other.committed;
        self.committed_with_loss += other.committed_with_loss;
        self.aborted += other.aborted;
        self.carried += other.carried;
    }
}

#[derive(Debug, Clone)]
pub(super) enum Packet {
    ToRank(GpuId, RankEvent),
    ToCoordinator(GpuId, Answer),
}

#[derive(Debug, Clone)]
pub(super) struct LanePacket {
    data: LaneData,
    contents: Vec<Option<Token>>,
}

#[derive(Debug, Clone)]
pub(super) enum Job {
    Load(GpuId, HandoverId),
    Compute(GpuId, StepId),
    /// A store operation of a reign, then its reply.
    Write(u64, Record),
    TakeTerm(u64, Term),
    Reply(u64, CoordinatorEvent),
    RankLost(GpuId),
}

pub(super) struct Device {
    pub(super) machine: Participant,
    /// Shards by layout; false where the content is bad or not there yet.
    pub(super) shards: BTreeMap<HandoverId, bool>,
    pub(super) kv: BTreeMap<(u32, KvBlockId, u32), Token>,
    pub(super) term: Term,
    pub(super) last_computed: Option<StepId>,
}

pub(super) struct Sent {
    header: StepHeader,
    roster: BTreeSet<GpuId>,
    done: BTreeSet<GpuId>,
}

pub(super) struct World {
    pub(super) random: ChaCha8Rng,
    pub(super) planted: Planted,
    pub(super) trouble: Trouble,
    pub(super) term: Term,
    pub(super) record: Record,
    /// The layout before the record's.
    pub(super) layout_before: Option<HandoverId>,
    pub(super) layouts: BTreeMap<HandoverId, BTreeMap<GpuId, BTreeSet<u32>>>,
    pub(super) lane_slices: BTreeMap<(HandoverId, LaneId), (u32, GpuId, GpuId)>,
    pub(super) coordinator: Coordinator,
    pub(super) reign: u64,
    pub(super) scheduler: Scheduler,
    pub(super) devices: BTreeMap<GpuId, Device>,
    pub(super) packets: Vec<Packet>,
    pub(super) lanes: BTreeMap<(HandoverId, LaneId), VecDeque<LanePacket>>,
    pub(super) jobs: Vec<Job>,
    pub(super) steps: BTreeMap<StepId, Sent>,
    pub(super) tables: BTreeMap<KvUnit, Vec<KvBlockId>>,
    pub(super) received: BTreeMap<SequenceId, u32>,
    pub(super) next_sequence: u64,
    pub(super) next_handover: u64,
    pub(super) crashes: u32,
    pub(super) tally: Tally,
}

impl World {
    pub(super) fn new(seed: u64, planted: Planted, trouble: Trouble) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let gpus = if trouble == Trouble::Storm { 4 } else { 2 };
        let stages = random.random_range(1..3);
        let options = EngineOptions {
            token_budget: 8,
            max_sequences: 4,
            max_context: Some(24),
        };
        let ledger = BlockLedger::identifying(9, BLOCK).unwrap();
        let record = Record {
            term: Term(1),
            epoch: Epoch(0),
            layout: HandoverId(0),
            roster: [GpuId(0)].into(),
            first_step: StepId(0),
        };
        let others = (1..gpus).map(GpuId).collect();
        let device = |gpu| Device {
            machine: Participant::with_fault(gpu, planted),
            shards: BTreeMap::new(),
            kv: BTreeMap::new(),
            term: Term(0),
            last_computed: None,
        };
        Self {
            random,
            planted,
            trouble,
            term: Term(1),
            coordinator: Coordinator::new(Term(1), &record, others, StepId(0)).with_fault(planted),
            record,
            layout_before: None,
            layouts: [(HandoverId(0), [(GpuId(0), (0..SLICES).collect())].into())].into(),
            lane_slices: BTreeMap::new(),
            reign: 0,
            scheduler: Scheduler::new(options, stages, ledger).unwrap(),
            devices: (0..gpus).map(GpuId).map(|gpu| (gpu, device(gpu))).collect(),
            packets: Vec::new(),
            lanes: BTreeMap::new(),
            jobs: Vec::new(),
            steps: BTreeMap::new(),
            tables: BTreeMap::new(),
            received: BTreeMap::new(),
            next_sequence: 0,
            next_handover: 1,
            crashes: 0,
            tally: Tally::default(),
        }
    }

    pub(super) fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    /// One random event of the storm.
    pub(super) fn happen(&mut self) -> Result<(), String> {
        match self.random.random_range(0..200) {
            0..70 => self.deliver_any(),
            70..100 => self.deliver_lane(),
            100..140 => self.work_any(),
            140..160 => self.dispatch(),
            160..172 => self.tick_any(),
            172..182 => {
                self.request();
                Ok(())
            }
            182 => {
                self.cancel();
                Ok(())
            }
            183..192 => self.begin_random(),
            192 => self.coordinate(CoordinatorEvent::Deadline),
            193 if self.crashes < 3 => {
                self.crashes += 1;
                match self.random.random_range(0..5) {
                    4 => self.crash_coordinator(),
                    gpu => self.crash_rank(GpuId(gpu)),
                }
            }
            _ => Ok(()),
        }
    }

    /// Nothing breaks any more: every request must end and the layout must settle.
    pub(super) fn calm_down(&mut self) -> Result<Tally, String> {
        self.trouble = Trouble::None;
        for _ in 0..60_000 {
            if !self.progress()? {
                let is_done = self.received.is_empty() && self.coordinator.is_settled();
                if is_done && self.steps.is_empty() {
                    return self.finish();
                }
                self.tick_all()?;
            }
        }
        Err(format!(
            "stuck: {} sequences live, coordinator {:?}",
            self.received.len(),
            self.coordinator
        ))
    }

    fn finish(&mut self) -> Result<Tally, String> {
        for (gpu, device) in &self.devices {
            let seated = self.record.roster.contains(gpu).then_some(self.record.epoch);
            if device.machine.epoch() != seated {
                return Err(format!(
                    "{gpu} serves {:?}, the record says {seated:?}",
                    device.machine.epoch()
                ));
            }
        }
        self.scheduler.check().map_err(|fault| fault.to_string())?;
        Ok(self.tally.clone())
    }

    /// The oldest of what waits, in a fixed order; false where nothing does.
    pub(super) fn progress(&mut self) -> Result<bool, String> {
        self.tally.events += 1;
        if !self.packets.is_empty() {
            let packet = self.packets.remove(0);
            self.deliver(packet)?;
        } else if let Some(lane) = self
            .lanes
            .iter()
            .find(|(_, queue)| !queue.is_empty())
            .map(|(lane, _)| *lane)
        {
            self.deliver_from(lane)?;
        } else if !self.jobs.is_empty() {
            let job = self.jobs.remove(0);
            self.work(job)?;
        } else {
            let before = self.scheduler.next_step();
            self.dispatch()?;
            return Ok(self.scheduler.next_step() != before);
        }
        Ok(true)
    }

    fn deliver_any(&mut self) -> Result<(), String> {
        if self.packets.is_empty() {
            return Ok(());
        }
        let index = self.random.random_range(0..self.packets.len());
        let packet = self.packets.swap_remove(index);
        match self.random.random_range(0..100) {
            0..6 => return Ok(()),
            6..12 => self.packets.push(packet.clone()),
            _ => {}
        }
        self.deliver(packet)
    }

    pub(super) fn deliver(&mut self, packet: Packet) -> Result<(), String> {
        match packet {
            Packet::ToRank(gpu, event) => self.tell_rank(gpu, event),
            Packet::ToCoordinator(from, answer) => {
                if let (Notice::Computed { step }, true) = (&answer.notice, self.coordinator.accepts(&answer))
                {
                    self.computed(from, *step)?;
                }
                self.coordinate(CoordinatorEvent::Answer { from, answer })
            }
        }
    }

    fn deliver_lane(&mut self) -> Result<(), String> {
        let busy: Vec<_> = self
            .lanes
            .iter()
            .filter(|(_, queue)| !queue.is_empty())
            .map(|(lane, _)| *lane)
            .collect();
        if busy.is_empty() {
            return Ok(());
        }
        let lane = busy[self.random.random_range(0..busy.len())];
        self.deliver_from(lane)
    }

    /// The head of a lane arrives, is lost or comes twice; order stays.
    fn deliver_from(&mut self, lane: (HandoverId, LaneId)) -> Result<(), String> {
        let storms = self.trouble == Trouble::Storm;
        let (is_lost, is_doubled) = (storms && self.chance(8), storms && self.chance(8));
        let queue = self.lanes.get_mut(&lane).expect("the lane is busy");
        let packet = if is_doubled {
            queue.front().cloned()
        } else {
            queue.pop_front()
        };
        let Some(packet) = packet.filter(|_| !is_lost) else {
            return Ok(());
        };
        let (slice, _, to) = self.lane_slices[&lane];
        let device = self.devices.get_mut(&to).expect("lanes lead to devices");
        let actions = device.machine.handle(RankEvent::Data(packet.data));
        for action in &actions {
            if let RankAction::Apply(fresh) = action {
                let table = &self.tables[&fresh.unit];
                for position in fresh.from..fresh.to {
                    let content = packet.contents[(position - packet.data.from) as usize];
                    let cell = (slice, table[(position / BLOCK) as usize], position % BLOCK);
                    match content {
                        Some(token) => device.kv.insert(cell, token),
                        None => device.kv.remove(&cell),
                    };
                }
            }
        }
        self.act(to, actions)
    }

    fn tell_rank(&mut self, gpu: GpuId, event: RankEvent) -> Result<(), String> {
        let device = self.devices.get_mut(&gpu).expect("the device exists");
        if let RankEvent::Order(order) = &event {
            device.term = device.term.max(order.stamp.term);
        }
        let actions = device.machine.handle(event);
        self.act(gpu, actions)
    }

    fn act(&mut self, gpu: GpuId, actions: Vec<RankAction>) -> Result<(), String> {
        for action in actions {
            match action {
                RankAction::Tell(answer) => self.packets.push(Packet::ToCoordinator(gpu, answer)),
                RankAction::Load(layout) => {
                    self.device(gpu).shards.insert(layout, false);
                    self.jobs.push(Job::Load(gpu, layout));
                }
                RankAction::Free(layout) => self.free(gpu, layout)?,
                RankAction::Ship(data) => self.ship(data),
                RankAction::Apply(_) => {}
                RankAction::Confirm(ack) => {
                    let (_, from, _) = self.lane_slices[&(ack.handover, ack.lane)];
                    self.packets.push(Packet::ToRank(from, RankEvent::Ack(ack)));
                }
                RankAction::Compute { layout, header } => self.compute(gpu, layout, header)?,
                RankAction::DropKv => {
                    self.device(gpu).kv.clear();
                    self.jobs
                        .retain(|job| !matches!(job, Job::Compute(worker, _) if *worker == gpu));
                }
            }
        }
        Ok(())
    }

    pub(super) fn device(&mut self, gpu: GpuId) -> &mut Device {
        self.devices.get_mut(&gpu).expect("the device exists")
    }

    fn ship(&mut self, data: LaneData) {
        let lane = (data.handover, data.lane);
        let (slice, from, _) = self.lane_slices[&lane];
        let (table, device) = (&self.tables[&data.unit], &self.devices[&from]);
        let cell = |position: u32| (slice, table[(position / BLOCK) as usize], position % BLOCK);
        let contents = (data.from..data.to).map(|position| device.kv.get(&cell(position)).copied());
        let packet = LanePacket {
            data,
            contents: contents.collect(),
        };
        self.lanes.entry(lane).or_default().push_back(packet);
    }

    /// An old shard goes only when nobody can need it: safety of the release.
    fn free(&mut self, gpu: GpuId, layout: HandoverId) -> Result<(), String> {
        let first_step = self.record.first_step;
        let no_recovery = self.record.term == self.term && self.devices[&gpu].term == self.term;
        if Some(layout) == self.layout_before && no_recovery {
            let lags = |gpu: &&GpuId| {
                self.devices[gpu]
                    .last_computed
                    .is_none_or(|step| step < first_step)
            };
            if let Some(laggard) = self.record.roster.iter().find(lags) {
                return Err(format!(
                    "{gpu} freed the old shards before {laggard} computed {first_step}"
                ));
            }
        }
        self.device(gpu).shards.remove(&layout);
        self.jobs
            .retain(|job| !matches!(job, Job::Load(worker, shard) if *worker == gpu && *shard == layout));
        Ok(())
    }

    /// A rank computes: its layout must be the committed one, its shards good, its KV complete.
    fn compute(&mut self, gpu: GpuId, layout: HandoverId, header: StepHeader) -> Result<(), String> {
        let step = header.step;
        let is_current = header.stamp.term == self.term;
        let device = self.devices.get_mut(&gpu).expect("the device exists");
        if header.stamp.term < device.term {
            return Err(format!(
                "{gpu} computes {step} for a coordinator that it knows to be deposed"
            ));
        }
        if is_current && header.stamp.epoch != committed_epoch(&self.record, self.term, step) {
            let epoch = header.stamp.epoch;
            return Err(format!(
                "{gpu} computes {step} in {epoch}, which the record does not say"
            ));
        }
        if device.shards.get(&layout) != Some(&true) {
            return Err(format!("{gpu} computes {step} without verified shards"));
        }
        for item in &header.items {
            let (table, sequence) = (&self.tables[&item.unit], item.unit.sequence);
            for slice in self.layouts[&layout].get(&gpu).into_iter().flatten() {
                for position in 0..item.start + item.count {
                    let cell = (*slice, table[(position / BLOCK) as usize], position % BLOCK);
                    let expected = (sequence, position);
                    if position >= item.start {
                        device.kv.insert(cell, expected);
                    } else if device.kv.get(&cell) != Some(&expected) {
                        let found = device.kv.get(&cell);
                        return Err(format!(
                            "{gpu} {step}: KV slice {slice} of {expected:?} is {found:?}"
                        ));
                    }
                }
            }
        }
        if is_current {
            device.last_computed = Some(step);
        }
        self.jobs.push(Job::Compute(gpu, step));
        Ok(())
    }

    /// A rank has told the coordinator that a step is done; steps complete in order, when all ranks have.
    fn computed(&mut self, gpu: GpuId, step: StepId) -> Result<(), String> {
        if let Some(sent) = self
            .steps
            .get_mut(&step)
            .filter(|sent| sent.roster.contains(&gpu))
        {
            sent.done.insert(gpu);
        }
        while let Some(entry) = self
            .steps
            .first_entry()
            .filter(|entry| entry.get().done == entry.get().roster)
        {
            let (step, sent) = entry.remove_entry();
            if sent.header.stamp.epoch != committed_epoch(&self.record, sent.header.stamp.term, step) {
                return Err(format!("{step} was accepted from {}", sent.header.stamp.epoch));
            }
            let outcome = self
                .scheduler
                .complete_step(step, &[])
                .map_err(|error| error.to_string())?;
            for token in &outcome.tokens {
                let received = self
                    .received
                    .get_mut(&token.sequence)
                    .ok_or("a token for the dead")?;
                if *received != token.index {
                    return Err(format!(
                        "{} got token {} after {received}",
                        token.sequence, token.index
                    ));
                }
                *received += 1;
                self.tally.tokens += 1;
            }
            for finished in &outcome.finished {
                self.received.remove(&finished.sequence);
            }
        }
        Ok(())
    }

    fn coordinate(&mut self, event: CoordinatorEvent) -> Result<(), String> {
        let computed = computed_marks(&self.scheduler);
        let view = ServingView {
            next_step: self.scheduler.next_step(),
            completed_below: self.scheduler.completed_below(),
            lead: 2,
            is_idle: self.scheduler.running() + self.scheduler.waiting() == 0,
            computed: &computed,
            step_tokens: 8,
        };
        let actions = self.coordinator.handle(event, view);
        self.carry_out(actions);
        Ok(())
    }

    pub(super) fn carry_out(&mut self, actions: Vec<CoordinatorAction>) {
        for action in actions {
            match action {
                CoordinatorAction::Tell { to, order } => {
                    self.packets.push(Packet::ToRank(to, RankEvent::Order(order)));
                }
                CoordinatorAction::Write(record) => self.jobs.push(Job::Write(self.reign, record)),
                CoordinatorAction::TakeTerm { above } => self.jobs.push(Job::TakeTerm(self.reign, above)),
                CoordinatorAction::LoseKv => self.lose_kv(),
                CoordinatorAction::Throttle(throttles) => self.scheduler.set_admission(!throttles),
                CoordinatorAction::Ended(HandoverEnd::Aborted { .. }) => self.tally.aborted += 1,
                CoordinatorAction::Ended(HandoverEnd::Committed { with_loss, .. }) => {
                    self.tally.committed += 1;
                    self.tally.committed_with_loss += u64::from(with_loss);
                }
            }
        }
    }

    pub(super) fn lose_kv(&mut self) {
        self.scheduler.lose_kv();
        self.steps.clear();
        self.scheduler.set_admission(true);
    }

    /// Plans a step and sends it, where the gate is open.
    pub(super) fn dispatch(&mut self) -> Result<(), String> {
        let Gate::Go {
            stamp,
            is_first,
            roster,
        } = self.coordinator.gate(self.scheduler.next_step())
        else {
            return Ok(());
        };
        let carried = is_first.then(|| carried_marks(&self.scheduler));
        let is_idle = self.scheduler.steps_in_flight().next().is_none();
        let plan = match self.scheduler.plan_step() {
            Some(plan) => plan,
            None if is_idle && self.coordinator.wants_steps() => self.scheduler.plan_empty_step(),
            None => return Ok(()),
        };
        self.tally.preemptions += plan.preempted.len() as u64;
        self.tally.carried += carried.as_ref().map_or(0, Vec::len) as u64;
        for item in &plan.items {
            self.tables.insert(item.unit(), item.block_table.clone());
        }
        let header = StepHeader::new(stamp, &plan, carried);
        self.send_header(&header, &roster);
        let done = BTreeSet::new();
        self.steps.insert(header.step, Sent { header, roster, done });
        Ok(())
    }

    fn send_header(&mut self, header: &StepHeader, roster: &BTreeSet<GpuId>) {
        let packets = roster
            .iter()
            .map(|gpu| Packet::ToRank(*gpu, RankEvent::Step(header.clone())));
        self.packets.extend(packets);
    }

    fn work_any(&mut self) -> Result<(), String> {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let index = self.random.random_range(0..self.jobs.len());
        // The store takes its time, so that steps reach the one that a record names before it is durable.
        let is_store = matches!(self.jobs[index], Job::Write(..) | Job::TakeTerm(..));
        if is_store && !self.chance(10) {
            return Ok(());
        }
        let job = self.jobs.remove(index);
        self.work(job)
    }

    pub(super) fn work(&mut self, job: Job) -> Result<(), String> {
        match job {
            Job::Load(gpu, layout) => {
                let fails = self.trouble == Trouble::Storm && self.chance(10);
                self.device(gpu).shards.insert(layout, !fails);
                let result = if fails {
                    Err(RefusalReason::Probe { layer: 0 })
                } else {
                    Ok(())
                };
                self.tell_rank(gpu, RankEvent::Loaded { layout, result })
            }
            Job::Compute(gpu, step) => self.tell_rank(gpu, RankEvent::StepDone(step)),
            Job::Write(reign, record) => {
                let follows = record.epoch.0 == self.record.epoch.0 + 1;
                let event = if record.term == self.term && follows {
                    self.layout_before = Some(self.record.layout);
                    self.record = record;
                    CoordinatorEvent::Written(self.record.layout)
                } else {
                    CoordinatorEvent::WriteRefused(record.term)
                };
                self.jobs.push(Job::Reply(reign, event));
                Ok(())
            }
            Job::TakeTerm(reign, above) => {
                let event = if above == self.term {
                    self.term = Term(above.0 + 1);
                    CoordinatorEvent::TermTaken {
                        term: self.term,
                        record: self.record.clone(),
                    }
                } else {
                    CoordinatorEvent::TermRefused(above)
                };
                self.jobs.push(Job::Reply(reign, event));
                Ok(())
            }
            Job::Reply(reign, event) if reign == self.reign => self.coordinate(event),
            Job::Reply(..) => Ok(()),
            Job::RankLost(gpu) => self.coordinate(CoordinatorEvent::RankLost(gpu)),
        }
    }

    fn tick_any(&mut self) -> Result<(), String> {
        match self.random.random_range(0..6) {
            4 => self.coordinate(CoordinatorEvent::Tick),
            5 => {
                self.resend_steps();
                Ok(())
            }
            gpu => self.tell_rank(GpuId(gpu), RankEvent::Tick),
        }
    }

    pub(super) fn tick_all(&mut self) -> Result<(), String> {
        self.coordinate(CoordinatorEvent::Tick)?;
        self.resend_steps();
        let gpus: Vec<GpuId> = self.devices.keys().copied().collect();
        gpus.into_iter()
            .try_for_each(|gpu| self.tell_rank(gpu, RankEvent::Tick))
    }

    fn resend_steps(&mut self) {
        for (step, sent) in std::mem::take(&mut self.steps) {
            let missing = sent.roster.difference(&sent.done).copied().collect();
            self.send_header(&sent.header, &missing);
            self.steps.insert(step, sent);
        }
    }
}

/// The epoch in which a step of a term must be computed. A term later than the record's begins with its
/// adoption, so all its steps are of the record's epoch.
fn committed_epoch(record: &Record, term: Term, step: StepId) -> Epoch {
    if term > record.term || step >= record.first_step {
        record.epoch
    } else {
        Epoch(record.epoch.0.saturating_sub(1))
    }
}
