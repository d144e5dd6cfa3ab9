//! The problem as a file gives it, and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Most layers that are accepted: the search keeps tables by layer.
pub const LAYER_LIMIT: u64 = 4_096;
/// Most nodes, copies counted, that are accepted: the network has an edge for every pair that may be linked.
pub const NODE_LIMIT: u64 = 1_024;

/// A placement problem as a JSON file gives it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowDocument {
    /// Layers of the model.
    pub layers: u64,
    /// Kinds of node.
    pub nodes: Vec<NodeDocument>,
    /// What links carry; without it all are unlimited.
    #[serde(default)]
    pub link_tokens_per_s: LinkDocument,
    /// What the link between the coordinator and one node carries each way, tokens/s; unlimited where absent.
    #[serde(default)]
    pub coordinator_tokens_per_s: Option<f64>,
    /// What one node receives, and what it sends, over all its links together, tokens/s; unlimited where
    /// absent.
    #[serde(default)]
    pub nic_tokens_per_s: Option<f64>,
    /// Whether a node may compute the last of its layers alone, for tokens that come with the first done.
    #[serde(default)]
    pub partial: bool,
}

/// Equal nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeDocument {
    /// Its copies are called `name#0`, `name#1` and so on.
    pub name: String,
    /// How many copies there are.
    #[serde(default = "one")]
    pub count: u64,
    /// Where they stand.
    #[serde(default)]
    pub region: u32,
    /// Tokens/s by number of layers held, as the file lists them; a number that is missing cannot be held.
    #[serde(deserialize_with = "entries")]
    pub throughput: Vec<(String, f64)>,
}

/// What links carry, tokens/s for each ordered pair of nodes; `null` is unlimited.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkDocument {
    /// Between nodes of one region.
    #[serde(default)]
    pub within: Option<f64>,
    /// Between nodes of two regions.
    #[serde(default)]
    pub cross: Option<f64>,
    /// Pairs that differ.
    #[serde(default)]
    pub pairs: Vec<PairDocument>,
}

/// One ordered pair of nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairDocument {
    /// The sender.
    pub from: String,
    /// The receiver.
    pub to: String,
    /// What the link carries.
    pub tokens_per_s: Option<f64>,
}

/// The entries of a map in their order, so that one that is given twice is seen.
fn entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, f64)>, D::Error> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(String, f64)>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("tokens/s by number of layers")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some(entry) = map.next_entry()? {
                entries.push(entry);
            }
            Ok(entries)
        }
    }
    deserializer.deserialize_map(Entries)
}

fn one() -> u64 {
    1
}

/// Why a problem is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// A number of layers that is not searched.
    #[error("layers is {layers}, between 1 and {LAYER_LIMIT} are accepted")]
    Layers {
        /// What was given.
        layers: u64,
    },
    /// Too many nodes, or none.
    #[error("there are {nodes} nodes, copies counted, between 1 and {NODE_LIMIT} are accepted")]
    Nodes {
        /// What was given.
        nodes: u64,
    },
    /// Two nodes of one name.
    #[error("two nodes are called `{name}`")]
    DuplicateNode {
        /// The name.
        name: String,
    },
    /// A throughput for something that is no number of layers.
    #[error("node `{node}` has a throughput for `{layers}` layers, a whole number of at least 1 is needed")]
    LayerCount {
        /// The node.
        node: String,
        /// What was given.
        layers: String,
    },
    /// One number of layers twice.
    #[error("node `{node}` has two throughputs for {layers} layers")]
    DuplicateLayerCount {
        /// The node.
        node: String,
        /// The number of layers.
        layers: u64,
    },
    /// A rate that is none.
    #[error("{field} is {value} tokens/s, a number from 0 up is needed")]
    Rate {
        /// Where it stands.
        field: String,
        /// What was given.
        value: f64,
    },
    /// A pair that names a node there is not.
    #[error("pair {pair} of link_tokens_per_s names node `{name}`, which there is not")]
    UnknownNode {
        /// Position of the pair.
        pair: usize,
        /// The name.
        name: String,
    },
    /// A pair of a node with itself.
    #[error("pair {pair} of link_tokens_per_s goes from node `{name}` to itself")]
    Loop {
        /// Position of the pair.
        pair: usize,
        /// The node.
        name: String,
    },
    /// One pair twice.
    #[error("the link from `{from}` to `{to}` is given twice")]
    DuplicatePair {
        /// The sender.
        from: String,
        /// The receiver.
        to: String,
    },
}

