//! Against a search that looks at every layout.

use infercluster_sim::cost::AnalyticCost;
use infercluster_spec::cluster::{DeviceType, Gpu, Node};
use infercluster_spec::layout::{CPU_F32, LayerGroup, Shard, Stage};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{BytesPerSec, Calibration, Dtype, FlopsPerSec, Fraction, IndexRange, memory};

use super::*;
use crate::fixtures::model;

/// One host with a worker of each speed and memory.
fn cluster(workers: &[(f64, u64)]) -> Cluster {
    let device = DeviceType {
        memory: Bytes(1 << 30),
        memory_bandwidth: BytesPerSec::new(1e9).unwrap(),
        peak: [(Dtype::F32, FlopsPerSec::new(1e10).unwrap())].into(),
        multiprocessors: None,
        last_level_cache: None,
        source: String::new(),
    };
    let gpus = workers.iter().enumerate().map(|(id, (speed, memory))| Gpu {
        id: GpuId(id as u32),
        device_type: "worker".to_owned(),
        memory: Some(Bytes(*memory)),
        speed: Fraction::new(*speed).unwrap(),
    });
    Cluster {
        name: "host".to_owned(),
        device_types: [("worker".to_owned(), device)].into(),
        nodes: vec![Node {
            name: "host".to_owned(),
            gpus: gpus.collect(),
            nics: Vec::new(),
        }],
        switches: Vec::new(),
        links: Vec::new(),
    }
}

const ROOMY: u64 = 1 << 30;

/// Compute that outweighs floors and host time, so that shares matter.
fn heavy(layers: u32, query_heads: u32, kv_heads: u32, units: u32) -> Model {
    Model {
        hidden: 1024,
        head_dim: 64,
        vocab: 2,
        ..model(layers, query_heads, kv_heads, units * 256)
    }
}

fn problem<'a>(cost: &'a AnalyticCost, model: &'a Model, cluster: &'a Cluster) -> PlanProblem<'a> {
    PlanProblem {
        cost,
        model,
        cluster,
        gpus: cluster.gpus().map(|(_, gpu)| gpu.id).collect(),
        reduction: Reduction::Fast,
        numerics: CPU_F32.to_owned(),
        quantum: 256,
        kv: KvCache {
            block_size: 16,
            dtype: Dtype::F32,
        },
        split_groups: true,
        stages: None,
        workload: Workload::decode(8, 100),
        objective: Objective::Throughput,
        reserve: Bytes(0),
    }
}

/// All ordered lists of nonempty groups of the devices, each group in device order.
fn all_structures(gpus: &[GpuId]) -> Vec<Vec<Vec<GpuId>>> {
    if gpus.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for mask in 1..1_usize << gpus.len() {
        let chosen = |index: &usize| mask >> index & 1 == 1;
        let first: Vec<GpuId> = (0..gpus.len()).filter(chosen).map(|index| gpus[index]).collect();
        let rest: Vec<GpuId> = gpus.iter().copied().filter(|gpu| !first.contains(gpu)).collect();
        for mut structure in all_structures(&rest) {
            structure.insert(0, first.clone());
            all.push(structure);
        }
    }
    all
}

/// All ways to cut `total` units of `unit` into ranges in rank order.
fn all_ranges(total: u32, unit: u32, ranks: usize, start: u32) -> Vec<Vec<IndexRange>> {
    if ranks == 1 {
        return vec![vec![IndexRange::new(start, total).unwrap()]];
    }
    let ends = (start..=total).filter(|end| end % unit == 0 || *end == total);
    ends.flat_map(|end| {
        all_ranges(total, unit, ranks - 1, end)
            .into_iter()
            .map(move |mut rest| {
                rest.insert(0, IndexRange::new(start, end).unwrap());
                rest
            })
    })
    .collect()
}

fn all_layer_cuts(layers: u32, stages: usize, start: u32) -> Vec<Vec<IndexRange>> {
    let mut all = all_ranges(layers, 1, stages, start);
    all.retain(|cut| cut.iter().all(|range| !range.is_empty()));
    all
}

