//! Stages of one region at one rate, and the most layers that chains of them cover.

use super::classes::Classes;
use super::problem::FlowProblem;

/// Stages that are considered in one region at one rate.
const STAGE_LIMIT: usize = 2_000;
/// Stages that are considered at the ends of a region's chain, and as many that are wide enough for its links.
const END_LIMIT: usize = 100;
/// States times stages times classes of one region at one rate.
const STEP_LIMIT: usize = 8_000_000;
/// Links of one node that a wide stage counts on, at most.
const WIDTHS: usize = 4;
/// Some nodes with the same layers.
#[derive(Debug, Clone)]
pub(super) struct StageKind {
    pub(super) held: usize,
    /// Nodes by class of the region.
    pub(super) nodes: Vec<usize>,
    /// The same as an index of counts.
    pub(super) state: usize,
    /// What each of its nodes carries, smallest first.
    pub(super) carried: Vec<f64>,
}

/// The stages of one region at one rate, and the most layers that chains of them cover.
pub(super) struct Region {
    /// Classes of the region, by position in [`Classes`].
    pub(super) classes: Vec<usize>,
    pub(super) kinds: Vec<StageKind>,
    /// How many of them stand inside chains; the others are wider than a stage needs to be.
    pub(super) inner: usize,
    /// Those that stand at the ends of chains.
    pub(super) ends: Vec<usize>,
    pub(super) counts: Vec<usize>,
    pub(super) radix: Vec<usize>,
    /// By counts: layers covered, and the stage that comes last, if any.
    pub(super) covered: Vec<(usize, Option<usize>)>,
}

impl Region {
    pub(super) fn new(problem: &FlowProblem, classes: &Classes, region: u32, rate: f64) -> Self {
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
        let steps = states.saturating_mul(counts.len());
        let mut region = Self {
            classes: own,
            kinds: Vec::new(),
            inner: 0,
            ends: Vec::new(),
            counts,
            radix,
            covered: Vec::new(),
        };
        if steps <= STEP_LIMIT {
            let limit = (STEP_LIMIT / steps.max(1)).min(STAGE_LIMIT);
            region.kinds = region.kinds(classes, problem.layers, rate, f64::INFINITY, limit);
            region.inner = region.kinds.len();
            region.ends = (0..region.inner.min(END_LIMIT)).collect();
            region.widen(problem, classes, rate);
            region.cover(states);
        }
        region
    }

    /// Adds stages for the ends of chains whose nodes each count for no more than their links would carry.
    fn widen(&mut self, problem: &FlowProblem, classes: &Classes, rate: f64) {
        let crossing = (1..=WIDTHS).map(|width| width as f64 * problem.cross);
        for link in std::iter::once(problem.coordinator).chain(crossing) {
            if link > 0.0 && link < rate {
                let wide = self.kinds(classes, problem.layers, rate, link, END_LIMIT);
                for kind in wide {
                    let known = |other: &StageKind| (other.held, &other.nodes) == (kind.held, &kind.nodes);
                    if !self.ends.iter().any(|end| known(&self.kinds[*end])) {
                        self.ends.push(self.kinds.len());
                        self.kinds.push(kind);
                    }
                }
            }
        }
    }

    /// Stages that carry the rate, where each node counts for no more than `link`, and would not with one node
    /// fewer; those first that use up the least of what nodes could do, and no more of them than `limit`.
    fn kinds(&self, classes: &Classes, layers: usize, rate: f64, link: f64, limit: usize) -> Vec<StageKind> {
        let most = |class: &usize| classes.classes[*class].most_held();
        let most_held = self.classes.iter().map(most).max().unwrap_or(0).min(layers);
        let mut kinds = Vec::new();
        for held in 1..=most_held {
            let own = self
                .classes
                .iter()
                .map(|class| classes.classes[*class].capacity[held]);
            let carried: Vec<f64> = own.collect();
            let counted: Vec<f64> = carried.iter().map(|carried| carried.min(link)).collect();
            let mut nodes = vec![0; self.classes.len()];
            let mut left = STAGE_LIMIT;
            self.collect(&counted, rate, 0, 0.0, &mut nodes, &mut |nodes| {
                kinds.push(self.kind(held, nodes, &carried));
                left -= 1;
                left > 0
            });
        }
        // What a node could do at best: layers at the whole rate.
        let worth = self.classes.iter().map(|class| {
            let class = &classes.classes[*class];
            let of = |held: usize| held as f64 * class.capacity[held].min(rate) / rate;
            class.held().map(of).fold(f64::MIN_POSITIVE, f64::max)
        });
        let worth: Vec<f64> = worth.collect();
        let waste = |kind: &StageKind| {
            let nodes = kind.nodes.iter().zip(&worth);
            nodes.map(|(count, worth)| *count as f64 * worth).sum::<f64>() / kind.held as f64
        };
        kinds.sort_by(|one, other| waste(one).total_cmp(&waste(other)));
        kinds.truncate(limit);
        kinds
    }

    /// Calls `found` for every such choice of nodes from a class on, until it answers false.
    fn collect(
        &self,
        carried: &[f64],
        rate: f64,
        class: usize,
        sum: f64,
        nodes: &mut Vec<usize>,
        found: &mut dyn FnMut(&[usize]) -> bool,
    ) -> bool {
        if sum >= rate {
            let mut used = nodes.iter().zip(carried).filter(|(count, _)| **count > 0);
            return used.any(|(_, own)| sum - own >= rate) || found(nodes);
        }
        // Without the rest there is no use in going on.
        let rest = (class..nodes.len()).map(|class| self.counts[class] as f64 * carried[class]);
        if sum + rest.sum::<f64>() < rate {
            return true;
        }
        let most = if carried[class] > 0.0 {
            self.counts[class]
        } else {
            0
        };
        let mut goes_on = true;
        for count in (0..=most).rev() {
            nodes[class] = count;
            let sum = sum + count as f64 * carried[class];
            goes_on = goes_on && self.collect(carried, rate, class + 1, sum, nodes, found);
        }
        nodes[class] = 0;
        goes_on
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
            for (index, kind) in self.kinds[..self.inner].iter().enumerate() {
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
    pub(super) fn between(&self, first: usize, last: usize) -> Option<usize> {
        match self.beside(first, last) {
            Some(left) => Some(self.kinds[first].held + self.kinds[last].held + self.covered[left].0),
            None => (first == last).then(|| self.kinds[first].held),
        }
    }

    pub(super) fn stages(&self, first: usize, last: usize) -> Vec<StageKind> {
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
