//! What ideal shares of a plan's structure and layer cuts would reach.

use std::collections::BTreeMap;

use infercluster_spec::{GpuId, SimDuration};

use super::bytes::row_units;
use super::stage::{StageSolver, pace, sequences_of_step};
use super::tables::{GroupTables, Pricer};
use super::{Candidate, PlanProblem, ReplicaError, cuts};
use crate::apportion::{CountShare, apportion, continuous_bound};

/// What ideal shares of a plan's structure and layer cuts would reach: no memory limit, and every collective
/// paced by an even share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareBounds {
    /// With whole heads, quanta and rows.
    pub integer: SimDuration,
    /// With any fraction.
    pub continuous: SimDuration,
}

/// Ideal shares for the stages of a candidate; `classes` says which devices are interchangeable.
pub(super) fn bounds(
    problem: &PlanProblem,
    candidate: &Candidate,
    classes: &BTreeMap<GpuId, usize>,
) -> Result<ShareBounds, ReplicaError> {
    let mut pricer = Pricer::new(problem, classes.clone())?;
    let count = candidate.stages.len();
    let structure: Vec<Vec<GpuId>> = candidate.stages.iter().map(|stage| stage.gpus.clone()).collect();
    let handovers = StageSolver::new(problem, classes.clone())?.handovers(&structure)?;
    let handover: u64 = handovers.into_iter().flatten().sum();
    let (mut integer, mut continuous) = (Vec::new(), Vec::new());
    for (position, stage) in candidate.stages.iter().enumerate() {
        let group = problem.cost.group(&stage.gpus)?;
        let sequences = sequences_of_step(problem, count);
        let mut tables = pricer.tables(&group, &stage.gpus, sequences, position + 1 == count)?;
        tables.drop_short_units(problem);
        tables.pace_evenly(stage.gpus.len());
        let fixed = tables.fixed + u64::from(stage.layers) * tables.per_layer;
        let ideal = tables.group_problem(stage.layers, vec![None; stage.gpus.len()]);
        let shares = apportion(&ideal).expect("without limits something fits");
        integer.push(fixed + shares.bound.0);
        continuous.push(fixed + continuous_bound(&ideal).0);
    }
    let value = |times: &[u64]| SimDuration(cuts::value(times, pace(problem, count, handover)));
    Ok(ShareBounds {
        integer: value(&integer),
        continuous: value(&continuous),
    })
}

impl GroupTables {
    /// Leaves out a last unit that is not whole: the tables charge it as a whole one, which a bound must not.
    fn drop_short_units(&mut self, problem: &PlanProblem) {
        let model = problem.model;
        let drop = |share: &mut CountShare, total: u32, unit: u32| {
            share.units -= u32::from(!total.is_multiple_of(unit));
        };
        drop(&mut self.columns, model.ffn, problem.quantum);
        if let Some(rows) = &mut self.rows {
            drop(rows, model.hidden, row_units(model.hidden).0);
        }
        if let Some(vocab) = &mut self.vocab {
            drop(vocab, model.vocab, row_units(model.vocab).0);
        }
    }

    /// Takes gathers out of the tables and charges each at an even share instead: the last segment of a kind
    /// is its gather, which is the same on every rank.
    fn pace_evenly(&mut self, ranks: usize) {
        let ranks = ranks as u32;
        let mut even_layer = 0;
        if self.heads.segments.len() > 1 {
            let share = self
                .heads
                .query_heads
                .div_ceil(ranks)
                .next_multiple_of(self.heads.unit);
            let gather = self.heads.segments.pop().expect("there are two");
            even_layer += gather
                .fewest_kv(share.min(self.heads.query_heads), self.heads.group_size)
                .0;
        }
        let even = |share: &mut CountShare, own: usize| match share.segments.len() > own {
            true => {
                let gather = share.segments.pop().expect("there are more");
                gather.of(0, share.units.div_ceil(ranks)).0
            }
            false => 0,
        };
        even_layer += even(&mut self.columns, 1);
        even_layer += self.rows.as_mut().map_or(0, |rows| even(rows, 2));
        self.per_layer += even_layer;
        self.fixed += self.vocab.as_mut().map_or(0, |vocab| even(vocab, 1));
    }
}
