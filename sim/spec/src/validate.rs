//! The one validator of layouts: planner output, simulator input and executor input pass through it.
//! It returns every violation, not the first.

use std::collections::BTreeMap;
use std::fmt;

use crate::cluster::Cluster;
use crate::ids::{GpuId, ReplicaId, StageId};
use crate::layout::{LayerGroup, Layout, Reduction, Replica, Stage};
use crate::memory::{self, Seats};
use crate::model::Model;
use crate::range::{IndexRange, PartitionFault, check_partition};
use crate::units::Bytes;

/// What a range of a shard cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Layers of a replica.
    Layers,
    /// Query heads.
    QueryHeads,
    /// MLP columns.
    MlpColumns,
    /// Rows of output and down projections.
    OutputRows,
    /// Rows of the LM head.
    Vocab,
    /// Routed experts.
    Experts,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Layers => "layers",
            Self::QueryHeads => "query heads",
            Self::MlpColumns => "mlp columns",
            Self::OutputRows => "output rows",
            Self::Vocab => "vocabulary rows",
            Self::Experts => "experts",
        })
    }
}

/// One rule that a layout breaks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutViolation {
    /// Indices that nobody holds.
    #[error("{place}: {cut} {missing} are held by no shard")]
    Gap {
        /// Replica, stage and layers.
        place: String,
        /// What is cut.
        cut: Cut,
        /// The uncovered indices.
        missing: IndexRange,
    },
    /// Indices that two shards hold, or ranges out of rank order.
    #[error("{place}: {cut} {twice} are held twice or out of rank order")]
    Overlap {
        /// Replica, stage and layers.
        place: String,
        /// What is cut.
        cut: Cut,
        /// The doubly covered indices.
        twice: IndexRange,
    },
    /// Indices that the model does not have.
    #[error("{place}: {cut} {beyond} lie past the model's {total}")]
    Beyond {
        /// Replica, stage and layers.
        place: String,
        /// What is cut.
        cut: Cut,
        /// The indices.
        beyond: IndexRange,
        /// How many the model has.
        total: u32,
    },
    /// A device that neither the layout nor the cluster lists.
    #[error("{place}: {gpu} is not among the known devices ({known})")]
    UnknownGpu {
        /// Replica and stage.
        place: String,
        /// The device.
        gpu: GpuId,
        /// Those that are known.
        known: String,
    },
    /// A device with two seats, or listed twice.
    #[error("{place}: {gpu} already has a seat in this layout")]
    GpuTwice {
        /// Replica and stage.
        place: String,
        /// The device.
        gpu: GpuId,
    },
    /// Layer groups of one stage that name other devices, or in another order.
    #[error(
        "{place}: layers {layers} name other devices or another rank order than the stage's first layers"
    )]
    GroupRanks {
        /// Replica and stage.
        place: String,
        /// The differing group.
        layers: IndexRange,
    },
    /// A list that must not be empty.
    #[error("{place}: there is no {what}")]
    Empty {
        /// Where.
        place: String,
        /// What is missing.
        what: &'static str,
    },
    /// A range that belongs elsewhere.
    #[error("{place}: {cut} of {gpu} must be {rule}")]
    Presence {
        /// Replica, stage and layers.
        place: String,
        /// What is cut.
        cut: Cut,
        /// The device.
        gpu: GpuId,
        /// The rule.
        rule: &'static str,
    },
    /// A column cut inside a kernel quantum.
    #[error("{place}: mlp columns of {gpu} end at {end}, which is no multiple of the quantum {quantum}")]
    Quantum {
        /// Replica, stage and layers.
        place: String,
        /// The device.
        gpu: GpuId,
        /// Where its range ends.
        end: u32,
        /// The quantum.
        quantum: u32,
    },
    /// Zero where a count is needed.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// More than a device can hold.
    #[error("{place} needs {needed} on {gpu} for weights and one KV block, but only {free} is there")]
    Memory {
        /// Replica and stage.
        place: String,
        /// The device.
        gpu: GpuId,
        /// Weights plus one KV block of every layer.
        needed: Bytes,
        /// Memory of the device.
        free: Bytes,
    },
}

/// Every rule that a layout breaks, at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutViolations(pub Vec<LayoutViolation>);

impl fmt::Display for LayoutViolations {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "the layout breaks {} rule{}",
            self.0.len(),
            if self.0.len() == 1 { "" } else { "s" }
        )?;
        self.0
            .iter()
            .try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

