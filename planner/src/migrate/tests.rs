//! Conservation: after its transfers every device holds exactly what its new shards need, and every source
//! had what it gave.

use std::collections::BTreeSet;

use infercluster_spec::IndexRange;
use infercluster_spec::layout::Reduction;
use infercluster_spec::memory;
use infercluster_spec::migration::{TransferItem, TransferSource, WeightKind};
use proptest::prelude::*;

use super::*;
use crate::fixtures::model;
use crate::proportional::{ProportionalRequest, proportional_layout};
use crate::proportions::Proportions;

/// One index of one matrix of one layer, or one KV head of one layer of one replica.
type Atom = (Option<WeightKind>, u32, u32);

/// What a device holds, index by index, straight from its shards.
fn atoms(layout: &Layout, model: &Model) -> BTreeMap<GpuId, BTreeSet<Atom>> {
    let mut all: BTreeMap<GpuId, BTreeSet<Atom>> = BTreeMap::new();
    for replica in &layout.replicas {
        for group in replica.stages.iter().flat_map(|stage| &stage.layer_groups) {
            for shard in &group.shards {
                let held = all.entry(shard.gpu).or_default();
                for layer in group.layers.iter() {
                    let heads = || shard.query_heads.iter();
                    let kv: BTreeSet<u32> = heads().map(|head| head / model.group_size()).collect();
                    held.extend(heads().map(|head| (Some(WeightKind::Query), layer, head)));
                    held.extend(kv.iter().map(|head| (Some(WeightKind::KeyValue), layer, *head)));
                    held.extend(kv.iter().map(|head| (None, layer, *head)));
                    let columns = || shard.mlp_columns.iter();
                    held.extend(columns().map(|column| (Some(WeightKind::GateUp), layer, column)));
                    held.extend((0..model.hidden).map(|index| (Some(WeightKind::Norms), layer, index)));
                    match shard.output_rows {
                        Some(rows) => {
                            held.extend(rows.iter().map(|row| (Some(WeightKind::Output), layer, row)));
                            held.extend(rows.iter().map(|row| (Some(WeightKind::Down), layer, row)));
                        }
                        None => {
                            held.extend(heads().map(|head| (Some(WeightKind::Output), layer, head)));
                            held.extend(columns().map(|column| (Some(WeightKind::Down), layer, column)));
                        }
                    }
                }
                let rows = shard.vocab.into_iter().flat_map(IndexRange::iter);
                held.extend(rows.map(|row| (Some(WeightKind::LmHead), model.layers, row)));
            }
        }
    }
    all
}

fn carried(item: &TransferItem, model: &Model) -> Vec<Atom> {
    let (kind, layers, indices) = match item {
        TransferItem::Weights {
            kind,
            layers,
            indices,
        } => (Some(*kind), *layers, *indices),
        TransferItem::Kv { layers, kv_heads, .. } => (None, *layers, *kv_heads),
    };
    let layers: Vec<u32> = if kind == Some(WeightKind::LmHead) {
        assert!(layers.is_empty());
        vec![model.layers]
    } else {
        layers.iter().collect()
    };
    let cells = layers.into_iter();
    cells
        .flat_map(|layer| indices.iter().map(move |index| (kind, layer, index)))
        .collect()
}

/// Carries a plan out on sets of indices.
fn carry_out(plan: &MigrationPlan, model: &Model, options: &MigrationOptions) -> usize {
    let mut held = atoms(&plan.from, model);
    let mut moved = 0;
    for phase in &plan.phases {
        validate_layout(&phase.to, model, None).unwrap();
        let before = held.clone();
        for transfer in &phase.transfers {
            for atom in carried(&transfer.item, model) {
                match transfer.from {
                    TransferSource::Disk => assert!(atom.0.is_some(), "KV is on no disk"),
                    TransferSource::Gpu(gpu) => assert!(before[&gpu].contains(&atom), "{gpu} lacks {atom:?}"),
                }
                let new = held.entry(transfer.to).or_default().insert(atom);
                assert!(new, "{} already has {atom:?}", transfer.to);
                moved += 1;
            }
        }
        for (gpu, held) in &held {
            check_peak(*gpu, held, phase, model, options);
        }
        // Nothing but what is needed stays, and nothing that is needed lacks.
        let needed = atoms(&phase.to, model);
        for (gpu, needed) in &needed {
            let has = held.get(gpu).cloned().unwrap_or_default();
            assert!(
                needed.is_subset(&has),
                "{gpu} lacks {:?}",
                needed.difference(&has).next()
            );
        }
        held = needed;
    }
    moved
}

