//! What each device of a layout holds, slice by slice.

use std::collections::BTreeMap;

use infercluster_spec::layout::Reduction;
use infercluster_spec::migration::WeightKind;
use infercluster_spec::model::Family;
use infercluster_spec::{Bytes, GpuId, IndexRange, Layout, Model, ReplicaId};

/// Slices on one device. The LM head stands at the layer past the last; there, an entry with an empty range
/// is a device that holds the final norm alone. Every other entry has indices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holdings {
    /// Indices of the cut axis by matrix and layer.
    pub weights: BTreeMap<(WeightKind, u32), IndexRange>,
    /// Whose keys and values it keeps.
    pub replica: ReplicaId,
    /// KV heads by layer.
    pub kv: BTreeMap<u32, IndexRange>,
}

impl Holdings {
    /// Bytes of its weights.
    pub fn weight_bytes(&self, model: &Model, reduction: Reduction) -> Bytes {
        let slices = self.weights.iter();
        slices
            .map(|((kind, _), range)| slice_bytes(model, reduction, *kind, range.len(), true))
            .sum()
    }

    /// KV bytes of one token.
    pub fn kv_token_bytes(&self, layout: &Layout, model: &Model) -> Bytes {
        let heads = self.kv.values().map(|range| range.len());
        heads
            .map(|heads| model.kv_bytes_per_token_layer(heads, layout.kv.dtype))
            .sum()
    }
}

/// Everything that the devices of a valid layout hold.
pub fn holdings(layout: &Layout, model: &Model) -> BTreeMap<GpuId, Holdings> {
    let mut all = BTreeMap::new();
    for (seat, gpu) in layout.seats() {
        let mut held = Holdings {
            replica: seat.replica,
            ..Holdings::default()
        };
        let groups = layout
            .stage(seat)
            .into_iter()
            .flat_map(|stage| &stage.layer_groups);
        for group in groups {
            let shard = &group.shards[seat.rank.index()];
            let kv_heads = shard.kv_heads(model.group_size());
            let (output, down) = match shard.output_rows {
                Some(rows) => (rows, rows),
                None => (shard.query_heads, shard.mlp_columns),
            };
            let norms = IndexRange::new(0, model.hidden).expect("zero is lowest");
            for layer in group.layers.iter() {
                let slices = [
                    (WeightKind::Query, shard.query_heads),
                    (WeightKind::KeyValue, kv_heads),
                    (WeightKind::Output, output),
                    (WeightKind::GateUp, shard.mlp_columns),
                    (WeightKind::Down, down),
                    (WeightKind::Norms, norms),
                ];
                for (kind, range) in slices.into_iter().filter(|(_, range)| !range.is_empty()) {
                    held.weights.insert((kind, layer), range);
                }
                if !kv_heads.is_empty() {
                    held.kv.insert(layer, kv_heads);
                }
            }
            if let Some(rows) = shard.vocab {
                held.weights.insert((WeightKind::LmHead, model.layers), rows);
            }
        }
        all.insert(gpu, held);
    }
    all
}

/// Bytes of `count` indices of a matrix in one layer. `with_final_norm` adds the final norm to an LM head;
/// the other matrices have nothing beside their indices.
pub fn slice_bytes(
    model: &Model,
    reduction: Reduction,
    kind: WeightKind,
    count: u32,
    with_final_norm: bool,
) -> Bytes {
    let (hidden, head_dim) = (u64::from(model.hidden), u64::from(model.head_dim));
    let bias = if model.qkv_bias { head_dim } else { 0 };
    let invariant = reduction == Reduction::Invariant;
    let each = match kind {
        WeightKind::Query => head_dim * hidden + bias,
        WeightKind::KeyValue => 2 * (head_dim * hidden + bias),
        WeightKind::Output if invariant => u64::from(model.query_heads) * head_dim,
        WeightKind::Output => head_dim * hidden,
        WeightKind::GateUp => 2 * hidden,
        WeightKind::Down if invariant => u64::from(model.ffn),
        WeightKind::Down | WeightKind::LmHead => hidden,
        // Indices are elements of the residual stream; two norms have each.
        WeightKind::Norms => 2,
    };
    let beside = match kind {
        WeightKind::LmHead if with_final_norm => hidden,
        WeightKind::Norms if model.family == Family::Qwen3 => 2 * head_dim,
        _ => 0,
    };
    model.dtype.bytes(u64::from(count) * each + beside)
}
