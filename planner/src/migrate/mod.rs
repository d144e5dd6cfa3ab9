//! From one layout to another: which slices move, in which phases, and why not.
//!
//! A device keeps every slice that both layouts give it, so a new view of weights already held moves nothing.
//! One phase is enough where old and new slices fit together; otherwise layers change over in groups, and
//! every layout on the way is valid and committed on its own. The target names its devices: choosing among
//! equal ones is the caller's business.
//!
//! Not known here: links and rates, so no route and no duration is filled in, and live sequences, of which
//! [`MigrationOptions::live_tokens`] is the caller's estimate.

mod diff;
mod holdings;
mod phases;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use infercluster_spec::migration::{MigrationPhase, MigrationPlan};
use infercluster_spec::validate::{LayoutViolations, validate_layout};
use infercluster_spec::{Bytes, Cluster, GpuId, Layout, Model, Tokens};

pub use holdings::{Holdings, holdings, slice_bytes};

/// Where a device gets weights that it lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightSource {
    /// From the checkpoint on its own host.
    #[default]
    Disk,
    /// From devices that hold them, lowest seat first; from disk what none holds.
    Holders,
}

/// What a migration has to keep to.
#[derive(Debug, Clone, Default)]
pub struct MigrationOptions {
    /// Memory that serving may use by device; no limit on a device without an entry.
    pub memory: BTreeMap<GpuId, Bytes>,
    /// Tokens whose KV each replica holds while it migrates.
    pub live_tokens: Tokens,
    /// Where weights come from.
    pub weight_source: WeightSource,
}

impl MigrationOptions {
    /// Memory limits as a cluster states them.
    pub fn of_cluster(cluster: &Cluster, live_tokens: Tokens) -> Self {
        let memory = cluster.gpus();
        let memory = memory.filter_map(|(_, gpu)| Some((gpu.id, cluster.memory(gpu)?)));
        Self {
            memory: memory.collect(),
            live_tokens,
            weight_source: WeightSource::Disk,
        }
    }
}

/// What two layouts must have in common, since KV moves as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Common {
    /// The model.
    Model,
    /// The reduction.
    Reduction,
    /// The numerics profile.
    Numerics,
    /// Tokens of a KV block.
    BlockSize,
    /// How keys and values are stored.
    KvDtype,
    /// Number of replicas: replicas neither split nor merge.
    ReplicaCount,
}

impl fmt::Display for Common {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Reduction => "reduction",
            Self::Numerics => "numerics profile",
            Self::BlockSize => "KV block size",
            Self::KvDtype => "KV dtype",
            Self::ReplicaCount => "number of replicas",
        })
    }
}

/// Why layers cannot change over one group at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unsplittable {
    /// A device sits in another replica or stage afterwards, and a device has one seat.
    SeatMoves(GpuId),
    /// A replica has another number of stages afterwards.
    StageCount,
    /// The ranks of a stage swap places.
    RankOrder,
    /// The layers are single already, or none can change before the others.
    NoSmallerStep,
}

impl fmt::Display for Unsplittable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::SeatMoves(gpu) => write!(f, "{gpu} changes its stage"),
            Self::StageCount => f.write_str("the number of stages changes"),
            Self::RankOrder => f.write_str("ranks of a stage change places"),
            Self::NoSmallerStep => f.write_str("no smaller group of layers fits"),
        }
    }
}

/// Why there is no migration plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The layout to start from is not valid.
    #[error("the layout to start from is not valid: {0}")]
    From(#[source] LayoutViolations),
    /// The target layout is not valid.
    #[error("the target layout is not valid: {0}")]
    To(#[source] LayoutViolations),
    /// Something differs that must not.
    #[error("the {what} changes from {from} to {to}, which no live migration can do")]
    Differs {
        /// What differs.
        what: Common,
        /// Before.
        from: String,
        /// After.
        to: String,
    },
    /// The model has parts whose slices are not described.
    #[error("model `{model}` has routed experts, whose migration is not supported")]
    Experts {
        /// The model.
        model: String,
    },
    /// Old and new slices do not fit together, and the step cannot be cut smaller.
    #[error(
        "{gpu} needs {needed} for old and new shards and KV of {live_tokens} tokens, but only {free} is there; \
         the migration cannot go in smaller phases: {reason}"
    )]
    Memory {
        /// The device.
        gpu: GpuId,
        /// Old and new weights and KV together.
        needed: Bytes,
        /// What serving may use there.
        free: Bytes,
        /// Live tokens that were asked for.
        live_tokens: Tokens,
        /// Why not smaller.
        reason: Unsplittable,
    },
}

/// The way from one layout to another.
pub fn plan_migration(
    from: &Layout,
    to: &Layout,
    model: &Model,
    options: &MigrationOptions,
) -> Result<MigrationPlan, MigrationError> {
    if model.experts.is_some() {
        return Err(MigrationError::Experts {
            model: model.name.clone(),
        });
    }
    validate_layout(from, model, None).map_err(MigrationError::From)?;
    validate_layout(to, model, None).map_err(MigrationError::To)?;
    check_common(from, to)?;
    let mut current = from.clone();
    let mut phases = Vec::new();
    for target in phases::targets(from, to, model, options)? {
        phases.push(phase(&current, &target, model, options));
        current = target;
    }
    Ok(MigrationPlan {
        from: from.clone(),
        phases,
    })
}

fn phase(from: &Layout, to: &Layout, model: &Model, options: &MigrationOptions) -> MigrationPhase {
    let step = diff::Step::new(from, to, model);
    MigrationPhase {
        to: to.clone(),
        transfers: step.transfers(options.weight_source),
        memory_peak: step.weight_peaks(),
        duration_bound: None,
        duration: None,
        pause: None,
    }
}

fn check_common(from: &Layout, to: &Layout) -> Result<(), MigrationError> {
    let texts = |layout: &Layout| {
        [
            (Common::Model, layout.model.clone()),
            (
                Common::Reduction,
                format!("{:?}", layout.reduction).to_lowercase(),
            ),
            (Common::Numerics, layout.numerics.clone()),
            (Common::BlockSize, layout.kv.block_size.to_string()),
            (Common::KvDtype, layout.kv.dtype.to_string()),
            (Common::ReplicaCount, layout.replicas.len().to_string()),
        ]
    };
    let differing = texts(from)
        .into_iter()
        .zip(texts(to))
        .find(|(one, other)| one != other);
    match differing {
        None => Ok(()),
        Some(((what, from), (_, to))) => Err(MigrationError::Differs { what, from, to }),
    }
}