/// The fastest layout by looking at every structure, every layer cut and every share of every stage: the best
/// shares of a stage do not depend on the other stages.
fn enumerate(problem: &PlanProblem) -> Option<f64> {
    let layers = problem.model.layers;
    let mut best: Option<f64> = None;
    let mut known = std::collections::BTreeMap::new();
    for structure in all_structures(&problem.gpus) {
        let count = structure.len();
        if count > layers as usize || problem.stages.is_some_and(|stages| stages != count) {
            continue;
        }
        for cut in all_layer_cuts(layers, count, 0) {
            let mut times = Vec::new();
            let mut way = 0.0;
            for position in 0..count {
                let key = (structure.clone(), position, cut[position].len());
                let found = *known
                    .entry(key)
                    .or_insert_with(|| best_stage(problem, &structure, &cut, position));
                let Some((time, handover)) = found else { break };
                times.push(time);
                way += time + handover;
            }
            if times.len() < count {
                continue;
            }
            let slowest = times.iter().copied().fold(0.0, f64::max);
            let value = match problem.objective {
                Objective::Latency => way,
                Objective::Throughput => way.max(micro_batches(problem, count) * slowest),
            };
            best = Some(best.map_or(value, |best| best.min(value)));
        }
    }
    best
}

/// One a stage, but of 2 sequences on 4 stages no more than 2, and of 5 on 4 stages the three of 2, 2 and 1.
fn micro_batches(problem: &PlanProblem, stages: usize) -> f64 {
    let sequences = problem.workload.sequences;
    let of_step = (1..=sequences)
        .find(|own| own * stages as u32 >= sequences)
        .unwrap();
    f64::from(sequences.div_ceil(of_step))
}

/// Shards of one stage with heads from `heads` and everything else from the first rank.
fn filler(problem: &PlanProblem, gpus: &[GpuId], is_last: bool) -> Vec<Shard> {
    let all = |total: u32, rank: usize| IndexRange::new(if rank == 0 { 0 } else { total }, total).unwrap();
    let model = problem.model;
    let shard = |(rank, gpu): (usize, &GpuId)| Shard {
        gpu: *gpu,
        query_heads: all(model.query_heads, rank),
        mlp_columns: all(model.ffn, rank),
        output_rows: (problem.reduction == Reduction::Invariant).then(|| all(model.hidden, rank)),
        vocab: is_last.then(|| all(model.vocab, rank)),
        experts: Vec::new(),
    };
    gpus.iter().enumerate().map(shard).collect()
}

fn best_stage(
    problem: &PlanProblem,
    structure: &[Vec<GpuId>],
    cut: &[IndexRange],
    position: usize,
) -> Option<(f64, f64)> {
    let model = problem.model;
    let gpus = &structure[position];
    let last = structure.len() - 1;
    let stages = structure.iter().enumerate().map(|(stage, gpus)| Stage {
        layer_groups: vec![LayerGroup {
            layers: cut[stage],
            shards: filler(problem, gpus, stage == last),
        }],
    });
    let mut layout = build::layout_of(problem, stages.collect());
    let shape = problem
        .workload
        .shape(stage::sequences_of_step(problem, structure.len()));
    let blocks = problem.workload.kv_tokens(problem.kv.block_size) / u64::from(problem.kv.block_size);
    let head_unit = if problem.split_groups {
        1
    } else {
        model.group_size()
    };
    let vocabs = if position == last {
        all_ranges(model.vocab, 1, gpus.len(), 0)
    } else {
        vec![Vec::new()]
    };
    let rows = match problem.reduction {
        Reduction::Invariant => all_ranges(model.hidden, bytes::row_units(model.hidden).0, gpus.len(), 0),
        Reduction::Fast => vec![Vec::new()],
    };
    // What goes with the heads and columns: every cut of rows with every cut of the vocabulary.
    let beside: Vec<(&Vec<IndexRange>, &Vec<IndexRange>)> = rows
        .iter()
        .flat_map(|rows| vocabs.iter().map(move |vocab| (rows, vocab)))
        .collect();
    let mut best: Option<(f64, f64)> = None;
    for heads in all_ranges(model.query_heads, head_unit, gpus.len(), 0) {
        for columns in all_ranges(model.ffn, problem.quantum, gpus.len(), 0) {
            for (rows, vocab) in &beside {
                let shards = &mut layout.replicas[0].stages[position].layer_groups[0].shards;
                for (rank, shard) in shards.iter_mut().enumerate() {
                    shard.query_heads = heads[rank];
                    shard.mlp_columns = columns[rank];
                    shard.output_rows = rows.get(rank).copied();
                    shard.vocab = vocab.get(rank).copied();
                }
                let id = infercluster_spec::StageId(position as u32);
                let fits = memory::seats(&layout, model)
                    .iter()
                    .filter(|seat| seat.seat.stage == id)
                    .all(|seat| {
                        let used = seat.memory.weights + seat.memory.kv_block * blocks;
                        used <= problem.cluster.gpu(seat.gpu).unwrap().memory.unwrap()
                    });
                if !fits {
                    continue;
                }
                let replica = infercluster_spec::ReplicaId(0);
                let cost = infercluster_sim::cost::StageCost::new(problem.cost, &layout, model, replica, id)
                    .unwrap();
                let time = cost.step(&shape).unwrap().total_s;
                if best.is_none_or(|(best, _)| time < best) {
                    best = Some((time, cost.handover_seconds(&shape).unwrap().unwrap_or(0.0)));
                }
            }
        }
    }
    best
}

