//! The best series-parallel placement where no link binds, by dynamic programming on layers and counts.
//!
//! With `l` consecutive layers and at most `c` nodes of each class: one node alone, two parts beside each other
//! (their rates add up) or two parts after each other (the smaller rate counts). Where the parts stand among
//! the layers does not matter, so a state is `(l, c)`. Placements that are not series-parallel, such as a
//! node that bridges two chains, are not seen.

use super::classes::Classes;
use super::network::{Placement, Span};

/// Elementary steps that the program may take; beyond that it is not run.
const STEP_LIMIT: u128 = 400_000_000;

/// How a state reaches its rate.
#[derive(Debug, Clone, Copy)]
enum Choice {
    Nothing,
    /// The same as with one node of that class fewer.
    Without(usize),
    /// One node of that class.
    Node(usize),
    /// A part with those counts beside the rest.
    Beside(usize),
    /// A part of so many layers with those counts before the rest.
    Before(usize, usize),
}

struct Series<'a> {
    classes: &'a Classes,
    /// Step of each class in the index of counts.
    radix: Vec<usize>,
    states: usize,
    /// By layers, then counts.
    rate: Vec<f64>,
    choice: Vec<Choice>,
}

/// The best series-parallel placement of `nodes` in all; `None` where the program is too large.
pub(super) fn best(classes: &Classes, layers: usize, nodes: usize) -> Option<Placement> {
    let counts = classes.counts();
    let pairs = counts.iter().fold(1_u128, |pairs, count| {
        pairs * ((count + 1) * (count + 2) / 2) as u128
    });
    let steps = pairs.checked_mul((layers * (layers + 4) / 4) as u128)?;
    if steps > STEP_LIMIT {
        return None;
    }
    let mut radix = Vec::new();
    let mut states = 1;
    for count in &counts {
        radix.push(states);
        states *= count + 1;
    }
    let mut series = Series {
        classes,
        radix,
        states,
        rate: vec![0.0; (layers + 1) * states],
        choice: vec![Choice::Nothing; (layers + 1) * states],
    };
    let below: Vec<Vec<usize>> = (0..states).map(|state| series.below(&counts, state)).collect();
    for held in 1..=layers {
        for (state, below) in below.iter().enumerate() {
            series.fill(held, state, &counts, below);
        }
    }
    let mut placement = vec![None; nodes];
    let mut used = vec![0; counts.len()];
    series.place(layers, states - 1, 0, &mut used, &mut placement);
    Some(placement)
}

impl Series<'_> {
    fn count(&self, counts: &[usize], state: usize, class: usize) -> usize {
        state / self.radix[class] % (counts[class] + 1)
    }

    /// Indices of all counts that are nowhere above those of a state, the state and nothing included.
    fn below(&self, counts: &[usize], state: usize) -> Vec<usize> {
        let mut all = vec![0];
        for class in 0..counts.len() {
            let own = self.count(counts, state, class);
            let radix = self.radix[class];
            all = (0..=own)
                .flat_map(|count| all.iter().map(move |below| below + count * radix))
                .collect();
        }
        all
    }

    fn fill(&mut self, held: usize, state: usize, counts: &[usize], below: &[usize]) {
        let (mut rate, mut choice) = (0.0, Choice::Nothing);
        for class in 0..counts.len() {
            if self.count(counts, state, class) == 0 {
                continue;
            }
            let without = self.rate[held * self.states + state - self.radix[class]];
            if without > rate {
                (rate, choice) = (without, Choice::Without(class));
            }
            let alone = self.classes.classes[class].capacity[held];
            if alone > rate {
                (rate, choice) = (alone, Choice::Node(class));
            }
        }
        let row = &self.rate[held * self.states..];
        for part in below {
            let beside = row[*part] + row[state - part];
            // A part that is everything or nothing was looked at.
            if *part != 0 && *part != state && beside > rate {
                (rate, choice) = (beside, Choice::Beside(*part));
            }
        }
        for first in 1..=held / 2 {
            let row = &self.rate[first * self.states..(first + 1) * self.states];
            let rest = &self.rate[(held - first) * self.states..(held - first + 1) * self.states];
            for part in below {
                let one = row[*part];
                if one > rate && rest[state - part] > rate {
                    rate = one.min(rest[state - part]);
                    choice = Choice::Before(first, *part);
                }
            }
        }
        self.rate[held * self.states + state] = rate;
        self.choice[held * self.states + state] = choice;
    }

    /// Gives nodes their layers; as deep as there are nodes and layers.
    fn place(
        &self,
        held: usize,
        state: usize,
        start: usize,
        used: &mut [usize],
        placement: &mut [Option<Span>],
    ) {
        match self.choice[held * self.states + state] {
            Choice::Nothing => {}
            Choice::Without(class) => self.place(held, state - self.radix[class], start, used, placement),
            Choice::Node(class) => {
                let node = self.classes.classes[class].members[used[class]];
                used[class] += 1;
                placement[node] = Some(Span {
                    start,
                    end: start + held,
                });
            }
            Choice::Beside(part) => {
                self.place(held, part, start, used, placement);
                self.place(held, state - part, start, used, placement);
            }
            Choice::Before(first, part) => {
                self.place(first, part, start, used, placement);
                self.place(held - first, state - part, start + first, used, placement);
            }
        }
    }
}