/// A phase states what old and new slices of a device weigh together, and that fits beside its KV.
fn check_peak(
    gpu: GpuId,
    held: &BTreeSet<Atom>,
    phase: &MigrationPhase,
    model: &Model,
    options: &MigrationOptions,
) {
    let reduction = phase.to.reduction;
    let weights = held.iter().filter_map(|atom| atom.0);
    let weights: Bytes = weights
        .map(|kind| slice_bytes(model, reduction, kind, 1, false))
        .sum();
    let stated = phase.memory_peak[&gpu];
    // Indices do not tell who holds the final norm.
    let norm = model.dtype.bytes(u64::from(model.hidden));
    assert!(
        weights <= stated && stated <= weights + norm,
        "{gpu}: {weights} held, {stated} stated"
    );
    let kv_heads = held.iter().filter(|atom| atom.0.is_none()).count() as u64;
    let kv = model.kv_bytes_per_token_layer(1, phase.to.kv.dtype) * kv_heads * options.live_tokens.0;
    let free = options.memory.get(&gpu);
    assert!(free.is_none_or(|free| weights + kv <= *free), "{gpu} overflows");
}

fn made(model: &Model, stages: &str, heads: &str, mlp: &str, reduction: Reduction) -> Layout {
    let stages: Proportions = stages.parse().unwrap();
    let heads: Proportions = heads.parse().unwrap();
    let request = ProportionalRequest {
        quantum: 1,
        split_groups: true,
        reduction,
        mlp: Some(mlp.parse().unwrap()),
        ..ProportionalRequest::equal((stages.len() * heads.len()) as u32)
    };
    let request = ProportionalRequest {
        stages: Some(stages),
        heads: Some(heads),
        ..request
    };
    proportional_layout(model, &request).unwrap()
}

#[test]
fn holdings_weigh_what_seats_weigh() {
    for reduction in [Reduction::Fast, Reduction::Invariant] {
        for qkv_bias in [false, true] {
            let model = Model {
                qkv_bias,
                ..model(3, 12, 6, 320)
            };
            let layout = made(&model, "2:1", "5:7", "3:1", reduction);
            let held = holdings(&layout, &model);
            for seat in memory::seats(&layout, &model) {
                let held = &held[&seat.gpu];
                assert_eq!(held.weight_bytes(&model, reduction), seat.memory.weights);
                let block = held.kv_token_bytes(&layout, &model) * u64::from(layout.kv.block_size);
                assert_eq!(block, seat.memory.kv_block);
            }
        }
    }
}

#[test]
fn shares_by_hand() {
    // 10 heads of own KV, 50:50 to 70:30: heads 5 and 6 move to gpu 0, with 2 of 10 columns.
    let model = model(2, 10, 10, 10);
    let from = made(&model, "1", "5:5", "5:5", Reduction::Fast);
    let to = made(&model, "1", "7:3", "7:3", Reduction::Fast);
    let plan = plan_migration(&from, &to, &model, &MigrationOptions::default()).unwrap();
    assert_eq!(plan.phases.len(), 1);
    let texts: Vec<String> = plan.phases[0]
        .transfers
        .iter()
        .map(|transfer| match transfer.item {
            TransferItem::Weights {
                kind,
                layers,
                indices,
            } => {
                format!(
                    "{kind:?} {layers} {indices} {:?} {}",
                    transfer.from, transfer.bytes.0
                )
            }
            TransferItem::Kv { layers, kv_heads, .. } => {
                format!("Kv {layers} {kv_heads} {:?} {}", transfer.from, transfer.bytes.0)
            }
        })
        .collect();
    // Two layers, f32: a query head has 8 x 96 numbers, a KV head twice that, a column 2 x 96, and so on; the
    // vocabulary of 50 goes from 25 to 35 rows. KV: 2 layers x 2 heads x 2 x 8 x 4 bytes a token.
    assert_eq!(
        texts,
        [
            "Query 0..2 5..7 Disk 12288",
            "KeyValue 0..2 5..7 Disk 24576",
            "Output 0..2 5..7 Disk 12288",
            "GateUp 0..2 5..7 Disk 3072",
            "Down 0..2 5..7 Disk 1536",
            "LmHead 2..2 25..35 Disk 3840",
            "Kv 0..2 5..7 Gpu(GpuId(1)) 256",
        ]
    );
    assert!(
        plan.phases[0]
            .transfers
            .iter()
            .all(|transfer| transfer.to == GpuId(0))
    );
    carry_out(&plan, &model, &MigrationOptions::default());
}

