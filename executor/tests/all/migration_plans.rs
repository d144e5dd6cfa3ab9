//! A plan is carried out as it says, or refused by the name of what its layouts do not need.

use std::collections::BTreeMap;

use infercluster_executor::coordinator::{
    Coordinator, MigrationError, MigrationPhase as Progress, MigrationReport, needed_transfers,
};
use infercluster_executor::generate::{GenerateOptions, generate};
use infercluster_spec::layout::Reduction;
use infercluster_spec::migration::{MigrationPhase, Transfer, TransferItem, TransferSource, WeightKind};
use infercluster_spec::{Bytes, GpuId, IndexRange, Layout, MigrationPlan, ReplicaId};

use crate::support::{Cuts, EVEN, UNEVEN, WHOLE, layout, made, model, options, prompts};

fn plan(layouts: &[Layout]) -> MigrationPlan {
    let phase = |way: &[Layout]| MigrationPhase {
        to: way[1].clone(),
        transfers: needed_transfers(&model(), &way[0], &way[1]),
        memory_peak: BTreeMap::new(),
        duration_bound: None,
        duration: None,
        pause: None,
    };
    MigrationPlan {
        from: layouts[0].clone(),
        phases: layouts.windows(2).map(phase).collect(),
    }
}

fn migrate(coordinator: &Coordinator, plan: MigrationPlan) -> Result<Vec<MigrationReport>, MigrationError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(coordinator.migrate_along(plan))
}

/// The first transfer of KV, and the first of a matrix.
fn first(plan: &MigrationPlan, is_kv: bool) -> usize {
    let is_wanted = |transfer: &Transfer| matches!(transfer.item, TransferItem::Kv { .. }) == is_kv;
    plan.phases[0].transfers.iter().position(is_wanted).unwrap()
}

type Change = fn(&mut MigrationPlan);

/// What is done to a good plan, and what must be said about it.
const FAULTS: [(Change, &str); 13] = [
    (
        |plan| {
            let kv = first(plan, true);
            plan.phases[0].transfers.remove(kv);
        },
        "phase 1 does not carry kv heads 2..3 of layer 0 to gpu 0, which needs them",
    ),
    (
        |plan| {
            let weights = first(plan, false);
            plan.phases[0].transfers.remove(weights);
        },
        "phase 1 does not carry query heads 3..5 of layer 0 to gpu 0, which needs them",
    ),
    (
        |plan| {
            let again = plan.phases[0].transfers[first(plan, true)].clone();
            plan.phases[0].transfers.push(again);
        },
        "carries kv heads 2..3 of layer 0 to gpu 0 a second time",
    ),
    (
        |plan| {
            let kv = first(plan, true);
            plan.phases[0].transfers[kv].from = TransferSource::Gpu(GpuId(0));
        },
        "reads kv heads 2..3 of layer 0 from gpu 0, which does not hold them",
    ),
    (
        |plan| {
            let kv = first(plan, true);
            plan.phases[0].transfers[kv].from = TransferSource::Disk;
        },
        "reads kv, which is nowhere but on devices, from disk",
    ),
    (
        |plan| {
            let weights = first(plan, false);
            plan.phases[0].transfers[weights].from = TransferSource::Gpu(GpuId(1));
        },
        "reads weights, which this executor takes from the checkpoint, from gpu 1",
    ),
    (
        |plan| {
            let kv = first(plan, true);
            plan.phases[0].transfers[kv].to = GpuId(1);
        },
        "carries kv heads 2..3 of layer 0 to gpu 1, which has them or does not need them",
    ),
    (
        |plan| {
            let kv = first(plan, true);
            plan.phases[0].transfers[kv].bytes += Bytes(1);
        },
        // Key and value of one head of 8 numbers, four bytes each.
        "moves 65 B of each token, its kv heads take 64 B",
    ),
    (
        |plan| {
            let weights = first(plan, false);
            if let TransferItem::Weights { layers, .. } = &mut plan.phases[0].transfers[weights].item {
                *layers = IndexRange::new(0, u32::MAX).unwrap();
            }
        },
        "transfer 1 of phase 1 carries layers 0..4294967295, the model has 4",
    ),
    (
        |plan| {
            let kv = first(plan, true);
            if let TransferItem::Kv { replica, .. } = &mut plan.phases[0].transfers[kv].item {
                *replica = ReplicaId(1);
            }
        },
        "carries kv of replica 1, there is only replica 0",
    ),
    (
        |plan| {
            // The head is there whole on both sides of a wider cut.
            let transfers = &mut plan.phases[0].transfers;
            let is_head = |transfer: &Transfer| {
                matches!(
                    transfer.item,
                    TransferItem::Weights {
                        kind: WeightKind::LmHead,
                        ..
                    }
                )
            };
            transfers.retain(|transfer| !is_head(transfer));
        },
        "phase 1 does not carry LM head rows 48..68 to gpu 0, which needs them",
    ),
    (|plan| plan.phases.clear(), "the plan has no phase"),
    (
        // Found before the first phase begins.
        |plan| plan.phases[1].transfers.clear(),
        "phase 2 does not carry",
    ),
];

#[test]
fn a_plan_that_its_layouts_do_not_bear_out_is_refused_by_name() {
    let folder = made();
    let (even, uneven) = (
        layout(&EVEN, Reduction::Invariant),
        layout(&UNEVEN, Reduction::Invariant),
    );
    let coordinator = Coordinator::start(options(folder.path(), even.clone())).unwrap();
    let good = plan(&[even.clone(), uneven.clone(), even.clone()]);
    for (change, expected) in FAULTS {
        let mut bad = good.clone();
        change(&mut bad);
        let error = migrate(&coordinator, bad).unwrap_err();
        assert!(matches!(error, MigrationError::Plan(_)), "{error:?}");
        assert!(
            error.to_string().contains(expected),
            "{error}\nexpected: {expected}"
        );
    }
    let elsewhere = migrate(&coordinator, plan(&[uneven, even]))
        .unwrap_err()
        .to_string();
    assert!(
        elsewhere.contains("does not start at the layout in force"),
        "{elsewhere}"
    );
    assert!(
        coordinator.migration_blocking().unwrap().is_none(),
        "nothing began"
    );
}

#[test]
fn a_plan_says_who_gives_kv() {
    // KV head 1 is held by both ranks of the even layout; whoever is named gives it.
    const LONG_FIRST: Cuts = Cuts {
        layers: &[0, 3, 4],
        ..WHOLE
    };
    let folder = made();
    let (even, staged) = (
        layout(&EVEN, Reduction::Invariant),
        layout(&LONG_FIRST, Reduction::Invariant),
    );
    let coordinator = Coordinator::start(options(folder.path(), even.clone())).unwrap();
    let all = GenerateOptions {
        max_tokens: 20,
        ignore_eos: true,
        logits: false,
        logits_hash: true,
    };
    let undisturbed = generate(&coordinator, &prompts(&[3, 30]), &all).unwrap();
    let there_and_back = plan(&[even.clone(), staged, even]);
    let reports = migrate(&coordinator, there_and_back).unwrap();
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|report| report.phase == Progress::Done));
    assert_eq!(
        generate(&coordinator, &prompts(&[3, 30]), &all).unwrap(),
        undisturbed
    );
}
