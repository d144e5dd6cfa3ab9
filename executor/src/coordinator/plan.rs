//! A migration plan held against the layouts that it joins: what each phase carries must be what its devices lack,
//! each slice once, from somebody who holds it. What is found is named by phase and transfer, both from 1.
//!
//! Weights are read from the checkpoint by every device for itself, so a plan that has devices send them is refused.
//! Bytes of weights, memory and times are the planner's predictions and not looked at.

use std::collections::BTreeMap;
use std::fmt;

use infercluster_spec::migration::{MigrationPhase, Transfer, TransferItem, TransferSource, WeightKind};
use infercluster_spec::{Bytes, GpuId, IndexRange, Layout, MigrationPlan, Model, ReplicaId};

use crate::lanes::{KvLane, KvSlice, numbered};

/// Where in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanPlace {
    /// Which phase, from 1.
    pub phase: usize,
    /// Which of its transfers, from 1.
    pub transfer: usize,
}

impl fmt::Display for PlanPlace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "transfer {} of phase {}", self.transfer, self.phase)
    }
}

/// What a transfer can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlanContent {
    /// A matrix.
    Weights(WeightKind),
    /// Keys and values.
    Kv,
}

/// A part of it in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanSlice {
    /// Of what.
    pub content: PlanContent,
    /// Which layer; the LM head stands past the last.
    pub layer: u32,
    /// Which indices.
    pub indices: IndexRange,
}

impl fmt::Display for PlanSlice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { layer, indices, .. } = self;
        let name = match self.content {
            PlanContent::Kv => "kv heads",
            PlanContent::Weights(WeightKind::Query) => "query heads",
            PlanContent::Weights(WeightKind::KeyValue) => "key and value heads",
            PlanContent::Weights(WeightKind::Output) => "output rows or heads",
            PlanContent::Weights(WeightKind::GateUp) => "gate and up columns",
            PlanContent::Weights(WeightKind::Down) => "down rows or columns",
            PlanContent::Weights(WeightKind::Norms) => "norms",
            PlanContent::Weights(WeightKind::LmHead) => return write!(f, "LM head rows {indices}"),
        };
        write!(f, "{name} {indices} of layer {layer}")
    }
}

/// Why a plan is not what its layouts need.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// It begins elsewhere.
    #[error("the plan does not start at the layout in force")]
    Start,
    /// It leads nowhere.
    #[error("the plan has no phase")]
    Empty,
    /// Layers that the model does not have.
    #[error("{place} carries layers {found}, the model has {layers}")]
    Layers {
        /// Where.
        place: PlanPlace,
        /// What it says.
        found: IndexRange,
        /// Layers of the model.
        layers: u32,
    },
    /// A copy of the model that is not there.
    #[error("{place} carries kv of {found}, there is only {}", ReplicaId(0))]
    Replica {
        /// Where.
        place: PlanPlace,
        /// What it says.
        found: ReplicaId,
    },
    /// Something that its receiver has or does not need.
    #[error("{place} carries {slice} to {gpu}, which has them or does not need them")]
    Needless {
        /// Where.
        place: PlanPlace,
        /// What.
        slice: PlanSlice,
        /// To whom.
        gpu: GpuId,
    },
    /// Something comes a second time.
    #[error("{place} carries {slice} to {gpu} a second time")]
    Twice {
        /// Where.
        place: PlanPlace,
        /// What.
        slice: PlanSlice,
        /// To whom.
        gpu: GpuId,
    },
    /// Something does not come.
    #[error("phase {phase} does not carry {slice} to {gpu}, which needs them")]
    Missing {
        /// Which phase, from 1.
        phase: usize,
        /// What.
        slice: PlanSlice,
        /// To whom.
        gpu: GpuId,
    },
    /// A source without the slice.
    #[error("{place} reads {slice} from {from}, which does not hold them")]
    NotHeld {
        /// Where.
        place: PlanPlace,
        /// What.
        slice: PlanSlice,
        /// From whom.
        from: GpuId,
    },
    /// A source that does not give such things.
    #[error("{place} reads {} from {}", what(.content), source_name(.from))]
    Source {
        /// Where.
        place: PlanPlace,
        /// What it reads.
        content: PlanContent,
        /// From where.
        from: TransferSource,
    },
    /// Bytes that its slices do not have.
    #[error("{place} moves {found} of each token, its kv heads take {expected}")]
    Bytes {
        /// Where.
        place: PlanPlace,
        /// What it says.
        found: Bytes,
        /// What is right.
        expected: Bytes,
    },
}

