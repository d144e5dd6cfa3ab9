//! What must hold at the end of every run. A breach is a bug of this program and panics with the values.

use infercluster_spec::{ReplicaId, memory};

use super::replica::ReplicaState;
use super::requests::Requests;
use crate::scenario::{Load, ReplicaOutcome, Scenario};

/// Requests, tokens and blocks are conserved; no device ever held more than its memory. `taken` requests of the
/// trace had their turn.
pub(super) fn verify_end(scenario: &Scenario, replicas: &[ReplicaState], requests: &Requests, taken: usize) {
    verify_requests(scenario, requests, taken);
    for (index, replica) in replicas.iter().enumerate() {
        let id = ReplicaId(index as u32);
        replica.verify();
        let ledger = replica.scheduler.ledger();
        assert_eq!(
            ledger.free(),
            ledger.total(),
            "{id} has blocks without a sequence"
        );
        let left = replica.scheduler.running() + replica.scheduler.waiting();
        assert_eq!(left, 0, "{id} has sequences that never ended");
    }
    let outcomes: Vec<ReplicaOutcome> = replicas.iter().map(ReplicaState::outcome).collect();
    verify_memory(scenario, &outcomes);
}

/// Every request that had its turn was completed with all its tokens, or skipped; all had, unless time was over.
fn verify_requests(scenario: &Scenario, requests: &Requests, taken: usize) {
    let mut sent = 0;
    for (request, record) in scenario.trace.requests.iter().zip(requests.by_position()) {
        let Some(record) = record else { continue };
        sent += 1;
        let tokens = record.token_times.len() as u64;
        assert!(
            record.completed && tokens == request.output.0,
            "{} ended with {tokens} of {} tokens",
            request.id,
            request.output
        );
    }
    let total = scenario.trace.requests.len();
    let is_limited = matches!(
        scenario.load,
        Load::Closed {
            duration: Some(_),
            ..
        }
    );
    assert!(
        taken == total || is_limited,
        "{taken} of {total} requests had their turn"
    );
    assert_eq!(
        sent + requests.skipped(),
        taken as u64,
        "requests sent and skipped are those that had their turn"
    );
}

/// Weights, reserve and the blocks in use fit each device.
pub(super) fn verify_memory(scenario: &Scenario, replicas: &[ReplicaOutcome]) {
    for seat in memory::seats(scenario.layout, scenario.model) {
        let device = scenario.cluster.gpu(seat.gpu);
        let Some(limit) = device.and_then(|device| scenario.cluster.memory(device)) else {
            continue;
        };
        let blocks = replicas[seat.seat.replica.index()].kv_blocks_peak;
        let kv = seat.memory.kv_block * u64::from(blocks);
        let used = if blocks == 0 {
            seat.memory.weights
        } else {
            seat.memory.weights + kv + scenario.memory_reserve
        };
        assert!(used <= limit, "{} holds {used} of {limit}", seat.gpu);
    }
}
