//! Better placements near a known one: one node moved, or two nodes exchanged, as long as that helps.

use super::classes::Classes;
use super::network::{Network, Placement, Span};
use super::problem::FlowProblem;

/// How good a placement is: its rate, and then how much its layers are covered beyond it, so that a search
/// crosses plateaus.
type Score = (f64, f64);

/// Layers are counted as covered up to this multiple of the rate.
const AMBITION: f64 = 1.25;

/// Climbs from a placement until nothing helps or `evaluations` are spent.
pub(super) struct Climb<'a> {
    pub(super) problem: &'a FlowProblem,
    pub(super) classes: &'a Classes,
    pub(super) network: &'a mut Network,
    /// Placements that may still be looked at.
    pub(super) evaluations: usize,
}

impl Climb<'_> {
    /// The best placement on the way; never worse than `start`.
    pub(super) fn from(&mut self, start: &Placement) -> (f64, Placement) {
        let mut best = start.clone();
        let mut score = self.score(&best);
        loop {
            let before = score;
            for class in 0..self.classes.classes.len() {
                self.move_members(class, &mut best, &mut score);
            }
            self.exchange(&mut best, &mut score);
            if score == before || self.evaluations == 0 {
                return (score.0, best);
            }
        }
    }

    fn score(&mut self, placement: &Placement) -> Score {
        self.evaluations = self.evaluations.saturating_sub(1);
        let value = self.network.value(self.problem, placement);
        let mut covered = vec![0.0; self.problem.layers];
        for (node, span) in placement.iter().enumerate() {
            let Some(span) = span else { continue };
            let carried = self.problem.throughput[node][span.len()];
            covered[span.start..span.end]
                .iter_mut()
                .for_each(|layer| *layer += carried);
        }
        let enough = value * AMBITION;
        (value, covered.iter().map(|layer| layer.min(enough)).sum())
    }

    fn try_out(&mut self, placement: &Placement, best: &mut Placement, score: &mut Score) -> bool {
        if self.evaluations == 0 {
            return false;
        }
        let own = self.score(placement);
        let better = own.0 > score.0 || own.0 == score.0 && own.1 > score.1;
        if better {
            (*best, *score) = (placement.clone(), own);
        }
        better
    }

    fn move_members(&mut self, class: usize, best: &mut Placement, score: &mut Score) {
        for node in self.classes.classes[class].members.clone() {
            let mut ends: Vec<usize> = best
                .iter()
                .flatten()
                .flat_map(|span| [span.start, span.end])
                .collect();
            ends.extend([0, self.problem.layers]);
            ends.sort_unstable();
            ends.dedup();
            let held: Vec<usize> = self.classes.classes[class].held().collect();
            for held in held {
                for end in &ends {
                    for start in [Some(*end), end.checked_sub(held)].into_iter().flatten() {
                        if start + held > self.problem.layers {
                            continue;
                        }
                        let mut other = best.clone();
                        other[node] = Some(Span {
                            start,
                            end: start + held,
                        });
                        self.try_out(&other, best, score);
                    }
                }
            }
        }
    }

    fn exchange(&mut self, best: &mut Placement, score: &mut Score) {
        for one in 0..best.len() {
            for other in one + 1..best.len() {
                let can = |node: usize, span: Option<Span>| {
                    span.is_none_or(|span| self.problem.throughput[node][span.len()] > 0.0)
                };
                if best[one] == best[other] || !can(one, best[other]) || !can(other, best[one]) {
                    continue;
                }
                let mut swapped = best.clone();
                swapped.swap(one, other);
                self.try_out(&swapped, best, score);
            }
        }
    }
}
