//! Every kind of document: its example reads, means what it should, and survives writing.

use std::fmt::Debug;

use infercluster_spec::json::{self, DocumentError};
use infercluster_spec::migration::{TransferItem, TransferSource};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{
    BatchShape, Bytes, Calibration, Cluster, Document, Dtype, GpuId, Layout, MigrationPlan, Model, Profile,
    Report, SegmentKind, StepRun, Trace,
};

macro_rules! example {
    ($name:literal) => {
        read(
            concat!($name, ".json"),
            include_str!(concat!("../../examples/", $name, ".json")),
        )
    };
}

/// Reads an example and checks that writing and reading it again changes nothing.
pub(crate) fn read<T: Document + PartialEq + Debug>(file: &str, text: &str) -> T {
    let document: T = json::read(file, text).unwrap_or_else(|error| panic!("{error}"));
    let written = json::write(&document);
    assert_eq!(json::read::<T>(file, &written).unwrap(), document);
    assert_eq!(json::write(&json::read::<T>(file, &written).unwrap()), written);
    document
}

pub(crate) fn model() -> Model {
    example!("model")
}

pub(crate) fn cluster() -> Cluster {
    example!("cluster")
}

pub(crate) fn layout() -> Layout {
    example!("layout")
}

#[test]
fn the_layout_fits_the_model_and_the_cluster() {
    validate_layout(&layout(), &model(), Some(&cluster())).unwrap_or_else(|error| panic!("{error}"));
    let stage = &layout().replicas[0].stages[0].layer_groups[0];
    // Heads 0..24 in groups of four need KV heads 0..6.
    assert_eq!(stage.shards[0].kv_heads(4).to_string(), "0..6");
    assert_eq!(model().params(), 8_030_261_248);
}

#[test]
fn the_cluster_names_ends_that_exist() {
    let cluster = cluster();
    assert_eq!(cluster.gpus().count(), 3);
    for link in &cluster.links {
        let back = |other: &&infercluster_spec::cluster::Link| (other.from, other.to) == (link.to, link.from);
        assert!(
            cluster.links.iter().find(back).is_some(),
            "{} to {} has no way back",
            link.from,
            link.to
        );
    }
    let slow = cluster.gpu(GpuId(1)).unwrap();
    assert_eq!(cluster.memory(slow), Some(Bytes(40_000_000_000)));
    assert_eq!(slow.speed.value(), 0.5);
}

#[test]
fn the_migration_plan_moves_what_its_layouts_differ_in() {
    let plan: MigrationPlan = example!("migration");
    let (model, cluster) = (model(), cluster());
    for layout in std::iter::once(&plan.from).chain(plan.phases.iter().map(|phase| &phase.to)) {
        validate_layout(layout, &model, Some(&cluster)).unwrap_or_else(|error| panic!("{error}"));
    }
    let phase = &plan.phases[0];
    assert_eq!(phase.to, layout());
    let is_kv = |item: &TransferItem| matches!(item, TransferItem::Kv { .. });
    let (kv, weights): (Vec<_>, Vec<_>) = phase.transfers.iter().partition(|transfer| is_kv(&transfer.item));
    // Per layer: 8 query heads in and out, 2 KV heads of keys and values, 2432 columns three times.
    let per_layer = (2 * 8 * 128 + 2 * 2 * 128 + 3 * 2432) * u64::from(model.hidden);
    let moved: Bytes = weights.iter().map(|transfer| transfer.bytes).sum();
    assert_eq!(moved, Dtype::Bf16.bytes(24 * per_layer));
    assert_eq!(kv[0].bytes, model.kv_bytes_per_token_layer(2, Dtype::Bf16) * 24);
    for transfer in &phase.transfers {
        assert_eq!(
            (transfer.from, transfer.to),
            (TransferSource::Gpu(GpuId(1)), GpuId(0))
        );
    }
}

#[test]
fn measurements_calibrations_reports_and_traces_read() {
    let profile: Profile = example!("profile");
    assert_eq!(profile.measurements.len(), 9);
    assert_eq!(
        profile.measurements[1].operator.flops().0,
        2 * 1024 * 14336 * 4096
    );
    let calibration: Calibration = example!("calibration");
    let device = &calibration.devices[&profile.device_type];
    assert_eq!(device.provenance, profile.provenance);
    assert!(device.gemm[&Dtype::Bf16].sharpness >= 1.0);
    assert_eq!(device.step.as_ref().unwrap().scale[&SegmentKind::Mlp], 1.03);
    let report: Report = example!("report");
    assert_eq!(report.requests_per_s, report.completed as f64 / report.duration_s);
    let trace: Trace = example!("trace");
    let block = u64::from(trace.hash_block.unwrap());
    for request in &trace.requests {
        assert_eq!(request.block_hashes.len() as u64, request.input.0.div_ceil(block));
    }
}

#[test]
fn measured_steps_read() {
    let run: StepRun = example!("steps");
    validate_layout(&run.layout, &model(), None).unwrap_or_else(|error| panic!("{error}"));
    // 64 new tokens after none: 64 x 65 / 2 pairs; two sequences of 350 tokens decode.
    let mut shape = BatchShape::default();
    shape.add_prefill(64, 0, true);
    (0..2).for_each(|_| shape.add_decode(350));
    assert_eq!(run.steps[0].shape, shape);
    let ranks: Vec<GpuId> = run.steps[0].ranks.iter().map(|rank| rank.gpu).collect();
    let stage: Vec<GpuId> = run.layout.replicas[0].stages[0].gpus().collect();
    assert_eq!(ranks, stage);
}

#[test]
fn another_kind_or_a_bad_field_is_named() {
    let text = include_str!("../../examples/cluster.json");
    let refuse = |text: &str, part: &str| {
        let error = json::read::<Cluster>("c.json", text).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("c.json") && message.contains(part),
            "`{message}` should hold `{part}`"
        );
        error
    };
    let layout = include_str!("../../examples/layout.json");
    assert!(matches!(
        refuse(layout, "expected \"infercluster-cluster/1\""),
        DocumentError::Schema { .. }
    ));
    assert!(matches!(refuse("{", "c.json:1:"), DocumentError::Syntax { .. }));
    refuse(&text.replacen("\"63 GB/s\"", "63", 1), "`links[0].bandwidth`");
    refuse(
        &text.replacen("\"63 GB/s\"", "\"NaN GB/s\"", 1),
        "`links[0].bandwidth`",
    );
    refuse(&text.replacen("gpu:0", "gpu:x", 1), "links[0]");
    refuse(&text.replacen("\"speed\": 0.5", "\"speed\": 5", 1), "speed");
    refuse(&text.replacen("\"nodes\"", "\"hosts\"", 1), "hosts");
    for end in (0..text.len()).step_by(7) {
        assert!(json::read::<Cluster>("c.json", &text[..end]).is_err());
    }
    assert!(json::read::<StepRun>("s.json", text).is_err());
}
