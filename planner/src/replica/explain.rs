//! What each stage of a plan does and what holds it back.

use std::fmt::{self, Write};

use infercluster_sim::cost::{SegmentTime, StageCost};
use infercluster_spec::cluster::DeviceType;
use infercluster_spec::layout::Shard;
use infercluster_spec::{
    BatchShape, Bytes, Dtype, GpuId, IndexRange, Layout, ReplicaId, SegmentKind, SimDuration, StageId, memory,
};

use super::{BaselineKind, Candidate, PlanProblem, ReplicaError, ReplicaPlan, stage};

/// What a stage would need more of to be faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindingConstraint {
    /// Arithmetic of a device.
    Compute,
    /// Memory rate of a device.
    MemoryBandwidth,
    /// Links among its devices.
    Link,
    /// Memory: other shares would be faster but do not fit.
    MemoryCapacity,
    /// Host time of a step.
    Host,
}

impl fmt::Display for BindingConstraint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Compute => "compute",
            Self::MemoryBandwidth => "memory bandwidth",
            Self::Link => "links",
            Self::MemoryCapacity => "memory capacity",
            Self::Host => "host time",
        })
    }
}

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StagePlan {
    /// Its devices in rank order.
    pub gpus: Vec<GpuId>,
    /// Its layers.
    pub layers: IndexRange,
    /// One micro-batch through it.
    pub time: SimDuration,
    /// The part of it that the host takes.
    pub host: SimDuration,
    /// The part of it that collectives take.
    pub collectives: SimDuration,
    /// Compute time by rank; a rank waits for the rest of `time`.
    pub rank_compute: Vec<SimDuration>,
    /// Where the time goes.
    pub segments: Vec<SegmentTime>,
    /// Weights and KV of the workload by rank.
    pub memory_used: Vec<Bytes>,
    /// What holds it back.
    pub binding: BindingConstraint,
}

impl ReplicaPlan {
    /// Why the layout is as it is, in lines: what binds each stage, where its ranks spend their time, and what
    /// other layouts would reach.
    pub fn explanation(&self) -> String {
        let mut text = format!(
            "one token for every sequence in {}: {:.1} output tokens/s\n",
            self.step_time, self.output_tokens_per_s
        );
        for (stage, plan) in self.stages.iter().enumerate() {
            let _ = writeln!(
                text,
                "stage {stage}, layers {}: {} a step, {} of it collectives, {} host; bound by {}",
                plan.layers, plan.time, plan.collectives, plan.host, plan.binding
            );
            for (gpu, (compute, used)) in plan
                .gpus
                .iter()
                .zip(plan.rank_compute.iter().zip(&plan.memory_used))
            {
                let _ = writeln!(text, "  {gpu}: computes {compute}, holds {used}");
            }
        }
        for baseline in &self.baselines {
            let name = match baseline.kind {
                BaselineKind::Even => "even shares and layers",
                BaselineKind::MemoryProportional => "even shares, layers by memory",
            };
            let factor = baseline.step_time.as_seconds() / self.step_time.as_seconds();
            let _ = writeln!(text, "{name}: {}, {factor:.2} times as long", baseline.step_time);
        }
        let _ = writeln!(
            text,
            "ideal whole shares of this structure: {}; fractional ones: {}",
            self.bounds.integer, self.bounds.continuous
        );
        let proof = if self.exact {
            "proven best of"
        } else {
            "best found of"
        };
        let _ = writeln!(
            text,
            "{proof} all ways to form stages that were priced: {}",
            self.structures
        );
        text
    }
}

/// How much faster a stage must be without memory limits to be called short of memory.
const CAPACITY_MARGIN: f64 = 1.01;

