//! Layouts written by hand as proportions: `layout make --stages 2:1 --heads 5:1 --mlp 70:30`.
//!
//! Every stage uses the same tensor-parallel proportions, what is not given is equal, and units are shared
//! by largest remainder with ties to the lower rank. Units are whole KV groups of query heads (single query
//! heads where groups may be split), layers, and `quantum` columns, the last of which may be short. Output
//! and vocabulary rows follow the column proportions in units of one row, experts in units of one expert.
//! Devices are numbered stage by stage, inside a stage rank by rank.

use infercluster_spec::layout::{
    CPU_F32, DEFAULT_BLOCK_SIZE, DEFAULT_QUANTUM, KvCache, LayerGroup, Layout, Reduction, Shard, Stage,
};
use infercluster_spec::{Dtype, GpuId, IndexRange, Model};

use crate::frame::Frame;
use crate::proportions::Proportions;

/// What a layout by proportions is asked to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProportionalRequest {
    /// Devices, one worker each; equals ranks times stages.
    pub devices: u32,
    /// Layers by stage.
    pub stages: Option<Proportions>,
    /// Query heads by rank.
    pub heads: Option<Proportions>,
    /// MLP columns, output rows, vocabulary rows and experts by rank.
    pub mlp: Option<Proportions>,
    /// Whether a KV group may be cut, so that two ranks hold its KV head.
    pub split_groups: bool,
    /// Unit of column cuts, at least 1.
    pub quantum: u32,
    /// How partial results become one.
    pub reduction: Reduction,
    /// Shape of the KV cache.
    pub kv: KvCache,
}

impl ProportionalRequest {
    /// Equal shares on that many devices, everything else as the command line has it by default.
    pub fn equal(devices: u32) -> Self {
        Self {
            devices,
            stages: None,
            heads: None,
            mlp: None,
            split_groups: false,
            quantum: DEFAULT_QUANTUM,
            reduction: Reduction::Fast,
            kv: KvCache {
                block_size: DEFAULT_BLOCK_SIZE,
                dtype: Dtype::F32,
            },
        }
    }
}

/// Why proportions give no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProportionalError {
    /// The number of devices is not the number of seats.
    #[error("{devices} devices were given, but {ranks} ranks x {stages} stages need {needed}")]
    DeviceCount {
        /// Devices asked for.
        devices: u32,
        /// Ranks of every stage.
        ranks: usize,
        /// Stages.
        stages: usize,
        /// Their product.
        needed: usize,
    },
    /// The devices do not divide among the stages or ranks that were given.
    #[error("{devices} devices do not divide into groups of {groups}")]
    Indivisible {
        /// Devices asked for.
        devices: u32,
        /// Stages, or ranks, that proportions were given for.
        groups: usize,
    },
    /// No device, or more than a layout is made for.
    #[error("{devices} devices were given, between 1 and {limit} are accepted")]
    DeviceLimit {
        /// Devices asked for.
        devices: u32,
        /// The most that are accepted.
        limit: usize,
    },
    /// Heads and columns were given for different numbers of ranks.
    #[error("head proportions {heads} name {head_ranks} ranks, mlp proportions {mlp} name {mlp_ranks}")]
    RankCount {
        /// The head proportions.
        heads: Proportions,
        /// How many they are.
        head_ranks: usize,
        /// The column proportions.
        mlp: Proportions,
        /// How many they are.
        mlp_ranks: usize,
    },
    /// A stage that would hold no layer.
    #[error("stage {stage} gets no layer from proportions {stages} of {layers} layers")]
    StageWithoutLayers {
        /// Which stage.
        stage: usize,
        /// The proportions.
        stages: Proportions,
        /// Layers of the model.
        layers: u32,
    },
    /// Zero where a unit is needed.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// Which value.
        field: &'static str,
    },
    /// The KV heads do not divide the query heads.
    #[error("{kv_heads} KV heads do not divide the model's {query_heads} query heads")]
    HeadGroups {
        /// Query heads of the model.
        query_heads: u32,
        /// KV heads of the model.
        kv_heads: u32,
    },
}