impl std::error::Error for LayoutViolations {}

/// Checks a layout against its model and, where there is one, its cluster.
pub fn validate_layout(
    layout: &Layout,
    model: &Model,
    cluster: Option<&Cluster>,
) -> Result<(), LayoutViolations> {
    let mut check = Check {
        layout,
        model,
        violations: Vec::new(),
    };
    check.counts();
    check.devices(cluster);
    for (index, replica) in layout.replicas.iter().enumerate() {
        check.replica(ReplicaId(index as u32), replica);
    }
    // Memory is judged only on a layout whose ranges mean something.
    if let (true, Some(cluster)) = (check.violations.is_empty(), cluster) {
        check.memory(cluster);
    }
    if check.violations.is_empty() {
        Ok(())
    } else {
        Err(LayoutViolations(check.violations))
    }
}

struct Check<'a> {
    layout: &'a Layout,
    model: &'a Model,
    violations: Vec<LayoutViolation>,
}

impl Check<'_> {
    fn counts(&mut self) {
        let fields = [
            ("quantum", self.layout.quantum),
            ("kv.block_size", self.layout.kv.block_size),
        ];
        for (field, _) in fields.into_iter().filter(|(_, value)| *value == 0) {
            self.violations.push(LayoutViolation::Zero { field });
        }
        if self.layout.replicas.is_empty() {
            self.violations.push(LayoutViolation::Empty {
                place: "layout".to_owned(),
                what: "replica",
            });
        }
    }

    fn devices(&mut self, cluster: Option<&Cluster>) {
        let mut listed: BTreeMap<GpuId, bool> = BTreeMap::new();
        for gpu in &self.layout.gpus {
            if listed.insert(*gpu, false).is_some() {
                self.violations.push(LayoutViolation::GpuTwice {
                    place: "gpus".to_owned(),
                    gpu: *gpu,
                });
            }
            if cluster.is_some_and(|cluster| cluster.gpu(*gpu).is_none()) {
                let known = cluster
                    .map(|cluster| list(cluster.gpus().map(|(_, gpu)| gpu.id)))
                    .unwrap_or_default();
                self.violations.push(LayoutViolation::UnknownGpu {
                    place: "gpus".to_owned(),
                    gpu: *gpu,
                    known,
                });
            }
        }
        for (seat, gpu) in self.layout.seats() {
            let place = place(seat.replica, seat.stage);
            match listed.get_mut(&gpu) {
                None => {
                    let known = list(self.layout.gpus.iter().copied());
                    self.violations
                        .push(LayoutViolation::UnknownGpu { place, gpu, known });
                }
                Some(seated) if *seated => self.violations.push(LayoutViolation::GpuTwice { place, gpu }),
                Some(seated) => *seated = true,
            }
        }
    }

    fn replica(&mut self, id: ReplicaId, replica: &Replica) {
        if replica.stages.is_empty() {
            self.violations.push(LayoutViolation::Empty {
                place: id.to_string(),
                what: "stage",
            });
        }
        let layers = replica
            .stages
            .iter()
            .flat_map(|stage| stage.layer_groups.iter().map(|group| group.layers));
        self.partition(&id.to_string(), Cut::Layers, layers.collect(), self.model.layers);
        for (index, stage) in replica.stages.iter().enumerate() {
            let last_stage = index + 1 == replica.stages.len();
            self.stage(&place(id, StageId(index as u32)), stage, last_stage);
        }
    }

    fn stage(&mut self, place: &str, stage: &Stage, last_stage: bool) {
        if stage.layer_groups.is_empty() {
            self.violations.push(LayoutViolation::Empty {
                place: place.to_owned(),
                what: "layer group",
            });
        }
        let gpus: Vec<GpuId> = stage.gpus().collect();
        for (index, group) in stage.layer_groups.iter().enumerate() {
            if !group
                .shards
                .iter()
                .map(|shard| shard.gpu)
                .eq(gpus.iter().copied())
            {
                self.violations.push(LayoutViolation::GroupRanks {
                    place: place.to_owned(),
                    layers: group.layers,
                });
            }
            let holds_head = last_stage && index + 1 == stage.layer_groups.len();
            self.group(&format!("{place} layers {}", group.layers), group, holds_head);
        }
    }

    fn group(&mut self, place: &str, group: &LayerGroup, holds_head: bool) {
        if group.shards.is_empty() {
            self.violations.push(LayoutViolation::Empty {
                place: place.to_owned(),
                what: "shard",
            });
        }
        if group.layers.is_empty() {
            self.violations.push(LayoutViolation::Empty {
                place: place.to_owned(),
                what: "layer",
            });
        }
        let invariant = self.layout.reduction == Reduction::Invariant;
        let rows = "present exactly in the invariant reduction";
        let head = "present exactly in the last layer group of the last stage";
        for shard in &group.shards {
            let presence = [
                (Cut::OutputRows, shard.output_rows.is_some() == invariant, rows),
                (Cut::Vocab, shard.vocab.is_some() == holds_head, head),
            ];
            for (cut, _, rule) in presence.into_iter().filter(|(_, right, _)| !right) {
                let place = place.to_owned();
                self.violations.push(LayoutViolation::Presence {
                    place,
                    cut,
                    gpu: shard.gpu,
                    rule,
                });
            }
        }
        let shards = || group.shards.iter();
        self.partition(
            place,
            Cut::QueryHeads,
            shards().map(|shard| shard.query_heads).collect(),
            self.model.query_heads,
        );
        self.partition(
            place,
            Cut::MlpColumns,
            shards().map(|shard| shard.mlp_columns).collect(),
            self.model.ffn,
        );
        if shards().all(|shard| shard.output_rows.is_some()) {
            self.partition(
                place,
                Cut::OutputRows,
                shards().filter_map(|shard| shard.output_rows).collect(),
                self.model.hidden,
            );
        }
        if shards().all(|shard| shard.vocab.is_some()) {
            self.partition(
                place,
                Cut::Vocab,
                shards().filter_map(|shard| shard.vocab).collect(),
                self.model.vocab,
            );
        }
        self.quantum(place, group);
        self.experts(place, group);
    }

    fn quantum(&mut self, place: &str, group: &LayerGroup) {
        let quantum = self.layout.quantum;
        for shard in group
            .shards
            .iter()
            .filter(|shard| !shard.mlp_columns.is_empty() && quantum > 0)
        {
            let end = shard.mlp_columns.end();
            if end < self.model.ffn && !end.is_multiple_of(quantum) {
                let place = place.to_owned();
                self.violations.push(LayoutViolation::Quantum {
                    place,
                    gpu: shard.gpu,
                    end,
                    quantum,
                });
            }
        }
    }

    fn experts(&mut self, place: &str, group: &LayerGroup) {
        let total = self.model.experts.map_or(0, |experts| experts.count);
        let mut held: Vec<u32> = group
            .shards
            .iter()
            .flat_map(|shard| shard.experts.iter().copied())
            .collect();
        held.sort_unstable();
        let singles = held
            .iter()
            // The last number has no successor; its neighbour is past every model's experts as well.
            .map(|&expert| expert.min(u32::MAX - 1))
            .filter_map(|expert| IndexRange::new(expert, expert + 1))
            .collect();
        self.partition(place, Cut::Experts, singles, total);
    }

    fn partition(&mut self, place: &str, cut: Cut, ranges: Vec<IndexRange>, total: u32) {
        for fault in check_partition(ranges, total) {
            let place = place.to_owned();
            self.violations.push(match fault {
                PartitionFault::Gap(missing) => LayoutViolation::Gap { place, cut, missing },
                PartitionFault::Overlap(twice) => LayoutViolation::Overlap { place, cut, twice },
                PartitionFault::Beyond(beyond) => LayoutViolation::Beyond {
                    place,
                    cut,
                    beyond,
                    total,
                },
            });
        }
    }

    fn memory(&mut self, cluster: &Cluster) {
        for Seats { seat, gpu, memory } in memory::seats(self.layout, self.model) {
            let free = cluster.gpu(gpu).and_then(|device| cluster.memory(device));
            let needed = memory.weights + memory.kv_block;
            if let Some(free) = free.filter(|free| *free < needed) {
                self.violations.push(LayoutViolation::Memory {
                    place: place(seat.replica, seat.stage),
                    gpu,
                    needed,
                    free,
                });
            }
        }
    }
}

fn place(replica: ReplicaId, stage: StageId) -> String {
    format!("{replica} {stage}")
}

fn list(gpus: impl Iterator<Item = GpuId>) -> String {
    let names: Vec<String> = gpus.take(16).map(|gpu| gpu.0.to_string()).collect();
    names.join(", ")
}
