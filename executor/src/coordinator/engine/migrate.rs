//! Changes of layout: the engine's side of the handover protocol. What the protocol decides is carried out here;
//! nothing here decides.

use infercluster_serving::handover::{
    Answer, Coordinator, CoordinatorAction, CoordinatorEvent, HandoverEnd, HandoverId, HandoverPlan, Notice,
    Record, RefusalReason, Stamp,
};
use infercluster_spec::migration::Transfer;
use infercluster_spec::{BytesPerSec, Epoch, GpuId, Layout, ReplicaId, StepId, Term};
use tokio::sync::oneshot;

use super::pools::{fitting_blocks, seating};
use super::{Engine, name_of};
use crate::coordinator::RequestError;
use crate::coordinator::migration::{
    Cause, End, Migration, MigrationError, MigrationPhase, MigrationReport, check_layouts,
};
use crate::coordinator::plan::planned_lanes;
use crate::coordinator::records::Recorded;
use crate::lanes::kv_lanes;
use crate::store::StoreError;
use crate::wire::message::{DocumentText, Shadow, ToWorker};

/// The replica that may migrate: a layout with several is refused.
const ONLY: ReplicaId = ReplicaId(0);
/// KV that may be left to copy when mirroring begins, where steps add less: it goes in the gaps of the next steps.
const GAP_BYTES: u64 = 4 << 20;
/// Bytes a second at which a device gives KV while it serves.
const COPY_RATE: f64 = 400e6;

impl Engine {
    /// Begins a migration, or says why not.
    pub(super) fn migrate(
        &mut self,
        to: Layout,
        transfers: Option<Vec<Transfer>>,
        reply: oneshot::Sender<Result<MigrationReport, MigrationError>>,
    ) {
        if let Err((error, reply)) = self.try_migrate(to, transfers, reply) {
            // Whoever asked may have gone.
            let _ = reply.send(Err(error));
        }
    }

    fn try_migrate(
        &mut self,
        to: Layout,
        transfers: Option<Vec<Transfer>>,
        reply: oneshot::Sender<Result<MigrationReport, MigrationError>>,
    ) -> Result<
        (),
        (
            MigrationError,
            oneshot::Sender<Result<MigrationReport, MigrationError>>,
        ),
    > {
        if let Err(error) = self.check_migration(&to) {
            return Err((error, reply));
        }
        let (model, from) = (&self.options.model, &self.options.layout);
        let lanes = match transfers {
            Some(transfers) => Some(planned_lanes(model, from, &to, &transfers)),
            None => kv_lanes(model, from, &to, ONLY),
        };
        let Some(lanes) = lanes else {
            return Err((MigrationError::Coverage, reply));
        };
        self.attempts += 1;
        let stamp = self.protocols[ONLY.index()].stamp();
        let plan = HandoverPlan {
            id: name_of(stamp.term, self.attempts),
            old: self.options.layout.seats().map(|(_, gpu)| gpu).collect(),
            new: to.seats().map(|(_, gpu)| gpu).collect(),
            lanes: lanes.iter().map(|lane| lane.lane).collect(),
        };
        let begun = match self.protocols[ONLY.index()].begin(plan.clone()) {
            Ok(actions) => actions,
            Err(error) => {
                let reason = error.to_string();
                return Err((MigrationError::Failed { reason }, reply));
            }
        };
        let epoch = Epoch(stamp.epoch.0 + 1);
        let known = (&self.options.model, &self.replicas[ONLY.index()]);
        let migration = Migration::new(plan, to, lanes, known, epoch, reply);
        self.describe(&migration, stamp);
        self.replicas[ONLY.index()].begin_migration(seating(&migration.to, ONLY));
        self.migration = Some(migration);
        self.act(ONLY.index(), begun);
        Ok(())
    }