fn what(content: &PlanContent) -> &'static str {
    match content {
        PlanContent::Kv => "kv, which is nowhere but on devices,",
        PlanContent::Weights(_) => "weights, which this executor takes from the checkpoint,",
    }
}

fn source_name(from: &TransferSource) -> String {
    match from {
        TransferSource::Disk => "disk".to_owned(),
        TransferSource::Gpu(gpu) => gpu.to_string(),
    }
}

/// Where a slice is: on which device, of what, in which layer.
type Key = (GpuId, PlanContent, u32);

/// One phase between its layouts.
struct Phase<'a> {
    number: usize,
    model: &'a Model,
    layout: &'a Layout,
    before: BTreeMap<Key, IndexRange>,
    after: BTreeMap<Key, IndexRange>,
}

/// Holds a whole plan against its layouts.
pub(super) fn check_plan(model: &Model, plan: &MigrationPlan) -> Result<(), PlanError> {
    if plan.phases.is_empty() {
        return Err(PlanError::Empty);
    }
    let mut from = &plan.from;
    for (index, MigrationPhase { to, transfers, .. }) in plan.phases.iter().enumerate() {
        Phase::new(index + 1, model, from, to).check(transfers)?;
        from = to;
    }
    Ok(())
}

/// The lanes of a phase that was found good: what it says for KV that crosses, and what devices keep.
pub(super) fn planned_lanes(
    model: &Model,
    from: &Layout,
    to: &Layout,
    transfers: &[Transfer],
) -> Vec<KvLane> {
    let phase = Phase::new(1, model, from, to);
    let mut slices: BTreeMap<(GpuId, GpuId), Vec<KvSlice>> = BTreeMap::new();
    for (&(gpu, content, layer), &needed) in &phase.after {
        let kept = phase.held(gpu, content, layer).intersect(needed);
        if content == PlanContent::Kv && !kept.is_empty() {
            let kv_heads = kept;
            slices
                .entry((gpu, gpu))
                .or_default()
                .push(KvSlice { layer, kv_heads });
        }
    }
    for transfer in transfers {
        if let (TransferItem::Kv { layers, kv_heads, .. }, TransferSource::Gpu(from)) =
            (transfer.item, transfer.from)
        {
            let of_layers = layers.iter().map(|layer| KvSlice { layer, kv_heads });
            slices.entry((from, transfer.to)).or_default().extend(of_layers);
        }
    }
    slices.values_mut().for_each(|slices| slices.sort_unstable());
    numbered(slices)
}

/// What a plan from one valid layout to another has to carry: weights from disk, KV from its first holder in the
/// order of seats, one transfer a layer.
pub fn needed_transfers(model: &Model, from: &Layout, to: &Layout) -> Vec<Transfer> {
    let phase = Phase::new(1, model, from, to);
    let mut transfers = Vec::new();
    for (&(gpu, content, layer), &needed) in &phase.after {
        for part in lacking(needed, phase.held(gpu, content, layer)) {
            match content {
                PlanContent::Weights(kind) => transfers.push(phase.weights(gpu, kind, layer, part)),
                PlanContent::Kv => transfers.extend(phase.kv(gpu, layer, part)),
            }
        }
    }
    transfers
}

impl<'a> Phase<'a> {
    fn new(number: usize, model: &'a Model, from: &'a Layout, to: &Layout) -> Self {
        Self {
            number,
            model,
            layout: from,
            before: holdings(model, from),
            after: holdings(model, to),
        }
    }

    fn held(&self, gpu: GpuId, content: PlanContent, layer: u32) -> IndexRange {
        let held = self.before.get(&(gpu, content, layer));
        held.copied().unwrap_or_default()
    }

