//! The best structure, cuts and shares.
//!
//! Every structure has a bound from below that needs no search: stages at their times without memory limits,
//! each with no more layers than memory may hold. Structures are priced in the order of their bounds until one
//! reaches the best candidate.

use infercluster_spec::{GpuId, SimDuration};

use super::cuts::Pace;
use super::stage::{GroupIndex, Outline, StageSolver, pace};
use super::structures::Structures;
use super::{Candidate, CandidateStage, Objective, PlanProblem, ReplicaError, cuts};

/// The best candidate, and whether nothing is better.
pub(super) struct Found {
    pub(super) best: Option<Candidate>,
    pub(super) exact: bool,
}

/// A structure that memory and links may carry.
struct Open<'a> {
    /// No cuts and shares of it are faster.
    bound: u64,
    structure: &'a [Vec<GpuId>],
    groups: Vec<GroupIndex>,
    pace: Pace,
}

/// Searches the structures of a list.
pub(super) fn search(problem: &PlanProblem, list: &Structures) -> Result<Found, ReplicaError> {
    let mut solver = StageSolver::new(problem, list.classes.clone())?;
    let mut open = Vec::new();
    for structure in &list.structures {
        open.extend(outlined(problem, &mut solver, structure)?);
    }
    // Stable: of equal bounds the one with fewer stages comes first.
    open.sort_by_key(|open| open.bound);
    let mut best: Option<Candidate> = None;
    for open in &open {
        if best.as_ref().is_some_and(|best| open.bound >= best.value.0) {
            break;
        }
        if let Some(candidate) = price(problem, &mut solver, open, best.as_ref()) {
            best = Some(candidate);
        }
    }
    Ok(Found {
        best,
        exact: list.all && solver.all_exact(),
    })
}

/// A structure with its bound; `None` where memory or links rule it out.
fn outlined<'a>(
    problem: &PlanProblem,
    solver: &mut StageSolver,
    structure: &'a [Vec<GpuId>],
) -> Result<Option<Open<'a>>, ReplicaError> {
    let count = structure.len();
    let mut groups = Vec::with_capacity(count);
    for (position, gpus) in structure.iter().enumerate() {
        match solver.group(gpus, count, position + 1 == count)? {
            Some(group) => groups.push(group),
            None => return Ok(None),
        }
    }
    let Some(handovers) = solver.handovers(structure)? else {
        return Ok(None);
    };
    let pace = pace(problem, count, handovers.iter().sum());
    let outlines: Vec<Outline> = groups.iter().map(|group| solver.outline(*group)).collect();
    Ok(bound(&outlines, pace, problem.model.layers).map(|bound| Open {
        bound,
        structure,
        groups,
        pace,
    }))
}

/// No cut of that many layers is faster; `None` where memory does not hold them.
fn bound(outlines: &[Outline], pace: Pace, layers: u32) -> Option<u64> {
    let most = |outline: &Outline| u64::from(outline.most_layers);
    if outlines.iter().any(|outline| outline.most_layers == 0)
        || outlines.iter().map(most).sum::<u64>() < u64::from(layers)
    {
        return None;
    }
    // The least way: one layer a stage, and the others where a layer takes least.
    let mut left = layers.checked_sub(outlines.len() as u32)?;
    let mut way = outlines.iter().fold(pace.handover, |way, outline| {
        way.saturating_add(outline.at_least(1))
    });
    let mut cheapest: Vec<&Outline> = outlines.iter().collect();
    cheapest.sort_by_key(|outline| outline.per_layer);
    for outline in cheapest {
        let own = left.min(outline.most_layers - 1);
        way = way.saturating_add(outline.per_layer.saturating_mul(u64::from(own)));
        left -= own;
    }
    if pace.objective == Objective::Latency {
        return Some(way);
    }
    // The least limit on a stage within which the stages hold all layers.
    let slowest = outlines
        .iter()
        .map(|outline| outline.at_least(outline.most_layers))
        .max()?;
    let (mut low, mut high) = (0, slowest);
    while low < high {
        let middle = low + (high - low) / 2;
        if within(outlines, middle) >= u64::from(layers) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(way.max(low.saturating_mul(pace.micro_batches)))
}

/// Layers that stages hold within a limit; 0 where one does not hold any.
fn within(outlines: &[Outline], limit: u64) -> u64 {
    let mut held = 0;
    for outline in outlines {
        let most = u64::from(outline.most_layers);
        let own = match limit.checked_sub(outline.fixed) {
            Some(left) => left.checked_div(outline.per_layer).unwrap_or(most).min(most),
            None => 0,
        };
        if own == 0 {
            return 0;
        }
        held += own;
    }
    held
}

/// The best cuts of one structure; `None` where memory rules it out or it does not beat `best`.
///
/// Shares are solved only for the numbers of layers that a cut takes: others stand with a bound from below,
/// so that a cut whose every stage is solved is the best.
fn price(
    problem: &PlanProblem,
    solver: &mut StageSolver,
    open: &Open,
    best: Option<&Candidate>,
) -> Option<Candidate> {
    loop {
        let times: Vec<Vec<Option<u64>>> = open.groups.iter().map(|group| solver.times(*group)).collect();
        let cut = cuts::best(&times, open.pace, problem.model.layers)?;
        if best.is_some_and(|best| cut.value >= best.value.0) {
            return None;
        }
        let chosen = || open.groups.iter().copied().zip(cut.layers.iter().copied());
        let options = chosen().map(|(group, layers)| solver.solved(group, layers).cloned());
        if let Some(options) = options.collect::<Option<Vec<_>>>() {
            let stages = open.structure.iter().zip(&cut.layers).zip(options);
            let stages = stages.map(|((gpus, layers), option)| CandidateStage {
                gpus: gpus.clone(),
                layers: *layers,
                option,
            });
            return Some(Candidate {
                value: SimDuration(cut.value),
                stages: stages.collect(),
            });
        }
        for (group, layers) in chosen() {
            if solver.solved(group, layers).is_none() {
                solver.solve(group, layers);
            }
        }
    }
}
