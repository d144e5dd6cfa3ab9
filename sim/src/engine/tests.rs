//! Runs worked out by hand, and random ones that must only end with their books balanced.

use infercluster_serving::RouterPolicy;
use infercluster_spec::cluster::{DeviceType, Gpu, Node};
use infercluster_spec::layout::{
    CPU_F32, KvCache, LayerGroup, Layout, Reduction, Replica, ReplicaRole, Shard, Stage,
};
use infercluster_spec::model::{Family, Model, Rope};
use infercluster_spec::{
    Bytes, BytesPerSec, Cluster, Dtype, EngineOptions, Fraction, GpuId, IndexRange, NodeId, Operator,
    Request, RequestId, SegmentKind, SimDuration, SimTime, Tokens, Trace, json,
};
use proptest::prelude::*;

use super::*;
use crate::cost::{CostError, CostModel, Origin, SegmentCorrection};
use crate::topology::{Algorithm, CollectiveGroup};

/// In every layer a prefill token takes 1 ms and a decode, of any size, 1 ms; a hand-over takes 0.5 ms. The
/// rest is free. Device 1 weighs a third of the others.
pub(super) struct ByTheMillisecond;

impl CostModel for ByTheMillisecond {
    fn operator_seconds(&self, gpu: GpuId, _: Dtype, operator: &Operator) -> Result<f64, CostError> {
        Ok(match *operator {
            Operator::AttentionPrefill { new_tokens, .. } => 1e-3 * new_tokens as f64,
            Operator::AttentionDecode { sequences, .. } if sequences > 0 => 1e-3,
            Operator::Gemm { m: 256, n: 8, k: 8 } if gpu == GpuId(1) => 3e-9,
            Operator::Gemm { m: 256, n: 8, k: 8 } => 1e-9,
            _ => 0.0,
        })
    }

    fn origin(&self, _: GpuId, _: Dtype, _: &Operator) -> Result<Origin, CostError> {
        Ok(Origin::Calibrated)
    }

    fn segment_correction(&self, _: GpuId, _: SegmentKind, _: bool) -> Result<SegmentCorrection, CostError> {
        Ok(SegmentCorrection::NONE)
    }

    fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, CostError> {
        let alone = gpus.len() == 1;
        Ok(CollectiveGroup {
            algorithm: if alone { Algorithm::Alone } else { Algorithm::Mesh },
            ranks: gpus.len() as u32,
            alpha_s: 0.5e-3,
            seconds_per_byte: 0.0,
            is_loopback: true,
        })
    }

    fn node_of(&self, _: GpuId) -> Result<NodeId, CostError> {
        Ok(NodeId(0))
    }
}

fn model(layers: u32) -> Model {
    Model {
        name: "tiny".to_owned(),
        family: Family::Llama,
        layers,
        hidden: 8,
        query_heads: 4,
        kv_heads: 2,
        head_dim: 2,
        ffn: 16,
        vocab: 32,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 1e4,
            llama3: None,
        },
        max_positions: 64,
        dtype: Dtype::F32,
        experts: None,
        sliding_window: None,
    }
}

fn range(start: u32, end: u32) -> IndexRange {
    IndexRange::new(start, end).unwrap()
}

/// Replicas of so many stages, each stage one layer on one device, blocks of 4 tokens.
fn layout(replicas: u32, stages: u32) -> Layout {
    let stage = |gpu: u32, index: u32| Stage {
        layer_groups: vec![LayerGroup {
            layers: range(index, index + 1),
            shards: vec![Shard {
                gpu: GpuId(gpu),
                query_heads: range(0, 4),
                mlp_columns: range(0, 16),
                output_rows: None,
                vocab: (index + 1 == stages).then(|| range(0, 32)),
                experts: Vec::new(),
            }],
        }],
    };
    let replica = |first: u32| Replica {
        role: ReplicaRole::Mixed,
        stages: (0..stages).map(|index| stage(first + index, index)).collect(),
    };
    Layout {
        model: "tiny".to_owned(),
        gpus: (0..replicas * stages).map(GpuId).collect(),
        reduction: Reduction::Fast,
        numerics: CPU_F32.to_owned(),
        quantum: 16,
        kv: KvCache {
            block_size: 4,
            dtype: Dtype::F32,
        },
        replicas: (0..replicas).map(|index| replica(index * stages)).collect(),
    }
}

