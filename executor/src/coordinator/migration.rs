//! One migration: what is asked, why it is refused, how far it is and what it cost. The protocol itself is
//! `handover` in `serving`; the engine carries out what that says.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{
    Command, CoordinatorAction, HandoverId, HandoverPlan, KvMark, KvUnit, LaneId,
};
use infercluster_spec::stats::Summary;
use infercluster_spec::validate::LayoutViolations;
use infercluster_spec::{Bytes, Epoch, GpuId, Layout, Model, StepId};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::plan::PlanError;
use super::replica::{Gaps, Replica};
use crate::clock;
use crate::lanes::KvLane;
use crate::wire::message::SwitchTimes;

/// Why a migration did not happen. The layout before it is in force, unless a worker was lost after the commit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The new layout breaks its rules.
    #[error(transparent)]
    Layout(#[from] LayoutViolations),
    /// One is under way.
    #[error("a migration is under way")]
    Busy,
    /// Copies of the model come, go or are several.
    #[error("this executor migrates one replica to one replica, the layouts have {from} and {to}")]
    Replicas {
        /// Replicas of the layout in force.
        from: usize,
        /// Replicas of the new one.
        to: usize,
    },
    /// Nothing would change.
    #[error("the new layout is the one in force")]
    Unchanged,
    /// Something that a migration cannot change.
    #[error("{field} cannot change in a migration: it is {from}, the new layout has {to}")]
    Fixed {
        /// What.
        field: &'static str,
        /// Its value.
        from: String,
        /// The wanted value.
        to: String,
    },
    /// A device without a worker.
    #[error("{gpu} has no worker in this service")]
    NoWorker {
        /// Which.
        gpu: GpuId,
    },
    /// The new layout has room for less KV.
    #[error(
        "the new layout has room for {fitting} KV blocks within {memory} a worker, the pool has {total} of \
         which {used} are in use"
    )]
    Pool {
        /// Blocks that fit.
        fitting: u64,
        /// What a worker may use.
        memory: Bytes,
        /// Blocks of the pool.
        total: u32,
        /// Blocks that somebody owns.
        used: u32,
    },
    /// A plan that its layouts do not bear out.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The layouts are of two models.
    #[error("the layout in force does not hold all the KV that the new one needs")]
    Coverage,
    /// The replica answers no more.
    #[error("the replica answers no more: {reason}")]
    Failed {
        /// Why.
        reason: String,
    },
    /// It was given up before the commit; the old layout serves on.
    #[error("the migration was given up, {epoch} stays in force: {reason}")]
    Aborted {
        /// The layout version in force.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// Something was lost after the commit.
    #[error("{epoch} is in force, and was hit by a loss: {reason}")]
    Lost {
        /// The layout version in force.
        epoch: Epoch,
        /// What.
        reason: String,
    },
    /// The service ends.
    #[error("the service is stopping")]
    Stopped,
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// Shadow shards are loaded and probed.
    Preparing,
    /// KV is copied in rounds.
    Copying,
    /// What each step adds goes to the new layout with that step.
    Mirroring,
    /// The record is being made durable.
    Committing,
    /// Steps of the new layout run, some rank of it is not complete.
    Switching,
    /// Old shards go.
    Releasing,
    /// The new layout is in force and alone.
    Done,
    /// The old layout stays.
    Failed,
}