/// The layout that proportions describe; it passes
/// [`validate_layout`](infercluster_spec::validate::validate_layout) without a cluster.
///
/// ```
/// use infercluster_planner::proportional::{ProportionalRequest, proportional_layout};
/// # let model: infercluster_spec::Model = infercluster_spec::json::read(
/// #     "model.json", include_str!("../../sim/spec/examples/model.json"))?;
/// let request = ProportionalRequest { heads: Some("5:3".parse()?), ..ProportionalRequest::equal(2) };
/// let layout = proportional_layout(&model, &request)?;
/// assert_eq!(layout.replicas[0].stages[0].layer_groups[0].shards[0].query_heads.to_string(), "0..20");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn proportional_layout(
    model: &Model,
    request: &ProportionalRequest,
) -> Result<Layout, ProportionalError> {
    check_units(model, request)?;
    let (ranks, stages) = group_shape(request)?;
    let equal = |parts| Proportions::equal(parts).expect("device limit bounds the parts");
    let stages = request.stages.clone().unwrap_or_else(|| equal(stages));
    let layers = stages.share(model.layers);
    if let Some(stage) = layers.iter().position(|layers| *layers == 0) {
        return Err(ProportionalError::StageWithoutLayers {
            stage,
            stages,
            layers: model.layers,
        });
    }
    let cuts = RankCuts::new(model, request, &equal(ranks));
    let stage_layers = consecutive(&layers);
    let last = stage_layers.len() - 1;
    let stages = stage_layers.iter().enumerate().map(|(stage, layers)| Stage {
        layer_groups: vec![LayerGroup {
            layers: *layers,
            shards: (0..ranks)
                .map(|rank| cuts.shard(GpuId((stage * ranks + rank) as u32), rank, stage == last))
                .collect(),
        }],
    });
    let frame = Frame {
        model,
        reduction: request.reduction,
        numerics: CPU_F32,
        quantum: request.quantum,
        kv: request.kv,
    };
    Ok(frame.one_replica(stages.collect()))
}

fn check_units(model: &Model, request: &ProportionalRequest) -> Result<(), ProportionalError> {
    let fields = [
        ("quantum", request.quantum),
        ("block size", request.kv.block_size),
        ("query heads of the model", model.query_heads),
        ("KV heads of the model", model.kv_heads),
    ];
    if let Some((field, _)) = fields.into_iter().find(|(_, value)| *value == 0) {
        return Err(ProportionalError::Zero { field });
    }
    if !model.query_heads.is_multiple_of(model.kv_heads) {
        return Err(ProportionalError::HeadGroups {
            query_heads: model.query_heads,
            kv_heads: model.kv_heads,
        });
    }
    Ok(())
}

/// Ranks of a stage and stages: each from its own list, else what the devices leave.
fn group_shape(request: &ProportionalRequest) -> Result<(usize, usize), ProportionalError> {
    let devices = request.devices;
    let limit = Proportions::MAX_PARTS;
    let count = devices as usize;
    if !(1..=limit).contains(&count) {
        return Err(ProportionalError::DeviceLimit { devices, limit });
    }
    let ranks = match (&request.heads, &request.mlp) {
        (Some(heads), Some(mlp)) if heads.len() != mlp.len() => {
            return Err(ProportionalError::RankCount {
                heads: heads.clone(),
                head_ranks: heads.len(),
                mlp: mlp.clone(),
                mlp_ranks: mlp.len(),
            });
        }
        (heads, mlp) => heads.as_ref().or(mlp.as_ref()).map(Proportions::len),
    };
    let stages = request.stages.as_ref().map(Proportions::len);
    let left = |groups: usize| match count.is_multiple_of(groups) {
        true => Ok(count / groups),
        false => Err(ProportionalError::Indivisible { devices, groups }),
    };
    match (ranks, stages) {
        (None, None) => Ok((count, 1)),
        (Some(ranks), None) => Ok((ranks, left(ranks)?)),
        (None, Some(stages)) => Ok((left(stages)?, stages)),
        (Some(ranks), Some(stages)) if ranks * stages == count => Ok((ranks, stages)),
        (Some(ranks), Some(stages)) => Err(ProportionalError::DeviceCount {
            devices,
            ranks,
            stages,
            needed: ranks * stages,
        }),
    }
}

/// Ranges of every rank, the same in every stage.
struct RankCuts {
    query_heads: Vec<IndexRange>,
    mlp_columns: Vec<IndexRange>,
    output_rows: Option<Vec<IndexRange>>,
    vocab: Vec<IndexRange>,
    experts: Vec<IndexRange>,
}

