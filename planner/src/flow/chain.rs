//! Placements as chains of stages for problems with regions, and for those too large for `series`.
//!
//! A stage is some nodes of one region with the same layers, which carry the rate together. For a rate `F` and
//! the nodes of one region a knapsack program finds the most layers that a chain of such stages covers; regions
//! follow each other in every order, where the links between the last stage of one and the first of the next
//! carry `F`. The largest `F` for which all layers are covered is found by bisection, for every set of regions;
//! disjoint sets serve beside each other. A heuristic: its placements are judged by the flow alone.

use super::classes::Classes;
use super::network::{Placement, Span};
use super::problem::FlowProblem;
use super::region::{Region, StageKind};

/// Most regions whose orders are tried.
const REGION_LIMIT: usize = 4;
/// Bisections of the rate.
const RATE_STEPS: usize = 14;

/// Stages of a chain with their region.
type Chain = Vec<(usize, StageKind)>;

/// Placements worth a look; `upper` is no less than any rate.
pub(super) fn candidates(problem: &FlowProblem, classes: &Classes, upper: f64) -> Vec<Placement> {
    let mut regions: Vec<u32> = classes.classes.iter().map(|class| class.region).collect();
    regions.sort_unstable();
    regions.dedup();
    regions.truncate(REGION_LIMIT);
    let sets = 1_usize << regions.len();
    // By set of regions: the best rate and its placement.
    let of_set = |set: usize| {
        let chosen = regions
            .iter()
            .enumerate()
            .filter(|(region, _)| set >> region & 1 == 1);
        let chosen: Vec<u32> = chosen.map(|(_, region)| *region).collect();
        let found = (set > 0)
            .then(|| best_chain(problem, classes, &chosen, upper))
            .flatten();
        found.unwrap_or_else(|| (0.0, vec![None; problem.names.len()]))
    };
    let mut best: Vec<(f64, Placement)> = (0..sets).map(of_set).collect();
    let alone: Vec<Placement> = best.iter().map(|(_, placement)| placement.clone()).collect();
    // Disjoint sets beside each other.
    for set in 1..sets {
        let mut part = (set - 1) & set;
        while part > 0 {
            let rate = best[part].0 + best[set ^ part].0;
            if rate > best[set].0 {
                let beside = best[part].1.iter().zip(&best[set ^ part].1);
                best[set] = (rate, beside.map(|(one, other)| one.or(*other)).collect());
            }
            part = (part - 1) & set;
        }
    }
    let all = best.pop().map(|(_, placement)| placement);
    all.into_iter().chain(alone.into_iter().skip(1)).collect()
}

/// The chain of the largest rate over some regions in any order.
fn best_chain(
    problem: &FlowProblem,
    classes: &Classes,
    regions: &[u32],
    upper: f64,
) -> Option<(f64, Placement)> {
    let (mut low, mut high, mut found) = (0.0, upper, None);
    for step in 0..RATE_STEPS {
        // The upper bound itself first: it is often reached.
        let rate = if step == 0 {
            upper
        } else {
            low + (high - low) / 2.0
        };
        if rate <= 0.0 {
            return None;
        }
        match chain(problem, classes, regions, rate) {
            Some(chain) => {
                (low, found) = (rate, Some((rate, placed(problem, classes, &chain))));
                if step == 0 {
                    return found;
                }
            }
            None => high = rate,
        }
    }
    found
}

/// A chain that covers all layers at a rate.
fn chain(problem: &FlowProblem, classes: &Classes, regions: &[u32], rate: f64) -> Option<Chain> {
    let regions: Vec<Region> = regions
        .iter()
        .map(|region| Region::new(problem, classes, *region, rate))
        .collect();
    if regions.iter().any(|region| region.ends.is_empty()) {
        return None;
    }
    let orders = orders(regions.len());
    let chains = orders
        .iter()
        .filter_map(|order| in_order(problem, &regions, order, rate));
    chains
        .map(|chain| trimmed(classes, chain, problem.layers, rate))
        .find_map(|chain| chain)
}

fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(count - 1);
    let inserted = |order: &Vec<usize>| {
        (0..count)
            .map(|at| {
                let mut order = order.clone();
                order.insert(at, count - 1);
                order
            })
            .collect::<Vec<_>>()
    };
    shorter.iter().flat_map(inserted).collect()
}