    fn check_migration(&self, to: &Layout) -> Result<(), MigrationError> {
        if self.migration.is_some() || !self.protocols.iter().all(|protocol| protocol.is_settled()) {
            return Err(MigrationError::Busy);
        }
        if let Some(failure) = self.replicas.iter().find_map(|replica| replica.failure()) {
            return Err(MigrationError::Failed {
                reason: failure.to_string(),
            });
        }
        check_layouts(&self.options.model, &self.options.layout, to)?;
        let living = self.fleet.living();
        if let Some((_, gpu)) = to.seats().find(|(_, gpu)| !living.contains(gpu)) {
            return Err(MigrationError::NoWorker { gpu });
        }
        let (total, used) = self.replicas[ONLY.index()].pool();
        if let Some(memory) = self.options.memory {
            let fitting = fitting_blocks(to, &self.options.model, ONLY, memory);
            if fitting < u64::from(total) {
                return Err(MigrationError::Pool {
                    fitting,
                    memory,
                    total,
                    used,
                });
            }
        }
        Ok(())
    }

    /// Tells every device that takes part what the new layout is.
    fn describe(&self, migration: &Migration, stamp: Stamp) {
        let (blocks, _) = self.replicas[ONLY.index()].pool();
        let shadow = Shadow {
            expected: self.probe.clone(),
            lanes: migration.lanes.clone(),
            copy_rate: BytesPerSec::new(COPY_RATE),
        };
        let next = Stamp {
            epoch: Epoch(stamp.epoch.0 + 1),
            ..stamp
        };
        let document = DocumentText::of(&migration.to);
        for gpu in migration.gpus() {
            let name = (migration.id(), next);
            let prepare = self.prepare(gpu, name, document.clone(), blocks, Some(shadow.clone()));
            // A worker that cannot be reached is noticed by its reading thread.
            let _ = self.fleet.send([&gpu], &ToWorker::Prepare(Box::new(prepare)));
        }
    }

    /// Gives a replica's protocol an event and does what it says.
    pub(super) fn drive(&mut self, index: usize, event: CoordinatorEvent) {
        if let (CoordinatorEvent::Answer { answer, .. }, Some(migration)) = (&event, &mut self.migration)
            && let Notice::Arrived { handover, lane, mark } = &answer.notice
            && *handover == migration.id()
        {
            migration.arrived(*lane, *mark);
        }
        self.handle_protocol(index, event);
        // Where nothing is left to copy no rank will say so: go on as far as it goes.
        while self
            .migration
            .as_ref()
            .is_some_and(|migration| migration.phase() < MigrationPhase::Committing)
        {
            let before = self.protocols[index].clone();
            let event = computed(&before, GpuId::default(), StepId(0));
            self.handle_protocol(index, event);
            if self.protocols[index] == before {
                break;
            }
        }
        self.finish_migration(index);
    }

    fn handle_protocol(&mut self, index: usize, event: CoordinatorEvent) {
        let computed = self.replicas[index].computed();
        let token_bytes = self
            .options
            .model
            .kv_bytes_per_token(self.options.layout.kv.dtype);
        let gap_tokens = GAP_BYTES / token_bytes.0.max(1);
        let view = self.replicas[index].view(&computed, self.records.write_time, gap_tokens);
        let actions = self.protocols[index].handle(event, view);
        self.act(index, actions);
    }

    fn act(&mut self, index: usize, actions: Vec<CoordinatorAction>) {
        if let Some(migration) = &mut self.migration {
            migration.follow(&actions, &self.replicas[index], &self.options.model);
        }
        for action in actions {
            match action {
                CoordinatorAction::Tell { to, order } => {
                    // A worker that cannot be reached is noticed by its reading thread.
                    let _ = self.fleet.send([&to], &ToWorker::Order(order));
                }
                CoordinatorAction::Write(record) => {
                    self.replicas[index].name_first_step(record.first_step);
                    self.records.swap(record);
                }
                CoordinatorAction::TakeTerm { above } => self.records.take_term(above),
                CoordinatorAction::LoseKv => self.replicas[index].lose_kv(),
                CoordinatorAction::Throttle(holds) => self.replicas[index].set_admission(!holds),
                CoordinatorAction::Ended(end) => self.end_migration(index, end),
            }
        }
    }

