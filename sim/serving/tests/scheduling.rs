//! Scheduling worked out by hand.

use infercluster_serving::{
    BlockLedger, FinishReason, NewSequence, Phase, Refusal, Scheduler, SchedulerError, StepPlan,
};
use infercluster_spec::{EngineOptions, KvBlockId, SequenceId, StepId};

const A: SequenceId = SequenceId(10);
const B: SequenceId = SequenceId(11);
const C: SequenceId = SequenceId(12);

/// A replica with blocks of 4 tokens.
fn scheduler(token_budget: u32, blocks: u32, stages: u32) -> Scheduler {
    let options = EngineOptions {
        token_budget,
        max_sequences: 8,
        max_context: Some(100),
    };
    let ledger = BlockLedger::identifying(blocks, 4).unwrap();
    Scheduler::new(options, stages, ledger).unwrap()
}

/// Items as (sequence, start, count, yields).
fn items(plan: &StepPlan) -> Vec<(SequenceId, u32, u32, bool)> {
    plan.items
        .iter()
        .map(|item| (item.sequence, item.start, item.count, item.yields_token))
        .collect()
}

/// Plans and completes one step.
fn run(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan_step().expect("there is work");
    scheduler.complete_step(plan.step, &[]).unwrap();
    scheduler.check().unwrap();
    plan
}

#[test]
fn a_long_prompt_shares_the_budget_with_decode() {
    let mut scheduler = scheduler(8, 16, 1);
    scheduler.add(NewSequence::new(A, 5, 3)).unwrap();
    scheduler.add(NewSequence::new(B, 10, 1)).unwrap();
    // 5 tokens of A leave 3 for B; A decodes beside the next 7 of B, which reach its end.
    assert_eq!(items(&run(&mut scheduler)), [(A, 0, 5, true), (B, 0, 3, false)]);
    let second = run(&mut scheduler);
    assert_eq!(items(&second), [(A, 5, 1, true), (B, 3, 7, true)]);
    assert_eq!(
        [second.items[0].phase, second.items[1].phase],
        [Phase::Decode, Phase::Prefill]
    );
    // A took blocks 0 and 1, B 2, then 3 and 4.
    assert_eq!(second.items[1].block_table, [2, 3, 4].map(KvBlockId));
    assert_eq!(items(&run(&mut scheduler)), [(A, 6, 1, true)]);
    assert_eq!(scheduler.plan_step(), None);
    assert_eq!(scheduler.ledger().free(), 16);
}

#[test]
fn a_dry_pool_preempts_the_latest() {
    // Two blocks each for 7 known tokens; position 8 needs a third, and there are four.
    let mut scheduler = scheduler(8, 4, 1);
    scheduler.add(NewSequence::new(A, 4, 9)).unwrap();
    scheduler.add(NewSequence::new(B, 4, 9)).unwrap();
    for _ in 0..5 {
        let plan = run(&mut scheduler);
        assert_eq!((plan.items.len(), plan.preempted.len()), (2, 0));
    }
    let dry = run(&mut scheduler);
    assert_eq!(items(&dry), [(A, 8, 1, true)]);
    assert_eq!(dry.preempted, [B]);
    // A has 3 of 4 blocks; B's 9 known tokens need 3, so it waits for A's end: its token 5 came with the step
    // above, 6, 7 and 8 follow.
    for position in 9..12 {
        assert_eq!(items(&run(&mut scheduler)), [(A, position, 1, true)]);
    }
    // B again: 9 known tokens, budget 8. The last one is a prefill of one token.
    let again = run(&mut scheduler);
    assert_eq!(items(&again), [(B, 0, 8, false)]);
    let rest = scheduler.plan_step().unwrap();
    assert_eq!(items(&rest), [(B, 8, 1, true)]);
    assert_eq!(rest.items[0].phase, Phase::Prefill);
    // 5 output tokens were known, so this is the one with index 5; 3 more follow.
    let outcome = scheduler.complete_step(rest.step, &[]).unwrap();
    assert_eq!(outcome.tokens[0].index, 5);
    run(&mut scheduler);
    assert_eq!(run(&mut scheduler).items[0].phase, Phase::Decode);
    let last = scheduler.plan_step().unwrap();
    let outcome = scheduler.complete_step(last.step, &[]).unwrap();
    assert_eq!(
        (
            outcome.finished[0].preemptions,
            outcome.finished[0].generated_tokens
        ),
        (1, 9)
    );
    assert_eq!((scheduler.running(), scheduler.waiting()), (0, 0));
}

#[test]
fn the_latest_gives_up_its_own_place() {
    // C holds the last block when it needs one more, and A and B come before it.
    let mut scheduler = scheduler(64, 3, 1);
    scheduler.add(NewSequence::new(A, 2, 3)).unwrap();
    scheduler.add(NewSequence::new(B, 2, 3)).unwrap();
    scheduler.add(NewSequence::new(C, 4, 3)).unwrap();
    run(&mut scheduler);
    let second = run(&mut scheduler);
    assert_eq!(items(&second), [(A, 2, 1, true), (B, 2, 1, true)]);
    assert_eq!(second.preempted, [C]);
}

#[test]
fn micro_batches_are_even_and_complete_in_order() {
    let mut scheduler = scheduler(64, 16, 2);
    for id in 0..3 {
        scheduler.add(NewSequence::new(SequenceId(id), 2, 2)).unwrap();
    }
    // Three sequences on two micro-batches: 2 and 1; then the pipeline is full.
    let first = scheduler.plan_step().unwrap();
    let second = scheduler.plan_step().unwrap();
    assert_eq!((first.items.len(), second.items.len()), (2, 1));
    assert_eq!(scheduler.plan_step(), None);
    let order = scheduler.complete_step(second.step, &[]);
    assert_eq!(
        order,
        Err(SchedulerError::OutOfOrder {
            step: StepId(1),
            oldest: Some(StepId(0))
        })
    );
    scheduler.complete_step(first.step, &[]).unwrap();
    // A sequence of the second micro-batch is in flight still: only the first two decode.
    let third = scheduler.plan_step().unwrap();
    assert_eq!(
        third.items.iter().map(|item| item.sequence.0).collect::<Vec<_>>(),
        [0, 1]
    );
    scheduler.check().unwrap();
}

