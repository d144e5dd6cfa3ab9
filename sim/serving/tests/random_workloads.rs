//! Random workloads against a slow, obvious model of what a KV cache holds.
//!
//! The model keeps, for every block, whose tokens at which positions were last written there. An item is
//! right only where everything before its start still stands in its blocks: that catches a lost block, a
//! block with two owners, a wrong start and a table that forgets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use infercluster_serving::{BlockLedger, KvUnit, NewSequence, Phase, Scheduler, StepPlan};
use infercluster_spec::{EngineOptions, KvBlockId, SequenceId};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Workload {
    token_budget: u32,
    max_sequences: u32,
    stages: u32,
    blocks: u32,
    block_size: u32,
    sequences: Vec<(u32, u32)>,
    /// What happens next: add, plan, complete, cancel, lose.
    choices: Vec<u8>,
}

fn workload() -> impl Strategy<Value = Workload> {
    (
        (1_u32..40, 1_u32..7, 1_u32..4, 1_u32..12, 1_u32..6),
        prop::collection::vec((1_u32..20, 1_u32..16), 1..12),
        prop::collection::vec(0_u8..100, 0..300),
    )
        .prop_map(
            |((token_budget, max_sequences, stages, blocks, block_size), sequences, choices)| Workload {
                token_budget,
                max_sequences,
                stages,
                blocks,
                block_size,
                sequences,
                choices,
            },
        )
}

/// The scheduler under test, its counting twin and the model.
struct Bench {
    scheduler: Scheduler,
    twin: Scheduler,
    block_size: u32,
    cache: BTreeMap<KvBlockId, Vec<Option<(SequenceId, u32)>>>,
    in_flight: VecDeque<StepPlan>,
    /// Prompt, asked and received tokens of each live sequence.
    live: BTreeMap<SequenceId, (u32, u32, u32)>,
    preempted: BTreeMap<SequenceId, u32>,
    released: BTreeSet<KvUnit>,
}

impl Bench {
    fn new(workload: &Workload) -> Self {
        let options = EngineOptions {
            token_budget: workload.token_budget,
            max_sequences: workload.max_sequences,
            max_context: None,
        };
        let (blocks, size) = (workload.blocks, workload.block_size);
        let make = |ledger| Scheduler::new(options, workload.stages, ledger).unwrap();
        Self {
            scheduler: make(BlockLedger::identifying(blocks, size).unwrap()),
            twin: make(BlockLedger::counting(blocks, size).unwrap()),
            block_size: size,
            cache: BTreeMap::new(),
            in_flight: VecDeque::new(),
            live: BTreeMap::new(),
            preempted: BTreeMap::new(),
            released: BTreeSet::new(),
        }
    }

    fn add(&mut self, id: SequenceId, prompt: u32, output: u32) {
        let new = NewSequence::new(id, prompt, output);
        let answer = self.scheduler.add(new);
        assert_eq!(answer, self.twin.add(new));
        if answer.is_ok() {
            self.live.insert(id, (prompt, output, 0));
        } else {
            assert!((prompt + output - 1).div_ceil(self.block_size) > self.scheduler.ledger().total());
        }
    }

    fn plan(&mut self) -> bool {
        let plan = self.scheduler.plan_step();
        let twin = self.twin.plan_step().map(|mut twin| {
            let real = plan.iter().flat_map(|plan| &plan.items);
            for (item, real) in twin.items.iter_mut().zip(real) {
                item.block_table.clone_from(&real.block_table);
            }
            twin
        });
        assert_eq!(plan, twin, "both ledger forms plan alike");
        let Some(plan) = plan else { return false };
        for victim in &plan.preempted {
            *self.preempted.entry(*victim).or_default() += 1;
        }
        for &unit in &plan.released {
            assert!(self.released.insert(unit), "a unit gives its blocks back once");
        }
        for item in &plan.items {
            assert!(
                !self.released.contains(&item.unit()),
                "a released unit is gone for good"
            );
            let (prompt, _, received) = self.live[&item.sequence];
            let end = item.start + item.count;
            assert_eq!(item.yields_token, end == prompt + received);
            if item.phase == Phase::Decode {
                assert_eq!((item.count, item.start + 1), (1, prompt + received));
            }
            self.write(item.sequence, &item.block_table, item.start, end);
        }
        self.in_flight.push_back(plan);
        true
    }

    /// Everything before `start` must stand in the table; then `start..end` is written.
    fn write(&mut self, sequence: SequenceId, table: &[KvBlockId], start: u32, end: u32) {
        let size = self.block_size;
        assert!(table.len() as u32 * size >= end);
        for position in 0..end {
            let block = self.cache.entry(table[(position / size) as usize]).or_default();
            block.resize(size as usize, None);
            let slot = &mut block[(position % size) as usize];
            if position < start {
                assert_eq!(*slot, Some((sequence, position)), "stale KV");
            } else {
                *slot = Some((sequence, position));
            }
        }
    }

    fn complete(&mut self) -> bool {
        let Some(plan) = self.in_flight.pop_front() else {
            return false;
        };
        let outcome = self.scheduler.complete_step(plan.step, &[]).unwrap();
        assert_eq!(outcome, self.twin.complete_step(plan.step, &[]).unwrap());
        for token in &outcome.tokens {
            let (_, _, received) = self
                .live
                .get_mut(&token.sequence)
                .expect("tokens are for the living");
            assert_eq!(token.index, *received, "each token once and in order");
            *received += 1;
        }
        for finished in &outcome.finished {
            let (_, output, received) = self.live.remove(&finished.sequence).unwrap();
            assert_eq!((received, finished.generated_tokens), (output, output));
            let preempted = self.preempted.remove(&finished.sequence).unwrap_or(0);
            assert_eq!(finished.preemptions, preempted);
        }
        true
    }

    fn cancel_oldest(&mut self) {
        if let Some((&id, _)) = self.live.first_key_value() {
            assert!(self.scheduler.cancel(id) && self.twin.cancel(id));
            // A token of it that comes all the same would find it dead.
            self.live.remove(&id);
        }
    }

    fn lose(&mut self) {
        let lost: Vec<_> = self.in_flight.drain(..).map(|plan| plan.step).collect();
        assert_eq!(self.scheduler.lose_kv(), lost);
        self.twin.lose_kv();
        self.cache.clear();
    }

    fn check(&self) {
        self.scheduler.check().unwrap();
        self.twin.check().unwrap();
        assert_eq!(self.scheduler.ledger().free(), self.twin.ledger().free());
    }
}

/// Runs the workload, then drains it: with nothing in flight there is always a next step.
fn drive(workload: &Workload) {
    let mut bench = Bench::new(workload);
    let mut next = workload.sequences.iter().enumerate();
    for &choice in &workload.choices {
        match choice {
            0..20 => {
                if let Some((index, &(prompt, output))) = next.next() {
                    bench.add(SequenceId(index as u64), prompt, output);
                }
            }
            20..60 => {
                bench.plan();
            }
            60..96 => {
                bench.complete();
            }
            96..99 => bench.cancel_oldest(),
            _ => bench.lose(),
        }
        bench.check();
    }
    // Every step computes at least one token of a finite number, recomputation included.
    for _ in 0..200_000 {
        while bench.plan() {}
        bench.check();
        if !bench.complete() {
            assert!(
                bench.live.is_empty(),
                "nothing in flight, and {:?} still live",
                bench.live
            );
            assert_eq!(bench.scheduler.ledger().free(), workload.blocks);
            return;
        }
    }
    unreachable!("the workload does not end");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_token_is_computed_from_its_own_kv(workload in workload()) {
        drive(&workload);
    }
}