/// Compares with the enumeration and answers the plan.
fn check(problem: &PlanProblem) -> Option<ReplicaPlan> {
    let truth = enumerate(problem);
    match plan_replica(problem).unwrap() {
        PlanOutcome::Plan(plan) => {
            let truth = truth.expect("a plan is among all layouts");
            let found = plan.step_time.as_seconds();
            assert!(
                (found / truth - 1.0).abs() < 1e-6,
                "planned {found}, best {truth}"
            );
            assert!(plan.exact);
            validate_layout(&plan.layout, problem.model, Some(problem.cluster)).unwrap();
            // The layout that is handed out costs what was promised.
            let again = baseline::layout_time(problem, &plan.layout)
                .unwrap()
                .unwrap()
                .as_seconds();
            assert!(
                (again / found - 1.0).abs() < 1e-6,
                "promised {found}, layout {again}"
            );
            let slack = SimDuration(1_000);
            assert!(plan.bounds.continuous <= plan.bounds.integer + slack);
            assert!(plan.bounds.integer <= plan.step_time + slack);
            Some(*plan)
        }
        PlanOutcome::Infeasible(_) => {
            assert_eq!(truth, None);
            None
        }
    }
}

#[test]
fn two_unlike_workers_equal_enumeration() {
    let model = heavy(5, 4, 2, 5);
    let cluster = cluster(&[(1.0, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    for objective in [Objective::Throughput, Objective::Latency] {
        for stages in [None, Some(1), Some(2)] {
            for split_groups in [false, true] {
                let plan = check(&PlanProblem {
                    objective,
                    stages,
                    split_groups,
                    ..problem(&cost, &model, &cluster)
                });
                let gain = plan.unwrap().gain_over_even().unwrap();
                assert!(gain >= 1.0, "{gain}");
            }
        }
    }
}

#[test]
fn three_and_four_workers_equal_enumeration() {
    let model = heavy(4, 3, 3, 3);
    let three = cluster(&[(1.0, ROOMY), (0.5, ROOMY), (0.3, ROOMY)]);
    let cost = AnalyticCost::new(&three, &Calibration::default()).unwrap();
    check(&problem(&cost, &model, &three)).unwrap();
    let four = cluster(&[(1.0, ROOMY), (1.0, ROOMY), (0.4, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&four, &Calibration::default()).unwrap();
    check(&PlanProblem {
        objective: Objective::Latency,
        ..problem(&cost, &heavy(3, 2, 2, 2), &four)
    })
    .unwrap();
}

#[test]
fn few_sequences_equal_enumeration() {
    let model = heavy(5, 4, 2, 5);
    let cluster = cluster(&[(1.0, ROOMY), (0.9, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    for sequences in [1, 2, 4] {
        check(&PlanProblem {
            workload: Workload::decode(sequences, 100),
            ..problem(&cost, &model, &cluster)
        })
        .unwrap();
    }
}

#[test]
fn memory_equals_enumeration() {
    let model = heavy(4, 4, 2, 4);
    let whole = model.weight_bytes().0;
    let mut seen = [0, 0];
    for share in [3, 4, 5, 6, 7, 9] {
        let cluster = cluster(&[(1.0, whole * share / 10), (0.4, whole * 7 / 10)]);
        let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
        let plan = check(&problem(&cost, &model, &cluster));
        seen[usize::from(plan.is_some())] += 1;
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn bounds_hold_where_the_last_column_unit_is_short() {
    // Three units of 256 columns, the last of them 10: the table charges it as a whole one, no bound may.
    let model = Model {
        ffn: 2 * 256 + 10,
        ..heavy(2, 2, 2, 1)
    };
    let cluster = cluster(&[(1.0, ROOMY), (0.9, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    let problem = PlanProblem {
        stages: Some(1),
        ..problem(&cost, &model, &cluster)
    };
    let truth = enumerate(&problem).unwrap();
    let PlanOutcome::Plan(plan) = plan_replica(&problem).unwrap() else {
        panic!("it fits")
    };
    let slack = 1.0 + 1e-9;
    assert!(
        plan.bounds.integer.as_seconds() <= truth * slack,
        "{:?}, {truth}",
        plan.bounds
    );
    assert!(plan.bounds.continuous <= plan.bounds.integer);
    assert!(plan.step_time.as_seconds() * slack >= truth);
}

#[test]
fn a_slow_rank_gets_less_by_hand() {
    // Weights are read once a step at 1 : 0.4, so shares tend to 5 : 2 of 7 columns.
    let model = heavy(6, 7, 7, 14);
    let cluster = cluster(&[(1.0, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    let forced = PlanProblem {
        stages: Some(1),
        ..problem(&cost, &model, &cluster)
    };
    let PlanOutcome::Plan(plan) = plan_replica(&forced).unwrap() else {
        panic!("it fits")
    };
    let shards = &plan.layout.replicas[0].stages[0].layer_groups[0].shards;
    assert_eq!(shards[0].mlp_columns.to_string(), "0..2560");
    assert_eq!(shards[0].query_heads.to_string(), "0..5");
    let explanation = plan.explanation();
    for part in [
        "stage 0, layers 0..6",
        "  gpu 1: computes ",
        "even shares and layers: ",
        "proven best of all ways to form stages that were priced: 1",
    ] {
        assert!(explanation.contains(part), "{explanation}");
    }
    // Weights at batch 8 are read, not computed.
    assert_eq!(
        plan.stages[0].binding,
        BindingConstraint::MemoryBandwidth,
        "{explanation}"
    );
}

/// Rows that are few, so that they can be enumerated, and long, so that they matter.
fn long_rows(layers: u32, query_heads: u32, kv_heads: u32, units: u32, rows: u32) -> Model {
    Model {
        hidden: rows,
        head_dim: 2048,
        vocab: 2,
        ..model(layers, query_heads, kv_heads, units * 4096)
    }
}

#[test]
fn invariant_plans_equal_enumeration() {
    let two = cluster(&[(1.0, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&two, &Calibration::default()).unwrap();
    let model = long_rows(3, 4, 2, 5, 9);
    for objective in [Objective::Throughput, Objective::Latency] {
        for stages in [None, Some(1)] {
            let plan = check(&PlanProblem {
                objective,
                stages,
                reduction: Reduction::Invariant,
                quantum: 4096,
                ..problem(&cost, &model, &two)
            })
            .unwrap();
            assert!(stages.is_none() || plan.gain_over_even().unwrap() > 1.1);
        }
    }
    let three = cluster(&[(1.0, ROOMY), (0.5, ROOMY), (0.3, ROOMY)]);
    let cost = AnalyticCost::new(&three, &Calibration::default()).unwrap();
    check(&PlanProblem {
        reduction: Reduction::Invariant,
        quantum: 4096,
        ..problem(&cost, &long_rows(2, 3, 3, 3, 4), &three)
    })
    .unwrap();
}

#[test]
fn hundreds_of_rows_leave_even_shares() {
    // Compute and its gather, two kinds of row that are cut alike, on 256 units: 1 / 1.4 of them is 183.
    let model = Model {
        hidden: 256,
        head_dim: 32,
        vocab: 2048,
        ..model(8, 8, 4, 1024)
    };
    let cluster = cluster(&[(1.0, ROOMY), (0.4, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    let problem = PlanProblem {
        reduction: Reduction::Invariant,
        quantum: 64,
        stages: Some(1),
        ..problem(&cost, &model, &cluster)
    };
    let PlanOutcome::Plan(plan) = plan_replica(&problem).unwrap() else {
        panic!("it fits")
    };
    assert!(plan.exact);
    let rows = plan.layout.replicas[0].stages[0].layer_groups[0].shards[0].output_rows;
    let rows = rows.unwrap().len();
    assert!(
        (165..=190).contains(&rows),
        "{rows} of 256 rows on a device of 0.71 of the speed"
    );
}

#[test]
fn invariant_plans_within_memory_equal_enumeration() {
    let model = long_rows(3, 4, 2, 4, 5);
    let whole = model.weight_bytes().0;
    let mut seen = [0, 0];
    for share in [2, 3, 4, 5, 6, 8] {
        let cluster = cluster(&[(1.0, whole * share / 10), (0.4, whole * 8 / 10)]);
        let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
        let plan = check(&PlanProblem {
            reduction: Reduction::Invariant,
            quantum: 4096,
            workload: Workload::decode(1, 16),
            kv: KvCache {
                block_size: 16,
                dtype: Dtype::F16,
            },
            ..problem(&cost, &model, &cluster)
        });
        seen[usize::from(plan.is_some())] += 1;
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn invariant_gathers_are_priced_as_the_layout_pays_them() {
    let model = heavy(3, 6, 3, 6);
    let cluster = cluster(&[(1.0, ROOMY), (0.4, ROOMY), (0.7, ROOMY)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    let problem = PlanProblem {
        reduction: Reduction::Invariant,
        workload: Workload {
            prefill_per_decode: 3.0,
            mean_prompt: 64,
            ..Workload::decode(6, 80)
        },
        ..problem(&cost, &model, &cluster)
    };
    let PlanOutcome::Plan(plan) = plan_replica(&problem).unwrap() else {
        panic!("it fits")
    };
    let again = baseline::layout_time(&problem, &plan.layout)
        .unwrap()
        .unwrap()
        .as_seconds();
    assert!((again / plan.step_time.as_seconds() - 1.0).abs() < 1e-6);
    let even = plan
        .baselines
        .iter()
        .map(|baseline| baseline.step_time)
        .min()
        .unwrap();
    assert!(plan.step_time <= even);
    assert!(plan.bounds.integer <= plan.step_time && plan.bounds.continuous <= plan.bounds.integer);
    // Twice the same question, the same answer.
    assert_eq!(plan_replica(&problem).unwrap(), PlanOutcome::Plan(plan));
}

#[test]
fn what_does_not_fit_says_what_would() {
    let model = heavy(4, 4, 2, 4);
    let weights = model.weight_bytes().0;
    // One worker; KV of a block of 16 tokens is 16 x 4 layers x 2 heads x 2 x 64 x 4 bytes = 64 KiB.
    let block = model.kv_bytes_per_token(Dtype::F32).0 * 16;
    assert_eq!(block, 64 << 10);
    let cluster = cluster(&[(1.0, weights + 30 * block)]);
    let cost = AnalyticCost::new(&cluster, &Calibration::default()).unwrap();
    let asked = PlanProblem {
        workload: Workload::decode(8, 100),
        ..problem(&cost, &model, &cluster)
    };
    let PlanOutcome::Infeasible(answer) = plan_replica(&asked).unwrap() else {
        panic!("56 blocks do not fit")
    };
    // Seven blocks each: four sequences take 28. Eight sequences leave three blocks each. The table that is
    // looked up on the host is not held here, which leaves two rows of 1,024 more.
    assert_eq!(answer.constraint, InfeasibleConstraint::Memory);
    let sentence = answer.to_string();
    for part in [
        "memory of all devices together",
        "4 sequences of this context",
        "contexts of 48 tokens",
    ] {
        assert!(sentence.contains(part), "{sentence}");
    }
    assert_eq!(answer.nearest_sequences, Some(4));
    assert_eq!(answer.nearest_context, Some(48));
    assert!(
        answer.missing > Bytes(25 * block) && answer.missing <= Bytes(26 * block),
        "{}",
        answer.missing
    );
}