#[test]
fn layers_by_hand() {
    // PP 2:1 to 1:2: layer 1 moves from gpu 0 to gpu 1, the head stays.
    let model = model(3, 4, 2, 32);
    let from = made(&model, "2:1", "1", "1", Reduction::Invariant);
    let to = made(&model, "1:2", "1", "1", Reduction::Invariant);
    let options = MigrationOptions {
        weight_source: WeightSource::Holders,
        ..MigrationOptions::default()
    };
    let plan = plan_migration(&from, &to, &model, &options).unwrap();
    let layer = IndexRange::new(1, 2).unwrap();
    let transfers = &plan.phases[0].transfers;
    assert_eq!(transfers.len(), 7);
    for transfer in transfers {
        assert_eq!(
            (transfer.from, transfer.to),
            (TransferSource::Gpu(GpuId(0)), GpuId(1))
        );
        match transfer.item {
            TransferItem::Weights { layers, .. } | TransferItem::Kv { layers, .. } => {
                assert_eq!(layers, layer)
            }
        }
    }
    let weights = transfers
        .iter()
        .filter(|transfer| matches!(transfer.item, TransferItem::Weights { .. }));
    assert_eq!(
        weights.map(|transfer| transfer.bytes).sum::<Bytes>(),
        model.dtype.bytes(model.layer_params())
    );
    // A view of what is held moves nothing.
    let nothing = plan_migration(&to, &to, &model, &options).unwrap();
    assert_eq!(nothing.phases[0].transfers, []);
}

#[test]
fn phases_split_by_layers() {
    let model = model(6, 10, 10, 100);
    let from = made(&model, "1", "5:5", "5:5", Reduction::Invariant);
    let to = made(&model, "1", "9:1", "9:1", Reduction::Invariant);
    let held =
        |layout: &Layout, gpu| holdings(layout, &model)[&GpuId(gpu)].weight_bytes(&model, from.reduction);
    let whole = |memory: Bytes, gpu| MigrationOptions {
        memory: [(GpuId(gpu), memory)].into(),
        ..MigrationOptions::default()
    };
    // Gpu 0 keeps its old rows and gets more: the peak is the new shard, one phase.
    let plan = plan_migration(&from, &to, &model, &whole(held(&to, 0), 0)).unwrap();
    assert_eq!(plan.phases.len(), 1);
    // Where the ranges of a device shift, old and new have little in common.
    let swapped = made(&model, "1", "1:5:4", "1:5:4", Reduction::Invariant);
    let from = made(&model, "1", "5:4:1", "5:4:1", Reduction::Invariant);
    let free = held(&swapped, 1) + Bytes(held(&swapped, 1).0 / 3);
    let options = whole(free, 1);
    let plan = plan_migration(&from, &swapped, &model, &options).unwrap();
    assert!(plan.phases.len() > 1, "{} phases", plan.phases.len());
    assert_eq!(plan.phases.last().unwrap().to, swapped);
    carry_out(&plan, &model, &options);
    // Less than the target itself needs can never work.
    let options = whole(Bytes(held(&swapped, 1).0 - 1), 1);
    let error = plan_migration(&from, &swapped, &model, &options).unwrap_err();
    assert!(
        matches!(error, MigrationError::Memory { gpu: GpuId(1), .. }),
        "{error}"
    );
}

