//! The path of least latency between two devices.

use std::ops::Add;

use infercluster_spec::GpuId;
use infercluster_spec::cluster::{Endpoint, LinkKind};
use infercluster_spec::ids::LinkId;
use petgraph::algo::dijkstra;
use petgraph::graph::NodeIndex;
use petgraph::visit::{EdgeRef, NodeFiltered, Reversed};

use super::{Topology, TopologyError};

/// A path between two devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Its links in order; empty where the devices talk over loopback.
    pub links: Vec<LinkId>,
    /// Seconds of an empty message: the sum over its links.
    pub alpha_s: f64,
    /// Rate of a long message, byte/s: the least over its links.
    pub bytes_per_s: f64,
    /// Whether it never leaves the host's memory.
    pub is_loopback: bool,
}

/// What routing minimises: latency in picoseconds, then links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Length(u64, u32);

impl Add for Length {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0), self.1.saturating_add(other.1))
    }
}

impl Topology {
    /// The route from one device to another.
    pub fn route(&self, from: GpuId, to: GpuId) -> Result<Route, TopologyError> {
        let (from_node, to_node) = (self.node(from)?, self.node(to)?);
        let ends = |gpu| self.vertices.get(&Endpoint::Gpu(gpu)).copied();
        match (ends(from), ends(to)) {
            (None, None) if from_node == to_node => Ok(Route {
                links: Vec::new(),
                alpha_s: self.loopback.alpha_s,
                bytes_per_s: self.loopback.bytes_per_s,
                is_loopback: true,
            }),
            (Some(source), Some(target)) => self
                .shortest(source, target)
                .map(|links| self.along(links))
                .ok_or(TopologyError::NoRoute { from, to }),
            _ => Err(TopologyError::NoRoute { from, to }),
        }
    }

    fn along(&self, links: Vec<LinkId>) -> Route {
        let costs = || links.iter().map(|link| &self.links[link.index()]);
        Route {
            alpha_s: costs().map(|link| link.alpha_s).sum(),
            bytes_per_s: costs().map(|link| link.bytes_per_s).fold(f64::INFINITY, f64::min),
            is_loopback: costs().all(|link| link.kind == LinkKind::Loopback),
            links,
        }
    }

    /// Distances to the target first; then from the source always the lowest link that lies on a shortest
    /// path, so that ties do not depend on the order of a queue.
    fn shortest(&self, source: NodeIndex, target: NodeIndex) -> Option<Vec<LinkId>> {
        let passable = |vertex: NodeIndex| {
            vertex == source || vertex == target || !matches!(self.graph[vertex], Endpoint::Gpu(_))
        };
        let filtered = NodeFiltered::from_fn(&self.graph, passable);
        let length = |link: LinkId| Length(self.links[link.index()].latency_ps, 1);
        let distances = dijkstra(Reversed(&filtered), target, Some(source), |edge| {
            length(*edge.weight())
        });
        let mut remaining = *distances.get(&source)?;
        let (mut at, mut links) = (source, Vec::new());
        while at != target {
            let (link, next) = self
                .graph
                .edges(at)
                .filter(|edge| {
                    distances
                        .get(&edge.target())
                        .is_some_and(|rest| *rest + length(*edge.weight()) == remaining)
                })
                .map(|edge| (*edge.weight(), edge.target()))
                .min()
                .expect("a vertex with a finite distance has an edge on a shortest path");
            remaining = distances[&next];
            links.push(link);
            at = next;
        }
        Some(links)
    }
}