fn cluster(gpus: u32) -> Cluster {
    let device = DeviceType {
        memory: Bytes(1 << 20),
        memory_bandwidth: BytesPerSec::new(1e9).unwrap(),
        peak: [].into(),
        multiprocessors: None,
        last_level_cache: None,
        source: String::new(),
    };
    let gpu = |id| Gpu {
        id: GpuId(id),
        device_type: "worker".to_owned(),
        memory: None,
        speed: Fraction::ONE,
    };
    Cluster {
        name: "host".to_owned(),
        device_types: [("worker".to_owned(), device)].into(),
        nodes: vec![Node {
            name: "host".to_owned(),
            gpus: (0..gpus).map(gpu).collect(),
            nics: Vec::new(),
        }],
        switches: Vec::new(),
        links: Vec::new(),
    }
}

/// Half milliseconds.
pub(super) fn at(halves: u64) -> SimTime {
    SimTime(halves * 500_000_000)
}

/// Requests as (arrival in half milliseconds, input, output).
fn trace(requests: &[(u64, u64, u64)]) -> Trace {
    let request = |(id, (arrival, input, output)): (usize, &(u64, u64, u64))| Request {
        id: RequestId(id as u64),
        arrival: Some(at(*arrival)),
        input: Tokens(*input),
        output: Tokens(*output),
        block_hashes: Vec::new(),
    };
    Trace {
        name: "by hand".to_owned(),
        requests: requests.iter().enumerate().map(request).collect(),
        hash_block: None,
    }
}

/// Everything a scenario borrows.
pub(super) struct Setup {
    pub(super) cluster: Cluster,
    pub(super) model: Model,
    pub(super) layout: Layout,
    pub(super) trace: Trace,
}

impl Setup {
    pub(super) fn new(replicas: u32, stages: u32, requests: &[(u64, u64, u64)]) -> Self {
        Self {
            cluster: cluster(replicas * stages),
            model: model(stages),
            layout: layout(replicas, stages),
            trace: trace(requests),
        }
    }

    pub(super) fn scenario<'a>(&'a self, cost: &'a dyn CostModel) -> Scenario<'a> {
        Scenario::new(&self.cluster, &self.model, &self.layout, cost, &self.trace)
    }

    fn run(&self, change: impl FnOnce(&mut Scenario)) -> Result<SimulationOutcome, SimError> {
        let mut scenario = self.scenario(&ByTheMillisecond);
        change(&mut scenario);
        simulate(&scenario)
    }
}

/// Token times of every request, in half milliseconds.
fn token_times(outcome: &SimulationOutcome) -> Vec<Vec<u64>> {
    let halves = |time: &SimTime| {
        assert_eq!(time.0 % 500_000_000, 0, "{time:?} is off the grid");
        time.0 / 500_000_000
    };
    outcome
        .requests
        .iter()
        .map(|record| record.token_times.iter().map(halves).collect())
        .collect()
}

#[test]
fn tokens_come_when_their_step_ends() {
    // Budget 8. Step 0 (8 ms): 5 tokens of A, 3 of B. Step 1 (1 + 1 ms): A decodes, the last of B. C comes
    // at 9 ms, inside step 1, and prefills in step 2 (1 + 2 ms) while A gets its last token.
    let setup = Setup::new(1, 1, &[(0, 5, 3), (0, 4, 1), (18, 2, 1)]);
    let outcome = setup.run(|scenario| scenario.options.token_budget = 8).unwrap();
    assert_eq!(token_times(&outcome), [vec![16, 20, 26], vec![20], vec![26]]);
    let report = &outcome.report;
    assert_eq!((report.completed, report.failed, report.skipped), (3, 0, 0));
    assert_eq!((report.steps, report.duration_s), (Some(3), 0.013));
    assert_eq!(report.busy_fraction.as_ref().unwrap().per_gpu[&GpuId(0)], 1.0);
    // A computes 5 + 2 tokens, B 4, C 2: the last token of each is never computed.
    assert_eq!(outcome.replicas[0].computed_tokens, 13);
    // At the end of step 0 A has 2 blocks and B 1; C's step adds one to A's 2.
    assert_eq!(outcome.replicas[0].kv_blocks_peak, 3);
}

