//! KV of one rank on its way from one layout to the next: what it sends, what it has received.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::{Epoch, SequenceId, StepId};

use super::fault::{Fault, Planted};
use super::{HandoverId, KvMark, KvUnit, LaneAck, LaneData, LaneId, StepHeader};

type LaneMarks = BTreeMap<(LaneId, KvUnit), u32>;

/// A rank's part in a handover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Movement {
    pub(super) id: HandoverId,
    /// The layout version that it leads to.
    pub(super) to: Epoch,
    pub(super) joins: bool,
    /// The layout that the rank serves until the switch; its shards stay until the release.
    pub(super) leaves: Option<HandoverId>,
    /// Whether the shadow is verified.
    pub(super) prepared: bool,
    incoming: BTreeSet<LaneId>,
    outgoing: BTreeSet<LaneId>,
    received: LaneMarks,
    /// Latest incarnation of each sequence that data came for.
    latest: BTreeMap<SequenceId, u32>,
    sent: LaneMarks,
    confirmed: LaneMarks,
    sends: bool,
    pub(super) mirrors: bool,
    pub(super) switched: Option<Switched>,
    planted: Planted,
}

/// What holds from the first step of the new layout on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Switched {
    first_step: StepId,
    /// Units that live on, with the marks that they need here.
    carried: BTreeMap<KvUnit, u32>,
    /// What this rank had computed in the old layout, and still owes to others.
    owed: BTreeMap<KvUnit, u32>,
    pub(super) computed_first: bool,
}

impl Movement {
    pub(super) fn new(
        id: HandoverId,
        to: Epoch,
        joins: bool,
        incoming: &[LaneId],
        outgoing: &[LaneId],
        planted: Planted,
    ) -> Self {
        Self {
            id,
            to,
            joins,
            leaves: None,
            prepared: false,
            incoming: incoming.iter().copied().collect(),
            outgoing: outgoing.iter().copied().collect(),
            received: LaneMarks::new(),
            latest: BTreeMap::new(),
            sent: LaneMarks::new(),
            confirmed: LaneMarks::new(),
            sends: false,
            mirrors: false,
            switched: None,
            planted,
        }
    }

    /// Sends from now on when asked to.
    pub(super) fn start_sending(&mut self) {
        self.sends = true;
    }

    /// What was computed and not sent, or owed after the switch.
    pub(super) fn ship(&mut self, computed: &BTreeMap<KvUnit, u32>) -> Vec<LaneData> {
        if !self.sends {
            return Vec::new();
        }
        let source = self.switched.as_ref().map_or(computed, |switched| &switched.owed);
        let mut data = Vec::new();
        for &lane in &self.outgoing {
            for (&unit, &to) in source {
                let sent = self.sent.entry((lane, unit)).or_default();
                if *sent < to {
                    data.push(LaneData {
                        handover: self.id,
                        lane,
                        unit,
                        from: *sent,
                        to,
                    });
                    *sent = to;
                }
            }
        }
        data
    }

    /// What a step has added, sent with that step.
    pub(super) fn mirror(&mut self, computed: &BTreeMap<KvUnit, u32>) -> Vec<LaneData> {
        let data = self.ship(computed);
        if self.mirrors && self.planted.is(Fault::SkipTail) {
            self.confirmed.clone_from(&self.sent);
            return Vec::new();
        }
        data
    }

    /// Everything unconfirmed is sent again.
    pub(super) fn resend(&mut self, computed: &BTreeMap<KvUnit, u32>) -> Vec<LaneData> {
        self.sent.clone_from(&self.confirmed);
        self.ship(computed)
    }

    pub(super) fn confirm(&mut self, ack: &LaneAck) {
        let key = (ack.lane, ack.mark.unit);
        let confirmed = self.confirmed.entry(key).or_default();
        *confirmed = (*confirmed).max(ack.mark.tokens);
        let sent = self.sent.entry(key).or_default();
        *sent = (*sent).max(ack.mark.tokens);
    }

