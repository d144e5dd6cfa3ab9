//! Single transitions, worked out by hand.

use infercluster_spec::{Epoch, GpuId, SequenceId, StepId, Term};

use super::super::*;

const STAMP: Stamp = Stamp {
    term: Term(1),
    epoch: Epoch(0),
};
const UNIT: KvUnit = KvUnit {
    sequence: SequenceId(1),
    incarnation: 0,
};

fn order(stamp: Stamp, command: Command) -> RankEvent {
    RankEvent::Order(Order { stamp, command })
}

fn notices(actions: &[RankAction]) -> Vec<Notice> {
    let told = actions.iter().filter_map(|action| match action {
        RankAction::Tell(answer) => Some(answer.notice.clone()),
        _ => None,
    });
    told.collect()
}

/// A worker that joins with one incoming lane and is ready.
fn joiner() -> Participant {
    let mut rank = Participant::new(GpuId(1));
    let handover = HandoverId(7);
    let prepare = Command::Prepare {
        handover,
        leaves_or_stays: false,
        joins: true,
        incoming: vec![LaneId(0)],
        outgoing: Vec::new(),
    };
    assert_eq!(rank.handle(order(STAMP, prepare)), [RankAction::Load(handover)]);
    let loaded = rank.handle(RankEvent::Loaded {
        layout: handover,
        result: Ok(()),
    });
    assert_eq!(notices(&loaded), [Notice::Ready { handover }]);
    rank
}

fn data(from: u32, to: u32) -> RankEvent {
    RankEvent::Data(LaneData {
        handover: HandoverId(7),
        lane: LaneId(0),
        unit: UNIT,
        from,
        to,
    })
}

/// Step 5, the first of epoch 1: the unit decodes at position 9.
fn first_step() -> StepHeader {
    StepHeader {
        stamp: Stamp {
            epoch: Epoch(1),
            ..STAMP
        },
        step: StepId(5),
        items: vec![ItemMark {
            unit: UNIT,
            start: 9,
            count: 1,
        }],
        released: Vec::new(),
        carried: Some(vec![KvMark {
            unit: UNIT,
            tokens: 9,
        }]),
    }
}

fn computes(actions: &[RankAction]) -> bool {
    actions
        .iter()
        .any(|action| matches!(action, RankAction::Compute { .. }))
}

#[test]
fn the_first_step_waits_for_the_tail() {
    let mut rank = joiner();
    rank.handle(data(0, 8));
    assert!(!computes(&rank.handle(RankEvent::Step(first_step()))));
    assert_eq!(rank.epoch(), Some(Epoch(1)));
    // 4..9 overlaps what is there: only position 8 is new.
    let actions = rank.handle(data(4, 9));
    assert!(computes(&actions));
    assert!(matches!(
        actions[0],
        RankAction::Apply(LaneData { from: 8, to: 9, .. })
    ));
    let done = rank.handle(RankEvent::StepDone(StepId(5)));
    let handover = HandoverId(7);
    assert_eq!(
        notices(&done),
        [Notice::Computed { step: StepId(5) }, Notice::Settled { handover }]
    );
}

#[test]
fn a_gap_is_no_token() {
    let mut rank = joiner();
    let actions = rank.handle(data(3, 9));
    assert!(
        !actions
            .iter()
            .any(|action| matches!(action, RankAction::Apply(_)))
    );
    let RankAction::Confirm(ack) = &actions[0] else {
        unreachable!("{actions:?}")
    };
    assert_eq!(ack.mark.tokens, 0);
}

#[test]
fn a_later_step_does_not_switch() {
    let mut rank = joiner();
    rank.handle(data(0, 9));
    let second = StepHeader {
        step: StepId(6),
        carried: None,
        ..first_step()
    };
    assert!(rank.handle(RankEvent::Step(second)).is_empty());
    assert_eq!(rank.epoch(), None);
    assert!(computes(&rank.handle(RankEvent::Step(first_step()))));
}

#[test]
fn lower_terms_and_epochs_are_refused() {
    let mut rank = joiner();
    let stale = Stamp {
        term: Term(0),
        ..STAMP
    };
    let abort = Command::Abort {
        handover: HandoverId(7),
    };
    assert!(rank.handle(order(stale, abort.clone())).is_empty());
    let mut header = first_step();
    header.stamp.term = Term(0);
    assert!(rank.handle(RankEvent::Step(header)).is_empty());
    rank.handle(data(0, 9));
    rank.handle(RankEvent::Step(first_step()));
    // Epoch 0 is over for this rank.
    assert!(rank.handle(order(STAMP, abort)).is_empty());
}

/// A coordinator of worker 0 that serves.
fn coordinator() -> Coordinator {
    let record = Record {
        term: Term(1),
        epoch: Epoch(0),
        layout: HandoverId(0),
        roster: [GpuId(0)].into(),
        first_step: StepId(0),
    };
    let mut coordinator = Coordinator::new(Term(1), &record, BTreeSet::new(), StepId(0));
    tell(&mut coordinator, GpuId(0), Notice::Adopted);
    assert!(coordinator.is_settled());
    coordinator
}

fn view(computed: &std::collections::BTreeMap<KvUnit, u32>) -> ServingView<'_> {
    ServingView {
        next_step: StepId(10),
        completed_below: StepId(14),
        lead: 3,
        is_idle: false,
        computed,
        step_tokens: 1,
    }
}