/// Where a migration is and what it cost, so far or in all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationReport {
    /// How far.
    pub phase: MigrationPhase,
    /// The layout version that it leads to.
    pub epoch: Epoch,
    /// The first step of the new layout, once it is named.
    pub first_step: Option<StepId>,
    /// KV that crossed between devices.
    pub kv_bytes_moved: Bytes,
    /// KV that devices copied for themselves.
    pub kv_bytes_kept: Bytes,
    /// KV of all live sequences when the step was named.
    pub kv_bytes_at_commit: Bytes,
    /// Sequences in prefill then.
    pub prefills_at_commit: u64,
    /// Units with all their marks, and units in all, when last looked at.
    pub units_arrived: u64,
    /// Live units.
    pub units: u64,
    /// Rounds in which KV was asked for, mirroring included.
    pub rounds: u32,
    /// Steps that completed between the request and the naming of the step.
    pub steps_meanwhile: u64,
    /// From the request to the last rank's being ready, in seconds.
    pub prepare_s: Option<f64>,
    /// From then to the naming of the step.
    pub copy_s: Option<f64>,
    /// From then to the durable record.
    pub record_s: Option<f64>,
    /// From then until every rank has computed the first step and has every mark.
    pub switch_s: Option<f64>,
    /// From then until the old shards are gone.
    pub release_s: Option<f64>,
    /// For each stream that goes on: from its last token of the old layout to its first of the new one.
    pub pauses_s: Vec<f64>,
    /// The same, summed up.
    pub pause_s: Summary,
    /// The same less the median gap just before the migration: a pause always contains a step.
    pub pause_excess_s: Summary,
    /// What lies between the last step of the old layout and the end of the first of the new one.
    pub first_step_s: FirstStepTimes,
    /// Gaps between a stream's tokens just before the migration.
    pub itl_before_s: Summary,
    /// The same from its start to the switch.
    pub itl_meanwhile_s: Summary,
    /// The same in the new layout.
    pub itl_after_s: Summary,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Where the time of a layout's first step went, in seconds; of ranks the longest counts.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct FirstStepTimes {
    /// From the last result before it to its leaving: long where the record was not durable in time.
    pub dispatch: f64,
    /// A rank had the step and lacked KV of the steps before.
    pub marks: f64,
    /// A rank sent what others still lacked.
    pub tail: f64,
    /// A rank computed, or waited for other ranks and stages.
    pub compute: f64,
}

impl FirstStepTimes {
    /// Takes in what a rank says.
    fn merge(&mut self, rank: SwitchTimes) {
        let longer = |known: &mut f64, found: Duration| *known = known.max(found.as_secs_f64());
        longer(&mut self.marks, rank.marks);
        longer(&mut self.tail, rank.tail);
        longer(&mut self.compute, rank.compute);
    }
}

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The new layout is in force and alone.
    Done,
    /// The old one stays.
    Aborted,
    /// The new one is in force and was hit by a loss.
    Lost,
}

/// How much a word about a failure says: what one device refuses makes others lose their connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// What the protocol says.
    Verdict,
    /// A connection has ended.
    Connection,
    /// A device cannot load its part.
    Load,
    /// A device says no: too little memory, or other numbers. Or it is lost.
    Refusal,
}

/// A migration that is under way.
pub(super) struct Migration {
    pub(super) plan: HandoverPlan,
    pub(super) to: Layout,
    pub(super) lanes: Vec<KvLane>,
    reply: oneshot::Sender<Result<MigrationReport, MigrationError>>,
    ended: Option<End>,
    /// Why it cannot go on: the first word of the strongest kind.
    failure: Option<(Cause, String)>,
    pub(super) started: Instant,
    token_bytes: BTreeMap<LaneId, (bool, Bytes)>,
    marks: BTreeMap<(LaneId, KvUnit), u32>,
    /// When each phase began.
    since: BTreeMap<MigrationPhase, Instant>,
    steps_before: u64,
    report: MigrationReport,
}

impl Migration {
    pub(super) fn new(
        plan: HandoverPlan,
        to: Layout,
        lanes: Vec<KvLane>,
        (model, replica): (&Model, &Replica),
        epoch: Epoch,
        reply: oneshot::Sender<Result<MigrationReport, MigrationError>>,
    ) -> Self {
        let token_bytes = lanes
            .iter()
            .map(|lane| (lane.lane.id, (lane.is_local(), lane.token_bytes(model, &to))))
            .collect();
        let started = clock::now();
        Self {
            plan,
            to,
            lanes,
            reply,
            ended: None,
            failure: None,
            started,
            token_bytes,
            marks: BTreeMap::new(),
            since: BTreeMap::from([(MigrationPhase::Preparing, started)]),
            steps_before: replica.steps(),
            report: MigrationReport {
                phase: MigrationPhase::Preparing,
                epoch,
                first_step: None,
                kv_bytes_moved: Bytes::ZERO,
                kv_bytes_kept: Bytes::ZERO,
                kv_bytes_at_commit: Bytes::ZERO,
                prefills_at_commit: 0,
                units_arrived: 0,
                units: 0,
                rounds: 0,
                steps_meanwhile: 0,
                prepare_s: None,
                copy_s: None,
                record_s: None,
                switch_s: None,
                release_s: None,
                pauses_s: Vec::new(),
                pause_s: Summary::default(),
                pause_excess_s: Summary::default(),
                first_step_s: FirstStepTimes::default(),
                itl_before_s: Summary::default(),
                itl_meanwhile_s: Summary::default(),
                itl_after_s: Summary::default(),
                failure: None,
            },
        }
    }

