//! Steps worked out by hand.

use infercluster_spec::calibration::{
    AffineFit, DecodeFit, DeviceCalibration, LinkFit, RooflineFit, StepFit,
};
use infercluster_spec::cluster::LinkKind;
use infercluster_spec::layout::{KvCache, LayerGroup, Reduction, Replica, Shard, Stage};
use infercluster_spec::operator::Provenance;
use infercluster_spec::{
    Calibration, Dtype, FlopsPerSec, GpuId, Layout, Operator, ReplicaId, SegmentKind, StageId,
};

use super::fixtures::{cluster, model, range};
use super::*;

/// One FLOP a second and no bytes: a GEMM lasts `2 m n k` seconds. Memory and attention are free, host
/// time is `1000 + sequences`, a message `10 + bytes`.
pub(super) fn calibration() -> Calibration {
    let free = 1e300;
    let roofline = |flops_per_s| RooflineFit {
        floor_s: 0.0,
        flops_per_s,
        bytes_per_s: free,
        half_rate_m: 0.0,
        sharpness: 1.0,
    };
    let decode = DecodeFit {
        floor_s: 0.0,
        bytes_per_s: free,
        per_pair_s: 0.0,
        flops_per_s: free,
    };
    let affine = |floor_s, per_s| Some(AffineFit { floor_s, per_s });
    let device = DeviceCalibration {
        gemm: [(Dtype::F32, roofline(1.0))].into(),
        attention_prefill: [(Dtype::F32, roofline(free))].into(),
        attention_decode: [(Dtype::F32, decode)].into(),
        memory: affine(0.0, free),
        host_step: affine(1000.0, 1.0),
        ..DeviceCalibration::default()
    };
    let loopback = LinkFit {
        provenance: Provenance::default(),
        alpha_s: 10.0,
        bytes_per_s: 1.0,
    };
    Calibration {
        devices: [("worker".to_owned(), device)].into(),
        links: [(LinkKind::Loopback, loopback)].into(),
    }
}

/// Both layers on two ranks: heads 3:1, columns 12:4, rows 6:2, vocabulary 20:12.
pub(super) fn uneven(reduction: Reduction) -> Layout {
    let invariant = reduction == Reduction::Invariant;
    let shard = |gpu, heads, columns, rows, vocab| Shard {
        gpu: GpuId(gpu),
        query_heads: heads,
        mlp_columns: columns,
        output_rows: invariant.then_some(rows),
        vocab: Some(vocab),
        experts: Vec::new(),
    };
    let group = LayerGroup {
        layers: range(0, 2),
        shards: vec![
            shard(0, range(0, 3), range(0, 12), range(0, 6), range(0, 20)),
            shard(1, range(3, 4), range(12, 16), range(6, 8), range(20, 32)),
        ],
    };
    Layout {
        gpus: vec![GpuId(0), GpuId(1)],
        kv: KvCache {
            block_size: 16,
            dtype: Dtype::F32,
        },
        replicas: vec![Replica {
            role: Default::default(),
            stages: vec![Stage {
                layer_groups: vec![group],
            }],
        }],
        ..Layout::single(&model(), reduction)
    }
}

fn batch() -> BatchShape {
    let mut shape = BatchShape::default();
    shape.add_prefill(2, 0, false);
    shape.add_decode(7);
    shape
}

fn step(calibration: &Calibration, layout: &Layout, speeds: &[f64]) -> StageTime {
    let cost = AnalyticCost::new(&cluster(speeds), calibration).unwrap();
    let model = model();
    stage_step_time(&cost, layout, &model, ReplicaId(0), StageId(0), &batch()).unwrap()
}

