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

/// Stages that are considered in one region at one rate.
const STAGE_LIMIT: usize = 4_000;
/// States times stages of one region at one rate.
const STEP_LIMIT: usize = 20_000_000;
/// Most regions whose orders are tried.
const REGION_LIMIT: usize = 4;
/// Bisections of the rate.
const RATE_STEPS: usize = 14;

/// Some nodes with the same layers.
#[derive(Debug, Clone)]
struct StageKind {
    held: usize,
    /// Nodes by class of the region.
    nodes: Vec<usize>,
    /// The same as an index of counts.
    state: usize,
    /// What each of its nodes carries, smallest first.
    carried: Vec<f64>,
}

/// The stages of one region at one rate, and the most layers that chains of them cover.
struct Region {
    /// Classes of the region, by position in [`Classes`].
    classes: Vec<usize>,
    kinds: Vec<StageKind>,
    counts: Vec<usize>,
    radix: Vec<usize>,
    /// By counts: layers covered, and the stage that comes last, if any.
    covered: Vec<(usize, Option<usize>)>,
}

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
        .map(|region| Region::new(classes, *region, problem.layers, rate))
        .collect();
    if regions.iter().any(|region| region.kinds.is_empty()) {
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
        let mut table = vec![None; region.kinds.len()];
        for (first, kind) in region.kinds.iter().enumerate() {
            let (so_far, from) = match before {
                None => (0, 0),
                Some((other, reached)) => {
                    let into = (0..reached.len()).filter_map(|last| {
                        let (covered, _, _) = reached[last]?;
                        let crosses = crossing(problem.cross, &other.kinds[last].carried, &kind.carried);
                        (crosses >= rate).then_some((covered, last))
                    });
                    match into.max() {
                        Some(best) => best,
                        None => continue,
                    }
                }
            };
            for (last, slot) in table.iter_mut().enumerate() {
                let Some(own) = region.between(first, last) else {
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
        let mut stages = regions[*own].stages(first, last);
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

impl Region {
    fn new(classes: &Classes, region: u32, layers: usize, rate: f64) -> Self {
        let own: Vec<usize> = (0..classes.classes.len())
            .filter(|class| classes.classes[*class].region == region)
            .collect();
        let counts: Vec<usize> = own
            .iter()
            .map(|class| classes.classes[*class].members.len())
            .collect();
        let mut radix = Vec::new();
        let mut states = 1_usize;
        for count in &counts {
            radix.push(states);
            states = states.saturating_mul(count + 1);
        }
        let mut region = Self {
            classes: own,
            kinds: Vec::new(),
            counts,
            radix,
            covered: Vec::new(),
        };
        if states <= STEP_LIMIT {
            region.kinds = region.kinds(classes, layers, rate, (STEP_LIMIT / states).clamp(1, STAGE_LIMIT));
            region.cover(states);
        }
        region
    }

    /// Stages that carry the rate and would not with one node fewer, those first that use up the least of what
    /// nodes could do, and no more of them than `limit`.
    fn kinds(&self, classes: &Classes, layers: usize, rate: f64, limit: usize) -> Vec<StageKind> {
        let most = |class: &usize| classes.classes[*class].most_held();
        let most_held = self.classes.iter().map(most).max().unwrap_or(0).min(layers);
        let mut kinds = Vec::new();
        for held in 1..=most_held {
            let carried: Vec<f64> = self
                .classes
                .iter()
                .map(|class| classes.classes[*class].capacity[held])
                .collect();
            let mut nodes = vec![0; self.classes.len()];
            self.collect(&carried, rate, 0, 0.0, &mut nodes, &mut |nodes| {
                if kinds.len() < STAGE_LIMIT * most_held {
                    kinds.push(self.kind(held, nodes, &carried));
                }
            });
        }
        // What a node could do at best: layers at the whole rate.
        let worth: Vec<f64> = self
            .classes
            .iter()
            .map(|class| {
                let class = &classes.classes[*class];
                let of = |held: usize| held as f64 * class.capacity[held].min(rate) / rate;
                class.held().map(of).fold(f64::MIN_POSITIVE, f64::max)
            })
            .collect();
        let waste = |kind: &StageKind| {
            let nodes = kind.nodes.iter().zip(&worth);
            nodes.map(|(count, worth)| *count as f64 * worth).sum::<f64>() / kind.held as f64
        };
        kinds.sort_by(|one, other| waste(one).total_cmp(&waste(other)));
        kinds.truncate(limit);
        kinds
    }

    fn collect(
        &self,
        carried: &[f64],
        rate: f64,
        class: usize,
        sum: f64,
        nodes: &mut Vec<usize>,
        found: &mut dyn FnMut(&[usize]),
    ) {
        if sum >= rate {
            let spare = nodes
                .iter()
                .zip(carried)
                .any(|(count, own)| *count > 0 && sum - own >= rate);
            if !spare {
                found(nodes);
            }
            return;
        }
        if class == nodes.len() {
            return;
        }
        let most = if carried[class] > 0.0 {
            self.counts[class]
        } else {
            0
        };
        for count in 0..=most {
            nodes[class] = count;
            self.collect(
                carried,
                rate,
                class + 1,
                sum + count as f64 * carried[class],
                nodes,
                found,
            );
        }
        nodes[class] = 0;
    }

    fn kind(&self, held: usize, nodes: &[usize], carried: &[f64]) -> StageKind {
        let each = nodes.iter().zip(carried);
        let mut carried: Vec<f64> = each
            .flat_map(|(count, own)| std::iter::repeat_n(*own, *count))
            .collect();
        carried.sort_by(f64::total_cmp);
        StageKind {
            held,
            nodes: nodes.to_vec(),
            state: nodes
                .iter()
                .zip(&self.radix)
                .map(|(count, radix)| count * radix)
                .sum(),
            carried,
        }
    }

    fn fits(&self, kind: &StageKind, state: usize) -> bool {
        let counts = self.counts.iter().zip(&self.radix).zip(&kind.nodes);
        counts
            .into_iter()
            .all(|((count, radix), own)| *own <= state / radix % (count + 1))
    }

    fn cover(&mut self, states: usize) {
        self.covered = vec![(0, None); states];
        for state in 0..states {
            let mut best = (0, None);
            for (index, kind) in self.kinds.iter().enumerate() {
                if self.fits(kind, state) {
                    let covered = kind.held + self.covered[state - kind.state].0;
                    if covered > best.0 {
                        best = (covered, Some(index));
                    }
                }
            }
            self.covered[state] = best;
        }
    }

    /// Counts that are left beside a first and a last stage, where there are nodes for both.
    fn beside(&self, first: usize, last: usize) -> Option<usize> {
        let left = self.covered.len() - 1 - self.kinds[first].state;
        let last = &self.kinds[last];
        self.fits(last, left).then(|| left - last.state)
    }

    /// The most layers of a chain with those stages at its ends; a kind that stands at both may be one stage.
    fn between(&self, first: usize, last: usize) -> Option<usize> {
        match self.beside(first, last) {
            Some(left) => Some(self.kinds[first].held + self.kinds[last].held + self.covered[left].0),
            None => (first == last).then(|| self.kinds[first].held),
        }
    }

    fn stages(&self, first: usize, last: usize) -> Vec<StageKind> {
        let mut stages = vec![self.kinds[first].clone()];
        let Some(mut left) = self.beside(first, last) else {
            return stages;
        };
        while let Some(index) = self.covered[left].1 {
            stages.push(self.kinds[index].clone());
            left -= self.kinds[index].state;
        }
        stages.push(self.kinds[last].clone());
        stages
    }
}
