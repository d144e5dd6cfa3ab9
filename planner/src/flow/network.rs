//! What a placement carries: the maximum flow from the coordinator through the nodes and back.

use super::problem::FlowProblem;

/// Layers of one node, half open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// The first.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

impl Span {
    pub(super) fn len(self) -> usize {
        self.end - self.start
    }
}

/// Layers by node; `None` for a node that is not used.
pub type Placement = Vec<Option<Span>>;

/// An end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowEnd {
    /// The coordinator, which sends tokens to nodes that start at layer 0.
    Source,
    /// A node by number.
    Node(usize),
    /// The coordinator, which receives tokens from nodes that end at the last layer.
    Sink,
}

/// Tokens/s over one link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flow {
    /// Where from.
    pub from: FlowEnd,
    /// Where to.
    pub to: FlowEnd,
    /// How much.
    pub tokens_per_s: f64,
}

struct Edge {
    to: usize,
    left: f64,
}

/// Maximum flow by Dinic's algorithm on floating capacities. Every augmentation takes some edge to exactly
/// zero, so it ends as it does on integers. Kept for many placements, so that nothing is allocated anew.
#[derive(Default)]
pub(super) struct Network {
    edges: Vec<Edge>,
    /// Edges out of each vertex; edge `e ^ 1` is the way back of edge `e`.
    out: Vec<Vec<usize>>,
    level: Vec<usize>,
    next: Vec<usize>,
    queue: Vec<usize>,
}

const SOURCE: usize = 0;
const SINK: usize = 1;

fn entry(seat: usize) -> usize {
    2 + 2 * seat
}

fn exit(seat: usize) -> usize {
    3 + 2 * seat
}

impl Network {
    /// Tokens/s that a placement carries.
    pub(super) fn value(&mut self, problem: &FlowProblem, placement: &[Option<Span>]) -> f64 {
        self.build(problem, placement);
        self.run()
    }

    /// The same with the flow over every link that is used.
    pub(super) fn flows(&mut self, problem: &FlowProblem, placement: &[Option<Span>]) -> (f64, Vec<Flow>) {
        let used = self.build(problem, placement);
        let value = self.run();
        let end = |vertex: usize| match vertex {
            SOURCE => FlowEnd::Source,
            SINK => FlowEnd::Sink,
            vertex => FlowEnd::Node(used[vertex / 2 - 1]),
        };
        let mut flows = Vec::new();
        for (from, out) in self.out.iter().enumerate() {
            for edge in out.iter().copied().filter(|edge| edge % 2 == 0) {
                let to = self.edges[edge].to;
                let carried = self.edges[edge ^ 1].left;
                // The edge inside a node is no link.
                if end(from) != end(to) && carried > 0.0 {
                    flows.push(Flow {
                        from: end(from),
                        to: end(to),
                        tokens_per_s: carried,
                    });
                }
            }
        }
        (value, flows)
    }

    /// Nodes that are used, by seat in the network.
    fn build(&mut self, problem: &FlowProblem, placement: &[Option<Span>]) -> Vec<usize> {
        let used: Vec<usize> = (0..placement.len())
            .filter(|node| placement[*node].is_some())
            .collect();
        self.edges.clear();
        self.out.iter_mut().for_each(Vec::clear);
        self.out.resize_with(2 + 2 * used.len(), Vec::new);
        let span = |node: usize| placement[node].expect("only used nodes are asked");
        for (seat, node) in used.iter().enumerate() {
            let own = span(*node);
            let throughput = problem.throughput[*node][own.len()].min(problem.nic);
            self.edge(entry(seat), exit(seat), throughput);
            if own.start == 0 {
                self.edge(SOURCE, entry(seat), problem.coordinator);
            }
            if own.end == problem.layers {
                self.edge(exit(seat), SINK, problem.coordinator);
            }
        }
        for (seat, node) in used.iter().enumerate() {
            for (other_seat, other) in used.iter().enumerate() {
                if follows(span(*node), span(*other), problem.partial) {
                    self.edge(exit(seat), entry(other_seat), problem.link(*node, *other));
                }
            }
        }
        used
    }

    fn edge(&mut self, from: usize, to: usize, capacity: f64) {
        self.out[from].push(self.edges.len());
        self.edges.push(Edge { to, left: capacity });
        self.out[to].push(self.edges.len());
        self.edges.push(Edge { to: from, left: 0.0 });
    }

    fn run(&mut self) -> f64 {
        let mut value = 0.0;
        while self.has_way() {
            self.next.clear();
            self.next.resize(self.out.len(), 0);
            loop {
                let pushed = self.push(SOURCE, f64::INFINITY);
                if pushed == 0.0 {
                    break;
                }
                value += pushed;
            }
        }
        value
    }

    fn has_way(&mut self) -> bool {
        self.level.clear();
        self.level.resize(self.out.len(), usize::MAX);
        self.level[SOURCE] = 0;
        self.queue.clear();
        self.queue.push(SOURCE);
        let mut at = 0;
        while let Some(vertex) = self.queue.get(at).copied() {
            at += 1;
            for edge in &self.out[vertex] {
                let Edge { to, left } = self.edges[*edge];
                if left > 0.0 && self.level[to] == usize::MAX {
                    self.level[to] = self.level[vertex] + 1;
                    self.queue.push(to);
                }
            }
        }
        self.level[SINK] != usize::MAX
    }

    /// Pushes up to `most` from a vertex to the sink along levels. As deep as the network has nodes.
    fn push(&mut self, vertex: usize, most: f64) -> f64 {
        if vertex == SINK {
            return most;
        }
        while let Some(edge) = self.out[vertex].get(self.next[vertex]).copied() {
            let Edge { to, left } = self.edges[edge];
            if left > 0.0 && self.level[to] == self.level[vertex] + 1 {
                let pushed = self.push(to, most.min(left));
                if pushed > 0.0 {
                    self.edges[edge].left -= pushed;
                    self.edges[edge ^ 1].left += pushed;
                    return pushed;
                }
            }
            self.next[vertex] += 1;
        }
        0.0
    }
}

/// Whether tokens may go from a node with layers `from` to one with layers `to`.
pub(super) fn follows(from: Span, to: Span, partial: bool) -> bool {
    to.start == from.end || partial && to.start <= from.end && from.end < to.end
}