impl RankCuts {
    fn new(model: &Model, request: &ProportionalRequest, equal: &Proportions) -> Self {
        let heads = request.heads.as_ref().unwrap_or(equal);
        let mlp = request.mlp.as_ref().unwrap_or(equal);
        let head_unit = if request.split_groups {
            1
        } else {
            model.group_size()
        };
        let rows = |total| in_units(mlp, total, 1);
        Self {
            query_heads: in_units(heads, model.query_heads, head_unit),
            mlp_columns: in_units(mlp, model.ffn, request.quantum),
            output_rows: (request.reduction == Reduction::Invariant).then(|| rows(model.hidden)),
            vocab: rows(model.vocab),
            experts: rows(model.experts.map_or(0, |experts| experts.count)),
        }
    }

    fn shard(&self, gpu: GpuId, rank: usize, holds_head: bool) -> Shard {
        Shard {
            gpu,
            query_heads: self.query_heads[rank],
            mlp_columns: self.mlp_columns[rank],
            output_rows: self.output_rows.as_ref().map(|rows| rows[rank]),
            vocab: holds_head.then(|| self.vocab[rank]),
            experts: self.experts[rank].iter().collect(),
        }
    }
}

/// Shares `total` indices in whole units; the last unit is short where the unit does not divide the total.
fn in_units(proportions: &Proportions, total: u32, unit: u32) -> Vec<IndexRange> {
    let units = proportions.share(total.div_ceil(unit));
    let mut start = 0_u32;
    units
        .iter()
        .map(|units| {
            let end = (u64::from(start) + u64::from(*units) * u64::from(unit)).min(u64::from(total)) as u32;
            let range = IndexRange::new(start, end).expect("ranges go up");
            start = end;
            range
        })
        .collect()
}