fn tell(coordinator: &mut Coordinator, from: GpuId, notice: Notice) -> Vec<CoordinatorAction> {
    let answer = Answer {
        term: Term(1),
        notice,
    };
    let computed = [(UNIT, 20)].into();
    coordinator.handle(CoordinatorEvent::Answer { from, answer }, view(&computed))
}

fn plan() -> HandoverPlan {
    HandoverPlan {
        id: HandoverId(7),
        old: [GpuId(0)].into(),
        new: [GpuId(1)].into(),
        lanes: vec![Lane {
            id: LaneId(0),
            from: GpuId(0),
            to: GpuId(1),
        }],
    }
}

fn arrived(tokens: u32) -> Notice {
    Notice::Arrived {
        handover: HandoverId(7),
        lane: LaneId(0),
        mark: KvMark { unit: UNIT, tokens },
    }
}

#[test]
fn the_record_names_a_future_step_and_holds_it() {
    let mut coordinator = coordinator();
    let handover = HandoverId(7);
    coordinator.begin(plan()).unwrap();
    assert_eq!(coordinator.begin(plan()), Err(HandoverError::Busy));
    for gpu in [0, 1] {
        tell(&mut coordinator, GpuId(gpu), Notice::Ready { handover });
    }
    // The first round must bring 20 tokens; then the sender mirrors, and one more round must be complete.
    assert!(tell(&mut coordinator, GpuId(1), arrived(19)).is_empty());
    let mirror = tell(&mut coordinator, GpuId(1), arrived(20));
    assert!(matches!(
        &mirror[..],
        [CoordinatorAction::Tell { to: GpuId(0), order }] if order.command == Command::Mirror { handover }
    ));
    tell(&mut coordinator, GpuId(0), Notice::Mirrors { handover });
    let write = tell(&mut coordinator, GpuId(1), arrived(20));
    let [CoordinatorAction::Write(record)] = &write[..] else {
        unreachable!("{write:?}")
    };
    assert_eq!((record.epoch, record.first_step), (Epoch(1), StepId(13)));
    // Steps below 13 run, 13 waits for the record.
    assert!(matches!(coordinator.gate(StepId(12)), Gate::Go { stamp, .. } if stamp.epoch == Epoch(0)));
    assert_eq!(coordinator.gate(StepId(13)), Gate::Hold);
    let computed = [].into();
    coordinator.handle(CoordinatorEvent::Written(handover), view(&computed));
    assert!(matches!(coordinator.gate(StepId(12)), Gate::Go { stamp, .. } if stamp.epoch == Epoch(0)));
    let first = coordinator.gate(StepId(13));
    assert!(matches!(first, Gate::Go { stamp, is_first: true, .. } if stamp.epoch == Epoch(1)));
    // Release only after the new rank has settled and the coordinator has the result of step 13.
    let early = ServingView {
        completed_below: StepId(13),
        ..view(&computed)
    };
    let settled = CoordinatorEvent::Answer {
        from: GpuId(1),
        answer: Answer {
            term: Term(1),
            notice: Notice::Settled { handover },
        },
    };
    assert!(coordinator.handle(settled.clone(), early).is_empty());
    let release = coordinator.handle(settled, view(&computed));
    assert_eq!(release.len(), 2);
}

#[test]
fn nothing_aborts_after_the_record() {
    let mut coordinator = coordinator();
    let handover = HandoverId(7);
    coordinator.begin(plan()).unwrap();
    for gpu in [0, 1] {
        tell(&mut coordinator, GpuId(gpu), Notice::Ready { handover });
    }
    tell(&mut coordinator, GpuId(1), arrived(20));
    tell(&mut coordinator, GpuId(0), Notice::Mirrors { handover });
    tell(&mut coordinator, GpuId(1), arrived(20));
    let computed = [].into();
    assert!(
        coordinator
            .handle(CoordinatorEvent::Deadline, view(&computed))
            .is_empty()
    );
    coordinator.handle(CoordinatorEvent::Written(handover), view(&computed));
    let lost = coordinator.handle(CoordinatorEvent::RankLost(GpuId(1)), view(&computed));
    assert_eq!(lost, [CoordinatorAction::TakeTerm { above: Term(1) }]);
    let record = Record {
        term: Term(1),
        epoch: Epoch(1),
        layout: handover,
        roster: [GpuId(1)].into(),
        first_step: StepId(13),
    };
    let term = Term(2);
    let actions = coordinator.handle(CoordinatorEvent::TermTaken { term, record }, view(&computed));
    assert!(actions.contains(&CoordinatorAction::LoseKv));
    let end = HandoverEnd::Committed {
        handover,
        with_loss: true,
    };
    assert!(actions.contains(&CoordinatorAction::Ended(end)));
    assert_eq!(
        coordinator.stamp(),
        Stamp {
            term,
            epoch: Epoch(1)
        }
    );
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    let refuse = |change: &dyn Fn(&mut HandoverPlan)| {
        let mut bad = plan();
        change(&mut bad);
        coordinator().begin(bad).unwrap_err()
    };
    assert_eq!(
        refuse(&|plan| plan.old = [GpuId(3)].into()),
        HandoverError::WrongStart
    );
    assert_eq!(refuse(&|plan| plan.new.clear()), HandoverError::Empty);
    assert!(matches!(
        refuse(&|plan| plan.id = HandoverId(0)),
        HandoverError::UsedId { .. }
    ));
    assert!(matches!(
        refuse(&|plan| plan.lanes[0].to = GpuId(0)),
        HandoverError::BadLane { .. }
    ));
}