    pub(super) fn id(&self) -> HandoverId {
        self.plan.id
    }

    /// The layout version that it leads to.
    pub(super) fn epoch(&self) -> Epoch {
        self.report.epoch
    }

    pub(super) fn phase(&self) -> MigrationPhase {
        self.report.phase
    }

    /// Every device that takes part.
    pub(super) fn gpus(&self) -> BTreeSet<GpuId> {
        self.plan.old.union(&self.plan.new).copied().collect()
    }

    /// Follows the protocol by what it orders.
    pub(super) fn follow(&mut self, actions: &[CoordinatorAction], replica: &Replica, model: &Model) {
        let mut asks = None;
        for action in actions {
            match action {
                CoordinatorAction::Tell { order, .. } => match order.command {
                    Command::Copy { .. } => asks = Some(MigrationPhase::Copying),
                    Command::Mirror { .. } => asks = Some(MigrationPhase::Mirroring),
                    Command::Release { .. } => self.enter(MigrationPhase::Releasing),
                    _ => {}
                },
                CoordinatorAction::Write(record) => {
                    self.report.first_step = Some(record.first_step);
                    let tokens = replica.computed().values().map(|tokens| u64::from(*tokens)).sum();
                    let kv_bytes = model.kv_bytes_per_token(self.to.kv.dtype).checked_mul(tokens);
                    self.report.kv_bytes_at_commit = kv_bytes.unwrap_or(Bytes(u64::MAX));
                    self.report.prefills_at_commit = replica.prefills();
                    self.report.steps_meanwhile = replica.steps() - self.steps_before;
                    self.enter(MigrationPhase::Committing);
                }
                _ => {}
            }
        }
        if let Some(phase) = asks {
            self.report.rounds += 1;
            self.enter(phase);
        }
    }

    /// Notes why it cannot go on.
    pub(super) fn note_failure(&mut self, cause: Cause, reason: impl FnOnce() -> String) {
        if self.failure.as_ref().is_none_or(|(known, _)| cause > *known) {
            self.failure = Some((cause, reason()));
        }
    }

    pub(super) fn enter(&mut self, phase: MigrationPhase) {
        self.report.phase = phase;
        self.since.entry(phase).or_insert_with(clock::now);
    }

    /// Counts what has arrived.
    pub(super) fn arrived(&mut self, lane: LaneId, mark: KvMark) {
        let Some(&(is_local, token_bytes)) = self.token_bytes.get(&lane) else {
            return;
        };
        let known = self.marks.entry((lane, mark.unit)).or_default();
        let new = token_bytes * u64::from(mark.tokens.saturating_sub(*known));
        *known = (*known).max(mark.tokens);
        if is_local {
            self.report.kv_bytes_kept += new;
        } else {
            self.report.kv_bytes_moved += new;
        }
    }

    /// A rank has computed the first step.
    pub(super) fn switched(&mut self, times: SwitchTimes) {
        self.report.first_step_s.merge(times);
    }