    /// The record log has answered.
    pub(super) fn recorded(&mut self, recorded: Result<Recorded, StoreError>) {
        let event = match recorded {
            Ok(Recorded::Swapped(layout)) => {
                self.commit();
                CoordinatorEvent::Written(layout)
            }
            Ok(Recorded::Term { term, record }) => {
                return self.reign(term, record);
            }
            Err(error) => {
                let description = format!("the record cannot be written: {error}");
                let term = self.protocols[ONLY.index()].stamp().term;
                self.drive(ONLY.index(), CoordinatorEvent::WriteRefused(term));
                let gpu = self.options.layout.gpus.first().copied().unwrap_or_default();
                return self.fail(ONLY, &RequestError::WorkerLost { gpu, description });
            }
        };
        self.drive(ONLY.index(), event);
    }

    /// A term was taken after a loss: the layout of its record serves on, unless a device of it is gone.
    fn reign(&mut self, term: Term, record: Record) {
        let roster = record.roster.clone();
        self.drive(ONLY.index(), CoordinatorEvent::TermTaken { term, record });
        for gpu in self.fleet.lost() {
            if roster.contains(&gpu) {
                // No further term would bring it back.
                let description = self.fleet.description_of_lost(gpu).unwrap_or_default().to_owned();
                return self.fail(ONLY, &RequestError::WorkerLost { gpu, description });
            }
            // The protocol forgets who was lost before the term: it will not hear from them.
            self.drive(ONLY.index(), CoordinatorEvent::RankLost(gpu));
        }
    }

    /// The record is durable: the new layout is the one in force.
    fn commit(&mut self) {
        if let Some(migration) = &mut self.migration {
            migration.enter(MigrationPhase::Switching);
            self.layout_id = migration.id();
            self.epoch = Epoch(self.epoch.0 + 1);
            self.options.layout = Layout {
                // Workers that have no seat any more stay in the service.
                gpus: self.options.layout.gpus.clone(),
                ..migration.to.clone()
            };
        }
    }

