//! Bounds from above on what any placement carries.
//!
//! All rest on one fact: every token is computed at every layer by a node that holds it, also where a node
//! computes only a part of its layers. So the nodes that hold a layer carry the whole rate `F` together.
//!
//! - *Layer shares*: of a node with `k` layers at most `min(T(k), F)` counts at each of them, and all layers need
//!   `L F`: `sum over nodes of max over k of k min(T(k), F) >= L F`.
//! - *Half layers*: a layer needs one node with `T(k) >= F` or at least two without: with weight 1 for the
//!   first and 1/2 for the others the nodes reach weight `L`.
//! - *Coordinator*: the nodes at layer 0 receive what one coordinator link each carries.

use std::fmt;

use super::classes::Classes;
use super::problem::FlowProblem;

/// Where a bound comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundMethod {
    /// The nodes cannot hold all layers.
    TooFewLayers,
    /// Capacity summed over layers.
    LayerShares,
    /// One node a layer, or two halves.
    HalfLayers,
    /// Links of the coordinator.
    Coordinator,
    /// Every placement was looked at or ruled out.
    Search,
}

impl fmt::Display for BoundMethod {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::TooFewLayers => "the nodes cannot hold all layers",
            Self::LayerShares => "layer shares",
            Self::HalfLayers => "half layers",
            Self::Coordinator => "coordinator links",
            Self::Search => "exhaustive search",
        })
    }
}

/// A rate that no placement exceeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct UpperBound {
    pub(super) value: f64,
    pub(super) method: BoundMethod,
}

/// Relative error of the sums, on the side that keeps bounds valid.
const ROUNDING: f64 = 1e-12;

/// The least of the bounds.
pub(super) fn upper(problem: &FlowProblem, classes: &Classes) -> UpperBound {
    let layers = problem.layers;
    let most_held = classes.classes.iter();
    let held: usize = most_held
        .map(|class| class.members.len() * class.most_held())
        .sum();
    if held < layers {
        return UpperBound {
            value: 0.0,
            method: BoundMethod::TooFewLayers,
        };
    }
    let of = |value: f64, method: BoundMethod| UpperBound { value, method };
    let bounds = [
        of(layer_shares(classes, layers), BoundMethod::LayerShares),
        of(half_layers(classes, layers), BoundMethod::HalfLayers),
        of(coordinator(problem, classes), BoundMethod::Coordinator),
    ];
    let least = bounds
        .into_iter()
        .min_by(|one, other| one.value.total_cmp(&other.value));
    least.expect("there are bounds")
}

fn layer_shares(classes: &Classes, layers: usize) -> f64 {
    let holds = |rate: f64| {
        let shares = classes.classes.iter().map(|class| {
            let best = class
                .held()
                .map(|held| held as f64 * class.capacity[held].min(rate));
            class.members.len() as f64 * best.fold(0.0, f64::max)
        });
        shares.sum::<f64>() >= layers as f64 * rate * (1.0 - ROUNDING)
    };
    let most = |class: &super::classes::Class| {
        let most = class.capacity.iter().copied().fold(0.0, f64::max);
        class.members.len() as f64 * most
    };
    let (mut low, mut high) = (0.0, classes.classes.iter().map(most).sum::<f64>());
    if holds(high) {
        return high;
    }
    loop {
        let middle = low + (high - low) / 2.0;
        if middle <= low || middle >= high {
            return high;
        }
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
}

/// The weights change where the rate passes a capacity, so only those have to be tried.
fn half_layers(classes: &Classes, layers: usize) -> f64 {
    let holds = |rate: f64| {
        // In halves: two a layer.
        let halves = classes.classes.iter().map(|class| {
            let weight = |held: usize| held * if class.capacity[held] >= rate { 2 } else { 1 };
            class.members.len() * class.held().map(weight).max().unwrap_or(0)
        });
        halves.sum::<usize>() >= 2 * layers
    };
    if holds(f64::INFINITY) {
        return f64::INFINITY;
    }
    let mut rates: Vec<f64> = classes
        .classes
        .iter()
        .flat_map(|class| class.capacity.iter().copied())
        .collect();
    rates.sort_by(f64::total_cmp);
    let within = rates.partition_point(|rate| holds(*rate));
    within.checked_sub(1).map_or(0.0, |last| rates[last])
}

fn coordinator(problem: &FlowProblem, classes: &Classes) -> f64 {
    let of = |class: &super::classes::Class| {
        let most = class.capacity.iter().copied().fold(0.0, f64::max);
        class.members.len() as f64 * most.min(problem.coordinator)
    };
    classes.classes.iter().map(of).sum::<f64>() * (1.0 + ROUNDING)
}
