//! Nodes that are interchangeable.

use std::collections::BTreeMap;

use super::problem::FlowProblem;

/// Nodes of one capacity, and in linked problems of one region; a node that a binding pair names stands alone.
#[derive(Debug, Clone)]
pub(super) struct Class {
    pub(super) members: Vec<usize>,
    /// By layers held, what one of them carries at most, links considered; 0 where it cannot hold that many.
    pub(super) capacity: Vec<f64>,
    pub(super) region: u32,
}

impl Class {
    /// Numbers of layers that it can hold.
    pub(super) fn held(&self) -> impl Iterator<Item = usize> + '_ {
        (1..self.capacity.len()).filter(|held| self.capacity[*held] > 0.0)
    }

    pub(super) fn most_held(&self) -> usize {
        self.held().last().unwrap_or(0)
    }
}

/// Nodes by class; those that carry nothing are left out.
#[derive(Debug, Clone)]
pub(super) struct Classes {
    pub(super) classes: Vec<Class>,
    /// Whether some link may bind.
    pub(super) linked: bool,
}

impl Classes {
    pub(super) fn new(problem: &FlowProblem) -> Self {
        let nodes = problem.names.len();
        let most: Vec<f64> = problem
            .throughput
            .iter()
            .map(|own| own.iter().copied().fold(0.0, f64::max).min(problem.nic))
            .collect();
        let binds = |from: usize, to: usize, link: f64| link < most[from].min(most[to]);
        let general =
            (0..nodes).any(|from| (0..nodes).any(|to| from != to && binds(from, to, problem.link(from, to))));
        // A pair matters where it binds, and where a general link that it lifts would.
        let named = |node: &usize| {
            let mut pairs = problem.pairs.iter();
            general && pairs.any(|((from, to), _)| from == node || to == node)
        };
        let mut keyed: BTreeMap<(u32, Option<usize>, Vec<u64>), Class> = BTreeMap::new();
        for node in 0..nodes {
            let limit = reach(problem, node);
            let own = problem.throughput[node].iter();
            let capacity: Vec<f64> = own.map(|carried| carried.min(problem.nic).min(limit)).collect();
            if capacity.iter().all(|carried| *carried == 0.0) {
                continue;
            }
            let region = if general { problem.regions[node] } else { 0 };
            let key = (
                region,
                named(&node).then_some(node),
                capacity.iter().map(|carried| carried.to_bits()).collect(),
            );
            let class = keyed.entry(key).or_insert_with(|| Class {
                members: Vec::new(),
                capacity,
                region,
            });
            class.members.push(node);
        }
        Self {
            classes: keyed.into_values().collect(),
            linked: general,
        }
    }

    /// Nodes by class.
    pub(super) fn counts(&self) -> Vec<usize> {
        self.classes.iter().map(|class| class.members.len()).collect()
    }
}

/// What may come to a node and leave it over all its links: at a start or an end of the model they are the
/// coordinator's, elsewhere those of the other nodes.
fn reach(problem: &FlowProblem, node: usize) -> f64 {
    let others = || (0..problem.names.len()).filter(|other| *other != node);
    let into: f64 = others().map(|other| problem.link(other, node)).sum();
    let out: f64 = others().map(|other| problem.link(node, other)).sum();
    // Where parts of layers are computed, a node at the start of the model is fed by others as well.
    let into = if problem.partial {
        into + problem.coordinator
    } else {
        into.max(problem.coordinator)
    };
    into.min(out.max(problem.coordinator))
}
