//! Collectives as alpha-beta: `messages x alpha_s + bytes x seconds_per_byte`.
//!
//! | algorithm | all-gather (largest share L) | all-reduce (vector of V bytes) |
//! |---|---|---|
//! | mesh: everyone sends to everyone at once | 1 message, L bytes | 1 message, V bytes; past two ranks and 16 KiB, 2 messages, 2 V / R bytes |
//! | ring of R: R - 1 or 2 (R - 1) rounds | R - 1 messages, (R - 1) L bytes | 2 (R - 1) messages, 2 (R - 1) V / R bytes |
//!
//! `seconds_per_byte` is the time of the busiest link when every flow of a round carries one byte: the sum of
//! the flows that cross it over its rate. That is exact for equal flows, and an upper bound for uneven ones,
//! whose largest share paces the round. A mesh's port carries R - 1 flows, so its byte costs R - 1 times
//! one flow's.
//!
//! CPU workers exchange as a mesh, devices with links of their own as a ring in (node, device) order. Left
//! out: trees and one-shot kernels that NCCL picks for small messages, which the ring over-estimates.

use std::collections::BTreeMap;

use infercluster_spec::ids::LinkId;
use infercluster_spec::{Bytes, GpuId, Operator};

use super::{Route, Topology, TopologyError};

/// Vector up to which a mesh of more than two sends it whole; a longer one is reduced by slices that are
/// then gathered, as the executor does it.
const WHOLE_REDUCE_LIMIT: Bytes = Bytes(16 << 10);

/// How a group exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// One device: nothing to exchange.
    Alone,
    /// Everyone to everyone at once, as the executor does it on CPU.
    Mesh,
    /// Around a ring in (node, device) order.
    Ring,
}

/// The resolved routes of a group of devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CollectiveGroup {
    /// How it exchanges.
    pub algorithm: Algorithm,
    /// How many devices.
    pub ranks: u32,
    /// Seconds of one round without bytes.
    pub alpha_s: f64,
    /// Seconds of one byte in every flow of a round.
    pub seconds_per_byte: f64,
    /// Whether every route stays in the host's memory.
    pub is_loopback: bool,
}

/// A collective in units of its group's alpha and beta.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CollectiveParts {
    /// Rounds, each worth `alpha_s`.
    pub messages: f64,
    /// Bytes of a flow over all rounds, each worth `seconds_per_byte`.
    pub bytes: f64,
}

impl Topology {
    /// Resolves the routes among devices.
    pub fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, TopologyError> {
        let mut order: Vec<_> = gpus
            .iter()
            .map(|gpu| self.node(*gpu).map(|node| (node, *gpu)))
            .collect::<Result<_, _>>()?;
        order.sort_unstable();
        if order.is_empty() || order.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(TopologyError::BadGroup { gpus: gpus.to_vec() });
        }
        let count = order.len();
        if count == 1 {
            return Ok(CollectiveGroup {
                algorithm: Algorithm::Alone,
                ranks: 1,
                alpha_s: 0.0,
                seconds_per_byte: 0.0,
                is_loopback: true,
            });
        }
        let ring = (0..count)
            .map(|rank| self.route(order[rank].1, order[(rank + 1) % count].1))
            .collect::<Result<Vec<_>, _>>()?;
        if !ring.iter().all(|route| route.is_loopback) {
            return Ok(self.summary(Algorithm::Ring, count, &ring));
        }
        let mut mesh = Vec::with_capacity(count * (count - 1));
        for (_, from) in &order {
            for (_, to) in order.iter().filter(|(_, to)| to != from) {
                mesh.push(self.route(*from, *to)?);
            }
        }
        Ok(self.summary(Algorithm::Mesh, count, &mesh))
    }

    fn summary(&self, algorithm: Algorithm, ranks: usize, flows: &[Route]) -> CollectiveGroup {
        let mut crossing: BTreeMap<LinkId, u32> = BTreeMap::new();
        for link in flows.iter().flat_map(|route| &route.links) {
            *crossing.entry(*link).or_default() += 1;
        }
        let busiest = crossing
            .iter()
            .map(|(link, flows)| f64::from(*flows) / self.links[link.index()].bytes_per_s)
            .fold(0.0, f64::max);
        // Loopback without listed links: a device's port carries a flow to every other device.
        let port_flows = if algorithm == Algorithm::Mesh {
            ranks - 1
        } else {
            1
        };
        let unlisted = flows.iter().filter(|route| route.links.is_empty());
        let port = unlisted
            .map(|route| port_flows as f64 / route.bytes_per_s)
            .fold(0.0, f64::max);
        CollectiveGroup {
            algorithm,
            ranks: ranks as u32,
            alpha_s: flows.iter().map(|route| route.alpha_s).fold(0.0, f64::max),
            seconds_per_byte: busiest.max(port),
            is_loopback: flows.iter().all(|route| route.is_loopback),
        }
    }
}

impl CollectiveGroup {
    /// Seconds of a collective or, for a group of two, a transfer; `None` for any other operator.
    pub fn seconds(&self, operator: &Operator) -> Option<f64> {
        let parts = self.parts(operator)?;
        Some(parts.messages * self.alpha_s + parts.bytes * self.seconds_per_byte)
    }

    /// Flows through one device's port in a round: what a byte of loopback's rate is shared by.
    pub fn flows(&self) -> f64 {
        match self.algorithm {
            Algorithm::Alone => 0.0,
            Algorithm::Mesh => f64::from(self.ranks - 1),
            Algorithm::Ring => 1.0,
        }
    }

    /// The same in units of alpha and beta, which is what a fit needs.
    pub fn parts(&self, operator: &Operator) -> Option<CollectiveParts> {
        let rounds = f64::from(self.ranks - 1);
        let parts = |messages, bytes| Some(CollectiveParts { messages, bytes });
        match (*operator, self.algorithm) {
            (Operator::AllGather { .. } | Operator::AllReduce { .. }, Algorithm::Alone) => parts(0.0, 0.0),
            (Operator::AllGather { largest, .. }, Algorithm::Mesh) => parts(1.0, largest.as_f64()),
            (Operator::AllReduce { bytes, .. }, Algorithm::Mesh)
                if self.ranks <= 2 || bytes <= WHOLE_REDUCE_LIMIT =>
            {
                parts(1.0, bytes.as_f64())
            }
            (Operator::AllReduce { bytes, .. }, Algorithm::Mesh) => {
                parts(2.0, 2.0 * bytes.as_f64() / f64::from(self.ranks))
            }
            (Operator::AllGather { largest, .. }, Algorithm::Ring) => {
                parts(rounds, rounds * largest.as_f64())
            }
            (Operator::AllReduce { bytes, .. }, Algorithm::Ring) => {
                let chunk = bytes.as_f64() / f64::from(self.ranks);
                parts(2.0 * rounds, 2.0 * rounds * chunk)
            }
            (Operator::Transfer { bytes }, _) if self.ranks == 2 => parts(1.0, bytes.as_f64()),
            _ => None,
        }
    }
}
