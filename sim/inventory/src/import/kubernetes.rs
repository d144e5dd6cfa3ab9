//! Kubernetes nodes: one or a list of them, as YAML or JSON or as `kubectl describe` prints them, whole or
//! only the status or the labels.

use std::collections::BTreeMap;

use super::error::ImportError;
use super::facts::NodeFacts;
use super::labels::Labels;
use super::table::{Line, lines};
use super::text::Text;
use super::tree::{Document, Node};
use super::{Import, Kind};

/// Resources that count whole devices.
const RESOURCES: [&str; 5] = [
    "nvidia.com/gpu",
    "amd.com/gpu",
    "gpu.intel.com/i915",
    "gpu.intel.com/xe",
    "habana.ai/gaudi",
];
/// Devices of one node.
const GPUS_LIMIT: u64 = 256;

/// What one node says.
#[derive(Debug, Default)]
struct Found {
    line: usize,
    name: Option<String>,
    labels: Labels,
    /// Resource, count and line of the capacity.
    capacity: Option<(u64, usize)>,
    allocatable: Option<(u64, usize)>,
    has_resources: bool,
    is_told: bool,
}

/// Nodes of a tree; `None` where it holds none.
pub(super) fn read(document: &Document, _: &Text) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(Kind::KubernetesNode);
    let mut found = Vec::new();
    for root in &document.roots {
        match root.get("items").and_then(Node::list) {
            Some(items) => found.extend(items.iter().filter_map(|item| node(item, &mut import))),
            None => found.extend(node(root, &mut import)),
        }
    }
    Ok(finish(import, found))
}

/// One node of a tree, where it is one: a resource or a label tells.
fn node(item: &Node, import: &mut Import) -> Option<Found> {
    let kind = item.get("kind").and_then(Node::text);
    if kind.is_some_and(|kind| kind != "Node") {
        return None;
    }
    // A paste may start below `status` or `metadata`.
    let status = item.get("status").unwrap_or(item);
    let metadata = item.get("metadata").unwrap_or(item);
    let resources = [status.get("capacity"), status.get("allocatable")];
    let labels = metadata.get("labels");
    let is_node = kind == Some("Node") || resources.iter().any(Option::is_some) || labels.is_some();
    let has_own = |node: &Node| {
        node.entries()
            .iter()
            .any(|(key, _)| key.contains("cpu") || key.contains("gpu"))
    };
    if !is_node || !resources.iter().flatten().copied().chain(labels).any(has_own) && kind != Some("Node") {
        return None;
    }
    let hostname = || {
        let addresses = status.get("addresses")?.list()?;
        let named = addresses
            .iter()
            .find(|address| address.get("type").and_then(Node::text) == Some("Hostname"));
        named?.get("address")?.text()
    };
    let mut found = Found {
        line: item.line(),
        name: metadata
            .get("name")
            .and_then(Node::text)
            .or_else(hostname)
            .map(str::to_owned),
        has_resources: resources[0].is_some(),
        ..Found::default()
    };
    for (key, value) in labels.map(Node::entries).unwrap_or_default() {
        found
            .labels
            .put(key, value.text().unwrap_or_default(), value.line());
    }
    let mut count = |resources: Option<&Node>| {
        let mut seen: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
        for (key, value) in resources.map(Node::entries).unwrap_or_default() {
            if !RESOURCES.contains(&key.as_str()) {
                continue;
            }
            let Some(count) = value.count().filter(|count| *count <= GPUS_LIMIT * 64) else {
                import.lost(value.line(), format!("{key} is no count of devices"));
                continue;
            };
            if let Some((_, first)) = seen.get(key.as_str()) {
                import.problem(value.line(), format!("{key} stands in line {first} too"));
            } else {
                seen.insert(key, (count, value.line()));
            }
        }
        seen.into_values()
            .reduce(|(sum, line), (count, _)| (sum + count, line))
    };
    found.capacity = count(resources[0]);
    found.allocatable = count(resources[1]);
    found.is_told = found.capacity.is_some() || found.allocatable.is_some();
    Some(found)
}