pub(super) fn stages(
    problem: &PlanProblem,
    candidate: &Candidate,
    layout: &Layout,
) -> Result<Vec<StagePlan>, ReplicaError> {
    let shape = problem
        .workload
        .shape(stage::sequences_of_step(problem, candidate.stages.len()));
    let seats = memory::seats(layout, problem.model);
    let kv_tokens = problem.workload.kv_tokens(problem.kv.block_size);
    let blocks = kv_tokens / u64::from(problem.kv.block_size);
    let mut plans = Vec::new();
    for (position, chosen) in candidate.stages.iter().enumerate() {
        let id = StageId(position as u32);
        let time = StageCost::new(problem.cost, layout, problem.model, ReplicaId(0), id)?.step(&shape)?;
        let rounded = |seconds: f64| SimDuration::from_seconds(seconds).unwrap_or(SimDuration(u64::MAX));
        let short = chosen.option.free_time.as_seconds() * CAPACITY_MARGIN < chosen.option.time.as_seconds();
        let compute_s = time.total_s - time.host_s - time.collective_s;
        let binding = if short {
            BindingConstraint::MemoryCapacity
        } else if time.collective_s >= compute_s.max(time.host_s) {
            BindingConstraint::Link
        } else if time.host_s >= compute_s {
            BindingConstraint::Host
        } else {
            device_binding(problem, layout, position, &time.segments, &shape)
        };
        let used = seats.iter().filter(|seat| seat.seat.stage == id);
        let used = used.map(|seat| seat.memory.weights + seat.memory.kv_block * blocks);
        let layers = layout.replicas[0].stages[position].layers();
        plans.push(StagePlan {
            gpus: chosen.gpus.clone(),
            layers: layers.unwrap_or_default(),
            time: rounded(time.total_s),
            host: rounded(time.host_s),
            collectives: rounded(time.collective_s),
            rank_compute: time
                .rank_compute_s
                .iter()
                .map(|seconds| rounded(*seconds))
                .collect(),
            segments: time.segments,
            memory_used: used.collect(),
            binding,
        });
    }
    Ok(plans)
}

/// Whether the slowest rank of the longest segment is bound by arithmetic or by its memory rate, by datasheet.
fn device_binding(
    problem: &PlanProblem,
    layout: &Layout,
    position: usize,
    segments: &[SegmentTime],
    shape: &BatchShape,
) -> BindingConstraint {
    let longest = segments.iter().max_by(|one, other| {
        let seconds = |segment: &SegmentTime| f64::from(segment.repeats) * segment.compute_s;
        seconds(one).total_cmp(&seconds(other))
    });
    let found = longest.and_then(|segment| {
        let group = layout.replicas[0].stages[position].layer_groups.first()?;
        let shard = group.shards.get(segment.slowest.index())?;
        let device = problem.cluster.device_type(problem.cluster.gpu(shard.gpu)?)?;
        Some((
            work(problem, shard, segment.kind, shape),
            peak(device, problem.model.dtype)?,
            device,
        ))
    });
    match found {
        Some(((flops, bytes), peak, device))
            if flops / peak < bytes / device.memory_bandwidth.per_second() =>
        {
            BindingConstraint::MemoryBandwidth
        }
        _ => BindingConstraint::Compute,
    }
}

fn peak(device: &DeviceType, dtype: Dtype) -> Option<f64> {
    let own = device.peak.get(&dtype).or_else(|| device.peak.values().next());
    own.map(|peak| peak.per_second())
}

/// Operations and bytes of one segment on one rank: weights once, keys and values once.
fn work(problem: &PlanProblem, shard: &Shard, kind: SegmentKind, shape: &BatchShape) -> (f64, f64) {
    let model = problem.model;
    let (hidden, width) = (f64::from(model.hidden), f64::from(model.head_dim));
    let queries = f64::from(shard.query_heads.len()) * width;
    let kv_heads = shard.kv_heads(model.group_size()).len();
    let keys = f64::from(kv_heads) * width;
    let columns = f64::from(shard.mlp_columns.len());
    let rows = f64::from(shard.output_rows.map_or(0, IndexRange::len));
    let all_queries = f64::from(model.query_heads) * width;
    let fast = if shard.output_rows.is_none() { 1.0 } else { 0.0 };
    let weights = match kind {
        SegmentKind::Attention => hidden * (queries + 2.0 * keys + fast * queries),
        SegmentKind::OutputRows => rows * all_queries,
        SegmentKind::Mlp => hidden * (2.0 + fast) * columns,
        SegmentKind::DownRows => rows * f64::from(model.ffn),
        SegmentKind::Head => hidden * f64::from(shard.vocab.map_or(0, IndexRange::len)),
    };
    let tokens = if kind == SegmentKind::Head {
        shape.logits_rows
    } else {
        shape.new_tokens
    };
    let mut flops = 2.0 * weights * tokens as f64;
    let mut bytes = weights * model.dtype.bits() as f64 / 8.0;
    if kind == SegmentKind::Attention {
        let pairs = shape.prefill_score_pairs + shape.decode_kv_tokens;
        flops += 4.0 * queries * pairs as f64;
        let cached = (shape.prefill_kv_tokens + shape.decode_kv_tokens) as f64;
        bytes += model
            .kv_bytes_per_token_layer(kv_heads, problem.kv.dtype)
            .as_f64()
            * cached;
    }
    (flops, bytes)
}
