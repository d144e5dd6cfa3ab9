//! Whether the machine itself was as fast as before: the same matrix product on every core at once.
//!
//! A probe takes a tenth of a second, before and after a run. It notices what lasts longer than a run, such as
//! another tenant of the host or a lower clock, and is blind to what comes and goes in between.

use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use infercluster_executor::backend::{Backend as _, BackendError, Cpu, MatrixShape};
use infercluster_executor::clock;
use infercluster_spec::Dtype;

/// How long a core is probed.
const PROBE: Duration = Duration::from_millis(100);
/// Tokens of the product, and both sides of its weight: more than the caches of one core hold.
const TOKENS: usize = 8;
const SIDE: usize = 1024;
/// Share of the best speed seen below which a machine is not quiet.
const QUIET: f64 = 0.90;

/// Probes so far.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    /// Products a second of the slowest core, at the best of times.
    best: f64,
    latest: f64,
}

impl Quiet {
    /// Probes `cores` cores at once; answers the share of the best speed so far that the slowest reached.
    pub(crate) fn probe(&mut self, cores: usize) -> anyhow::Result<f64> {
        let rates = thread::scope(|scope| {
            let threads: Vec<_> = (0..cores).map(|_| scope.spawn(products_per_s)).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|rate| rate.map_err(|_| anyhow!("a probe panicked"))?.map_err(Into::into))
                .collect::<anyhow::Result<Vec<f64>>>()
        })?;
        self.latest = rates.into_iter().fold(f64::INFINITY, f64::min);
        self.best = self.best.max(self.latest);
        Ok(self.share())
    }

    /// The share of the best speed so far that the latest probe reached.
    pub(crate) fn share(&self) -> f64 {
        if self.best > 0.0 {
            self.latest / self.best
        } else {
            1.0
        }
    }
}

/// Whether that share of the best speed is that of a quiet machine.
pub(crate) fn is_quiet(share: f64) -> bool {
    share >= QUIET
}

fn products_per_s() -> Result<f64, BackendError> {
    let backend = Cpu::new();
    let stored = vec![0x2c; Dtype::F32.bytes((SIDE * SIDE) as u64).0 as usize];
    let shape = MatrixShape {
        rows: SIDE,
        columns: SIDE,
    };
    let weight = backend.load_weight(&stored, shape, Dtype::F32)?;
    let x = backend.allocate(TOKENS * SIDE)?;
    let mut out = backend.allocate(TOKENS * SIDE)?;
    let started = clock::now();
    let mut products = 0_u32;
    while started.elapsed() < PROBE {
        backend.gemm(&x, TOKENS, &weight, None, &mut out)?;
        products += 1;
    }
    Ok(f64::from(products) / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_stand_beside_the_best() {
        let mut quiet = Quiet::default();
        assert_eq!(quiet.share(), 1.0);
        quiet.best = 4.0;
        quiet.latest = 3.0;
        assert_eq!(quiet.share(), 0.75);
        assert!(is_quiet(0.9) && !is_quiet(0.89));
        assert!(quiet.probe(1).unwrap() <= 1.0 && quiet.latest > 0.0);
    }
}
