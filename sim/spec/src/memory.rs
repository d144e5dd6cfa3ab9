//! Bytes that a seat of a layout occupies, and how many KV blocks fit beside its weights.

use crate::ids::GpuId;
use crate::layout::{LayerGroup, Layout, Seat, Shard};
use crate::model::{Family, Model};
use crate::units::Bytes;

/// What one seat keeps in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SeatMemory {
    /// Weights of its shards, norms included.
    pub weights: Bytes,
    /// One KV block in each of its layers.
    pub kv_block: Bytes,
}

/// A seat, its device and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seats {
    /// Where in the layout.
    pub seat: Seat,
    /// On which device.
    pub gpu: GpuId,
    /// Its bytes.
    pub memory: SeatMemory,
}

/// Every seat of a valid layout with its bytes.
pub fn seats(layout: &Layout, model: &Model) -> Vec<Seats> {
    layout
        .seats()
        .filter_map(|(seat, gpu)| {
            let stage = layout.stage(seat)?;
            let mut memory = SeatMemory::default();
            for group in &stage.layer_groups {
                let shard = group.shards.get(seat.rank.index())?;
                memory.weights += group_weights(layout, model, group, shard);
                memory.kv_block += group_kv_block(layout, model, group, shard);
            }
            Some(Seats { seat, gpu, memory })
        })
        .collect()
}

/// KV blocks of one replica: the minimum over the seats that hold KV of (memory - weights - reserve) over
/// block bytes. `memory` gives what serving may use on a device, `None` for no limit.
pub fn kv_capacity_blocks(
    layout: &Layout,
    model: &Model,
    replica: crate::ids::ReplicaId,
    reserve: Bytes,
    memory: impl Fn(GpuId) -> Option<Bytes>,
) -> Option<u64> {
    seats(layout, model)
        .into_iter()
        .filter(|seats| seats.seat.replica == replica && seats.memory.kv_block > Bytes::ZERO)
        .filter_map(|seats| {
            let free = memory(seats.gpu)?
                .saturating_sub(seats.memory.weights)
                .saturating_sub(reserve);
            Some(free.0 / seats.memory.kv_block.0)
        })
        .min()
}

/// Parameters of one layer's shard, norms counted once a rank.
///
/// Attention: q rows, k and v rows of its KV heads, biases. Output and down projections: K-slices of its
/// own heads and columns in `fast`, whole rows of its `output_rows` in `invariant`.
pub fn layer_shard_params(model: &Model, shard: &Shard) -> u64 {
    let (hidden, head_dim) = (u64::from(model.hidden), u64::from(model.head_dim));
    let queries = u64::from(shard.query_heads.len()) * head_dim;
    let keys = u64::from(shard.kv_heads(model.group_size()).len()) * head_dim;
    let columns = u64::from(shard.mlp_columns.len());
    let all_queries = u64::from(model.query_heads) * head_dim;
    let bias = if model.qkv_bias { queries + 2 * keys } else { 0 };
    let head_norms = if model.family == Family::Qwen3 {
        2 * head_dim
    } else {
        0
    };
    let down = match shard.output_rows {
        Some(rows) => u64::from(rows.len()) * (all_queries + u64::from(model.ffn)),
        None => hidden * (queries + columns),
    };
    hidden * (queries + 2 * keys) + bias + head_norms + 2 * hidden * columns + down + 2 * hidden
}

fn group_weights(layout: &Layout, model: &Model, group: &LayerGroup, shard: &Shard) -> Bytes {
    debug_assert!(layout.quantum > 0, "memory is asked of valid layouts only");
    let head = shard
        .vocab
        .map_or(0, |rows| u64::from(rows.len() + 1) * u64::from(model.hidden));
    let layers = u64::from(group.layers.len()) * layer_shard_params(model, shard);
    model.dtype.bytes(layers + head)
}

fn group_kv_block(layout: &Layout, model: &Model, group: &LayerGroup, shard: &Shard) -> Bytes {
    let heads = shard.kv_heads(model.group_size()).len();
    model.kv_bytes_per_token_layer(heads, layout.kv.dtype)
        * u64::from(layout.kv.block_size)
        * u64::from(group.layers.len())
}