/// A checked placement problem: nodes by number, rates with infinity for what is unlimited.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowProblem {
    /// Layers of the model.
    pub(super) layers: usize,
    pub(super) names: Vec<String>,
    pub(super) regions: Vec<u32>,
    /// By node, then by layers held; 0 for a number that cannot be held, and at 0.
    pub(super) throughput: Vec<Vec<f64>>,
    pub(super) within: f64,
    pub(super) cross: f64,
    pub(super) pairs: BTreeMap<(usize, usize), f64>,
    pub(super) coordinator: f64,
    pub(super) nic: f64,
    pub(super) partial: bool,
}

impl FlowProblem {
    /// Checks a document.
    pub fn new(document: &FlowDocument) -> Result<Self, FlowError> {
        let layers = document.layers;
        if !(1..=LAYER_LIMIT).contains(&layers) {
            return Err(FlowError::Layers { layers });
        }
        let layers = layers as usize;
        let counts = document.nodes.iter().map(|node| node.count);
        let nodes = counts.fold(0_u64, u64::saturating_add);
        if !(1..=NODE_LIMIT).contains(&nodes) {
            return Err(FlowError::Nodes { nodes });
        }
        let links = &document.link_tokens_per_s;
        let mut problem = Self {
            layers,
            names: Vec::new(),
            regions: Vec::new(),
            throughput: Vec::new(),
            within: rate("within of link_tokens_per_s", links.within)?,
            cross: rate("cross of link_tokens_per_s", links.cross)?,
            pairs: BTreeMap::new(),
            coordinator: rate("coordinator_tokens_per_s", document.coordinator_tokens_per_s)?,
            nic: rate("nic_tokens_per_s", document.nic_tokens_per_s)?,
            partial: document.partial,
        };
        let mut known = BTreeSet::new();
        for node in &document.nodes {
            if !known.insert(&node.name) {
                return Err(FlowError::DuplicateNode {
                    name: node.name.clone(),
                });
            }
            let throughput = throughput(node, layers)?;
            for copy in 0..node.count {
                problem.names.push(format!("{}#{copy}", node.name));
                problem.regions.push(node.region);
                problem.throughput.push(throughput.clone());
            }
        }
        problem.add_pairs(&links.pairs)?;
        Ok(problem)
    }

    fn add_pairs(&mut self, pairs: &[PairDocument]) -> Result<(), FlowError> {
        let mut by_name = BTreeMap::new();
        for (node, name) in self.names.iter().enumerate() {
            if by_name.insert(name.as_str(), node).is_some() {
                return Err(FlowError::DuplicateNode { name: name.clone() });
            }
        }
        for (position, pair) in pairs.iter().enumerate() {
            let node = |name: &String| {
                let found = by_name.get(name.as_str()).copied();
                found.ok_or_else(|| FlowError::UnknownNode {
                    pair: position,
                    name: name.clone(),
                })
            };
            let (from, to) = (node(&pair.from)?, node(&pair.to)?);
            if from == to {
                return Err(FlowError::Loop {
                    pair: position,
                    name: pair.from.clone(),
                });
            }
            let field = format!("the link from `{}` to `{}`", pair.from, pair.to);
            if self
                .pairs
                .insert((from, to), rate(&field, pair.tokens_per_s)?)
                .is_some()
            {
                return Err(FlowError::DuplicatePair {
                    from: pair.from.clone(),
                    to: pair.to.clone(),
                });
            }
        }
        Ok(())
    }

    /// Names of the nodes, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// What the link between two nodes carries.
    pub(super) fn link(&self, from: usize, to: usize) -> f64 {
        let general = || {
            if self.regions[from] == self.regions[to] {
                self.within
            } else {
                self.cross
            }
        };
        self.pairs.get(&(from, to)).copied().unwrap_or_else(general)
    }
}

fn throughput(node: &NodeDocument, layers: usize) -> Result<Vec<f64>, FlowError> {
    let mut throughput = vec![0.0; layers + 1];
    let mut known = BTreeSet::new();
    for (held, value) in &node.throughput {
        let field = || format!("throughput of node `{}` for {held} layers", node.name);
        let count: u64 = held.parse().unwrap_or(0);
        if count == 0 {
            return Err(FlowError::LayerCount {
                node: node.name.clone(),
                layers: held.clone(),
            });
        }
        if !known.insert(count) {
            return Err(FlowError::DuplicateLayerCount {
                node: node.name.clone(),
                layers: count,
            });
        }
        let value = rate(&field(), Some(*value))?;
        // More layers than the model has are never held.
        if let Some(slot) = usize::try_from(count)
            .ok()
            .and_then(|count| throughput.get_mut(count))
        {
            *slot = value;
        }
    }
    Ok(throughput)
}

fn rate(field: &str, value: Option<f64>) -> Result<f64, FlowError> {
    match value {
        None => Ok(f64::INFINITY),
        Some(value) if value.is_finite() && value >= 0.0 => Ok(value),
        Some(value) => Err(FlowError::Rate {
            field: field.to_owned(),
            value,
        }),
    }
}