#[test]
fn a_pipeline_keeps_two_micro_batches_in_flight() {
    // A and B, 2 tokens in and 2 out, on two stages; hand-over 0.5 ms. In ms:
    //   stage 0: A 0-2, B 2-4, A' 4.5-5.5,            B' 6.5-7.5
    //   stage 1:        A 2.5-4.5, B 4.5-6.5, A' 6.5-7.5,   B' 8-9
    // A' starts when A's token is there (4.5) and waits for stage 1 until B leaves it (6.5).
    let setup = Setup::new(1, 2, &[(0, 2, 2), (0, 2, 2)]);
    let outcome = setup.run(|_| ()).unwrap();
    assert_eq!(token_times(&outcome), [[9, 15], [13, 18]]);
    // Both stages compute 2 + 2 + 1 + 1 of 9 ms: waiting for a hand-over is not busy.
    let busy = outcome.report.busy_fraction.unwrap();
    assert_eq!(
        busy.per_gpu,
        [(GpuId(0), 6.0 / 9.0), (GpuId(1), 6.0 / 9.0)].into()
    );
    assert_eq!(outcome.report.steps, Some(4));
}

#[test]
fn a_dry_pool_preempts_the_latest() {
    // Both hold 2 of 4 blocks until position 8. Step 0 lasts 8 ms, steps 1 to 4 one each: 5 tokens each at
    // 12 ms. Then A runs alone: tokens 5 to 8 at 13, 14, 15, 16. B prefills its 9 known tokens: 25 ms, then
    // 26, 27, 28.
    let setup = Setup::new(1, 1, &[(0, 4, 9), (0, 4, 9)]);
    let outcome = setup.run(|scenario| scenario.kv_blocks_limit = Some(4)).unwrap();
    let shared = [16, 18, 20, 22, 24];
    assert_eq!(
        token_times(&outcome),
        [
            [&shared[..], &[26, 28, 30, 32]].concat(),
            [&shared[..], &[50, 52, 54, 56]].concat()
        ]
    );
    let preemptions: Vec<u32> = outcome.requests.iter().map(|record| record.preemptions).collect();
    assert_eq!((preemptions, outcome.report.preemptions), (vec![0, 1], 1));
    // 12 tokens each, and B's first 8 once more.
    assert_eq!(outcome.replicas[0].computed_tokens, 32);
    assert_eq!(
        (outcome.replicas[0].kv_blocks, outcome.replicas[0].kv_blocks_peak),
        (4, 4)
    );
}

#[test]
fn clients_of_a_closed_loop_wait_for_their_answers() {
    // Two clients, three requests: A (4 ms, then 1 a token) and B share the first step of 6 ms. B ends with it.
    let mut setup = Setup::new(1, 1, &[(0, 4, 2), (0, 2, 1), (0, 3, 1)]);
    for request in &mut setup.trace.requests {
        request.arrival = None;
    }
    let run = |turnaround: u64, duration| {
        let load = Load::Closed {
            clients: 2,
            turnaround: SimDuration(turnaround * 500_000_000),
            duration,
        };
        setup.run(|scenario| scenario.load = load).unwrap()
    };
    // A client that takes no time sends C at 6 ms, beside A's last token: 1 + 3 ms.
    let outcome = run(0, None);
    assert_eq!(token_times(&outcome), [vec![12, 20], vec![12], vec![20]]);
    assert_eq!(outcome.requests[2].arrival, at(12));
    // One that takes half a millisecond misses A's step from 6 to 7 ms: C runs alone from 7 to 10 ms.
    let outcome = run(1, None);
    assert_eq!(token_times(&outcome), [vec![12, 14], vec![12], vec![20]]);
    assert_eq!(outcome.requests[2].arrival, at(13));
    // Nobody sends when the time is over: C would come at 6.5 ms.
    assert_eq!(run(1, Some(SimDuration(6_500_000_000))).requests.len(), 2);
    assert_eq!(run(1, Some(SimDuration(6_500_000_001))).requests.len(), 3);
    assert_eq!(
        setup.run(|_| ()),
        Err(SimError::NoArrival {
            request: RequestId(0)
        })
    );
}

#[test]
fn requests_that_fit_nowhere_are_skipped() {
    // 64 positions: 60 + 5 is too long. A pool of 3 blocks holds 12 tokens: 10 + 4 - 1 is too much.
    let setup = Setup::new(
        2,
        1,
        &[(0, 60, 5), (2, 10, 4), (4, 10, 3), (6, u64::MAX, 1), (8, 1, 0)],
    );
    let outcome = setup.run(|scenario| scenario.kv_blocks_limit = Some(3)).unwrap();
    assert_eq!((outcome.report.completed, outcome.report.skipped), (1, 4));
    assert_eq!(outcome.requests[0].id, RequestId(2));
    // A closed loop goes on behind them.
    let load = Load::closed(1);
    let closed = setup.run(|scenario| (scenario.load, scenario.kv_blocks_limit) = (load, Some(3)));
    assert_eq!(closed.unwrap().report.completed, 1);
}