/// Ranges of those lengths, one after the other.
fn consecutive(lengths: &[u32]) -> Vec<IndexRange> {
    let mut start = 0;
    lengths
        .iter()
        .map(|length| {
            let range = IndexRange::new(start, start + length).expect("lengths go up");
            start += length;
            range
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use infercluster_spec::validate::validate_layout;
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures::model;

    fn proportions(text: &str) -> Option<Proportions> {
        (!text.is_empty()).then(|| text.parse().unwrap())
    }

    /// Asks by text, checks the validator and answers the ranges of one kind.
    fn make(model: &Model, devices: u32, stages: &str, heads: &str, mlp: &str) -> Layout {
        let request = ProportionalRequest {
            stages: proportions(stages),
            heads: proportions(heads),
            mlp: proportions(mlp),
            ..ProportionalRequest::equal(devices)
        };
        let layout = proportional_layout(model, &request).unwrap();
        validate_layout(&layout, model, None).unwrap();
        layout
    }

    fn ranges(layout: &Layout, of: impl Fn(&Shard) -> IndexRange) -> Vec<String> {
        let shards = &layout.replicas[0].stages[0].layer_groups[0].shards;
        shards.iter().map(|shard| of(shard).to_string()).collect()
    }

    #[test]
    fn heads_by_hand() {
        // 6 groups of 2 heads in 5:1 are 5 groups and 1.
        let twelve = model(3, 12, 6, 320);
        let layout = make(&twelve, 2, "", "5:1", "");
        assert_eq!(ranges(&layout, |shard| shard.query_heads), ["0..10", "10..12"]);
        let layout = make(&twelve, 3, "", "3:2:1", "");
        assert_eq!(
            ranges(&layout, |shard| shard.query_heads),
            ["0..6", "6..10", "10..12"]
        );
        let layout = make(&twelve, 3, "", "1:1:0", "");
        assert_eq!(
            ranges(&layout, |shard| shard.query_heads),
            ["0..6", "6..12", "12..12"]
        );
    }

    #[test]
    fn split_groups_by_hand() {
        let qwen = model(4, 14, 2, 256);
        let request = ProportionalRequest {
            heads: proportions("9:5"),
            split_groups: true,
            ..ProportionalRequest::equal(2)
        };
        let layout = proportional_layout(&qwen, &request).unwrap();
        validate_layout(&layout, &qwen, None).unwrap();
        assert_eq!(ranges(&layout, |shard| shard.query_heads), ["0..9", "9..14"]);
        // Both hold KV head 1, whose group is cut.
        assert_eq!(ranges(&layout, |shard| shard.kv_heads(7)), ["0..2", "1..2"]);
        // Whole groups: 9:5 of two groups is 1.29 and 0.71.
        let layout = make(&qwen, 2, "", "9:5", "");
        assert_eq!(ranges(&layout, |shard| shard.query_heads), ["0..7", "7..14"]);
    }

    #[test]
    fn columns_rows_and_layers_by_hand() {
        let llama = model(3, 12, 6, 320);
        let request = ProportionalRequest {
            stages: proportions("2:1"),
            mlp: proportions("90:10"),
            quantum: 1,
            reduction: Reduction::Invariant,
            ..ProportionalRequest::equal(4)
        };
        let layout = proportional_layout(&llama, &request).unwrap();
        validate_layout(&layout, &llama, None).unwrap();
        assert_eq!(ranges(&layout, |shard| shard.mlp_columns), ["0..288", "288..320"]);
        // 96 rows are 86.4 and 9.6: the larger remainder is the second rank's.
        assert_eq!(
            ranges(&layout, |shard| shard.output_rows.unwrap()),
            ["0..86", "86..96"]
        );
        let stages = &layout.replicas[0].stages;
        assert_eq!(stages[0].layers().unwrap().to_string(), "0..2");
        assert_eq!(stages[1].layers().unwrap().to_string(), "2..3");
        assert_eq!(stages[1].gpus().collect::<Vec<_>>(), [GpuId(2), GpuId(3)]);
        // Five quanta of 64 columns: 4.5 and 0.5 tie, the lower rank takes the unit.
        let layout = make(&llama, 2, "", "", "90:10");
        assert_eq!(ranges(&layout, |shard| shard.mlp_columns), ["0..320", "320..320"]);
        // 100 columns are one quantum and a short one.
        let layout = make(&model(1, 2, 2, 100), 2, "", "", "1:1");
        assert_eq!(ranges(&layout, |shard| shard.mlp_columns), ["0..64", "64..100"]);
    }

    #[test]
    fn counts_that_do_not_fit_are_refused() {
        let llama = model(3, 12, 6, 320);
        let refuse = |devices, stages: &str, heads: &str, mlp: &str| {
            let request = ProportionalRequest {
                stages: proportions(stages),
                heads: proportions(heads),
                mlp: proportions(mlp),
                ..ProportionalRequest::equal(devices)
            };
            proportional_layout(&llama, &request).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(3, "2:1", "5:1", ""),
            "3 devices were given, but 2 ranks x 2 stages need 4"
        );
        assert_eq!(
            refuse(3, "", "5:1", ""),
            "3 devices do not divide into groups of 2"
        );
        assert_eq!(
            refuse(5, "2:1", "", ""),
            "5 devices do not divide into groups of 2"
        );
        assert_eq!(
            refuse(2, "100:1", "", ""),
            "stage 1 gets no layer from proportions 100:1 of 3 layers"
        );
        assert_eq!(
            refuse(3, "", "5:1", "1:1:1"),
            "head proportions 5:1 name 2 ranks, mlp proportions 1:1:1 name 3"
        );
        assert_eq!(
            refuse(0, "", "", ""),
            "0 devices were given, between 1 and 4096 are accepted"
        );
    }

    fn weights(parts: usize) -> impl Strategy<Value = Option<Proportions>> {
        let list = prop::collection::vec(0_u32..20, parts)
            .prop_filter_map("a weight above 0", |weights| Proportions::new(weights).ok());
        prop::option::of(list)
    }

    prop_compose! {
        fn shapes()(ranks in 1_usize..5, stages in 1_usize..4)(
            ranks in Just(ranks), stages in Just(stages),
            heads in weights(ranks), mlp in weights(ranks), layers in weights(stages),
            kv_heads in 1_u32..7, group in 1_u32..8, ffn in 0_u32..700, quantum in 1_u32..130,
            split_groups in any::<bool>(), invariant in any::<bool>(),
        ) -> (Model, ProportionalRequest) {
            let request = ProportionalRequest {
                stages: layers, heads, mlp, split_groups, quantum,
                reduction: if invariant { Reduction::Invariant } else { Reduction::Fast },
                ..ProportionalRequest::equal((ranks * stages) as u32)
            };
            (model(7, kv_heads * group, kv_heads, ffn), request)
        }
    }

    proptest! {
        #[test]
        fn what_is_made_is_valid((model, request) in shapes()) {
            match proportional_layout(&model, &request) {
                Ok(layout) => validate_layout(&layout, &model, None).unwrap(),
                Err(error) => prop_assert!(
                    matches!(error, ProportionalError::StageWithoutLayers { .. }), "{}", error
                ),
            }
        }
    }
}
