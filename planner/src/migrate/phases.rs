//! Layouts on the way: which layers change over together so that old and new slices fit.
//!
//! A layout on the way takes some layers from the target and the others from the start. It is valid where
//! layers still run through the stages in order and no stage is left without one. Ranks of a stage are those of
//! both ends; a device that holds nothing of some layers holds empty ranges of them.

use infercluster_spec::layout::{LayerGroup, Replica, Shard, Stage};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{GpuId, IndexRange, Layout, Model};

use super::diff::Step;
use super::{MigrationError, MigrationOptions, Unsplittable};

/// The layouts to commit one after the other, the last of them `to`.
pub(super) fn targets(
    from: &Layout,
    to: &Layout,
    model: &Model,
    options: &MigrationOptions,
) -> Result<Vec<Layout>, MigrationError> {
    let Some(excess) = excess(from, to, model, options) else {
        return Ok(vec![to.clone()]);
    };
    let ranks = merged_ranks(from, to).map_err(|reason| excess.error(options, reason))?;
    let mut changed = vec![false; model.layers as usize];
    let mut current = from.clone();
    let mut targets = Vec::new();
    loop {
        if self::excess(&current, to, model, options).is_none() {
            targets.push(to.clone());
            return Ok(targets);
        }
        let mix = Mix {
            from,
            to,
            model,
            ranks: &ranks,
        };
        let Some(next) = mix.extend(&current, &mut changed, options) else {
            let excess = self::excess(&current, to, model, options).unwrap_or(excess);
            return Err(excess.error(options, Unsplittable::NoSmallerStep));
        };
        targets.push(next.clone());
        current = next;
    }
}

/// The device that is short of the most memory in a step.
#[derive(Clone, Copy)]
struct Excess {
    gpu: GpuId,
    needed: infercluster_spec::Bytes,
    free: infercluster_spec::Bytes,
}

impl Excess {
    fn error(self, options: &MigrationOptions, reason: Unsplittable) -> MigrationError {
        MigrationError::Memory {
            gpu: self.gpu,
            needed: self.needed,
            free: self.free,
            live_tokens: options.live_tokens,
            reason,
        }
    }
}

fn excess(from: &Layout, to: &Layout, model: &Model, options: &MigrationOptions) -> Option<Excess> {
    let peaks = Step::new(from, to, model).memory_peaks(options.live_tokens);
    peaks
        .into_iter()
        .filter_map(|(gpu, needed)| {
            let free = *options.memory.get(&gpu)?;
            (needed > free).then_some(Excess { gpu, needed, free })
        })
        .max_by_key(|excess| (excess.needed - excess.free, std::cmp::Reverse(excess.gpu)))
}

/// By replica and stage, the devices of both ends in an order that keeps each end's.
fn merged_ranks(from: &Layout, to: &Layout) -> Result<Vec<Vec<Vec<GpuId>>>, Unsplittable> {
    for (seat, gpu) in to.seats() {
        if let Some(old) = from.seat_of(gpu)
            && (old.replica, old.stage) != (seat.replica, seat.stage)
        {
            return Err(Unsplittable::SeatMoves(gpu));
        }
    }
    let replicas = from.replicas.iter().zip(&to.replicas);
    replicas
        .map(|(old, new)| {
            if old.stages.len() != new.stages.len() {
                return Err(Unsplittable::StageCount);
            }
            let stages = old.stages.iter().zip(&new.stages);
            stages
                .map(|(old, new)| merge(old.gpus().collect(), new.gpus().collect()))
                .collect()
        })
        .collect()
}

fn merge(old: Vec<GpuId>, new: Vec<GpuId>) -> Result<Vec<GpuId>, Unsplittable> {
    let mut merged = Vec::new();
    let mut rest = new.as_slice();
    for gpu in old {
        if let Some(position) = rest.iter().position(|other| *other == gpu) {
            merged.extend_from_slice(&rest[..position]);
            rest = &rest[position + 1..];
        } else if new.contains(&gpu) {
            return Err(Unsplittable::RankOrder);
        }
        merged.push(gpu);
    }
    merged.extend_from_slice(rest);
    Ok(merged)
}

struct Mix<'a> {
    from: &'a Layout,
    to: &'a Layout,
    model: &'a Model,
    ranks: &'a [Vec<Vec<GpuId>>],
}

