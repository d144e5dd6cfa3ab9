//! What shares of one layer and of the head weigh.

use infercluster_spec::Bytes;
use infercluster_spec::layout::Reduction;
use infercluster_spec::migration::WeightKind;

use super::PlanProblem;
use crate::apportion::{CountShare, GroupProblem, HeadShare};
use crate::migrate::slice_bytes;

/// Most units that rows and vocabulary are cut into: finer cuts change a stage by less than the model knows.
pub(super) const ROW_UNITS: u32 = 256;
/// A cache of this many bytes a layer and KV head fits nowhere; sums over layers and heads stay within 64 bits.
const LARGEST_CACHE: Bytes = Bytes(1 << 44);

/// What can be shared of one layer and of the head, without times.
pub(super) struct ShareBytes {
    /// Of one layer.
    pub(super) heads: HeadShare,
    /// Of one layer.
    pub(super) columns: CountShare,
    /// Of one layer; shared out in the `invariant` reduction alone.
    pub(super) rows: CountShare,
    /// Of the last stage.
    pub(super) vocab: CountShare,
    invariant: bool,
    /// Norms of one layer, which every rank holds.
    layer: Bytes,
    /// The norm before the head, which every rank of the last stage holds.
    final_norm: Bytes,
}

impl ShareBytes {
    /// The weights of the problem's model and the cache of its workload.
    pub(super) fn new(problem: &PlanProblem) -> Self {
        let (model, reduction) = (problem.model, problem.reduction);
        let of = |kind: WeightKind| slice_bytes(model, reduction, kind, 1, false);
        let invariant = reduction == Reduction::Invariant;
        let (output, down) = (of(WeightKind::Output), of(WeightKind::Down));
        // In `fast` the inputs of the output and down projections are cut with the heads and columns.
        let beside = |bytes: Bytes| if invariant { Bytes::ZERO } else { bytes };
        let group_size = model.group_size();
        let kv_tokens = problem.workload.kv_tokens(problem.kv.block_size);
        let kv_token = model.kv_bytes_per_token_layer(1, problem.kv.dtype);
        let cache = kv_token.checked_mul(kv_tokens).unwrap_or(LARGEST_CACHE);
        let heads = HeadShare {
            query_heads: model.query_heads,
            group_size,
            unit: if problem.split_groups { 1 } else { group_size },
            query_bytes: of(WeightKind::Query) + beside(output),
            kv_bytes: of(WeightKind::KeyValue) + cache.min(LARGEST_CACHE),
            segments: Vec::new(),
        };
        let counted = |units: u32, unit: u32, bytes: Bytes| CountShare {
            units,
            unit_bytes: bytes * u64::from(unit),
            segments: Vec::new(),
        };
        let (row, rows) = row_units(model.hidden);
        let (word, words) = row_units(model.vocab);
        let quantum = problem.quantum.min(model.ffn);
        Self {
            heads,
            columns: counted(
                model.ffn.div_ceil(problem.quantum),
                quantum,
                of(WeightKind::GateUp) + beside(down),
            ),
            rows: counted(rows, row, output + down),
            vocab: counted(words, word, of(WeightKind::LmHead)),
            invariant,
            layer: slice_bytes(model, reduction, WeightKind::Norms, model.hidden, false),
            final_norm: slice_bytes(model, reduction, WeightKind::LmHead, 0, true),
        }
    }

    /// What a stage of that many layers shares within `memory`, times left out; `None` where what every rank
    /// holds does not fit.
    pub(super) fn group_problem(&self, layers: u32, is_last: bool, memory: &[Bytes]) -> Option<GroupProblem> {
        let times = u64::from(layers);
        let repeated = |share: &CountShare| CountShare {
            unit_bytes: share.unit_bytes * times,
            ..share.clone()
        };
        let counts = std::iter::once(repeated(&self.columns))
            .chain(self.invariant.then(|| repeated(&self.rows)))
            .chain(is_last.then(|| self.vocab.clone()));
        Some(GroupProblem {
            heads: HeadShare {
                query_bytes: self.heads.query_bytes * times,
                kv_bytes: self.heads.kv_bytes * times,
                ..self.heads.clone()
            },
            counts: counts.collect(),
            memory: self.room(layers, is_last, memory)?,
        })
    }

    /// Memory for shares beside what every rank holds; `None` where that alone does not fit.
    pub(super) fn room(&self, layers: u32, is_last: bool, memory: &[Bytes]) -> Option<Vec<Option<Bytes>>> {
        let last = if is_last { self.final_norm } else { Bytes::ZERO };
        let held = self.layer * u64::from(layers) + last;
        let beside = |memory: &Bytes| memory.0.checked_sub(held.0).map(|left| Some(Bytes(left)));
        memory.iter().map(beside).collect()
    }

    /// The most layers for which `holds` says yes of what a stage shares within `memory`: more layers need
    /// more of everything.
    pub(super) fn most_layers(
        &self,
        layers: u32,
        is_last: bool,
        memory: &[Bytes],
        holds: impl Fn(&GroupProblem) -> bool,
    ) -> u32 {
        let (mut low, mut high) = (0, layers + 1);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if self
                .group_problem(middle, is_last, memory)
                .is_some_and(|problem| holds(&problem))
            {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// Indices of one unit of rows, and how many units there are.
pub(super) fn row_units(total: u32) -> (u32, u32) {
    let unit = total.div_ceil(ROW_UNITS).max(1);
    (unit, total.div_ceil(unit))
}
