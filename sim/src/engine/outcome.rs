//! From what happened to what is reported.

use std::collections::BTreeMap;

use infercluster_spec::report::BusyFraction;
use infercluster_spec::{GpuId, Operator, Report, SimDuration, SimTime};

use super::replica::ReplicaState;
use super::requests::Requests;
use crate::scenario::{ReplicaOutcome, Scenario, SimError, SimulationOutcome};

/// Tokens of the GEMM that weighs devices: between decode, which is bound by memory, and a full prefill
/// chunk, which is bound by compute.
const CAPABILITY_TOKENS: u64 = 256;

/// A device and how long it computed.
pub(super) struct BusyGpu {
    pub(super) gpu: GpuId,
    pub(super) busy: SimDuration,
}

pub(super) fn outcome(
    scenario: &Scenario,
    replicas: &[ReplicaState],
    requests: Requests,
) -> Result<SimulationOutcome, SimError> {
    let skipped = requests.skipped();
    let records = requests.into_records();
    let first = records.iter().map(|record| record.arrival).min();
    let last = records
        .iter()
        .filter_map(|record| record.token_times.last())
        .max();
    let busy = replicas
        .iter()
        .flat_map(|replica| &replica.stages)
        .flat_map(|stage| {
            let pairs = stage.gpus().iter().zip(&stage.busy);
            pairs.map(|(gpu, busy)| BusyGpu {
                gpu: *gpu,
                busy: *busy,
            })
        });
    let outcomes: Vec<ReplicaOutcome> = replicas.iter().map(ReplicaState::outcome).collect();
    let report = Report {
        skipped,
        steps: Some(outcomes.iter().map(|replica| replica.steps).sum()),
        busy_fraction: busy_fraction(scenario, busy, first.zip(last.copied()))?,
        ..Report::from_records(&records, scenario.slo)
    };
    Ok(SimulationOutcome {
        report,
        requests: records,
        replicas: outcomes,
    })
}

/// Compute time of each device over the `window` from first arrival to last token, devices of the layout
/// without a seat included; `None` where that time is zero.
pub(super) fn busy_fraction(
    scenario: &Scenario,
    devices: impl Iterator<Item = BusyGpu>,
    window: Option<(SimTime, SimTime)>,
) -> Result<Option<BusyFraction>, SimError> {
    let elapsed = window.map(|(first, last)| last.since(first));
    let Some(elapsed) = elapsed.filter(|elapsed| *elapsed > SimDuration::ZERO) else {
        return Ok(None);
    };
    let mut per_gpu: BTreeMap<GpuId, f64> = scenario.layout.gpus.iter().map(|gpu| (*gpu, 0.0)).collect();
    for device in devices {
        per_gpu.insert(device.gpu, device.busy.as_f64() / elapsed.as_f64());
    }
    let (mut weighted, mut weights) = (0.0, 0.0);
    for (gpu, busy) in &per_gpu {
        let weight = capability(scenario, *gpu)?;
        weighted += weight * busy;
        weights += weight;
    }
    Ok(Some(BusyFraction {
        weighted: weighted / weights,
        per_gpu,
    }))
}

/// GEMMs a second of the model's hidden size: how much a device counts in the weighted mean.
fn capability(scenario: &Scenario, gpu: GpuId) -> Result<f64, SimError> {
    let hidden = u64::from(scenario.model.hidden);
    let gemm = Operator::Gemm {
        m: CAPABILITY_TOKENS,
        n: hidden,
        k: hidden,
    };
    let seconds = scenario.cost.operator_seconds(gpu, scenario.model.dtype, &gemm)?;
    // A free GEMM weighs like one of a picosecond, the clock's grain.
    Ok(1.0 / seconds.max(1e-12))
}