#[test]
fn who_is_in_flight_keeps_its_blocks() {
    // Stage 0 holds A, stage 1 holds B; A needs a third block, B has the rest and is in flight.
    let mut scheduler = scheduler(64, 4, 2);
    scheduler.add(NewSequence::new(A, 8, 4)).unwrap();
    scheduler.add(NewSequence::new(B, 8, 4)).unwrap();
    let first = scheduler.plan_step().unwrap();
    let second = scheduler.plan_step().unwrap();
    assert_eq!(
        (items(&first), items(&second)),
        (vec![(A, 0, 8, true)], vec![(B, 0, 8, true)])
    );
    scheduler.complete_step(first.step, &[]).unwrap();
    assert_eq!(scheduler.plan_step(), None);
    scheduler.complete_step(second.step, &[]).unwrap();
    let third = scheduler.plan_step().unwrap();
    assert_eq!((items(&third), third.preempted), (vec![(A, 8, 1, true)], vec![B]));
}

#[test]
fn cancelled_sequences_leave_when_their_step_does() {
    let mut scheduler = scheduler(64, 8, 1);
    scheduler.add(NewSequence::new(A, 4, 4)).unwrap();
    scheduler.add(NewSequence::new(B, 4, 4)).unwrap();
    let plan = scheduler.plan_step().unwrap();
    assert!(scheduler.cancel(A));
    assert_eq!(scheduler.ledger().held(A), 1);
    let outcome = scheduler.complete_step(plan.step, &[B]).unwrap();
    assert_eq!(outcome.dropped, [A]);
    assert_eq!(outcome.finished[0].reason, FinishReason::EndedEarly);
    assert_eq!(scheduler.ledger().free(), 8);
    assert!(!scheduler.cancel(A));
    scheduler.check().unwrap();
}

#[test]
fn only_a_new_token_ends_a_sequence() {
    let mut scheduler = scheduler(4, 8, 1);
    scheduler.add(NewSequence::new(A, 6, 4)).unwrap();
    let chunk = scheduler.plan_step().unwrap();
    let error = scheduler.complete_step(chunk.step, &[A]);
    assert_eq!(
        error,
        Err(SchedulerError::NoToken {
            sequence: A,
            step: chunk.step
        })
    );
    // The refused call changed nothing.
    assert!(
        scheduler
            .complete_step(chunk.step, &[])
            .unwrap()
            .tokens
            .is_empty()
    );
}

#[test]
fn lost_kv_is_computed_again() {
    let mut scheduler = scheduler(64, 8, 2);
    scheduler.add(NewSequence::new(A, 4, 4)).unwrap();
    scheduler.add(NewSequence::new(B, 4, 4)).unwrap();
    run(&mut scheduler);
    let (one, two) = (scheduler.plan_step().unwrap(), scheduler.plan_step().unwrap());
    assert_eq!(scheduler.lose_kv(), [one.step, two.step]);
    assert_eq!(scheduler.ledger().free(), 8);
    scheduler.check().unwrap();
    // A has its first token, so 5 known tokens are prefilled and give its second.
    let again = scheduler.plan_step().unwrap();
    assert_eq!(items(&again), [(A, 0, 5, true)]);
    assert!(again.step > two.step, "numbers are never used twice");
    assert_eq!(again.items[0].phase, Phase::Prefill);
}

#[test]
fn what_can_never_run_is_refused() {
    let mut scheduler = scheduler(64, 4, 1);
    let refusal =
        |scheduler: &mut Scheduler, prompt, output| scheduler.add(NewSequence::new(A, prompt, output));
    assert_eq!(
        refusal(&mut scheduler, 0, 1),
        Err(Refusal::EmptyPrompt { sequence: A })
    );
    assert!(matches!(
        refusal(&mut scheduler, 1, 0),
        Err(Refusal::NothingToGenerate { .. })
    ));
    assert!(matches!(
        refusal(&mut scheduler, 90, 11),
        Err(Refusal::TooLong { context: 101, .. })
    ));
    assert!(matches!(
        refusal(&mut scheduler, u32::MAX, u32::MAX),
        Err(Refusal::TooLong { .. })
    ));
    // 18 tokens need 17 places; 16 are there. The last token of 17 is never computed.
    assert_eq!(
        refusal(&mut scheduler, 8, 10),
        Err(Refusal::PoolTooSmall {
            sequence: A,
            needed: 5,
            total: 4
        })
    );
    assert_eq!(refusal(&mut scheduler, 8, 9), Ok(()));
    assert_eq!(
        refusal(&mut scheduler, 8, 9),
        Err(Refusal::Duplicate { sequence: A })
    );
}

#[test]
fn limits_of_zero_are_refused() {
    let ledger = || BlockLedger::counting(4, 4).unwrap();
    let defaults = EngineOptions::default();
    for (options, stages) in [
        (
            EngineOptions {
                token_budget: 0,
                ..defaults
            },
            1,
        ),
        (
            EngineOptions {
                max_sequences: 0,
                ..defaults
            },
            1,
        ),
        (defaults, 0),
    ] {
        assert!(matches!(
            Scheduler::new(options, stages, ledger()),
            Err(SchedulerError::Zero { .. })
        ));
    }
}
