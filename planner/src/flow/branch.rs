//! Every placement, as far as bounds do not rule it out.
//!
//! Nodes are decided one by one, the strongest first; of interchangeable nodes a later one never takes a span
//! before that of an earlier one. With some nodes decided every layer still needs the wanted rate less what
//! those carry there, and the two bounds of `bound` say whether the others can still bring it.

use super::classes::{Class, Classes};
use super::network::{Network, Placement, Span};
use super::problem::FlowProblem;

/// Elementary steps after which the search gives up.
const STEP_LIMIT: u64 = 300_000_000;
/// What one flow costs in those steps, times nodes squared.
const FLOW_STEPS: u64 = 40;

/// What an exhaustive search found.
pub(super) struct Searched {
    /// A better placement than the one known, where there is one.
    pub(super) better: Option<(f64, Placement)>,
    /// Whether no placement carries more.
    pub(super) complete: bool,
}

struct Branch<'a> {
    problem: &'a FlowProblem,
    network: &'a mut Network,
    /// Classes, the strongest first, and their spans.
    classes: Vec<&'a Class>,
    spans: Vec<Vec<Span>>,
    /// What decided nodes carry by layer.
    carried: Vec<f64>,
    placement: Placement,
    best: f64,
    better: Option<Placement>,
    steps: u64,
}

/// Looks for a placement that carries more than `known`.
pub(super) fn search(
    problem: &FlowProblem,
    classes: &Classes,
    network: &mut Network,
    known: f64,
) -> Searched {
    let mut ordered: Vec<&Class> = classes.classes.iter().collect();
    let strength = |class: &Class| {
        let of = class.held().map(|held| held as f64 * class.capacity[held]);
        of.fold(0.0, f64::max)
    };
    ordered.sort_by(|one, other| strength(other).total_cmp(&strength(one)));
    let spans = ordered.iter().map(|class| spans(class, problem.layers)).collect();
    let mut branch = Branch {
        problem,
        network,
        classes: ordered,
        spans,
        carried: vec![0.0; problem.layers],
        placement: vec![None; problem.names.len()],
        best: known,
        better: None,
        steps: 0,
    };
    branch.decide(0, 0, 0);
    Searched {
        complete: branch.steps < STEP_LIMIT,
        better: branch.better.map(|placement| (branch.best, placement)),
    }
}

fn spans(class: &Class, layers: usize) -> Vec<Span> {
    let held = class.held();
    held.flat_map(|held| {
        (0..=layers - held).map(move |start| Span {
            start,
            end: start + held,
        })
    })
    .collect()
}

impl Branch<'_> {
    /// Decides one node of a class: a span at or after position `from`, or none, which stands last.
    fn decide(&mut self, class: usize, member: usize, from: usize) {
        if self.steps >= STEP_LIMIT {
            return;
        }
        let Some(own) = self.classes.get(class).copied() else {
            return self.judge();
        };
        if member == own.members.len() {
            return self.decide(class + 1, 0, 0);
        }
        if self.is_ruled_out(class, member) {
            return;
        }
        let node = own.members[member];
        for position in from..self.spans[class].len() {
            let span = self.spans[class][position];
            let capacity = own.capacity[span.len()];
            let before = self.carried[span.start..span.end].to_vec();
            self.carried[span.start..span.end]
                .iter_mut()
                .for_each(|layer| *layer += capacity);
            self.placement[node] = Some(span);
            self.decide(class, member + 1, position);
            self.placement[node] = None;
            // Restored, not subtracted: sums stay what they were.
            self.carried[span.start..span.end].copy_from_slice(&before);
        }
        // Unused, and with it all later ones of the class.
        self.decide(class + 1, 0, 0);
    }

    fn judge(&mut self) {
        let used = self.placement.iter().flatten().count() as u64;
        self.steps += self.problem.layers as u64;
        if self.carried.iter().any(|carried| *carried <= self.best) {
            return;
        }
        self.steps += FLOW_STEPS * used * used;
        let value = self.network.value(self.problem, &self.placement);
        // A difference in the last digits is one of summation.
        if value > self.best * (1.0 + 1e-12) {
            self.best = value;
            self.better = Some(self.placement.clone());
        }
    }

    /// Whether the nodes that are left cannot bring every layer above the best rate.
    fn is_ruled_out(&mut self, class: usize, member: usize) -> bool {
        let rate = self.best;
        let missing: Vec<f64> = self
            .carried
            .iter()
            .map(|carried| (rate - carried).max(0.0))
            .collect();
        // A layer that carries exactly the best rate needs more as well, however little.
        let short: Vec<bool> = self.carried.iter().map(|carried| *carried <= rate).collect();
        let needed: f64 = missing.iter().sum();
        let halves_needed = 2 * short.iter().filter(|short| **short).count();
        let (mut brought, mut halves) = (0.0, 0);
        for (later, own) in self.classes.iter().enumerate().skip(class) {
            let count = own.members.len() - if later == class { member } else { 0 };
            let (most, most_halves) = self.most(&self.spans[later], own, &missing, &short);
            self.steps += (self.spans[later].len() * 4) as u64;
            brought += count as f64 * most;
            halves += count * most_halves;
        }
        brought < needed * (1.0 - 1e-12) || halves < halves_needed
    }

    /// What one node brings at most: rate summed over layers up to what is missing, and halves of layers.
    fn most(&self, spans: &[Span], class: &Class, missing: &[f64], short: &[bool]) -> (f64, usize) {
        let (mut most, mut most_halves) = (0.0_f64, 0);
        for span in spans {
            let capacity = class.capacity[span.len()];
            let (mut brought, mut halves) = (0.0, 0);
            for layer in span.start..span.end {
                brought += missing[layer].min(capacity);
                if short[layer] {
                    halves += if capacity >= missing[layer] { 2 } else { 1 };
                }
            }
            most = most.max(brought);
            most_halves = most_halves.max(halves);
        }
        (most, most_halves)
    }
}
