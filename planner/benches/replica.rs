//! Time to plan one replica of Llama 3.1 8B over unlike devices of one node.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use infercluster_planner::replica::{Objective, PlanProblem, Workload, plan_replica};
use infercluster_sim::cost::AnalyticCost;
use infercluster_spec::cluster::{DeviceType, Gpu, Node};
use infercluster_spec::layout::{DEFAULT_BLOCK_SIZE, DEFAULT_QUANTUM, KvCache, Reduction};
use infercluster_spec::{
    Bytes, BytesPerSec, Calibration, Cluster, Dtype, FlopsPerSec, Fraction, GpuId, Model, json,
};

fn device(memory: &str, bandwidth: &str, peak: &str) -> DeviceType {
    let peak: FlopsPerSec = peak.parse().expect("a rate");
    DeviceType {
        memory: memory.parse().expect("bytes"),
        memory_bandwidth: bandwidth.parse::<BytesPerSec>().expect("a rate"),
        peak: [(Dtype::Bf16, peak), (Dtype::F32, peak)].into(),
        multiprocessors: None,
        last_level_cache: None,
        source: String::new(),
    }
}

/// `large` devices of one type and `small` of another on one node.
fn cluster(large: u32, small: u32) -> Cluster {
    let gpu = |id| Gpu {
        id: GpuId(id),
        device_type: if id < large { "large" } else { "small" }.to_owned(),
        memory: None,
        speed: Fraction::ONE,
    };
    Cluster {
        name: "bench".to_owned(),
        device_types: [
            ("large".to_owned(), device("20 GiB", "3350 GB/s", "989 TFLOP/s")),
            ("small".to_owned(), device("6 GiB", "864 GB/s", "181 TFLOP/s")),
        ]
        .into(),
        nodes: vec![Node {
            name: "node".to_owned(),
            gpus: (0..large + small).map(gpu).collect(),
            nics: Vec::new(),
        }],
        switches: Vec::new(),
        links: Vec::new(),
    }
}

/// Devices of each type, sequences in flight and reduction.
const CASES: [(u32, u32, u32, Reduction); 7] = [
    (1, 1, 8, Reduction::Fast),
    (2, 2, 8, Reduction::Fast),
    (2, 2, 64, Reduction::Fast),
    (3, 3, 64, Reduction::Fast),
    (4, 4, 8, Reduction::Fast),
    (4, 4, 64, Reduction::Fast),
    (4, 4, 64, Reduction::Invariant),
];

fn bench(criterion: &mut Criterion) {
    let text = include_str!("../../sim/spec/examples/model.json");
    let model: Model = json::read("model.json", text).expect("the example reads");
    let mut group = criterion.benchmark_group("plan_replica_llama_3_1_8b");
    group.sample_size(10);
    for (large, small, sequences, reduction) in CASES {
        let cluster = cluster(large, small);
        let cost = AnalyticCost::new(&cluster, &Calibration::default()).expect("the cluster is described");
        let problem = PlanProblem {
            cost: &cost,
            model: &model,
            cluster: &cluster,
            gpus: cluster.gpus().map(|(_, gpu)| gpu.id).collect(),
            reduction,
            numerics: "cuda-bf16/1".to_owned(),
            quantum: DEFAULT_QUANTUM,
            kv: KvCache {
                block_size: DEFAULT_BLOCK_SIZE,
                dtype: Dtype::Bf16,
            },
            split_groups: true,
            stages: None,
            workload: Workload::decode(sequences, 2000),
            objective: Objective::Throughput,
            reserve: Bytes(1 << 30),
        };
        group.bench_function(
            format!("{large}+{small} devices, {sequences} sequences, {reduction:?}"),
            |bencher| {
                bencher.iter(|| plan_replica(black_box(&problem)));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