#[test]
fn fast_step_by_hand() {
    let time = step(&calibration(), &uneven(Reduction::Fast), &[1.0, 0.5]);
    // 3 tokens. Rank 0, three heads on KV heads 0 and 1: rows 3x2 + 2x2x2 = 14, QKV 2x3x14x8 = 672,
    // output 2x3x8x6 = 288: 960. Rank 1, one head on one KV head at half speed: rows 2 + 4 = 6, 288 + 96
    // = 384, doubled 768. Slowest: rank 0.
    // MLP: rank 0 2x3x24x8 + 2x3x8x12 = 1728; rank 1 (384 + 192) x 2 = 1152.
    // Head, one row: rank 0 2x20x8 = 320; rank 1 2x12x8x2 = 384 is the slower.
    let found: Vec<_> = time
        .segments
        .iter()
        .map(|segment| {
            (
                segment.kind,
                segment.repeats,
                segment.compute_s,
                segment.slowest.0,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (SegmentKind::Attention, 2, 960.0, 0),
            (SegmentKind::Mlp, 2, 1728.0, 0),
            (SegmentKind::Head, 1, 384.0, 1),
        ]
    );
    // All-reduce of 3 x 8 x 4 bytes: 10 + 96. Logits: largest share 20 x 4 bytes: 10 + 80.
    let collectives: Vec<f64> = time.segments.iter().map(|segment| segment.collective_s).collect();
    assert_eq!(collectives, [106.0, 106.0, 90.0]);
    assert_eq!(time.host_s, 1001.0);
    assert_eq!(time.rank_compute_s, [2.0 * 2688.0 + 320.0, 2.0 * 1920.0 + 384.0]);
    let total = 1001.0 + 2.0 * (960.0 + 1728.0 + 2.0 * 106.0) + 384.0 + 90.0;
    assert_eq!(time.total_s, total);
}

#[test]
fn invariant_step_by_hand() {
    let time = step(&calibration(), &uneven(Reduction::Invariant), &[1.0, 1.0]);
    // Attention without output projection: 672. Output rows 2x3x6x8 = 288, MLP 1152, down rows 2x3x6x16 = 576.
    // Gathers of the largest share, 3 tokens x 4 bytes x (3 heads x 2 | 6 rows | 12 columns | 6 rows).
    let found: Vec<_> = time
        .segments
        .iter()
        .map(|segment| (segment.kind, segment.compute_s, segment.collective_s))
        .collect();
    assert_eq!(
        found,
        [
            (SegmentKind::Attention, 672.0, 82.0),
            (SegmentKind::OutputRows, 288.0, 82.0),
            (SegmentKind::Mlp, 1152.0, 154.0),
            (SegmentKind::DownRows, 576.0, 82.0),
            (SegmentKind::Head, 320.0, 90.0),
        ]
    );
}

#[test]
fn one_rank_exchanges_nothing_and_pays_no_neighbour() {
    let mut calibration = calibration();
    let device = calibration.devices.get_mut("worker").unwrap();
    device.step = Some(StepFit {
        segment_floor_s: 5.0,
        scale: [(SegmentKind::Mlp, 2.0)].into(),
        neighbour_slowdown: 3.0,
    });
    let alone = step(&calibration, &Layout::single(&model(), Reduction::Fast), &[1.0]);
    assert_eq!(alone.collective_s, 0.0);
    // 2x3x32x8 + 2x3x8x16 = 2304, twice, plus the floor.
    assert_eq!(alone.segments[1].compute_s, 2.0 * 2304.0 + 5.0);
    // Beside a neighbour: 3 x (5 + 2 x 1728) on rank 0.
    let both = step(&calibration, &uneven(Reduction::Fast), &[1.0, 1.0]);
    assert_eq!(both.segments[1].compute_s, 3.0 * (2.0 * 1728.0 + 5.0));
    // The planner's per-share question gives the same seconds.
    let cost = AnalyticCost::new(&cluster(&[1.0, 1.0]), &calibration).unwrap();
    let (model, layout) = (model(), uneven(Reduction::Fast));
    let share = ShareCost::of_layout(&cost, &layout, &model).unwrap();
    let seconds = share.mlp_seconds(GpuId(0), &batch(), 12).unwrap();
    assert_eq!(seconds, both.segments[1].compute_s);
}

#[test]
fn pipeline_stages_hand_over_and_only_the_last_samples() {
    let mut layout = uneven(Reduction::Fast);
    let mut first = layout.replicas[0].stages[0].layer_groups[0].clone();
    first.layers = range(0, 1);
    first.shards.iter_mut().for_each(|shard| shard.vocab = None);
    let last = &mut layout.replicas[0].stages[0].layer_groups[0];
    last.layers = range(1, 2);
    for shard in &mut last.shards {
        shard.gpu.0 += 2;
    }
    layout.replicas[0].stages.insert(
        0,
        Stage {
            layer_groups: vec![first],
        },
    );
    let cost = AnalyticCost::new(&cluster(&[1.0; 4]), &calibration()).unwrap();
    let model = model();
    let stage = |id| StageCost::new(&cost, &layout, &model, ReplicaId(0), StageId(id)).unwrap();
    let (first, last) = (stage(0), stage(1));
    assert_eq!(first.step(&batch()).unwrap().host_s, 1000.0);
    assert_eq!(last.step(&batch()).unwrap().host_s, 1001.0);
    // 3 tokens x 8 x 4 bytes.
    assert_eq!(first.handover_seconds(&batch()), Ok(Some(106.0)));
    assert_eq!(last.handover_seconds(&batch()), Ok(None));
    assert_eq!(first.step(&batch()).unwrap().segments.len(), 2);
}

#[test]
fn missing_rates_are_errors_not_zeros() {
    let cost = AnalyticCost::new(&cluster(&[1.0]), &Calibration::default()).unwrap();
    let gemm = Operator::Gemm { m: 1, n: 1, k: 1 };
    // The type computes in single precision: 16-bit weights widen to it, tf32 does too, nothing narrows.
    assert_eq!(cost.origin(GpuId(0), Dtype::Bf16, &gemm), Ok(Origin::Datasheet));
    let mut narrow = cluster(&[1.0]);
    let device = narrow.device_types.get_mut("worker").unwrap();
    device.peak = [(Dtype::Bf16, FlopsPerSec::new(1e12).unwrap())].into();
    let narrow = AnalyticCost::new(&narrow, &Calibration::default()).unwrap();
    let error = narrow.operator_seconds(GpuId(0), Dtype::F32, &gemm).unwrap_err();
    assert_eq!(error.to_string(), "gpu 0 of type worker has no GEMM rate for f32");
    let error = cost.operator_seconds(GpuId(7), Dtype::F32, &gemm).unwrap_err();
    assert_eq!(error.to_string(), "gpu 7 is not in cluster `host`");
    assert!(matches!(
        AnalyticCost::new(&cluster(&[0.0]), &Calibration::default()),
        Err(CostError::NoSpeed { .. })
    ));
    let mut absurd = calibration();
    let fits = &mut absurd.devices.get_mut("worker").unwrap().gemm;
    fits.get_mut(&Dtype::F32).unwrap().flops_per_s = 0.0;
    let absurd = AnalyticCost::new(&cluster(&[1.0]), &absurd).unwrap();
    assert!(matches!(
        absurd.operator_seconds(GpuId(0), Dtype::F32, &gemm),
        Err(CostError::NotFinite { .. })
    ));
}