/// `kubectl describe node`.
pub(super) fn described(text: &Text) -> Result<Option<Import>, ImportError> {
    if !text.body().contains("Capacity:") {
        return Ok(None);
    }
    let mut import = Import::new(Kind::KubernetesNode);
    let mut found: Vec<Found> = Vec::new();
    let mut part = String::new();
    for line in lines(text.body()) {
        if line.indent() == 0 && line.text.starts_with("Name:")
            || found.is_empty() && line.text.contains("Capacity:")
        {
            found.push(Found {
                line: line.number,
                ..Found::default()
            });
        }
        if let Some(found) = found.last_mut() {
            describe(found, &mut part, &line, &mut import);
        }
    }
    found.retain(|found| found.has_resources);
    Ok(finish(import, found))
}

fn describe(found: &mut Found, part: &mut String, line: &Line, import: &mut Import) {
    let (key, value) = line.pair().unwrap_or((line.text.trim(), ""));
    if line.indent() == 0 || ["Capacity", "Allocatable"].contains(&key) {
        *part = key.to_owned();
        found.has_resources |= key == "Capacity";
    }
    match part.as_str() {
        "Name" if line.indent() == 0 => found.name = (!value.is_empty()).then(|| value.to_owned()),
        "Labels" => {
            let label = line.text.trim().trim_start_matches("Labels:").trim();
            if let Some((key, value)) = label.split_once('=') {
                found.labels.put(key, value, line.number);
            }
        }
        "Capacity" | "Allocatable" if RESOURCES.contains(&key) => {
            let place = if part == "Capacity" {
                &mut found.capacity
            } else {
                &mut found.allocatable
            };
            match value
                .parse::<u64>()
                .ok()
                .filter(|count| line.is_ended && *count <= GPUS_LIMIT * 64)
            {
                Some(count) => *place = Some((place.map_or(0, |(sum, _)| sum) + count, line.number)),
                None => import.lost(line.number, format!("{key} is no count of devices")),
            }
            found.is_told = true;
        }
        _ => {}
    }
}

fn finish(mut import: Import, found: Vec<Found>) -> Option<Import> {
    if found.is_empty() {
        return None;
    }
    let mut total = 0;
    for node in found {
        let offered = node.capacity.or(node.allocatable);
        let replicas = node.labels.replicas().filter(|replicas| *replicas > 1);
        let labelled = node.labels.count();
        // Shared devices are offered several times; the label counts them once.
        let count = match (offered, labelled) {
            (Some(_), Some(labelled)) if replicas.is_some() => labelled,
            (Some((offered, line)), Some((labelled, other))) if offered != labelled && offered > 0 => {
                let what =
                    format!("{offered} devices are offered, the label in line {other} counts {labelled}");
                import.problem(line, what);
                (offered, line)
            }
            (Some(offered), _) => offered,
            (None, Some(labelled)) => labelled,
            (None, None) => (0, node.line),
        };
        if let Some(((allocatable, line), (capacity, other))) = node.allocatable.zip(node.capacity)
            && allocatable > capacity
        {
            let what = format!("{allocatable} devices are allocatable, line {other} has {capacity}");
            import.problem(line, what);
        }
        if let Some((offered, line)) = offered.filter(|_| replicas.is_some() && labelled.is_none()) {
            let what = format!("{offered} shares are offered, but no label counts the devices");
            import.problem(line, what);
        }
        if !node.has_resources && offered.is_none() && labelled.is_none() {
            import.lost(node.line, "the node says nothing of its capacity");
        }
        if count.0 > GPUS_LIMIT {
            import.problem(
                count.1,
                format!("{} devices in one node, at most {GPUS_LIMIT} are known", count.0),
            );
            continue;
        }
        total += count.0;
        if count.0 > 0 {
            let name = node.labels.product().map(|(name, _)| name);
            import.facts.nodes.push(NodeFacts {
                line: count.1,
                names: node.name.into_iter().collect(),
                count: 1,
                gpus: vec![(name, count.0, node.labels.memory())],
            });
        }
    }
    import.gpus = Some(total);
    Some(import)
}
