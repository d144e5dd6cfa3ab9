//! What a coordinator can be asked: its state, and where the workers' time went.

use std::collections::BTreeMap;
use std::time::Duration;

use infercluster_spec::operator::RankStep;
use infercluster_spec::report::BusyFraction;
use infercluster_spec::{BatchShape, Epoch, GpuId, ReplicaId, StageId, StepId, StepRecord};
use serde::Serialize;

use super::replica::{Completed, Replica};
use crate::speed::{SegmentTimes, Speed, SpeedCheck};
use crate::wire::message::{StepTimes, WorkerTimes};

/// One replica right now; counters run since the start.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplicaStatus {
    /// Which.
    pub id: ReplicaId,
    /// The layout version that it runs.
    pub epoch: Epoch,
    /// Sequences that hold KV.
    pub running: u64,
    /// Sequences that wait.
    pub waiting: u64,
    /// Blocks of the pool.
    pub kv_blocks: u64,
    /// Blocks that nobody owns.
    pub kv_blocks_free: u64,
    /// Completed steps.
    pub steps: u64,
    /// Their seconds, summed; steps in flight together count each.
    pub step_s: f64,
    /// Prompt tokens of accepted requests.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Times a sequence lost its KV.
    pub preemptions: u64,
    /// Requests that got all their tokens.
    pub finished_length: u64,
    /// Requests that ended with their text.
    pub finished_stop: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Why it answers no more.
    pub failure: Option<String>,
}

/// One worker right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkerStatus {
    /// Its device.
    pub gpu: GpuId,
    /// Its process; `None` where it is lost.
    pub process: Option<u32>,
}

/// The whole service right now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// By id.
    pub replicas: Vec<ReplicaStatus>,
    /// By device.
    pub workers: Vec<WorkerStatus>,
    /// Requests that were refused at the door.
    pub refused: u64,
}

impl Status {
    /// Whether requests are answered.
    pub fn is_ready(&self) -> bool {
        self.replicas.iter().any(|replica| replica.failure.is_none())
    }
}

/// Where time went over one window.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurements {
    /// Length of the window.
    pub elapsed: Duration,
    /// Each living worker's times.
    pub workers: BTreeMap<GpuId, WorkerTimes>,
    /// Emulated speeds.
    pub speeds: BTreeMap<GpuId, Speed>,
    /// The latest steps, stage by stage: what `calibrate` reads.
    pub steps: Vec<StepRecord>,
}

impl Measurements {
    /// The share of the window in which each device computed, pacing included, and their mean weighted by
    /// emulated speed: all devices are of one type.
    pub fn busy_fraction(&self) -> BusyFraction {
        let elapsed = self.elapsed.as_secs_f64();
        let busy = |times: &WorkerTimes| {
            let paced: f64 = times.segments.values().map(SegmentTimes::paced_s).sum();
            if elapsed > 0.0 { paced / elapsed } else { 0.0 }
        };
        let per_gpu: BTreeMap<GpuId, f64> = self
            .workers
            .iter()
            .map(|(gpu, times)| (*gpu, busy(times)))
            .collect();
        let weights: f64 = per_gpu.keys().map(|gpu| self.speed(*gpu).factor()).sum();
        let weighted: f64 = per_gpu
            .iter()
            .map(|(gpu, busy)| busy * self.speed(*gpu).factor())
            .sum();
        BusyFraction {
            weighted: if weights > 0.0 { weighted / weights } else { 0.0 },
            per_gpu,
        }
    }

    /// Whether each emulated device had its speed.
    pub fn speed_checks(&self) -> Vec<SpeedCheck> {
        self.workers
            .iter()
            .map(|(gpu, times)| SpeedCheck::of(*gpu, self.speed(*gpu), &times.segments))
            .collect()
    }

    fn speed(&self, gpu: GpuId) -> Speed {
        self.speeds.get(&gpu).copied().unwrap_or(Speed::FULL)
    }
}

/// Joins the coordinator's steps with what every rank says about them. A one-stage replica's wall time is the
/// coordinator's, from dispatch to tokens; inside a pipeline a stage's is that of its slowest rank, from the
/// arrival of its input to its hand-over.
pub(super) fn step_records(
    replica: &Replica,
    completed: &[Completed],
    workers: &BTreeMap<GpuId, WorkerTimes>,
) -> Vec<StepRecord> {
    let by_step = |times: &WorkerTimes| -> BTreeMap<StepId, StepTimes> {
        times
            .latest
            .iter()
            .map(|step| (step.step, step.clone()))
            .collect()
    };
    let ranks: BTreeMap<GpuId, BTreeMap<StepId, StepTimes>> = replica
        .seating
        .gpus()
        .filter_map(|gpu| Some((*gpu, by_step(workers.get(gpu)?))))
        .collect();
    let stages = replica.seating.stage_count();
    let mut records = Vec::new();
    for done in completed
        .iter()
        // Steps of a layout before would be told by the seats of this one.
        .filter(|done| done.shape != BatchShape::default() && done.epoch == replica.epoch)
    {
        for stage in 0..stages {
            let stage = StageId(stage as u32);
            let seated = replica
                .seating
                .seats
                .iter()
                .filter(|(seat, _)| seat.stage == stage);
            let told: Option<Vec<(GpuId, &StepTimes)>> = seated
                .map(|(_, gpu)| Some((*gpu, ranks.get(gpu)?.get(&done.step)?)))
                .collect();
            let Some(told) = told else {
                continue;
            };
            let slowest = told.iter().map(|(_, times)| times.wall_s).fold(0.0, f64::max);
            records.push(StepRecord {
                replica: replica.id,
                stage,
                shape: done.shape,
                wall_s: if stages == 1 { done.wall_s } else { slowest },
                ranks: told
                    .into_iter()
                    .map(|(gpu, times)| RankStep {
                        gpu,
                        compute_s: times.compute_s.clone(),
                    })
                    .collect(),
            });
        }
    }
    records
}
