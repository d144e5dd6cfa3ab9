//! What one step from layout to layout moves and how much memory it takes.

use std::collections::BTreeMap;

use infercluster_spec::migration::{Transfer, TransferItem, TransferSource, WeightKind};
use infercluster_spec::{Bytes, GpuId, IndexRange, Layout, Model, ReplicaId, Tokens};

use super::WeightSource;
use super::holdings::{Holdings, holdings, slice_bytes};

pub(super) struct Step<'a> {
    from: &'a Layout,
    model: &'a Model,
    before: BTreeMap<GpuId, Holdings>,
    after: BTreeMap<GpuId, Holdings>,
}

/// One layer's part of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    what: Content,
    indices: IndexRange,
    from: TransferSource,
    layer: u32,
    /// The LM head's final norm comes along.
    final_norm: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    Weights(WeightKind),
    Kv(ReplicaId),
}

impl<'a> Step<'a> {
    pub(super) fn new(from: &'a Layout, to: &Layout, model: &'a Model) -> Self {
        Self {
            from,
            model,
            before: holdings(from, model),
            after: holdings(to, model),
        }
    }

    /// Everything that moves: by receiving device, weights before KV, lower layers first.
    pub(super) fn transfers(&self, weight_source: WeightSource) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (&gpu, needed) in &self.after {
            let mut pieces = self.weight_pieces(gpu, needed, weight_source);
            pieces.extend(self.kv_pieces(gpu, needed));
            pieces.sort_unstable();
            let same_run = |one: &Piece, other: &Piece| {
                (one.what, one.indices, one.from, one.final_norm)
                    == (other.what, other.indices, other.from, other.final_norm)
                    && one.layer + 1 == other.layer
            };
            transfers.extend(pieces.chunk_by(same_run).map(|run| self.transfer(gpu, run)));
        }
        transfers
    }

    fn transfer(&self, to: GpuId, run: &[Piece]) -> Transfer {
        let first = run[0];
        let end = first.layer + run.len() as u32;
        let layers = IndexRange::new(first.layer, end).expect("a run goes up");
        let count = first.indices.len();
        let (item, layer_bytes) = match first.what {
            Content::Weights(kind) => {
                let bytes = slice_bytes(self.model, self.from.reduction, kind, count, first.final_norm);
                // The head belongs to no layer.
                let past = IndexRange::new(self.model.layers, self.model.layers).expect("empty");
                let layers = if kind == WeightKind::LmHead { past } else { layers };
                let indices = first.indices;
                (
                    TransferItem::Weights {
                        kind,
                        layers,
                        indices,
                    },
                    bytes,
                )
            }
            Content::Kv(replica) => {
                let bytes = self.model.kv_bytes_per_token_layer(count, self.from.kv.dtype);
                let kv_heads = first.indices;
                (
                    TransferItem::Kv {
                        replica,
                        layers,
                        kv_heads,
                    },
                    bytes,
                )
            }
        };
        Transfer {
            item,
            from: first.from,
            to,
            route: Vec::new(),
            bytes: layer_bytes * run.len() as u64,
        }
    }

    fn weight_pieces(&self, gpu: GpuId, needed: &Holdings, weight_source: WeightSource) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (&(kind, layer), &range) in &needed.weights {
            let held = self
                .before
                .get(&gpu)
                .and_then(|held| held.weights.get(&(kind, layer)));
            let mut final_norm = kind == WeightKind::LmHead && held.is_none();
            let mut missing = subtract(range, held.copied().unwrap_or_default());
            if missing.is_empty() && final_norm {
                missing.push(range);
            }
            for part in missing {
                for (indices, from) in self.weight_sources(kind, layer, part, weight_source) {
                    let what = Content::Weights(kind);
                    pieces.push(Piece {
                        what,
                        indices,
                        from,
                        layer,
                        final_norm,
                    });
                    final_norm = false;
                }
            }
        }
        pieces
    }

    fn weight_sources(
        &self,
        kind: WeightKind,
        layer: u32,
        part: IndexRange,
        weight_source: WeightSource,
    ) -> Vec<(IndexRange, TransferSource)> {
        match weight_source {
            WeightSource::Disk => vec![(part, TransferSource::Disk)],
            WeightSource::Holders => cover(part, || {
                let seats = self.from.seats();
                seats.filter_map(|(_, gpu)| Some((gpu, *self.before.get(&gpu)?.weights.get(&(kind, layer))?)))
            }),
        }
    }

    fn kv_pieces(&self, gpu: GpuId, needed: &Holdings) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let replica = needed.replica;
        for (&layer, &range) in &needed.kv {
            for part in subtract(range, self.kv_held(gpu, replica, layer)) {
                let sources = cover(part, || {
                    let seats = self.from.seats().filter(|(seat, _)| seat.replica == replica);
                    seats.map(|(_, holder)| (holder, self.kv_held(holder, replica, layer)))
                });
                let piece = |(indices, from)| Piece {
                    what: Content::Kv(replica),
                    indices,
                    from,
                    layer,
                    final_norm: false,
                };
                pieces.extend(sources.into_iter().map(piece));
            }
        }
        pieces
    }

    /// KV heads of a replica that a device holds before the step.
    fn kv_held(&self, gpu: GpuId, replica: ReplicaId, layer: u32) -> IndexRange {
        let held = self.before.get(&gpu).filter(|held| held.replica == replica);
        held.and_then(|held| held.kv.get(&layer))
            .copied()
            .unwrap_or_default()
    }

    /// Weights in use by device while the step runs: all old ones and what is missing of the new.
    pub(super) fn weight_peaks(&self) -> BTreeMap<GpuId, Bytes> {
        let reduction = self.from.reduction;
        let mut peaks: BTreeMap<GpuId, Bytes> = self
            .before
            .iter()
            .map(|(gpu, held)| (*gpu, held.weight_bytes(self.model, reduction)))
            .collect();
        for (gpu, needed) in &self.after {
            let pieces = self.weight_pieces(*gpu, needed, WeightSource::Disk);
            let missing = pieces.iter().map(|piece| match piece.what {
                Content::Weights(kind) => {
                    slice_bytes(self.model, reduction, kind, piece.indices.len(), piece.final_norm)
                }
                Content::Kv(_) => Bytes::ZERO,
            });
            *peaks.entry(*gpu).or_default() += missing.sum();
        }
        peaks
    }

    /// Weights and KV of so many live tokens a replica, by device, while the step runs.
    pub(super) fn memory_peaks(&self, live_tokens: Tokens) -> BTreeMap<GpuId, Bytes> {
        let mut peaks = self.weight_peaks();
        for (gpu, peak) in &mut peaks {
            let old = self.before.get(gpu);
            let mut token_bytes = old.map_or(Bytes::ZERO, |held| held.kv_token_bytes(self.from, self.model));
            if let Some(needed) = self.after.get(gpu) {
                for piece in self.kv_pieces(*gpu, needed) {
                    let heads = piece.indices.len();
                    token_bytes += self.model.kv_bytes_per_token_layer(heads, self.from.kv.dtype);
                }
            }
            let kv = token_bytes.checked_mul(live_tokens.0).unwrap_or(Bytes(u64::MAX));
            *peak = peak.checked_add(kv).unwrap_or(Bytes(u64::MAX));
        }
        peaks
    }
}