#[test]
fn what_must_be_common_is_refused() {
    let model = model(2, 4, 2, 32);
    let from = made(&model, "1", "1:1", "1:1", Reduction::Fast);
    let refuse = |change: fn(&mut Layout)| {
        let mut to = from.clone();
        change(&mut to);
        match plan_migration(&from, &to, &model, &MigrationOptions::default()) {
            Err(MigrationError::Differs { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refuse(|to| to.kv.block_size = 8), Common::BlockSize);
    assert_eq!(
        refuse(|to| to.kv.dtype = infercluster_spec::Dtype::Bf16),
        Common::KvDtype
    );
    assert_eq!(refuse(|to| to.numerics = "cuda/1".to_owned()), Common::Numerics);
    assert_eq!(refuse(|to| to.model = "other".to_owned()), Common::Model);
    let mut gap = from.clone();
    gap.replicas[0].stages[0].layer_groups[0].shards.pop();
    let error = plan_migration(&from, &gap, &model, &MigrationOptions::default()).unwrap_err();
    assert!(matches!(error, MigrationError::To(_)), "{error}");
}

prop_compose! {
    fn layouts()(
        reduction in prop_oneof![Just(Reduction::Fast), Just(Reduction::Invariant)],
        shapes in prop::collection::vec(
            (1_usize..4, 1_usize..4, prop::collection::vec(0_u32..6, 12), any::<[u8; 9]>()), 2,
        ),
    ) -> (Model, Vec<Layout>) {
        let model = model(5, 6, 3, 40);
        let weights = |list: &[u32]| {
            let mut list = list.to_vec();
            list[0] = list[0].max(1);
            Some(Proportions::new(list).unwrap())
        };
        let make = |(stages, ranks, draws, order): &(usize, usize, Vec<u32>, [u8; 9])| {
            let stage_weights = draws[..*stages].iter().map(|weight| weight + 3).collect::<Vec<_>>();
            let request = ProportionalRequest {
                quantum: 1 + draws[11],
                split_groups: true,
                reduction,
                stages: weights(&stage_weights),
                heads: weights(&draws[3..3 + ranks]),
                mlp: weights(&draws[6..6 + ranks]),
                ..ProportionalRequest::equal((stages * ranks) as u32)
            };
            let mut layout = proportional_layout(&model, &request).unwrap();
            // Half of the layouts have their devices dealt out in another order.
            let mut dealt: Vec<u32> = (0..layout.gpus.len() as u32).collect();
            if order[0] % 2 == 0 {
                dealt.sort_by_key(|gpu| order[*gpu as usize]);
            }
            let shards = layout.replicas[0].stages.iter_mut().flat_map(|stage| &mut stage.layer_groups);
            for shard in shards.flat_map(|group| &mut group.shards) {
                shard.gpu = GpuId(dealt[shard.gpu.index()]);
            }
            layout
        };
        let layouts = shapes.iter().map(make).collect();
        (model, layouts)
    }
}

proptest! {
    #[test]
    fn every_seat_ends_with_what_it_needs(
        (model, layouts) in layouts(), tight in 0_u64..=8, holders: bool, live in 0_u64..50,
    ) {
        let (from, to) = (&layouts[0], &layouts[1]);
        let weight_source = if holders { WeightSource::Holders } else { WeightSource::Disk };
        let free = MigrationOptions { weight_source, live_tokens: Tokens(live), ..MigrationOptions::default() };
        let plan = plan_migration(from, to, &model, &free).unwrap();
        prop_assert_eq!(plan.phases.len(), 1);
        carry_out(&plan, &model, &free);
        // Limits between what either end needs and what both need together.
        let both = diff::Step::new(from, to, &model).memory_peaks(free.live_tokens);
        let ends = [
            diff::Step::new(from, from, &model).memory_peaks(free.live_tokens),
            diff::Step::new(to, to, &model).memory_peaks(free.live_tokens),
        ];
        let memory = both.into_iter().map(|(gpu, both)| {
            let least = ends.iter().filter_map(|end| end.get(&gpu)).max().copied().unwrap_or_default();
            (gpu, Bytes(least.0 + (both.0 - least.0) * tight / 8))
        });
        let options = MigrationOptions { memory: memory.collect(), ..free };
        match plan_migration(from, to, &model, &options) {
            Ok(plan) => {
                carry_out(&plan, &model, &options);
                prop_assert!(tight == 8 || !plan.phases.is_empty());
            }
            Err(MigrationError::Memory { gpu, needed, free, .. }) => {
                prop_assert!(tight < 8 && needed > free && options.memory[&gpu] == free);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}
