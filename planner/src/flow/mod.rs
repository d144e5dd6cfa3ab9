//! The layer-placement flow problem: which consecutive layers each node of a cluster holds, so that the most
//! tokens a second flow from the coordinator through all layers and back.
//!
//! A node that holds `k` layers carries at most its throughput for `k`; tokens go from a node to one that begins
//! where the first ends (with `partial` also to one that holds what comes next), over links of given capacity.
//! The value of a placement is the maximum flow (`network`); every answer is judged by that alone.
//!
//! **Search.** Where links do not bind: the best series-parallel placement (`series`). Elsewhere, and where that
//! is too large: chains of stages by region (`chain`, `region`). Both are improved node by node (`improve`), and problems
//! that are small enough are searched to the end (`branch`). **Bounds**: `bound`, and the exhaustive search
//! where it ends. Everything is counted in steps, not in seconds, so the answer is the same on every machine.

mod bound;
mod branch;
mod chain;
mod classes;
mod improve;
mod network;
mod problem;
mod region;
mod series;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use bound::BoundMethod;
pub use network::{Flow, FlowEnd, Placement, Span};
pub use problem::{
    FlowDocument, FlowError, FlowProblem, LAYER_LIMIT, LinkDocument, NODE_LIMIT, NodeDocument, PairDocument,
};

use bound::UpperBound;
use classes::Classes;
use improve::Climb;
use network::Network;

/// Placements that improving looks at, times nodes squared.
const CLIMB_STEPS: usize = 10_000_000;
/// Best placements that are improved.
const CLIMBS: usize = 3;
/// Relative differences below this are summation.
const ROUNDING: f64 = 1e-9;

/// The answer to a [`FlowProblem`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowPlan {
    /// Tokens/s that the placement carries.
    pub objective: f64,
    /// Tokens/s that no placement exceeds.
    pub bound: f64,
    /// Where the bound comes from.
    pub bound_method: String,
    /// What is open between them, as a share of the bound; 0 where the placement is proven to be the best.
    pub gap: f64,
    /// Nodes that carry something.
    pub placement: Vec<PlacedNode>,
    /// What flows over which link; the coordinator is `source` and `sink`.
    pub flows: Vec<PlacedFlow>,
}

/// The layers of one node, half open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlacedNode {
    /// The node.
    pub node: String,
    /// The first layer.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

/// What flows over one link.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacedFlow {
    /// Where from.
    pub from: String,
    /// Where to.
    pub to: String,
    /// How much.
    pub tokens_per_s: f64,
}

/// The best placement found, with a bound.
///
/// ```
/// use infercluster_planner::flow::{FlowDocument, FlowProblem, solve};
/// // Two equal nodes, six layers: three each, one after the other, carry 20 tokens/s; alone neither holds all.
/// let document: FlowDocument = serde_json::from_str(
///     r#"{"layers": 6, "nodes": [{"name": "card", "count": 2, "throughput": {"3": 20.0, "4": 12.0}}]}"#,
/// )?;
/// let plan = solve(&FlowProblem::new(&document)?);
/// assert_eq!((plan.objective, plan.gap), (20.0, 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn solve(problem: &FlowProblem) -> FlowPlan {
    let classes = Classes::new(problem);
    let mut upper = bound::upper(problem, &classes);
    let mut network = Network::default();
    let nothing: Placement = vec![None; problem.names.len()];
    let mut best = (0.0, nothing);
    if upper.value > 0.0 {
        best = search(problem, &classes, &mut network, &mut upper);
    }
    answer(problem, &mut network, best, upper)
}

/// The best placement; lowers `upper` where the search proves more.
fn search(
    problem: &FlowProblem,
    classes: &Classes,
    network: &mut Network,
    upper: &mut UpperBound,
) -> (f64, Placement) {
    let is_open = |value: f64, upper: &UpperBound| upper.value - value > ROUNDING * upper.value;
    let mut found: Vec<(f64, Placement)> = Vec::new();
    let judge = |placement: Placement, found: &mut Vec<(f64, Placement)>, network: &mut Network| {
        let value = network.value(problem, &placement);
        if found.iter().all(|(_, other)| *other != placement) {
            found.push((value, placement));
        }
        found.sort_by(|one, other| other.0.total_cmp(&one.0));
    };
    let series = series::best(classes, problem.layers, problem.names.len());
    let is_large = series.is_none();
    if let Some(placement) = series {
        judge(placement, &mut found, network);
    }
    let best_value = |found: &[(f64, Placement)]| found.first().map_or(0.0, |best| best.0);
    let is_limited = classes.linked || problem.coordinator < upper.value;
    if is_open(best_value(&found), upper) && (is_limited || is_large) {
        for placement in chain::candidates(problem, classes, upper.value) {
            judge(placement, &mut found, network);
        }
    }
    judge(vec![None; problem.names.len()], &mut found, network);
    if is_open(best_value(&found), upper) {
        let mut climb = Climb {
            problem,
            classes,
            network,
            evaluations: 0,
        };
        let starts: Vec<Placement> = found
            .iter()
            .take(CLIMBS)
            .map(|(_, start)| start.clone())
            .collect();
        for start in starts {
            climb.evaluations = CLIMB_STEPS / (CLIMBS * start.len().pow(2)).max(CLIMBS * 100);
            found.push(climb.from(&start));
        }
        found.sort_by(|one, other| other.0.total_cmp(&one.0));
    }
    let mut best = found.swap_remove(0);
    if is_open(best.0, upper) {
        let searched = branch::search(problem, classes, network, best.0);
        best = searched.better.unwrap_or(best);
        if searched.complete {
            *upper = UpperBound {
                value: best.0,
                method: BoundMethod::Search,
            };
        }
    }
    best
}

fn answer(
    problem: &FlowProblem,
    network: &mut Network,
    (_, placement): (f64, Placement),
    upper: UpperBound,
) -> FlowPlan {
    let (objective, flows) = network.flows(problem, &placement);
    let name = |end: FlowEnd| match end {
        FlowEnd::Source => "source".to_owned(),
        FlowEnd::Sink => "sink".to_owned(),
        FlowEnd::Node(node) => problem.names[node].clone(),
    };
    let carries = |node: usize| {
        let node = FlowEnd::Node(node);
        flows.iter().any(|flow| flow.from == node)
    };
    let used = placement.iter().enumerate().filter(|(node, _)| carries(*node));
    let placed = used.filter_map(|(node, span)| {
        Some(PlacedNode {
            node: problem.names[node].clone(),
            start: span.as_ref()?.start,
            end: span.as_ref()?.end,
        })
    });
    let bound = upper.value.max(objective);
    let open = (bound - objective) / bound;
    FlowPlan {
        objective,
        bound,
        bound_method: upper.method.to_string(),
        gap: if open > ROUNDING { open } else { 0.0 },
        placement: placed.collect(),
        flows: flows
            .iter()
            .map(|flow| PlacedFlow {
                from: name(flow.from),
                to: name(flow.to),
                tokens_per_s: flow.tokens_per_s,
            })
            .collect(),
    }
}
