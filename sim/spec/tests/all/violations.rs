//! Every rule of the validator, broken one at a time and several at once.

use infercluster_spec::layout::{Layout, Reduction, Stage};
use infercluster_spec::validate::{LayoutViolations, validate_layout};
use infercluster_spec::{Bytes, Cluster, GpuId, IndexRange};

use crate::documents::{cluster, layout, model};

fn range(start: u32, end: u32) -> IndexRange {
    IndexRange::new(start, end).unwrap()
}

fn violations(layout: &Layout, cluster: &Cluster) -> LayoutViolations {
    validate_layout(layout, &model(), Some(cluster)).unwrap_err()
}

/// Changes the example and expects exactly these violations, each by a part of its message.
fn check(change: impl FnOnce(&mut Layout), expected: &[&str]) {
    let mut changed = layout();
    change(&mut changed);
    let found: Vec<String> = violations(&changed, &cluster())
        .0
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(found.len(), expected.len(), "{found:#?} should be {expected:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "`{found}` should hold `{expected}`");
    }
}

fn stage(layout: &mut Layout, index: usize) -> &mut Stage {
    &mut layout.replicas[0].stages[index]
}

#[test]
fn cuts_cover_everything_once() {
    let heads = |range: IndexRange| {
        move |layout: &mut Layout| stage(layout, 0).layer_groups[0].shards[1].query_heads = range
    };
    let place = "replica 0 stage 0 layers 0..24: ";
    check(
        heads(range(26, 32)),
        &[&format!("{place}query heads 24..26 are held by no shard")],
    );
    check(
        heads(range(22, 32)),
        &["query heads 22..24 are held twice or out of rank order"],
    );
    check(
        heads(range(24, 40)),
        &["query heads 32..40 lie past the model's 32"],
    );
    check(
        heads(range(24, u32::MAX)),
        &["query heads 32..4294967295 lie past"],
    );
    check(heads(range(0, 0)), &["query heads 24..32 are held by no shard"]);
    check(
        |layout| stage(layout, 0).layer_groups[0].shards[0].mlp_columns = range(0, 9536),
        &["mlp columns 9536..9600 are held by no shard"],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].shards[0].vocab = Some(range(0, 128_255)),
        &["vocabulary rows 128255..128256 are held by no shard"],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].layers = range(26, 32),
        &["replica 0: layers 24..26 are held by no shard"],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].layers = range(24, 33),
        &["replica 0: layers 32..33 lie past the model's 32"],
    );
    let experts = |held: u32| {
        move |layout: &mut Layout| stage(layout, 1).layer_groups[0].shards[0].experts = vec![held]
    };
    check(experts(0), &["experts 0..1 lie past the model's 0"]);
    check(
        experts(u32::MAX),
        &["are held by no shard", "lie past the model's 0"],
    );
}

#[test]
fn output_rows_belong_to_the_invariant_reduction() {
    let rows = "output rows of gpu 0 must be present exactly in the invariant reduction";
    check(
        |layout| stage(layout, 0).layer_groups[0].shards[0].output_rows = Some(range(0, 4096)),
        &[rows],
    );
    check(
        |layout| layout.reduction = Reduction::Invariant,
        &[
            rows,
            "output rows of gpu 1 must be present",
            "output rows of gpu 2 must be present",
        ],
    );
    check(
        |layout| {
            layout.reduction = Reduction::Invariant;
            let rows = [range(0, 2048), range(2050, 4096)];
            for (shard, rows) in stage(layout, 0).layer_groups[0].shards.iter_mut().zip(rows) {
                shard.output_rows = Some(rows);
            }
            stage(layout, 1).layer_groups[0].shards[0].output_rows = Some(range(0, 4096));
        },
        &["output rows 2048..2050 are held by no shard"],
    );
}

#[test]
fn the_head_belongs_to_the_last_layers() {
    let rule = "present exactly in the last layer group of the last stage";
    check(
        |layout| stage(layout, 0).layer_groups[0].shards[1].vocab = Some(range(0, 1)),
        &[&format!("vocabulary rows of gpu 1 must be {rule}")],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].shards[0].vocab = None,
        &[&format!("vocabulary rows of gpu 2 must be {rule}")],
    );
}