    /// Takes data: what of it is new, and how much of the unit has arrived. `None` where it belongs to a unit
    /// that is gone.
    pub(super) fn receive(&mut self, data: &LaneData) -> Option<(Option<LaneData>, LaneAck)> {
        let unit = self.key(data.unit);
        let gone = self
            .switched
            .as_ref()
            .is_some_and(|switched| !switched.carried.contains_key(&unit));
        let latest = self.latest.entry(unit.sequence).or_insert(unit.incarnation);
        if gone || unit.incarnation < *latest || !self.incoming.contains(&data.lane) {
            return None;
        }
        *latest = unit.incarnation;
        let mark = self.received.entry((data.lane, unit)).or_default();
        let follows = data.from <= *mark || self.planted.is(Fault::AcceptGap);
        let fresh = (follows && data.to > *mark).then(|| LaneData {
            from: data.from.max(*mark),
            ..*data
        });
        if fresh.is_some() {
            *mark = data.to;
        }
        let ack = LaneAck {
            handover: self.id,
            lane: data.lane,
            mark: KvMark {
                unit: data.unit,
                tokens: *mark,
            },
        };
        Some((fresh, ack))
    }

    /// Every mark so far.
    pub(super) fn arrived(&self) -> impl Iterator<Item = (LaneId, KvMark)> {
        self.received
            .iter()
            .map(|(&(lane, unit), &tokens)| (lane, KvMark { unit, tokens }))
    }

    /// The first step of the new layout is here.
    pub(super) fn switch(
        &mut self,
        header: &StepHeader,
        carried: &[KvMark],
        computed: &BTreeMap<KvUnit, u32>,
    ) {
        self.sends = true;
        self.switched = Some(Switched {
            first_step: header.step,
            carried: carried
                .iter()
                .map(|mark| (self.key(mark.unit), mark.tokens))
                .collect(),
            owed: computed.clone(),
            computed_first: false,
        });
    }

    /// A unit has given its blocks back.
    pub(super) fn forget(&mut self, unit: KvUnit) {
        if self.planted.is(Fault::ForgetIncarnation) {
            return;
        }
        if let Some(switched) = &mut self.switched {
            switched.carried.remove(&unit);
            switched.owed.remove(&unit);
        }
        self.received.retain(|(_, owner), _| *owner != unit);
        self.sent.retain(|(_, owner), _| *owner != unit);
        self.confirmed.retain(|(_, owner), _| *owner != unit);
    }

    /// Whether everything that a step reads has arrived.
    pub(super) fn allows(&self, header: &StepHeader) -> bool {
        let Some(switched) = &self.switched else {
            return true;
        };
        self.planted.is(Fault::SwitchWithoutMarks)
            || header.items.iter().all(|item| {
                let unit = self.key(item.unit);
                switched
                    .carried
                    .get(&unit)
                    .is_none_or(|tokens| self.has(unit, *tokens))
            })
    }

    /// Whether the first step of the new layout is computed and every mark is complete.
    pub(super) fn is_settled(&self) -> bool {
        self.switched.as_ref().is_some_and(|switched| {
            let mut carried = switched.carried.iter();
            switched.computed_first && carried.all(|(unit, tokens)| self.has(*unit, *tokens))
        })
    }

    /// A step is computed.
    pub(super) fn computed(&mut self, step: StepId) {
        if let Some(switched) = &mut self.switched {
            switched.computed_first |= step >= switched.first_step;
        }
    }

    fn has(&self, unit: KvUnit, tokens: u32) -> bool {
        self.incoming
            .iter()
            .all(|lane| self.received.get(&(*lane, unit)).copied().unwrap_or(0) >= tokens)
    }

    fn key(&self, unit: KvUnit) -> KvUnit {
        let incarnation = if self.planted.is(Fault::ForgetIncarnation) {
            0
        } else {
            unit.incarnation
        };
        KvUnit { incarnation, ..unit }
    }
}
