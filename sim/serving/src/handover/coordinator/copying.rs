//! Rounds of KV copying: how far every lane is, and what to ask next.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::GpuId;

use super::ServingView;
use crate::handover::{Command, HandoverPlan, KvUnit, Lane, LaneId};

/// Rounds after which waiting sequences are held back, so that the marks catch up.
const ROUNDS_BEFORE_THROTTLE: u32 = 4;

/// KV on its way.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct KvCopy {
    rounds: u32,
    pub(super) arrived: BTreeMap<(LaneId, KvUnit), u32>,
    /// What this round must reach.
    target: BTreeMap<KvUnit, u32>,
    /// Senders that mirror, once they were asked to.
    pub(super) mirrors: Option<BTreeSet<GpuId>>,
    /// Whether the target was set after the last of them began.
    pub(super) is_last_round: bool,
    pub(super) throttles: bool,
    /// Whether the senders must be asked something new.
    pub(super) asks: bool,
}

impl KvCopy {
    /// The first round: everything that is computed now.
    pub(super) fn begin(computed: &BTreeMap<KvUnit, u32>) -> Self {
        Self {
            target: computed.clone(),
            ..Self::default()
        }
    }

    /// Whether every lane has what this round must reach of every unit that still lives.
    pub(super) fn reached(&self, plan: &HandoverPlan, computed: &BTreeMap<KvUnit, u32>) -> bool {
        let awaits_mirrors = self
            .mirrors
            .as_ref()
            .is_some_and(|mirrors| mirrors.len() < senders(plan).len());
        let live = self.target.iter().filter(|(unit, _)| computed.contains_key(unit));
        !awaits_mirrors
            && live
                .into_iter()
                .all(|(unit, tokens)| self.behind(plan, *unit, *tokens) == 0)
    }

    /// Tokens of a unit that the slowest lane lacks.
    fn behind(&self, plan: &HandoverPlan, unit: KvUnit, tokens: u32) -> u32 {
        let missing = |lane: &Lane| {
            let arrived = self.arrived.get(&(lane.id, unit)).copied().unwrap_or(0);
            tokens.saturating_sub(arrived)
        };
        plan.lanes.iter().map(missing).max().unwrap_or(0)
    }

    /// Asks for what has come since: another round, mirroring, or the last round under mirroring. Answers a
    /// change of throttling.
    pub(super) fn next_round(&mut self, plan: &HandoverPlan, view: ServingView) -> Option<bool> {
        let lag: u64 = view
            .computed
            .iter()
            .map(|(unit, tokens)| u64::from(self.behind(plan, *unit, *tokens)))
            .sum();
        self.target.clone_from(view.computed);
        self.rounds += 1;
        if self.mirrors.is_some() {
            self.is_last_round = true;
            return None;
        }
        self.asks = true;
        if lag <= view.step_tokens {
            self.mirrors = Some(BTreeSet::new());
            return None;
        }
        let throttles = self.rounds >= ROUNDS_BEFORE_THROTTLE;
        let changes = throttles && !self.throttles;
        self.throttles |= throttles;
        changes.then_some(true)
    }

    pub(super) fn unanswered(&self, plan: &HandoverPlan) -> impl Iterator<Item = (GpuId, Command)> {
        let handover = plan.id;
        let mirrors = self.mirrors.clone();
        senders(plan).into_iter().filter_map(move |gpu| match &mirrors {
            None => Some((gpu, Command::Copy { handover })),
            Some(mirrors) if mirrors.contains(&gpu) => None,
            Some(_) => Some((gpu, Command::Mirror { handover })),
        })
    }
}

fn senders(plan: &HandoverPlan) -> BTreeSet<GpuId> {
    plan.lanes.iter().map(|lane| lane.from).collect()
}