    /// The protocol has decided; the answer waits until every rank has confirmed, so that another may follow.
    fn end_migration(&mut self, index: usize, end: HandoverEnd) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        self.replicas[index].end_migration(matches!(end, HandoverEnd::Committed { .. }));
        let ended = match end {
            HandoverEnd::Committed { with_loss: false, .. } => End::Done,
            HandoverEnd::Committed { .. } => {
                migration.note_failure(Cause::Verdict, || "a rank was lost".to_owned());
                End::Lost
            }
            HandoverEnd::Aborted { reason, .. } => {
                migration.note_failure(Cause::Verdict, || reason.to_string());
                End::Aborted
            }
        };
        migration.end(ended);
    }

    /// Answers whoever asked for a migration that has ended.
    fn finish_migration(&mut self, index: usize) {
        if !self.protocols[index].is_settled() {
            return;
        }
        let ended = self.migration.take_if(|migration| migration.has_ended());
        if let Some(migration) = ended {
            let replica = &self.replicas[index];
            let report = migration.report(&replica.gaps, &replica.computed());
            migration.answer(&report, self.epoch);
            self.last_migration = Some(report);
        }
    }

    /// The migration under way, or the last one.
    pub(super) fn migration_report(&self) -> Option<MigrationReport> {
        let replica = &self.replicas[ONLY.index()];
        let now = self.migration.as_ref();
        now.map(|migration| migration.report(&replica.gaps, &replica.computed()))
            .or_else(|| self.last_migration.clone())
    }

    /// A step is done, which the answering rank's word says: units that it ended are not waited for any more.
    pub(super) fn migration_step(&mut self, index: usize, gpu: GpuId, step: StepId) {
        self.drive(index, computed(&self.protocols[index], gpu, step));
    }

    /// The replica whose migration a device without a present seat takes part in.
    pub(super) fn migrating_replica(&self, gpu: GpuId) -> Option<ReplicaId> {
        let takes_part = self.protocols.len() == 1 && self.fleet.living().contains(&gpu);
        takes_part.then_some(ONLY)
    }

    /// A device could not load the shadow: its words are better than the protocol's.
    pub(super) fn load_failed(
        &mut self,
        gpu: GpuId,
        layout_id: HandoverId,
        refusal: RefusalReason,
        reason: &str,
    ) {
        if let Some(migration) = &mut self.migration
            && migration.id() == layout_id
        {
            let cause = match refusal {
                RefusalReason::Memory { .. } | RefusalReason::Probe { .. } => Cause::Refusal,
                _ => Cause::Load,
            };
            migration.note_failure(cause, || format!("{gpu} refuses: {reason}"));
        }
    }

    /// KV does not move between two devices any more.
    pub(super) fn lane_failed(&mut self, gpu: GpuId, layout_id: HandoverId, peer: GpuId, reason: &str) {
        let Some(migration) = self
            .migration
            .as_mut()
            .filter(|migration| migration.id() == layout_id)
        else {
            return;
        };
        let phase = migration.phase();
        let reason = format!("kv between {gpu} and {peer}: {reason}");
        if phase < MigrationPhase::Committing {
            migration.note_failure(Cause::Connection, || reason);
            self.drive(ONLY.index(), CoordinatorEvent::Deadline);
        } else if phase < MigrationPhase::Releasing {
            // A tail is lost after the record may have been written: the new layout cannot serve from it. A worker
            // that is gone says more, and may be one that the new layout does without.
            let description = format!("{epoch} cannot begin: {reason}", epoch = migration.epoch());
            self.suspect_soon(ONLY, RequestError::WorkerLost { gpu, description });
        }
    }

    /// A device is lost that computes no step: it was to join, or was about to leave.
    pub(super) fn lose_helper(&mut self, gpu: GpuId, description: String) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        if migration.gpus().contains(&gpu) {
            migration.note_failure(Cause::Refusal, || description);
            // Its loss explains the connections that ended with it.
            self.suspicions.retain(|suspicion| suspicion.replica != ONLY);
            self.drive(ONLY.index(), CoordinatorEvent::RankLost(gpu));
        }
    }

    /// Gives up a migration that takes too long.
    pub(super) fn judge_migration(&mut self) {
        let limit = self.options.limits.load;
        if let Some(migration) = &mut self.migration
            && migration.is_overdue(limit)
        {
            let waited = limit.as_secs();
            let reason = || format!("it was not ready to commit within {waited} s");
            migration.note_failure(Cause::Verdict, reason);
            self.drive(ONLY.index(), CoordinatorEvent::Deadline);
        }
    }

    /// The replica has failed: there is nothing to migrate.
    pub(super) fn fail_migration(&mut self, reason: &str) {
        let Some(mut migration) = self.migration.take() else {
            return;
        };
        let was_committed = migration.phase() >= MigrationPhase::Switching;
        if !migration.has_ended() {
            migration.note_failure(Cause::Refusal, || reason.to_owned());
            migration.end(if was_committed { End::Lost } else { End::Aborted });
        }
        let replica = &self.replicas[ONLY.index()];
        let report = migration.report(&replica.gaps, &replica.computed());
        migration.answer(&report, self.epoch);
        self.last_migration = Some(report);
    }
}

/// A rank's word that a step is done.
fn computed(protocol: &Coordinator, from: GpuId, step: StepId) -> CoordinatorEvent {
    let answer = Answer {
        term: protocol.stamp().term,
        notice: Notice::Computed { step },
    };
    CoordinatorEvent::Answer { from, answer }
}