    /// The report as of now; `computed` are the marks of all live units.
    pub(super) fn report(&self, gaps: &Gaps, computed: &BTreeMap<KvUnit, u32>) -> MigrationReport {
        let mut report = self.report.clone();
        let has = |unit: &KvUnit, tokens: u32| {
            let arrived = |lane: &KvLane| self.marks.get(&(lane.lane.id, *unit)).copied().unwrap_or(0);
            self.lanes.iter().all(|lane| arrived(lane) >= tokens)
        };
        report.units = computed.len() as u64;
        report.units_arrived = computed
            .iter()
            .filter(|(unit, tokens)| has(unit, **tokens))
            .count() as u64;
        let seconds = |from: MigrationPhase, to: &[MigrationPhase]| {
            let end = to.iter().filter_map(|phase| self.since.get(phase)).min()?;
            Some(
                end.saturating_duration_since(*self.since.get(&from)?)
                    .as_secs_f64(),
            )
        };
        use MigrationPhase as Phase;
        let copying = [Phase::Copying, Phase::Mirroring];
        report.prepare_s = seconds(Phase::Preparing, &copying);
        let first_copy = copying.into_iter().find(|phase| self.since.contains_key(phase));
        report.copy_s = first_copy.and_then(|from| seconds(from, &[Phase::Committing]));
        report.record_s = seconds(Phase::Committing, &[Phase::Switching]);
        report.switch_s = seconds(Phase::Switching, &[Phase::Releasing]);
        report.release_s = seconds(Phase::Releasing, &[Phase::Done]);
        report.pauses_s.clone_from(&gaps.pauses);
        report.pause_s = Summary::of(gaps.pauses.clone());
        report.itl_before_s = Summary::of(gaps.before.iter().copied().collect());
        let usual = report.itl_before_s.p50;
        report.pause_excess_s = Summary::of(gaps.pauses.iter().map(|pause| pause - usual).collect());
        report.first_step_s.dispatch = gaps.dispatch_s.unwrap_or(0.0);
        report.itl_meanwhile_s = Summary::of(gaps.meanwhile.clone());
        report.itl_after_s = Summary::of(gaps.after.clone());
        report.failure = self.failure.as_ref().map(|(_, reason)| reason.clone());
        report
    }

    /// It has ended.
    pub(super) fn end(&mut self, end: End) {
        self.enter(match end {
            End::Done => MigrationPhase::Done,
            End::Aborted | End::Lost => MigrationPhase::Failed,
        });
        self.ended.get_or_insert(end);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Tells whoever asked how it ended; `epoch` is in force.
    pub(super) fn answer(self, report: &MigrationReport, epoch: Epoch) {
        let reason = report.failure.clone().unwrap_or_default();
        let result = match self.ended {
            Some(End::Done) => Ok(report.clone()),
            Some(End::Aborted) => Err(MigrationError::Aborted { epoch, reason }),
            Some(End::Lost) => Err(MigrationError::Lost { epoch, reason }),
            None => Err(MigrationError::Stopped),
        };
        // Whoever asked may have gone; the migration does not depend on it.
        let _ = self.reply.send(result);
    }

    /// Whether preparing and copying have taken longer than `limit`.
    pub(super) fn is_overdue(&self, limit: Duration) -> bool {
        self.report.phase < MigrationPhase::Committing && self.started.elapsed() > limit
    }
}

/// Why a layout cannot follow another, as far as the two say.
pub(super) fn check_layouts(model: &Model, from: &Layout, to: &Layout) -> Result<(), MigrationError> {
    infercluster_spec::validate::validate_layout(to, model, None)?;
    if from.replicas.len() != 1 || to.replicas.len() != 1 {
        return Err(MigrationError::Replicas {
            from: from.replicas.len(),
            to: to.replicas.len(),
        });
    }
    let fixed = [
        ("the model", from.model.clone(), to.model.clone()),
        (
            "the reduction",
            format!("{:?}", from.reduction).to_lowercase(),
            format!("{:?}", to.reduction).to_lowercase(),
        ),
        ("the numerics profile", from.numerics.clone(), to.numerics.clone()),
        ("the KV dtype", from.kv.dtype.to_string(), to.kv.dtype.to_string()),
        (
            "the KV block size",
            from.kv.block_size.to_string(),
            to.kv.block_size.to_string(),
        ),
    ];
    if let Some((field, from, to)) = fixed.into_iter().find(|(_, from, to)| from != to) {
        return Err(MigrationError::Fixed { field, from, to });
    }
    if from.replicas == to.replicas {
        return Err(MigrationError::Unchanged);
    }
    Ok(())
}