/// The indices of `range` that `held` lacks.
fn subtract(range: IndexRange, held: IndexRange) -> Vec<IndexRange> {
    let common = range.intersect(held);
    if common.is_empty() {
        return Some(range)
            .into_iter()
            .filter(|range| !range.is_empty())
            .collect();
    }
    [(range.start(), common.start()), (common.end(), range.end())]
        .into_iter()
        .filter_map(|(start, end)| IndexRange::new(start, end))
        .filter(|part| !part.is_empty())
        .collect()
}

/// Cuts `part` among holders: at each index the first holder in order that has it, for as far as it has; what
/// nobody holds comes from disk.
fn cover<I: Iterator<Item = (GpuId, IndexRange)>>(
    part: IndexRange,
    holders: impl Fn() -> I,
) -> Vec<(IndexRange, TransferSource)> {
    if part.is_empty() {
        return vec![(part, TransferSource::Disk)];
    }
    let mut pieces = Vec::new();
    let mut start = part.start();
    while start < part.end() {
        let (end, from) = match holders().find(|(_, range)| range.contains(start)) {
            Some((gpu, range)) => (range.end().min(part.end()), TransferSource::Gpu(gpu)),
            None => {
                let next = holders()
                    .map(|(_, range)| range.start())
                    .filter(|next| *next > start);
                (
                    next.min().unwrap_or(part.end()).min(part.end()),
                    TransferSource::Disk,
                )
            }
        };
        pieces.push((IndexRange::new(start, end).expect("pieces go up"), from));
        start = end;
    }
    pieces
}