    fn check(&self, transfers: &[Transfer]) -> Result<(), PlanError> {
        let mut carried: BTreeMap<Key, Vec<(IndexRange, PlanPlace)>> = BTreeMap::new();
        for (index, transfer) in transfers.iter().enumerate() {
            let place = PlanPlace {
                phase: self.number,
                transfer: index + 1,
            };
            let (content, layers, indices) = self.parts(place, transfer)?;
            for layer in layers.iter() {
                let slice = PlanSlice {
                    content,
                    layer,
                    indices,
                };
                self.check_slice(place, slice, transfer)?;
                let key = (transfer.to, content, layer);
                carried.entry(key).or_default().push((indices, place));
            }
        }
        self.check_coverage(carried)
    }

    /// What a transfer carries, once its numbers are within the model's.
    fn parts(
        &self,
        place: PlanPlace,
        transfer: &Transfer,
    ) -> Result<(PlanContent, IndexRange, IndexRange), PlanError> {
        let past = self.model.layers;
        let parts = match transfer.item {
            TransferItem::Weights { kind, indices, .. } if kind == WeightKind::LmHead => {
                let head = IndexRange::new(past, past + 1).unwrap_or_default();
                return match transfer.from {
                    TransferSource::Disk => Ok((PlanContent::Weights(kind), head, indices)),
                    from @ TransferSource::Gpu(_) => Err(PlanError::Source {
                        place,
                        content: PlanContent::Weights(kind),
                        from,
                    }),
                };
            }
            TransferItem::Weights {
                kind,
                layers,
                indices,
            } => (PlanContent::Weights(kind), layers, indices),
            TransferItem::Kv {
                replica,
                layers,
                kv_heads,
            } => {
                if replica != ReplicaId(0) {
                    return Err(PlanError::Replica {
                        place,
                        found: replica,
                    });
                }
                (PlanContent::Kv, layers, kv_heads)
            }
        };
        let (content, layers, indices) = parts;
        if layers.end() > past {
            return Err(PlanError::Layers {
                place,
                found: layers,
                layers: past,
            });
        }
        match (content, transfer.from) {
            (PlanContent::Weights(_), TransferSource::Disk) => {}
            (PlanContent::Kv, TransferSource::Gpu(_)) => {
                let token = self
                    .model
                    .kv_bytes_per_token_layer(indices.len(), self.layout.kv.dtype);
                let expected = token.checked_mul(u64::from(layers.len()));
                if expected != Some(transfer.bytes) {
                    return Err(PlanError::Bytes {
                        place,
                        found: transfer.bytes,
                        expected: expected.unwrap_or(Bytes(u64::MAX)),
                    });
                }
            }
            (content, from) => return Err(PlanError::Source { place, content, from }),
        }
        Ok((content, layers, indices))
    }

    fn check_slice(&self, place: PlanPlace, slice: PlanSlice, transfer: &Transfer) -> Result<(), PlanError> {
        let PlanSlice {
            content,
            layer,
            indices,
        } = slice;
        let gpu = transfer.to;
        let needed = self.after.get(&(gpu, content, layer)).copied();
        let mut lacks = lacking(needed.unwrap_or_default(), self.held(gpu, content, layer));
        // The final norm may come with no row of the LM head.
        let is_norm = content == PlanContent::Weights(WeightKind::LmHead) && needed.is_some();
        let is_needed = lacks.any(|part| part.intersect(indices) == indices && !indices.is_empty());
        if !(is_needed || is_norm && indices.is_empty()) {
            return Err(PlanError::Needless { place, slice, gpu });
        }
        match transfer.from {
            TransferSource::Gpu(from) if self.held(from, content, layer).intersect(indices) != indices => {
                Err(PlanError::NotHeld { place, slice, from })
            }
            _ => Ok(()),
        }
    }

    /// Whether what is lacking comes, and once.
    fn check_coverage(
        &self,
        mut carried: BTreeMap<Key, Vec<(IndexRange, PlanPlace)>>,
    ) -> Result<(), PlanError> {
        for (&(gpu, content, layer), &needed) in &self.after {
            let pieces = carried.entry((gpu, content, layer)).or_default();
            pieces.sort_unstable_by_key(|(range, place)| (range.start(), place.transfer));
            let slice = |indices| PlanSlice {
                content,
                layer,
                indices,
            };
            for part in lacking(needed, self.held(gpu, content, layer)) {
                let mut from = part.start();
                let inside = pieces
                    .iter()
                    .filter(|(range, _)| !range.intersect(part).is_empty());
                for &(range, place) in inside {
                    if range.start() < from {
                        let slice = slice(range);
                        return Err(PlanError::Twice { place, slice, gpu });
                    }
                    if range.start() > from {
                        break;
                    }
                    from = range.end();
                }
                if let Some(rest) = IndexRange::new(from, part.end()).filter(|rest| !rest.is_empty()) {
                    return Err(PlanError::Missing {
                        phase: self.number,
                        slice: slice(rest),
                        gpu,
                    });
                }
            }
        }
        Ok(())
    }