impl Mix<'_> {
    /// Changes over as many more layers as fit at once; `None` where none does.
    fn extend(&self, current: &Layout, changed: &mut [bool], options: &MigrationOptions) -> Option<Layout> {
        let mut best = None;
        loop {
            let mut grown = false;
            // Layers that move to an earlier stage change over from below, to a later one from above.
            let ways: [Vec<usize>; 2] = [(0..changed.len()).collect(), (0..changed.len()).rev().collect()];
            for layer in ways.into_iter().flatten() {
                if changed[layer] {
                    continue;
                }
                changed[layer] = true;
                let layout = self.layout(changed);
                let fits = |layout: &Layout| excess(current, layout, self.model, options).is_none();
                match layout.filter(fits) {
                    Some(layout) => {
                        best = Some(layout);
                        grown = true;
                    }
                    None => changed[layer] = false,
                }
            }
            if !grown {
                return best;
            }
        }
    }

    /// The layout with those layers changed over; `None` where it is not valid.
    fn layout(&self, changed: &[bool]) -> Option<Layout> {
        let mut layout = self.to.clone();
        layout.gpus = self.from.gpus.clone();
        let more = self.to.gpus.iter().filter(|gpu| !self.from.gpus.contains(gpu));
        layout.gpus.extend(more);
        // A cut that both quanta allow.
        layout.quantum = gcd(self.from.quantum, self.to.quantum);
        for (index, replica) in layout.replicas.iter_mut().enumerate() {
            *replica = self.replica(index, changed);
        }
        validate_layout(&layout, self.model, None).ok()?;
        Some(layout)
    }

    fn replica(&self, index: usize, changed: &[bool]) -> Replica {
        let ends = [&self.from.replicas[index], &self.to.replicas[index]];
        let mut stages: Vec<Stage> = self.ranks[index]
            .iter()
            .map(|_| Stage {
                layer_groups: Vec::new(),
            })
            .collect();
        let mut last_origin = None;
        for (layer, changed) in changed.iter().enumerate() {
            let end = ends[usize::from(*changed)];
            let Some((stage, group)) = place_of(end, layer as u32) else {
                continue;
            };
            let source = &end.stages[stage].layer_groups[group];
            let origin = (*changed, stage, group);
            let groups = &mut stages[stage].layer_groups;
            match groups.last_mut().filter(|_| last_origin == Some(origin)) {
                Some(open) => open.layers = up_to(open.layers, layer as u32),
                None => groups.push(self.group(index, stage, layer as u32, source)),
            }
            last_origin = Some(origin);
        }
        // The head goes where the last layer goes: only its group keeps vocabulary ranges.
        let vocab_end = ends[usize::from(changed.last().copied().unwrap_or(true))];
        self.place_head(index, &mut stages, vocab_end);
        Replica {
            role: self.to.replicas[index].role,
            stages,
        }
    }

    fn group(&self, replica: usize, stage: usize, layer: u32, source: &LayerGroup) -> LayerGroup {
        let invariant = source.shards.iter().any(|shard| shard.output_rows.is_some());
        let shards = self.ranks[replica][stage].iter().map(|gpu| {
            let own = source.shards.iter().find(|shard| shard.gpu == *gpu).cloned();
            let mut shard = own.unwrap_or_else(|| Shard {
                gpu: *gpu,
                query_heads: IndexRange::default(),
                mlp_columns: IndexRange::default(),
                output_rows: invariant.then(IndexRange::default),
                vocab: None,
                experts: Vec::new(),
            });
            shard.vocab = None;
            shard
        });
        LayerGroup {
            layers: up_to(IndexRange::new(layer, layer).expect("empty"), layer),
            shards: shards.collect(),
        }
    }

    fn place_head(&self, replica: usize, stages: &mut [Stage], end: &Replica) {
        let source = end.stages.last().and_then(|stage| stage.layer_groups.last());
        let group = stages.last_mut().and_then(|stage| stage.layer_groups.last_mut());
        let (Some(source), Some(group)) = (source, group) else {
            return;
        };
        debug_assert_eq!(group.shards.len(), self.ranks[replica].last().map_or(0, Vec::len));
        for shard in &mut group.shards {
            let own = source.shards.iter().find(|own| own.gpu == shard.gpu);
            shard.vocab = Some(own.and_then(|own| own.vocab).unwrap_or_default());
        }
    }
}

/// Stage and layer group of a layer.
fn place_of(replica: &Replica, layer: u32) -> Option<(usize, usize)> {
    replica.stages.iter().enumerate().find_map(|(stage, part)| {
        let group = part
            .layer_groups
            .iter()
            .position(|group| group.layers.contains(layer))?;
        Some((stage, group))
    })
}

fn up_to(range: IndexRange, layer: u32) -> IndexRange {
    IndexRange::new(range.start(), layer + 1).expect("layers go up")
}

fn gcd(one: u32, other: u32) -> u32 {
    if other == 0 { one } else { gcd(other, one % other) }
}
