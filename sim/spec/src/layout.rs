//! What runs where: replicas of stages of layer groups of shards.
//!
//! Shares are ranges and uneven is the normal case. Key/value heads are not written down: they are those
//! of the query heads ([`Shard::kv_heads`]), and ranks that split a group both hold its KV head in full.
//! The embedding table is not sharded: ranks of a first stage look rows up on the host and send nothing.

use serde::{Deserialize, Serialize};

use crate::ids::{GpuId, Rank, ReplicaId, StageId};
use crate::json::Document;
use crate::model::{Dtype, Model};
use crate::range::IndexRange;

/// A whole layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Name of the model it cuts.
    pub model: String,
    /// The devices it was made for, each once; a shard on any other is refused.
    pub gpus: Vec<GpuId>,
    /// How partial results of a tensor-parallel group become one.
    pub reduction: Reduction,
    /// Which bits are promised (`cpu-f32/1`): part of the identity of every KV block.
    pub numerics: String,
    /// Kernel quantum of column cuts; the last range of a group takes the rest.
    pub quantum: u32,
    /// Shape of the KV cache.
    pub kv: KvCache,
    /// Copies of the model; [`ReplicaId`] is the position.
    pub replicas: Vec<Replica>,
}

impl Document for Layout {
    const SCHEMA: &'static str = "infercluster-layout/1";
}

/// How partial results of a tensor-parallel group become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Output and down projections are cut along K, partial sums meet in an all-reduce: bits depend on
    /// the layout.
    Fast,
    /// Output and down projections are cut by rows, activations meet in gathers: bits do not depend on
    /// the layout.
    Invariant,
}

/// Shape of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvCache {
    /// Tokens of one block.
    pub block_size: u32,
    /// How keys and values are stored.
    pub dtype: Dtype,
}

/// What a replica is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaRole {
    /// Prefill and decode.
    #[default]
    Mixed,
    /// Prefill only; KV is handed over.
    Prefill,
    /// Decode only; KV is taken over.
    Decode,
}

/// One copy of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replica {
    /// What it is used for.
    #[serde(default)]
    pub role: ReplicaRole,
    /// Pipeline stages, first layers first; [`StageId`] is the position.
    pub stages: Vec<Stage>,
}

/// Contiguous layers on one tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Runs of layers, each with its own shares, so that a half-moved stage is a valid layout.
    pub layer_groups: Vec<LayerGroup>,
}

/// A run of layers with the same shares.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerGroup {
    /// Which layers of the model.
    pub layers: IndexRange,
    /// One shard a rank, in rank order: every group of a stage names the same devices in the same order.
    pub shards: Vec<Shard>,
}

/// The piece of a layer run that one rank holds. Any range may be empty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The device.
    pub gpu: GpuId,
    /// Its query heads.
    pub query_heads: IndexRange,
    /// Its columns of the MLP.
    pub mlp_columns: IndexRange,
    /// Its rows of output and down projections; present exactly in the `invariant` reduction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_rows: Option<IndexRange>,
    /// Its rows of the LM head; present exactly in the last layer group of a replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab: Option<IndexRange>,
    /// Its routed experts; empty in a dense model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<u32>,
}

impl Shard {
    /// The KV heads that its query heads need, for query heads in groups of `group_size`.
    pub fn kv_heads(&self, group_size: u32) -> IndexRange {
        kv_heads_of(self.query_heads, group_size)
    }
}

/// The KV heads that a range of query heads needs.
pub fn kv_heads_of(query_heads: IndexRange, group_size: u32) -> IndexRange {
    if query_heads.is_empty() {
        return IndexRange::default();
    }
    IndexRange::new(
        query_heads.start() / group_size,
        query_heads.end().div_ceil(group_size),
    )
    .expect("floor of the start is not above ceiling of the end")
}

impl Stage {
    /// Its layers; `None` without a layer group.
    pub fn layers(&self) -> Option<IndexRange> {
        IndexRange::new(
            self.layer_groups.first()?.layers.start(),
            self.layer_groups.last()?.layers.end(),
        )
    }

    /// Its devices in rank order.
    pub fn gpus(&self) -> impl Iterator<Item = GpuId> {
        self.layer_groups
            .first()
            .into_iter()
            .flat_map(|group| group.shards.iter().map(|shard| shard.gpu))
    }

    /// How many ranks it has.
    pub fn tp_size(&self) -> usize {
        self.layer_groups.first().map_or(0, |group| group.shards.len())
    }

    /// The group that holds a layer.
    pub fn group_of(&self, layer: u32) -> Option<&LayerGroup> {
        self.layer_groups
            .iter()
            .find(|group| group.layers.contains(layer))
    }
}

/// Where one device stands in a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seat {
    /// Which copy of the model.
    pub replica: ReplicaId,
    /// Which of its stages.
    pub stage: StageId,
    /// Which rank of the stage.
    pub rank: Rank,
}

impl Layout {
    /// Every seat with its device, in replica, stage, rank order.
    pub fn seats(&self) -> impl Iterator<Item = (Seat, GpuId)> {
        self.replicas.iter().enumerate().flat_map(|(replica, copy)| {
            copy.stages.iter().enumerate().flat_map(move |(stage, part)| {
                part.gpus().enumerate().map(move |(rank, gpu)| {
                    let seat = Seat {
                        replica: ReplicaId(replica as u32),
                        stage: StageId(stage as u32),
                        rank: Rank(rank as u32),
                    };
                    (seat, gpu)
                })
            })
        })
    }

    /// The seat of a device, where it has one.
    pub fn seat_of(&self, gpu: GpuId) -> Option<Seat> {
        self.seats()
            .find(|(_, holder)| *holder == gpu)
            .map(|(seat, _)| seat)
    }

    /// The stage of a seat.
    pub fn stage(&self, seat: Seat) -> Option<&Stage> {
        self.replicas
            .get(seat.replica.index())?
            .stages
            .get(seat.stage.index())
    }

    /// One device holding everything: the layout that every other is compared with.
    pub fn single(model: &Model, reduction: Reduction) -> Self {
        let all = |count| IndexRange::new(0, count).expect("zero is not above a count");
        let shard = Shard {
            gpu: GpuId(0),
            query_heads: all(model.query_heads),
            mlp_columns: all(model.ffn),
            output_rows: (reduction == Reduction::Invariant).then(|| all(model.hidden)),
            vocab: Some(all(model.vocab)),
            experts: (0..model.experts.map_or(0, |experts| experts.count)).collect(),
        };
        let group = LayerGroup {
            layers: all(model.layers),
            shards: vec![shard],
        };
        Self {
            model: model.name.clone(),
            gpus: vec![GpuId(0)],
            reduction,
            numerics: CPU_F32.to_owned(),
            quantum: DEFAULT_QUANTUM,
            kv: KvCache {
                block_size: DEFAULT_BLOCK_SIZE,
                dtype: Dtype::F32,
            },
            replicas: vec![Replica {
                role: ReplicaRole::Mixed,
                stages: vec![Stage {
                    layer_groups: vec![group],
                }],
            }],
        }
    }
}

/// The numerics profile of the CPU backend.
pub const CPU_F32: &str = "cpu-f32/1";
/// Kernel quantum of column cuts where nothing else is asked for.
pub const DEFAULT_QUANTUM: u32 = 64;
/// Tokens of a KV block where nothing else is asked for.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