/// The chain of most layers through all regions in an order, if it covers enough.
fn in_order(problem: &FlowProblem, regions: &[Region], order: &[usize], rate: f64) -> Option<Chain> {
    // By last stage of the regions so far: layers covered, and the first stage of this region and the last one
    // of the region before that lead there.
    let mut tables: Vec<Vec<Option<(usize, usize, usize)>>> = Vec::new();
    for (position, own) in order.iter().enumerate() {
        let region = &regions[*own];
        let before = position
            .checked_sub(1)
            .map(|before| (&regions[order[before]], &tables[before]));
        let is_last = position + 1 == order.len();
        let mut table = vec![None; region.ends.len()];
        for (first, kind) in region.ends.iter().map(|end| &region.kinds[*end]).enumerate() {
            let (so_far, from) = match before {
                None if coordinated(problem, kind) < rate => continue,
                None => (0, 0),
                Some((other, reached)) => {
                    let into = (0..reached.len()).filter_map(|last| {
                        let (covered, _, _) = reached[last]?;
                        let crosses = crossing(
                            problem.cross,
                            &other.kinds[other.ends[last]].carried,
                            &kind.carried,
                        );
                        (crosses >= rate).then_some((covered, last))
                    });
                    match into.max() {
                        Some(best) => best,
                        None => continue,
                    }
                }
            };
            for (last, slot) in table.iter_mut().enumerate() {
                let (first_kind, last_kind) = (region.ends[first], region.ends[last]);
                if is_last && coordinated(problem, &region.kinds[last_kind]) < rate {
                    continue;
                }
                let Some(own) = region.between(first_kind, last_kind) else {
                    continue;
                };
                if slot.is_none_or(|(covered, _, _)| so_far + own > covered) {
                    *slot = Some((so_far + own, first, from));
                }
            }
        }
        tables.push(table);
    }
    let ends = tables.last()?.iter().enumerate();
    let (_, mut last) = ends
        .filter_map(|(last, end)| Some((end.as_ref()?.0, last)))
        .max()?;
    let mut chain = Chain::new();
    for (position, own) in order.iter().enumerate().rev() {
        let (_, first, from) = tables[position][last]?;
        let region = &regions[*own];
        let mut stages = region.stages(region.ends[first], region.ends[last]);
        stages.reverse();
        chain.extend(stages.into_iter().map(|stage| (*own, stage)));
        last = from;
    }
    chain.reverse();
    let covered: usize = chain.iter().map(|(_, stage)| stage.held).sum();
    // Regions are known by their position here, and by their classes in what is placed.
    let named = chain.into_iter().map(|(own, stage)| {
        let mut nodes = vec![
            0;
            regions
                .iter()
                .flat_map(|region| &region.classes)
                .max()
                .map_or(0, |most| most + 1)
        ];
        for (class, count) in regions[own].classes.iter().zip(&stage.nodes) {
            nodes[*class] = *count;
        }
        (own, StageKind { nodes, ..stage })
    });
    (covered >= problem.layers).then(|| named.collect())
}

/// What the links of the coordinator carry to or from a stage.
fn coordinated(problem: &FlowProblem, stage: &StageKind) -> f64 {
    stage
        .carried
        .iter()
        .map(|carried| carried.min(problem.coordinator))
        .sum()
}

/// What links of one capacity between all nodes of two stages carry: the least cut.
fn crossing(link: f64, from: &[f64], to: &[f64]) -> f64 {
    let sums = |carried: &[f64]| -> Vec<f64> {
        let mut sum = 0.0;
        std::iter::once(0.0)
            .chain(carried.iter().map(|own| {
                sum += own;
                sum
            }))
            .collect()
    };
    let (from_sums, to_sums) = (sums(from), sums(to));
    let mut least = f64::INFINITY;
    for (cut, one) in from_sums.iter().enumerate() {
        for (other_cut, other) in to_sums.iter().enumerate() {
            let links = (from.len() - cut) * (to.len() - other_cut);
            // No link at infinite capacity is no number.
            let across = if links == 0 { 0.0 } else { link * links as f64 };
            least = least.min(one + other + across);
        }
    }
    least
}

/// Takes layers off until exactly `layers` are left, from stages that still carry the rate with fewer.
fn trimmed(classes: &Classes, mut chain: Chain, layers: usize, rate: f64) -> Option<Chain> {
    let covered: usize = chain.iter().map(|(_, stage)| stage.held).sum();
    let mut excess = covered.checked_sub(layers)?;
    for (_, stage) in &mut chain {
        let carries = |held: usize| {
            let nodes = stage
                .nodes
                .iter()
                .zip(&classes.classes)
                .filter(|(count, _)| **count > 0);
            let each = || {
                nodes
                    .clone()
                    .map(|(count, class)| *count as f64 * class.capacity[held])
            };
            held > 0 && each().all(|carried| carried > 0.0) && each().sum::<f64>() >= rate
        };
        let fewest = stage.held - excess.min(stage.held - 1);
        if let Some(held) = (fewest..=stage.held).find(|held| carries(*held)) {
            excess -= stage.held - held;
            stage.held = held;
        }
    }
    (excess == 0).then_some(chain)
}

fn placed(problem: &FlowProblem, classes: &Classes, chain: &Chain) -> Placement {
    let mut placement = vec![None; problem.names.len()];
    let mut used = vec![0; classes.classes.len()];
    let mut start = 0;
    for (_, stage) in chain {
        let span = Span {
            start,
            end: start + stage.held,
        };
        for (class, count) in stage.nodes.iter().enumerate() {
            for node in &classes.classes[class].members[used[class]..used[class] + count] {
                placement[*node] = Some(span);
            }
            used[class] += count;
        }
        start = span.end;
    }
    placement
}