    fn weights(&self, to: GpuId, kind: WeightKind, layer: u32, indices: IndexRange) -> Transfer {
        let past = usize::from(kind != WeightKind::LmHead) as u32;
        Transfer {
            item: TransferItem::Weights {
                kind,
                layers: IndexRange::new(layer, layer + past).unwrap_or_default(),
                indices,
            },
            from: TransferSource::Disk,
            to,
            route: Vec::new(),
            bytes: Bytes::ZERO,
        }
    }

    fn kv(&self, to: GpuId, layer: u32, part: IndexRange) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        let mut start = part.start();
        while start < part.end() {
            let holders = self.layout.seats().map(|(_, gpu)| gpu);
            let mut holders = holders.map(|gpu| (gpu, self.held(gpu, PlanContent::Kv, layer)));
            let Some((from, held)) = holders.find(|(_, held)| held.contains(start)) else {
                // The layouts are of two models.
                return transfers;
            };
            let kv_heads = IndexRange::new(start, held.end().min(part.end())).unwrap_or_default();
            transfers.push(Transfer {
                item: TransferItem::Kv {
                    replica: ReplicaId(0),
                    layers: IndexRange::new(layer, layer + 1).unwrap_or_default(),
                    kv_heads,
                },
                from: TransferSource::Gpu(from),
                to,
                route: Vec::new(),
                bytes: self
                    .model
                    .kv_bytes_per_token_layer(kv_heads.len(), self.layout.kv.dtype),
            });
            start = kv_heads.end();
        }
        transfers
    }
}

/// What every device of a valid layout holds.
fn holdings(model: &Model, layout: &Layout) -> BTreeMap<Key, IndexRange> {
    let mut held = BTreeMap::new();
    let norms = IndexRange::new(0, model.hidden).unwrap_or_default();
    for (seat, gpu) in layout.seats() {
        let groups = layout
            .stage(seat)
            .into_iter()
            .flat_map(|stage| &stage.layer_groups);
        for group in groups {
            let Some(shard) = group.shards.get(seat.rank.index()) else {
                continue;
            };
            let kv_heads = shard.kv_heads(model.group_size());
            let of_layer = [
                (PlanContent::Weights(WeightKind::Query), shard.query_heads),
                (PlanContent::Weights(WeightKind::KeyValue), kv_heads),
                (
                    PlanContent::Weights(WeightKind::Output),
                    shard.output_rows.unwrap_or(shard.query_heads),
                ),
                (PlanContent::Weights(WeightKind::GateUp), shard.mlp_columns),
                (
                    PlanContent::Weights(WeightKind::Down),
                    shard.output_rows.unwrap_or(shard.mlp_columns),
                ),
                (PlanContent::Weights(WeightKind::Norms), norms),
                (PlanContent::Kv, kv_heads),
            ];
            for layer in group.layers.iter() {
                let slices = of_layer.iter().filter(|(_, range)| !range.is_empty());
                held.extend(slices.map(|(content, range)| ((gpu, *content, layer), *range)));
            }
            if let Some(rows) = shard.vocab {
                held.insert(
                    (gpu, PlanContent::Weights(WeightKind::LmHead), model.layers),
                    rows,
                );
            }
        }
    }
    held
}

/// The parts of `needed` that are not in `held`, ascending.
fn lacking(needed: IndexRange, held: IndexRange) -> impl Iterator<Item = IndexRange> {
    let common = needed.intersect(held);
    let parts = if common.is_empty() {
        [Some(needed), None]
    } else {
        [
            IndexRange::new(needed.start(), common.start()),
            IndexRange::new(common.end(), needed.end()),
        ]
    };
    parts.into_iter().flatten().filter(|part| !part.is_empty())
}