#[test]
fn devices_are_known_and_have_one_seat() {
    check(
        |layout| layout.gpus.push(GpuId(9)),
        &["gpus: gpu 9 is not among the known devices (0, 1, 2)"],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].shards[0].gpu = GpuId(7),
        &["replica 0 stage 1: gpu 7 is not among the known devices (0, 1, 2)"],
    );
    check(
        |layout| layout.gpus.push(GpuId(0)),
        &["gpus: gpu 0 already has a seat in this layout"],
    );
    check(
        |layout| stage(layout, 1).layer_groups[0].shards[0].gpu = GpuId(0),
        &["replica 0 stage 1: gpu 0 already has a seat"],
    );
    check(
        |layout| {
            let mut second = stage(layout, 0).layer_groups[0].clone();
            stage(layout, 0).layer_groups[0].layers = range(0, 10);
            second.layers = range(10, 24);
            for (shard, gpu) in second.shards.iter_mut().zip([1, 0]) {
                shard.gpu = GpuId(gpu);
            }
            stage(layout, 0).layer_groups.push(second);
        },
        &["replica 0 stage 0: layers 10..24 name other devices or another rank order"],
    );
}

#[test]
fn lists_and_counts_are_not_empty() {
    check(|layout| layout.replicas.clear(), &["layout: there is no replica"]);
    check(
        |layout| layout.replicas[0].stages.clear(),
        &[
            "replica 0: there is no stage",
            "replica 0: layers 0..32 are held by no shard",
        ],
    );
    check(
        |layout| stage(layout, 0).layer_groups.clear(),
        &[
            "replica 0: layers 0..24 are held by no shard",
            "replica 0 stage 0: there is no layer group",
        ],
    );
    check(
        |layout| {
            let mut empty = stage(layout, 0).layer_groups[0].clone();
            empty.layers = range(24, 24);
            stage(layout, 0).layer_groups.push(empty);
        },
        &["replica 0 stage 0 layers 24..24: there is no layer"],
    );
    let mut nobody = layout();
    stage(&mut nobody, 0).layer_groups[0].shards.clear();
    let message = violations(&nobody, &cluster()).to_string();
    assert!(message.contains("layers 0..24: there is no shard"), "{message}");
    check(
        |layout| layout.quantum = 0,
        &["quantum is 0, at least 1 is needed"],
    );
    check(|layout| layout.kv.block_size = 0, &["kv.block_size is 0"]);
}

#[test]
fn columns_are_cut_at_the_quantum() {
    let cut = |at: u32| {
        move |layout: &mut Layout| {
            let shards = &mut stage(layout, 0).layer_groups[0].shards;
            shards[0].mlp_columns = range(0, at);
            shards[1].mlp_columns = range(at, 14336);
        }
    };
    check(
        cut(9601),
        &["mlp columns of gpu 0 end at 9601, which is no multiple of the quantum 64"],
    );
    // A quantum of one allows every cut, and the last range takes the rest.
    let mut exact = layout();
    cut(9601)(&mut exact);
    exact.quantum = 1;
    assert_eq!(validate_layout(&exact, &model(), Some(&cluster())), Ok(()));
}

#[test]
fn memory_holds_the_weights_and_one_block() {
    let mut small = cluster();
    small.nodes[1].gpus[0].memory = Some(Bytes(1 << 20));
    let message = violations(&layout(), &small).to_string();
    assert!(
        message.contains("replica 0 stage 1 needs") && message.contains("on gpu 2"),
        "{message}"
    );
    assert!(
        message.contains("only 1 MiB is there") || message.contains("only 1.0 MiB is there"),
        "{message}"
    );
    // Without a cluster nothing is known about memory.
    assert_eq!(validate_layout(&layout(), &model(), None), Ok(()));
}

#[test]
fn every_violation_is_reported_at_once() {
    let mut broken = layout();
    broken.quantum = 0;
    broken.gpus.push(GpuId(9));
    let first = &mut stage(&mut broken, 0).layer_groups[0].shards;
    first[0].query_heads = range(0, 20);
    first[1].mlp_columns = range(9000, 14336);
    stage(&mut broken, 1).layer_groups[0].shards[0].gpu = GpuId(1);
    let found = violations(&broken, &cluster());
    let message = found.to_string();
    assert!(message.starts_with("the layout breaks 5 rules\n  "), "{message}");
    for part in ["quantum", "gpu 9", "20..24", "9000..9600", "gpu 1 already"] {
        assert!(message.contains(part), "`{message}` should hold `{part}`");
    }
}
