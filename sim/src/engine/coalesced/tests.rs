//! Every scenario that is covered must come out as from the step-by-step engine, to the picosecond.

use infercluster_serving::RouterPolicy;
use infercluster_spec::report::{RequestRecord, Slo};
use infercluster_spec::{
    Dtype, EngineOptions, GpuId, IndexRange, NodeId, Operator, SegmentKind, SimDuration, json,
};
use proptest::prelude::*;

use super::*;
use crate::cost::{CostError, CostModel, Origin, SegmentCorrection};
use crate::engine::simulate;
use crate::engine::tests::{ByTheMillisecond, Setup, at};
use crate::scenario::{FixedSteps, SimulationOutcome, StepTimes};
use crate::topology::CollectiveGroup;

/// Time grows with the cache, on device 1 slowly from a high floor: which rank paces a step changes on the
/// way, between knots too.
struct Growing;

impl CostModel for Growing {
    fn operator_seconds(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<f64, CostError> {
        let odd = f64::from(gpu.0 % 2);
        Ok(match *operator {
            Operator::AttentionDecode {
                sequences, kv_tokens, ..
            } if sequences > 0 => {
                let tokens = kv_tokens as f64;
                1e-3 + odd * 4e-4 + 1.3e-5 * sequences as f64 + (1.7e-5 - odd * 1.1e-5) * tokens
            }
            // Falls beyond 40 tokens, as no real kernel does: increments may be negative.
            Operator::Gemm { m, .. } => 1e-4 * (m as f64).sqrt() + 1e-6 * (40.0 - m as f64).abs(),
            Operator::HostStep { sequences } => 3e-4 + 7.7e-6 / (1.0 + sequences as f64),
            _ => ByTheMillisecond.operator_seconds(gpu, dtype, operator)?,
        })
    }

    fn origin(&self, _: GpuId, _: Dtype, _: &Operator) -> Result<Origin, CostError> {
        Ok(Origin::Calibrated)
    }

    fn segment_correction(&self, _: GpuId, _: SegmentKind, _: bool) -> Result<SegmentCorrection, CostError> {
        Ok(SegmentCorrection::NONE)
    }

    fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, CostError> {
        ByTheMillisecond.group(gpus)
    }

    fn node_of(&self, _: GpuId) -> Result<NodeId, CostError> {
        Ok(NodeId(0))
    }
}

/// The same in steps that get shorter as the cache grows.
struct Shrinking;

impl CostModel for Shrinking {
    fn operator_seconds(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<f64, CostError> {
        match *operator {
            Operator::AttentionDecode { kv_tokens, .. } => Ok(1e-3 + 1e-2 / (1.0 + kv_tokens as f64)),
            _ => Growing.operator_seconds(gpu, dtype, operator),
        }
    }

    fn origin(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<Origin, CostError> {
        Growing.origin(gpu, dtype, operator)
    }

    fn segment_correction(
        &self,
        gpu: GpuId,
        kind: SegmentKind,
        shared: bool,
    ) -> Result<SegmentCorrection, CostError> {
        Growing.segment_correction(gpu, kind, shared)
    }

    fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, CostError> {
        Growing.group(gpus)
    }

    fn node_of(&self, gpu: GpuId) -> Result<NodeId, CostError> {
        Growing.node_of(gpu)
    }
}

const FIXED: FixedSteps = FixedSteps {
    prefill: SimDuration(2_500_000_000),
    decode: SimDuration(1_000_000_000),
};

/// Cuts the one stage of each replica into two ranks.
fn two_ranks(setup: &mut Setup) {
    let range = |start, end| IndexRange::new(start, end).unwrap();
    for (index, replica) in setup.layout.replicas.iter_mut().enumerate() {
        for group in &mut replica.stages[0].layer_groups {
            let mut second = group.shards[0].clone();
            let first = &mut group.shards[0];
            (first.gpu, second.gpu) = (GpuId(2 * index as u32), GpuId(2 * index as u32 + 1));
            (first.query_heads, second.query_heads) = (range(0, 2), range(2, 4));
            (first.mlp_columns, second.mlp_columns) = (range(0, 16), range(16, 16));
            (first.vocab, second.vocab) = (Some(range(0, 16)), Some(range(16, 32)));
            group.shards.push(second);
        }
    }
    setup.layout.gpus = (0..2 * setup.layout.replicas.len() as u32).map(GpuId).collect();
}

/// Runs both engines and compares everything that they share.
fn compare(scenario: &Scenario) -> SimulationOutcome {
    assert_eq!(uncovered(scenario), None);
    let slow = simulate(scenario).unwrap();
    let (fast, token_times) = run(scenario, true).unwrap();
    let by_summary: Vec<_> = fast.requests.summaries(scenario.trace).collect();
    let mut token_times = token_times.unwrap().into_iter();
    let by_id = |id: u64| {
        scenario
            .trace
            .requests
            .iter()
            .position(|request| request.id.0 == id)
    };
    let mut before = 0;
    let records: Vec<RequestRecord> = by_summary
        .iter()
        .map(|summary| {
            let position = by_id(summary.id.0).unwrap();
            let times = token_times.nth(position - before).unwrap();
            before = position + 1;
            RequestRecord {
                id: summary.id,
                arrival: summary.arrival,
                input: summary.input,
                token_times: times,
                preemptions: summary.preemptions,
                completed: summary.completed,
            }
        })
        .collect();
    assert_eq!(records, slow.requests);
    if scenario.slo.is_some_and(|slo| slo.itl.is_some()) {
        let expected: Vec<_> = records.iter().map(RequestRecord::summary).collect();
        assert_eq!(by_summary, expected);
    }
    assert_eq!(fast.replicas, slow.replicas);
    assert_eq!(fast.report, slow.report);
    assert_eq!(json::write(&fast.report), json::write(&slow.report));
    slow
}

#[test]
fn a_lone_request_is_three_events() {
    // Arrival, prefill, one run of 9 decode steps.
    let setup = Setup::new(1, 1, &[(0, 4, 10)]);
    let mut scenario = setup.scenario(&ByTheMillisecond);
    scenario.router = RouterPolicy::RoundRobin;
    scenario.steps = StepTimes::Fixed(FIXED);
    compare(&scenario);
    assert_eq!(run(&scenario, false).unwrap().0.events, 3);
}

#[test]
fn what_is_not_covered_says_why() {
    let setup = Setup::new(1, 2, &[]);
    let pipeline = uncovered(&setup.scenario(&ByTheMillisecond)).unwrap();
    assert_eq!(pipeline.to_string(), "replica 0 has 2 pipeline stages");
    let setup = Setup::new(1, 1, &[]);
    let mut scenario = setup.scenario(&ByTheMillisecond);
    (scenario.options.max_sequences, scenario.options.token_budget) = (9, 8);
    let starvation = uncovered(&scenario).unwrap();
    assert_eq!(
        starvation.to_string(),
        "9 sequences may run, but a step computes at most 8 tokens"
    );
}

#[derive(Debug, Clone)]
struct Workload {
    replicas: u32,
    tensor: bool,
    blocks: u32,
    block_size: u32,
    spare_budget: u32,
    max_sequences: u32,
    cost: u8,
    router: u8,
    load: Option<(u32, u64, Option<u64>)>,
    slo: bool,
    requests: Vec<(u64, u64, u64)>,
}

fn workload() -> impl Strategy<Value = Workload> {
    let engine = (1_u32..4, any::<bool>(), 1_u32..30, 1_u32..8, 0_u32..40, 1_u32..10);
    let load = prop::option::weighted(0.4, (1_u32..8, 0_u64..4, prop::option::of(10_u64..200)));
    let requests = prop::collection::vec((0_u64..24, 1_u64..34, 1_u64..32), 0..40);
    (engine, (0_u8..4, 0_u8..3, any::<bool>()), load, requests).prop_map(
        |(
            (replicas, tensor, blocks, block_size, spare_budget, max_sequences),
            (cost, router, slo),
            load,
            requests,
        )| {
            Workload {
                replicas,
                tensor,
                blocks,
                block_size,
                spare_budget,
                max_sequences,
                cost,
                router,
                load,
                slo,
                requests,
            }
        },
    )
}

fn drive(workload: &Workload) -> SimulationOutcome {
    let mut arrival = 0;
    let requests: Vec<_> = workload
        .requests
        .iter()
        .map(|&(gap, input, output)| {
            // Many come at the same instant.
            arrival += gap.saturating_sub(10);
            (arrival, input, output)
        })
        .collect();
    let mut setup = Setup::new(
        workload.replicas * if workload.tensor { 2 } else { 1 },
        1,
        &requests,
    );
    setup.layout.replicas.truncate(workload.replicas as usize);
    setup.layout.gpus.truncate(workload.replicas as usize);
    setup.layout.kv.block_size = workload.block_size;
    if workload.tensor {
        two_ranks(&mut setup);
    }
    let costs: [&dyn CostModel; 4] = [&ByTheMillisecond, &Growing, &Shrinking, &ByTheMillisecond];
    let mut scenario = setup.scenario(costs[workload.cost as usize]);
    if workload.cost == 3 {
        scenario.steps = StepTimes::Fixed(FIXED);
    }
    scenario.router = [
        RouterPolicy::RoundRobin,
        RouterPolicy::LeastOutstanding,
        RouterPolicy::CapacityWeighted,
    ][workload.router as usize];
    scenario.kv_blocks_limit = Some(workload.blocks);
    scenario.options = EngineOptions {
        token_budget: workload.max_sequences + workload.spare_budget,
        max_sequences: workload.max_sequences,
        max_context: None,
    };
    if let Some((clients, turnaround, duration)) = workload.load {
        let half = |halves: u64| at(halves).since(SimTime::ZERO);
        scenario.load = Load::Closed {
            clients,
            turnaround: half(turnaround),
            duration: duration.map(half),
        };
    }
    scenario.slo = workload.slo.then_some(Slo {
        itl: Some(SimDuration(4_000_000_000)),
        ..Slo::default()
    });
    compare(&scenario)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_engines_agree_to_the_picosecond(workload in workload()) {
        drive(&workload);
    }
}

/// Larger pools, longer answers and more of them, so that runs are long and preempted sequences come back.
#[test]
fn long_runs_agree() {
    let mut state = 11_u64;
    let mut draw = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % limit
    };
    let (mut preemptions, mut saved) = (0, 0);
    for round in 0..40_u8 {
        let requests = (0..300).map(|_| (draw(30), 1 + draw(34), 1 + draw(30))).collect();
        let workload = Workload {
            replicas: 1 + u32::from(round) % 3,
            tensor: round % 4 == 1,
            blocks: 20 + draw(60) as u32,
            block_size: 1 + draw(8) as u32,
            spare_budget: draw(60) as u32,
            max_sequences: 4 + draw(20) as u32,
            cost: round % 4,
            router: (round / 4) % 3,
            load: (round % 5 == 0).then_some((24, 1, None)),
            slo: round % 2 == 0,
            requests,
        };
        let outcome = drive(&workload);
        preemptions += outcome.report.preemptions;
        saved += outcome.report.steps.unwrap();
    }
    assert!(
        preemptions > 100 && saved > 10_000,
        "{preemptions} preemptions in {saved} steps"
    );
}
