//! Which KV has to move from one layout to the next, worked out from the two layouts alone.
//!
//! For every device of the new layout, every layer and every KV head that it will hold there is exactly one
//! source: the device itself where it holds the slice already, else the first holder in seat order. A lane joins
//! all slices of one (from, to) pair, so a unit has one mark for them.

use std::collections::BTreeMap;

use infercluster_serving::handover::{Lane, LaneId};
use infercluster_spec::{Bytes, GpuId, IndexRange, Layout, Model, ReplicaId};
use serde::{Deserialize, Serialize};

/// KV heads of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KvSlice {
    /// The layer, numbered in the whole model.
    pub layer: u32,
    /// KV heads, numbered in the whole model.
    pub kv_heads: IndexRange,
}

/// Everything that one device gives another. A device gives itself what it keeps, from the old pool into the
/// shadow's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLane {
    /// Which, who and to whom.
    pub lane: Lane,
    /// What, ascending by layer and head.
    pub slices: Vec<KvSlice>,
}

impl KvLane {
    /// Bytes of one token on this lane.
    pub fn token_bytes(&self, model: &Model, layout: &Layout) -> Bytes {
        let slices = self.slices.iter();
        slices
            .map(|slice| model.kv_bytes_per_token_layer(slice.kv_heads.len(), layout.kv.dtype))
            .sum()
    }

    /// Whether both ends are one device, so that nothing crosses a network.
    pub fn is_local(&self) -> bool {
        self.lane.from == self.lane.to
    }
}

/// KV heads by device and layer, devices in seat order.
type Holdings = Vec<(GpuId, BTreeMap<u32, IndexRange>)>;

/// The lanes of a replica from one valid layout to another, by (from, to). `None` where the new layout needs a
/// slice that the old one does not have: layouts of two models.
pub fn kv_lanes(model: &Model, old: &Layout, new: &Layout, replica: ReplicaId) -> Option<Vec<KvLane>> {
    let held = holdings(model, old, replica);
    let mut slices: BTreeMap<(GpuId, GpuId), Vec<KvSlice>> = BTreeMap::new();
    for (to, layers) in holdings(model, new, replica) {
        for (layer, needed) in layers {
            for (from, kv_heads) in sources(&held, to, layer, needed)? {
                slices
                    .entry((from, to))
                    .or_default()
                    .push(KvSlice { layer, kv_heads });
            }
        }
    }
    Some(numbered(slices))
}

/// Lanes of slices by (from, to), in this order.
pub(crate) fn numbered(slices: BTreeMap<(GpuId, GpuId), Vec<KvSlice>>) -> Vec<KvLane> {
    let lane = |(index, ((from, to), slices))| KvLane {
        lane: Lane {
            id: LaneId(index as u32),
            from,
            to,
        },
        slices,
    };
    slices.into_iter().enumerate().map(lane).collect()
}

fn holdings(model: &Model, layout: &Layout, replica: ReplicaId) -> Holdings {
    let seats = layout.seats().filter(|(seat, _)| seat.replica == replica);
    seats
        .filter_map(|(seat, gpu)| {
            let mut layers = BTreeMap::new();
            for group in &layout.stage(seat)?.layer_groups {
                let kv_heads = group.shards.get(seat.rank.index())?.kv_heads(model.group_size());
                if !kv_heads.is_empty() {
                    layers.extend(group.layers.iter().map(|layer| (layer, kv_heads)));
                }
            }
            Some((gpu, layers))
        })
        .collect()
}