#[test]
fn replicas_share_requests_and_busy_time_is_weighted() {
    // Three requests of 2 ms on two replicas, round robin: replica 0 has the first and the third. All come
    // at once, so one step of 4 ms there and one of 2 ms on replica 1.
    let setup = Setup::new(2, 1, &[(0, 2, 1), (0, 2, 1), (0, 2, 1)]);
    let outcome = setup
        .run(|scenario| scenario.router = RouterPolicy::RoundRobin)
        .unwrap();
    assert_eq!(token_times(&outcome), [[8], [4], [8]]);
    // Device 1 weighs a third: (1 x 1 + 1/3 x 1/2) / (4/3) = 7/8.
    let busy = outcome.report.busy_fraction.unwrap();
    assert!((busy.weighted - 0.875).abs() < 1e-12, "{busy:?}");
}

#[test]
fn what_cannot_be_simulated_says_why() {
    let mut setup = Setup::new(1, 1, &[(4, 2, 1), (2, 2, 1)]);
    let order = setup.run(|_| ());
    assert_eq!(
        order,
        Err(SimError::ArrivalOrder {
            request: RequestId(1)
        })
    );
    let nobody = setup.run(|scenario| scenario.load = Load::closed(0));
    assert_eq!(nobody, Err(SimError::NoClients));
    let budget = setup.run(|scenario| scenario.options.token_budget = 0);
    assert!(matches!(budget, Err(SimError::Options(_))));
    setup.trace.requests[1].arrival = Some(SimTime(u64::MAX));
    assert_eq!(setup.run(|_| ()), Err(SimError::ClockEnds));
    setup.layout.replicas[0].role = ReplicaRole::Decode;
    assert!(matches!(setup.run(|_| ()), Err(SimError::Role { .. })));
    setup.layout.replicas[0].stages[0].layer_groups[0].shards[0].vocab = None;
    assert!(matches!(setup.run(|_| ()), Err(SimError::Layout(_))));
}

#[test]
fn nothing_to_do_is_an_outcome() {
    let outcome = Setup::new(1, 1, &[]).run(|_| ()).unwrap();
    assert_eq!(
        (outcome.report.completed, outcome.report.busy_fraction),
        (0, None)
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The checkers of the engine do the work; the run itself must end, and end the same way twice.
    #[test]
    fn random_runs_balance_their_books(
        replicas in 1_u32..3,
        stages in 1_u32..4,
        blocks in 1_u32..20,
        token_budget in 1_u32..40,
        max_sequences in 1_u32..8,
        clients in prop::option::of(1_u32..6),
        requests in prop::collection::vec((0_u64..20, 1_u64..30, 1_u64..20), 0..30),
    ) {
        let mut arrival = 0;
        let requests: Vec<_> = requests
            .into_iter()
            .map(|(gap, input, output)| {
                arrival += gap;
                (arrival, input, output)
            })
            .collect();
        let setup = Setup::new(replicas, stages, &requests);
        let run = || {
            setup.run(|scenario| {
                scenario.kv_blocks_limit = Some(blocks);
                scenario.options = EngineOptions { token_budget, max_sequences, max_context: None };
                if let Some(clients) = clients {
                    scenario.load = Load::closed(clients);
                }
            })
        };
        let (one, two) = (run().unwrap(), run().unwrap());
        prop_assert_eq!(json::write(&one.report), json::write(&two.report));
        prop_assert_eq!(&one, &two);
        prop_assert_eq!(one.report.completed + one.report.skipped, requests.len() as u64);
        // What is never preempted is computed exactly once.
        if one.report.preemptions == 0 {
            let needed: u64 = one.requests.iter().map(|record| record.input.0 + record.token_times.len() as u64 - 1).sum();
            let computed: u64 = one.replicas.iter().map(|replica| replica.computed_tokens).sum();
            prop_assert_eq!(computed, needed);
        }
        // Nobody is faster than alone: every prompt token takes 1 ms in each stage.
        for record in &one.requests {
            let alone = stages_time(stages, record.input.0);
            prop_assert!(record.token_times[0].since(record.arrival).0 >= alone);
        }
    }
}

/// Picoseconds of a prompt that goes through the pipeline in one piece and alone, without the hand-overs: the
/// first stage needs all of it, and a later one at least its last chunk of one token.
fn stages_time(stages: u32, input: u64) -> u64 {
    (input + u64::from(stages) - 1) * 1_000_000_000
}
