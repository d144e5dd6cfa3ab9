//! A short cluster file as values, in the form that `cluster_file` reads.

use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub(super) struct Sketch {
    pub(super) name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) link: Vec<LinkSketch>,
    pub(super) node: Vec<NodeSketch>,
}

/// A NIC's link that the catalogue does not have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct LinkSketch {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) bandwidth: String,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct NodeSketch {
    pub(super) names: Vec<String>,
    pub(super) gpus: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) memory: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) nics: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) nic_names: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pcie: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) socket: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fabric: Option<FabricSketch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) links: Vec<PairsSketch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) switches: Vec<GroupSketch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) sockets: Vec<GroupSketch>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct FabricSketch {
    pub(super) kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bandwidth: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct PairsSketch {
    pub(super) between: Vec<usize>,
    pub(super) kind: &'static str,
    pub(super) bandwidth: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct GroupSketch {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) gpus: Vec<usize>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) nics: Vec<usize>,
}

/// Equal neighbours counted: `["4 x a", "1 x b"]`.
pub(super) fn counted(names: &[String]) -> Vec<String> {
    let runs = names.chunk_by(|a, b| a == b);
    runs.map(|run| format!("{} x {}", run.len(), run[0])).collect()
}