/// Cuts the needed heads of a layer among their sources: at each head the device itself, else the first holder,
/// for as far as it has heads and the device itself has none.
fn sources(held: &Holdings, to: GpuId, layer: u32, needed: IndexRange) -> Option<Vec<(GpuId, IndexRange)>> {
    let of_layer = |(gpu, layers): &(GpuId, BTreeMap<u32, IndexRange>)| Some((*gpu, *layers.get(&layer)?));
    let own = held
        .iter()
        .filter_map(of_layer)
        .find(|(gpu, _)| *gpu == to)
        .map_or(IndexRange::default(), |(_, heads)| heads);
    let mut pieces = Vec::new();
    let mut head = needed.start();
    while head < needed.end() {
        let (from, end) = if own.contains(head) {
            (to, own.end())
        } else {
            let holder = held
                .iter()
                .filter_map(of_layer)
                .find(|(_, heads)| heads.contains(head));
            let (gpu, heads) = holder?;
            let before_own = if own.start() > head { own.start() } else { u32::MAX };
            (gpu, heads.end().min(before_own))
        };
        let end = end.min(needed.end());
        pieces.push((from, IndexRange::new(head, end)?));
        head = end;
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use infercluster_spec::Dtype;
    use infercluster_spec::layout::{LayerGroup, Reduction, Shard, Stage};
    use infercluster_spec::model::{Family, Rope};

    use super::*;

    fn model() -> Model {
        Model {
            name: "lanes".to_owned(),
            family: Family::Llama,
            layers: 3,
            hidden: 40,
            query_heads: 10,
            kv_heads: 10,
            head_dim: 4,
            ffn: 64,
            vocab: 50,
            tied_embeddings: false,
            qkv_bias: false,
            rms_epsilon: 1e-5,
            rope: Rope {
                theta: 10_000.0,
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

    /// One stage a list of head cuts; devices are numbered through.
    fn layout(stages: &[(IndexRange, &[u32])]) -> Layout {
        let mut layout = Layout::single(&model(), Reduction::Fast);
        let mut next = 0;
        let stage = |(layers, cuts): &(IndexRange, &[u32])| {
            let shard = |cut: &[u32]| {
                next += 1;
                Shard {
                    gpu: GpuId(next - 1),
                    query_heads: range(cut[0], cut[1]),
                    mlp_columns: range(0, 0),
                    output_rows: None,
                    vocab: None,
                    experts: Vec::new(),
                }
            };
            Stage {
                layer_groups: vec![LayerGroup {
                    layers: *layers,
                    shards: cuts.windows(2).map(shard).collect(),
                }],
            }
        };
        layout.replicas[0].stages = stages.iter().map(stage).collect();
        layout
    }

    /// From, to, heads by layer.
    type Found = (u32, u32, Vec<(u32, IndexRange)>);

    fn lanes(old: &Layout, new: &Layout) -> Vec<Found> {
        kv_lanes(&model(), old, new, ReplicaId(0))
            .unwrap()
            .into_iter()
            .map(|lane| {
                let slices = lane.slices.iter().map(|slice| (slice.layer, slice.kv_heads));
                (lane.lane.from.0, lane.lane.to.0, slices.collect())
            })
            .collect()
    }

    #[test]
    fn a_wider_rank_takes_what_it_lacks_and_keeps_the_rest() {
        let all = range(0, 3);
        let (even, uneven) = (layout(&[(all, &[0, 5, 10])]), layout(&[(all, &[0, 7, 10])]));
        let every = |heads| (0..3).map(|layer| (layer, heads)).collect::<Vec<_>>();
        assert_eq!(
            lanes(&even, &uneven),
            [
                (0, 0, every(range(0, 5))),
                (1, 0, every(range(5, 7))),
                (1, 1, every(range(7, 10))),
            ]
        );
        assert_eq!(
            lanes(&uneven, &even),
            [
                (0, 0, every(range(0, 5))),
                (0, 1, every(range(5, 7))),
                (1, 1, every(range(7, 10))),
            ]
        );
    }

    #[test]
    fn a_layer_that_changes_its_stage_moves_alone() {
        let heads: &[u32] = &[0, 10];
        let whole = range(0, 10);
        let long = layout(&[(range(0, 2), heads), (range(2, 3), heads)]);
        let short = layout(&[(range(0, 1), heads), (range(1, 3), heads)]);
        assert_eq!(
            lanes(&long, &short),
            [
                (0, 0, vec![(0, whole)]),
                (0, 1, vec![(1, whole)]),
                (1, 1, vec![(2, whole)]),
            ]
        );
    }

    #[test]
    fn own_heads_in_the_middle_are_not_asked_of_others() {
        // Device 1 holds heads 3..6 and will hold 0..10; device 0 holds 0..3, device 2 holds 6..10.
        let all = range(0, 3);
        let old = layout(&[(all, &[0, 3, 6, 10])]);
        let new = layout(&[(all, &[0, 0, 10, 10])]);
        let found: Vec<_> = lanes(&old, &new)
            .into_iter()
            .map(|(from, to, slices)| (from, to, slices[0].1))
            .collect();
        assert_eq!(
            found,
            [(0, 1, range(0, 3)), (1, 1, range(3, 6)), (2, 1, range(6, 10))]
        );
    }

    #[test]
    fn bytes_of_a_token_are_those_of_its_slices() {
        let all = range(0, 3);
        let lanes = kv_lanes(
            &model(),
            &layout(&[(all, &[0, 5, 10])]),
            &layout(&[(all, &[0, 7, 10])]),
            ReplicaId(0),
        )
        .unwrap();
        // 3 layers x 2 heads x (key, value) x 4 numbers x 4 bytes.
        assert_eq!(
            lanes[1].token_bytes(&model(), &layout(&[(all, &[0, 10])])),
            Bytes(192)
        );
        assert!(lanes[0].is_local() && !lanes[1].is_local());
    }
}
