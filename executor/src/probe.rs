//! The probe that a new layout must pass before it is ready: one short fixed prompt through its shadow shards,
//! compared layer by layer with what the first layout of the service gave. A checksum proves bytes, not that
//! they are the right slice.
//!
//! In `invariant` the bits must be equal. In `fast` they depend on the cut; there the last token's numbers must
//! agree within [`FAST_TOLERANCE`] of the largest of them, far above what another order of adding does and far
//! below what a wrong slice does.

use std::collections::BTreeMap;

use infercluster_spec::layout::Reduction;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// Tokens of the prompt.
const PROBE_TOKENS: u32 = 16;
/// How far numbers may differ in `fast`, as a share of the largest number of their row.
pub const FAST_TOLERANCE: f32 = 1e-3;

/// The prompt for a vocabulary and a longest context.
pub fn probe_tokens(vocab: u32, max_positions: u32) -> Vec<u32> {
    let tokens = 0..PROBE_TOKENS.min(max_positions);
    tokens.map(|i| (i * 31 + 7) % vocab.max(1)).collect()
}

/// What one layer, or the LM head, gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProbeState {
    hash: u64,
    /// The last token's numbers; empty where bits are promised.
    last_row: Vec<f32>,
}

impl ProbeState {
    /// Of rows that lie one after another, the last of them `width` long.
    pub fn of(rows: &[f32], width: usize, reduction: Reduction) -> Self {
        let mut hash = Xxh3::new();
        for number in rows {
            hash.update(&number.to_le_bytes());
        }
        let last_row = match reduction {
            Reduction::Invariant => Vec::new(),
            Reduction::Fast => rows[rows.len().saturating_sub(width)..].to_vec(),
        };
        Self {
            hash: hash.digest(),
            last_row,
        }
    }

    fn agrees(&self, expected: &Self, reduction: Reduction) -> bool {
        match reduction {
            Reduction::Invariant => self.hash == expected.hash,
            Reduction::Fast => close(&self.last_row, &expected.last_row),
        }
    }
}

/// What the probe gave on some layers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ProbeTrace {
    /// By layer, numbered in the whole model.
    pub layers: BTreeMap<u32, ProbeState>,
    /// From the rank that answers.
    pub logits: Option<ProbeState>,
}

impl ProbeTrace {
    /// The first layer that both traces have and that differs between them; `layers` for the logits.
    pub fn first_conflict(&self, other: &Self, reduction: Reduction, layers: u32) -> Option<u32> {
        let differs = self.layers.iter().find(|(layer, found)| {
            let known = other.layers.get(layer);
            known.is_some_and(|known| !found.agrees(known, reduction))
        });
        differs.map(|(layer, _)| *layer).or_else(|| {
            let (found, known) = (self.logits.as_ref()?, other.logits.as_ref()?);
            (!found.agrees(known, reduction)).then_some(layers)
        })
    }

    /// Adds what another rank saw.
    pub fn merge(&mut self, other: Self) {
        self.layers.extend(other.layers);
        self.logits = other.logits.or(self.logits.take());
    }

    /// The first layer that differs from `expected`, of those that this trace has; `layers` for the logits. A
    /// layer that was not expected differs.
    pub fn first_difference(&self, expected: &Self, reduction: Reduction, layers: u32) -> Option<u32> {
        let agrees = |found: &ProbeState, wanted: Option<&ProbeState>| {
            wanted.is_some_and(|wanted| found.agrees(wanted, reduction))
        };
        let differs = self
            .layers
            .iter()
            .find(|(layer, found)| !agrees(found, expected.layers.get(layer)));
        differs.map(|(layer, _)| *layer).or_else(|| {
            let logits = self.logits.as_ref()?;
            (!agrees(logits, expected.logits.as_ref())).then_some(layers)
        })
    }
}

fn close(found: &[f32], expected: &[f32]) -> bool {
    let largest = expected
        .iter()
        .fold(0.0_f32, |largest, number| largest.max(number.abs()));
    let mut pairs = found.iter().zip(expected);
    found.len() == expected.len() && pairs.all(|(a, b)| (a - b).abs() <= FAST_TOLERANCE * largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(reduction: Reduction, change: Option<(usize, f32)>) -> ProbeTrace {
        let rows = |index: usize| {
            let mut rows = [1.0, -2.0, 0.5, 4.0, index as f32, 0.25];
            if let Some((_, by)) = change.filter(|(at, _)| *at == index) {
                rows[4] += by;
            }
            ProbeState::of(&rows, 3, reduction)
        };
        ProbeTrace {
            layers: (0..3).map(|layer| (layer + 5, rows(layer as usize))).collect(),
            logits: Some(rows(3)),
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        for reduction in [Reduction::Invariant, Reduction::Fast] {
            let expected = trace(reduction, None);
            let found = |change| trace(reduction, change).first_difference(&expected, reduction, 8);
            assert_eq!(found(None), None);
            assert_eq!(found(Some((1, 0.1))), Some(6));
            assert_eq!(
                found(Some((3, 0.1))),
                Some(8),
                "the logits come after the last layer"
            );
            assert_eq!(found(Some((0, f32::NAN))), Some(5));
            let other = trace(reduction, Some((1, 0.1)));
            assert_eq!(other.first_conflict(&expected, reduction, 8), Some(6));
            assert_eq!(other.first_conflict(&ProbeTrace::default(), reduction, 8), None);
            let tiny = (reduction == Reduction::Invariant).then_some(7);
            assert_eq!(found(Some((2, 1e-4))), tiny, "{reduction:?}");
        }
    }

    #[test]
    fn parts_of_ranks_join_and_unknown_layers_differ() {
        let whole = trace(Reduction::Invariant, None);
        let mut joined = ProbeTrace::default();
        for (layer, state) in &whole.layers {
            joined.merge(ProbeTrace {
                layers: [(*layer, state.clone())].into(),
                logits: None,
            });
        }
        joined.merge(ProbeTrace {
            layers: BTreeMap::new(),
            logits: whole.logits.clone(),
        });
        assert_eq!(joined, whole);
        let missing = ProbeTrace::default();
        assert_eq!(whole.first_difference(&missing, Reduction::Invariant, 8), Some(5));
    }
}
