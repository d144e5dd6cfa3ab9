//! Routes over a cluster's links, and what a collective costs on them.
//!
//! A route is the path of least latency, then of fewest links, then of the lowest link ids; it leads
//! through switches, bridges and NICs but never through another device. Devices of one node whose cluster
//! file lists no link of theirs (CPU workers) talk over loopback.
//!
//! Not known here: other traffic. A collective shares a link with its own flows only.

mod collective;
mod route;

use std::collections::BTreeMap;

use infercluster_spec::calibration::LinkFit;
use infercluster_spec::cluster::{Endpoint, LinkKind};
use infercluster_spec::ids::{LinkId, NodeId};
use infercluster_spec::{Cluster, GpuId};
use petgraph::graph::{DiGraph, NodeIndex};

pub use collective::{Algorithm, CollectiveGroup, CollectiveParts};
pub use route::Route;

/// Loopback of a host that nobody measured: latency of an empty message, seconds.
pub const DEFAULT_LOOPBACK_ALPHA_S: f64 = 30e-6;
/// Loopback of a host that nobody measured: byte/s through one device's port.
pub const DEFAULT_LOOPBACK_BYTES_PER_S: f64 = 4e9;

/// Why there is no route or no group.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A device that the cluster does not have.
    #[error("{gpu} is not in the cluster")]
    UnknownGpu {
        /// The device.
        gpu: GpuId,
    },
    /// No path of links.
    #[error("no links lead from {from} to {to}")]
    NoRoute {
        /// Where data starts.
        from: GpuId,
        /// Where it should arrive.
        to: GpuId,
    },
    /// A link that never delivers.
    #[error("{link} from {from} to {to} has rate 0")]
    NoRate {
        /// The link.
        link: LinkId,
        /// Its start.
        from: Endpoint,
        /// Its end.
        to: Endpoint,
    },
    /// A collective of nobody, or with a device twice.
    #[error("a collective needs each device once and at least one, found {gpus:?}")]
    BadGroup {
        /// What was asked for.
        gpus: Vec<GpuId>,
    },
}

/// The links of a cluster as a graph.
#[derive(Debug, Clone)]
pub struct Topology {
    graph: DiGraph<Endpoint, LinkId>,
    vertices: BTreeMap<Endpoint, NodeIndex>,
    links: Vec<LinkCost>,
    nodes: BTreeMap<GpuId, NodeId>,
    loopback: LinkCost,
}

/// What one link costs alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LinkCost {
    kind: LinkKind,
    /// Picoseconds of an empty message as the cluster file states them: what routing compares.
    latency_ps: u64,
    alpha_s: f64,
    bytes_per_s: f64,
}

impl Topology {
    /// Builds the graph. A link without a fit of its kind reaches `efficiency` of its stated rate at its
    /// stated latency; a fit replaces the latency and caps the rate.
    pub fn new(
        cluster: &Cluster,
        fits: &BTreeMap<LinkKind, LinkFit>,
        efficiency: f64,
    ) -> Result<Self, TopologyError> {
        let mut topology = Self {
            graph: DiGraph::new(),
            vertices: BTreeMap::new(),
            links: Vec::with_capacity(cluster.links.len()),
            nodes: cluster.gpus().map(|(node, gpu)| (gpu.id, node)).collect(),
            loopback: loopback(fits.get(&LinkKind::Loopback)),
        };
        for (position, link) in cluster.links.iter().enumerate() {
            let id = LinkId(position as u32);
            let stated = link.bandwidth.per_second();
            if stated == 0.0 {
                return Err(TopologyError::NoRate {
                    link: id,
                    from: link.from,
                    to: link.to,
                });
            }
            let fit = fits.get(&link.kind);
            topology.links.push(LinkCost {
                kind: link.kind,
                latency_ps: link.latency.0,
                alpha_s: fit.map_or(link.latency.as_seconds(), |fit| fit.alpha_s),
                bytes_per_s: fit.map_or(stated * efficiency, |fit| fit.bytes_per_s.min(stated)),
            });
            let (from, to) = (topology.vertex(link.from), topology.vertex(link.to));
            topology.graph.add_edge(from, to, id);
        }
        Ok(topology)
    }

    fn vertex(&mut self, endpoint: Endpoint) -> NodeIndex {
        *self
            .vertices
            .entry(endpoint)
            .or_insert_with(|| self.graph.add_node(endpoint))
    }

    pub(crate) fn node(&self, gpu: GpuId) -> Result<NodeId, TopologyError> {
        self.nodes
            .get(&gpu)
            .copied()
            .ok_or(TopologyError::UnknownGpu { gpu })
    }
}

fn loopback(fit: Option<&LinkFit>) -> LinkCost {
    LinkCost {
        kind: LinkKind::Loopback,
        latency_ps: 0,
        alpha_s: fit.map_or(DEFAULT_LOOPBACK_ALPHA_S, |fit| fit.alpha_s),
        bytes_per_s: fit.map_or(DEFAULT_LOOPBACK_BYTES_PER_S, |fit| fit.bytes_per_s),
    }
}

#[cfg(test)]
mod tests;
