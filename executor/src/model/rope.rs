//! The table of rotations, computed in f64 and rounded once.

use std::f64::consts::PI;

use infercluster_spec::model::Rope;
use xxhash_rust::xxh3::Xxh3;

use crate::backend::{Backend, BackendError};

/// Positions that the table grows by at least.
const GROWTH: usize = 1024;

/// `[position][cosines, sines]`, grown as positions are met: a context of 128 Ki positions is rarely used.
pub(super) struct RopeTable<B: Backend> {
    frequencies: Vec<f64>,
    limit: usize,
    host: Vec<f32>,
    device: Option<B::Buffer>,
}

impl<B: Backend> RopeTable<B> {
    pub(super) fn new(rope: Rope, head_dim: usize, max_positions: u32) -> Self {
        Self {
            frequencies: frequencies(rope, head_dim),
            limit: max_positions as usize,
            host: Vec::new(),
            device: None,
        }
    }

    /// The table with at least `positions` rows, at most the model's positions.
    pub(super) fn reach(&mut self, backend: &B, positions: usize) -> Result<&B::Buffer, BackendError> {
        let width = 2 * self.frequencies.len();
        let rows = self.host.len() / width.max(1);
        if rows < positions || self.device.is_none() {
            let rows = positions.max(2 * rows).max(GROWTH).min(self.limit.max(1));
            self.host = table(&self.frequencies, rows);
            let mut device = backend.allocate(self.host.len())?;
            backend.upload(&self.host, &mut device, 0)?;
            self.device = Some(device);
        }
        Ok(self.device.as_ref().expect("it was made above"))
    }
}

/// Identity of the rotations of a model: ranks that disagree on it must not serve together. Covers the
/// positions 0, 1, 2, 4, .. 2^17: every frequency shows at the low ones, and the rounding of large angles at the
/// high ones.
pub fn rope_hash(rope: Rope, head_dim: u32) -> u64 {
    let frequencies = frequencies(rope, head_dim as usize);
    let mut hasher = Xxh3::new();
    for position in std::iter::once(0).chain((0..=17).map(|power| 1 << power)) {
        for number in row(&frequencies, position) {
            hasher.update(&number.to_le_bytes());
        }
    }
    hasher.digest()
}

fn table(frequencies: &[f64], rows: usize) -> Vec<f32> {
    let mut table = Vec::with_capacity(rows * 2 * frequencies.len());
    table.extend((0..rows).flat_map(|position| row(frequencies, position)));
    table
}

/// Cosines, then sines, of one position.
fn row(frequencies: &[f64], position: usize) -> impl Iterator<Item = f32> {
    let angles = move || {
        frequencies
            .iter()
            .map(move |frequency| position as f64 * frequency)
    };
    let cosines = angles().map(|angle| angle.cos() as f32);
    cosines.chain(angles().map(|angle| angle.sin() as f32))
}

/// Radians a position of each pair of a head.
fn frequencies(rope: Rope, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|pair| {
            let frequency = rope.theta.powf(-((2 * pair) as f64) / head_dim as f64);
            let Some(scaling) = rope.llama3 else {
                return frequency;
            };
            let original = f64::from(scaling.original_max_position);
            let wavelength = 2.0 * PI / frequency;
            if wavelength < original / scaling.high_freq_factor {
                frequency
            } else if wavelength > original / scaling.low_freq_factor {
                frequency / scaling.factor
            } else {
                let smooth = (original / wavelength - scaling.low_freq_factor)
                    / (scaling.high_freq_factor - scaling.low_freq_factor);
                (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use infercluster_spec::model::Llama3RopeScaling;

    use super::*;

    #[test]
    fn frequencies_follow_the_published_formula() {
        let plain = Rope {
            theta: 10_000.0,
            llama3: None,
        };
        let by_hand = [1.0, 0.1, 0.01, 0.001];
        for (found, expected) in frequencies(plain, 8).iter().zip(by_hand) {
            assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        }
        let stretched = Rope {
            theta: 500_000.0,
            llama3: Some(Llama3RopeScaling {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            }),
        };
        let base = frequencies(
            Rope {
                llama3: None,
                ..stretched
            },
            128,
        );
        let found = frequencies(stretched, 128);
        assert_eq!(found[0], base[0], "short wavelengths stay");
        assert_eq!(
            found[63],
            base[63] / 8.0,
            "long wavelengths are stretched in full"
        );
        // Pair 32: wavelength 2 pi sqrt(500000) = 4442.9, between 2048 and 8192: smooth = 0.2813.
        let smooth = (8192.0 / (2.0 * PI * 500_000f64.sqrt()) - 1.0) / 3.0;
        let between = base[32] * (smooth + (1.0 - smooth) / 8.0);
        assert!((found[32] - between).abs() < 1e-15);
    }

    #[test]
    fn the_hash_tells_rotations_apart() {
        let hash = |theta| rope_hash(Rope { theta, llama3: None }, 64);
        assert_eq!(hash(10_000.0), hash(10_000.0));
        assert_ne!(hash(10_000.0), hash(10_000.1));
    }
}
