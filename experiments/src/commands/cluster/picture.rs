//! A cluster as lines: for each kind of node its PCI Express tree, its islands of scale-up links, and the
//! networks between nodes. Nodes that look alike are drawn once.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::cluster::{Endpoint, Link, LinkKind, Node};
use infercluster_spec::{BytesPerSec, Cluster, GpuId, NodeId};

/// Columns of a terminal that lines fit in.
const WIDTH: usize = 100;
/// Kinds of nodes that are drawn; more are counted.
const KINDS_LIMIT: usize = 12;

/// The whole picture.
pub(super) fn draw(cluster: &Cluster) -> String {
    let links = by_node(cluster);
    let mut drawn: Vec<(Vec<&str>, String)> = Vec::new();
    for (position, node) in cluster.nodes.iter().enumerate() {
        let text = draw_node(cluster, NodeId(position as u32), node, &links[position]);
        match drawn.last_mut().filter(|(_, last)| *last == text) {
            Some((names, _)) => names.push(&node.name),
            None => drawn.push((vec![&node.name], text)),
        }
    }
    let mut picture = String::new();
    for (alike, text) in drawn.iter().take(KINDS_LIMIT) {
        let count = if alike.len() == 1 {
            String::new()
        } else {
            format!("{} nodes alike: ", alike.len())
        };
        picture.push_str(&wrapped(&format!("{count}{}", names(alike)), 0));
        picture.push_str(text);
        picture.push('\n');
    }
    if drawn.len() > KINDS_LIMIT {
        picture.push_str(&format!(
            "and {} more kinds of nodes\n\n",
            drawn.len() - KINDS_LIMIT
        ));
    }
    let networks = networks(cluster);
    if !networks.is_empty() {
        picture.push_str(&networks);
        picture.push('\n');
    }
    picture
}

/// Names in few words: all of a few, first and last of many.
pub(super) fn names(names: &[&str]) -> String {
    match names {
        [first, .., last] if names.len() > 4 => format!("{first} .. {last} ({})", names.len()),
        _ => names.join(", "),
    }
}

/// A line of a list, wrapped under its own beginning.
pub(super) fn item(text: &str) -> String {
    wrapped(text, 2)
}

/// Words in lines of the terminal's width, each line after the first indented two more.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = String::new();
    let mut line = " ".repeat(indent);
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push_str(&line);
            lines.push('\n');
            line = " ".repeat(indent + 2);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines + &line + "\n"
}

/// Links by the node that they start in; those between switches of a network belong to none.
fn by_node(cluster: &Cluster) -> Vec<Vec<&Link>> {
    let mut node_of: BTreeMap<GpuId, usize> = BTreeMap::new();
    for (node, gpu) in cluster.gpus() {
        node_of.insert(gpu.id, node.0 as usize);
    }
    let mut links = vec![Vec::new(); cluster.nodes.len()];
    for link in &cluster.links {
        let node = match link.from {
            Endpoint::Gpu(gpu) => node_of.get(&gpu).copied(),
            Endpoint::Nic(node, _) | Endpoint::Bridge(node, _) => Some(node.0 as usize),
            Endpoint::Switch(_) => None,
        };
        if let Some(own) = node.and_then(|node| links.get_mut(node)) {
            own.push(link);
        }
    }
    links
}

fn draw_node(cluster: &Cluster, id: NodeId, node: &Node, links: &[&Link]) -> String {
    let place: BTreeMap<GpuId, usize> = node
        .gpus
        .iter()
        .enumerate()
        .map(|(position, gpu)| (gpu.id, position))
        .collect();
    let tree = Tree {
        cluster,
        node,
        id,
        place: &place,
        links,
    };
    let mut text = tree.draw();
    text.push_str(&islands(node, &place, links));
    text
}

/// The devices and interfaces of a node below their bridges.
struct Tree<'a> {
    cluster: &'a Cluster,
    node: &'a Node,
    id: NodeId,
    place: &'a BTreeMap<GpuId, usize>,
    links: &'a [&'a Link],
}

impl Tree<'_> {
    fn draw(&self) -> String {
        let mut below: BTreeMap<u32, Vec<(Endpoint, BytesPerSec)>> = BTreeMap::new();
        let mut above: BTreeMap<u32, u32> = BTreeMap::new();
        let mut sockets: BTreeMap<u32, BytesPerSec> = BTreeMap::new();
        let mut hung: BTreeSet<Endpoint> = BTreeSet::new();
        for link in self.links {
            match (link.from, link.to, link.kind) {
                (Endpoint::Bridge(_, from), Endpoint::Bridge(_, _), LinkKind::Socket) => {
                    sockets.insert(from, link.bandwidth);
                }
                // A switch has a higher number than its socket.
                (Endpoint::Bridge(_, from), Endpoint::Bridge(_, to), _) if from > to => {
                    above.insert(from, to);
                    below.entry(to).or_default().push((link.from, link.bandwidth));
                }
                (leaf @ (Endpoint::Gpu(_) | Endpoint::Nic(..)), Endpoint::Bridge(_, bridge), _) => {
                    below.entry(bridge).or_default().push((leaf, link.bandwidth));
                    hung.insert(leaf);
                }
                _ => {}
            }
        }
        let mut text = String::new();
        let roots = below.keys().filter(|bridge| !above.contains_key(bridge));
        for root in roots {
            let socket = sockets
                .get(root)
                .map(|rate| format!(", {rate} to each other socket"));
            let name = if sockets.is_empty() {
                "host bridge"
            } else {
                "socket"
            };
            text.push_str(&format!("  {name} {root}{}\n", socket.unwrap_or_default()));
            self.branch(&below, *root, "  ", &mut text);
        }
        let alone = |leaf: &Endpoint| !hung.contains(leaf);
        let gpus = self
            .node
            .gpus
            .iter()
            .map(|gpu| Endpoint::Gpu(gpu.id))
            .filter(alone);
        let nics = (0..self.node.nics.len())
            .map(|nic| Endpoint::Nic(self.id, nic as u32))
            .filter(alone);
        let rest: Vec<Endpoint> = gpus.chain(nics).collect();
        for run in self.runs(&rest) {
            text.push_str(&format!("  {run}\n"));
        }
        text
    }

    fn branch(
        &self,
        below: &BTreeMap<u32, Vec<(Endpoint, BytesPerSec)>>,
        bridge: u32,
        indent: &str,
        text: &mut String,
    ) {
        let members = below.get(&bridge).map(Vec::as_slice).unwrap_or_default();
        let mut lines: Vec<(String, Option<u32>)> = Vec::new();
        for run in members.chunk_by(|a, b| is_leaf(a.0) && is_leaf(b.0) && same_rate(a.1, b.1)) {
            match run {
                [(Endpoint::Bridge(_, child), rate)] => {
                    lines.push((format!("PCIe switch {child}, {rate} up"), Some(*child)));
                }
                _ => {
                    let leaves: Vec<Endpoint> = run.iter().map(|(leaf, _)| *leaf).collect();
                    let rate = run[0].1;
                    let leaves = self.runs(&leaves).into_iter();
                    lines.extend(leaves.map(|leaf| (format!("{leaf}, slot {rate}"), None)));
                }
            }
        }
        let last = lines.len().saturating_sub(1);
        for (position, (line, child)) in lines.into_iter().enumerate() {
            let (mark, next) = if position == last {
                ("`-- ", "    ")
            } else {
                ("|-- ", "|   ")
            };
            text.push_str(&format!("{indent}{mark}{line}\n"));
            // Numbers fall along a branch, so it ends.
            if let Some(child) = child.filter(|child| *child > bridge) {
                self.branch(below, child, &format!("{indent}{next}"), text);
            }
        }
    }

    /// Equal neighbours in one line: `gpu 0-7: h100-sxm-80gb, 80 GB each`.
    fn runs(&self, leaves: &[Endpoint]) -> Vec<String> {
        let described: Vec<(&str, usize, String)> = leaves.iter().map(|leaf| self.describe(*leaf)).collect();
        let runs = described.chunk_by(|a, b| a.0 == b.0 && a.1 + 1 == b.1 && a.2 == b.2);
        runs.map(|run| {
            let (kind, first, what) = &run[0];
            match run.len() {
                1 => format!("{kind} {first}: {what}"),
                count => format!("{kind} {first}-{}: {count} x {what}", first + count - 1),
            }
        })
        .collect()
    }

    fn describe(&self, leaf: Endpoint) -> (&'static str, usize, String) {
        match leaf {
            Endpoint::Gpu(gpu) => {
                let position = self.place.get(&gpu).copied().unwrap_or_default();
                let gpu = self.node.gpus.get(position);
                let memory = gpu.and_then(|gpu| self.cluster.memory(gpu));
                let memory = memory.map_or(String::new(), |memory| format!(" {memory}"));
                let kind = gpu.map_or("", |gpu| &gpu.device_type);
                ("gpu", position, format!("{kind}{memory}"))
            }
            Endpoint::Nic(_, position) => {
                let nic = self.node.nics.get(position as usize);
                let rate = nic.map_or(String::new(), |nic| nic.bandwidth.to_string());
                let out = Endpoint::Nic(self.id, position);
                let kind = self
                    .links
                    .iter()
                    .find(|link| link.from == out && link.kind != LinkKind::Pcie);
                let kind = kind.map_or(String::new(), |link| format!(" {:?}", link.kind).to_lowercase());
                ("nic", position as usize, format!("{rate}{kind}"))
            }
            Endpoint::Bridge(..) | Endpoint::Switch(_) => ("", 0, leaf.to_string()),
        }
    }
}

fn is_leaf(end: Endpoint) -> bool {
    matches!(end, Endpoint::Gpu(_) | Endpoint::Nic(..))
}

fn same_rate(a: BytesPerSec, b: BytesPerSec) -> bool {
    a.per_second().total_cmp(&b.per_second()).is_eq()
}

/// Devices that scale-up links join, and how.
fn islands(node: &Node, place: &BTreeMap<GpuId, usize>, links: &[&Link]) -> String {
    let scale_up: Vec<&&Link> = links
        .iter()
        .filter(|link| matches!(link.kind, LinkKind::Nvlink | LinkKind::Xgmi))
        .collect();
    if node.gpus.len() < 2 {
        return String::new();
    }
    let mut island: Vec<usize> = (0..node.gpus.len()).collect();
    let mut switch_of: BTreeMap<Endpoint, usize> = BTreeMap::new();
    for link in &scale_up {
        let Endpoint::Gpu(from) = link.from else { continue };
        let Some(from) = place.get(&from).copied() else {
            continue;
        };
        let other = match link.to {
            Endpoint::Gpu(to) => place.get(&to).copied(),
            switch => Some(*switch_of.entry(switch).or_insert(from)),
        };
        if let Some(other) = other {
            let (old, new) = (island[from].max(island[other]), island[from].min(island[other]));
            island
                .iter_mut()
                .filter(|own| **own == old)
                .for_each(|own| *own = new);
        }
    }
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    island
        .iter()
        .enumerate()
        .for_each(|(gpu, own)| members.entry(*own).or_default().push(gpu));
    let mut text = String::new();
    let mut alone = Vec::new();
    for gpus in members.values() {
        if gpus.len() == 1 {
            alone.extend(gpus);
            continue;
        }
        let how = how_joined(gpus, place, &scale_up);
        text.push_str(&wrapped(&format!("island of gpu {}: {how}", ranges(gpus)), 2));
    }
    if !alone.is_empty() {
        text.push_str(&wrapped(&format!("no scale-up link: gpu {}", ranges(&alone)), 2));
    }
    text
}

/// The rates between the devices of an island, or into its switch.
fn how_joined(gpus: &[usize], place: &BTreeMap<GpuId, usize>, links: &[&&Link]) -> String {
    let mut switched: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut direct: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    for link in links {
        let Endpoint::Gpu(from) = link.from else { continue };
        let Some(from) = place.get(&from).copied().filter(|from| gpus.contains(from)) else {
            continue;
        };
        let rate = format!("{} {}", format!("{:?}", link.kind).to_lowercase(), link.bandwidth);
        match link.to {
            Endpoint::Gpu(to) => {
                if let Some(to) = place.get(&to).copied().filter(|to| from < *to) {
                    direct.entry(rate).or_default().push((from, to));
                }
            }
            _ => switched.entry(rate).or_default().push(from),
        }
    }
    let mut parts: Vec<String> = switched
        .iter()
        .map(|(rate, members)| format!("gpu {} into a switch by {rate} each way", ranges(members)))
        .collect();
    let every = gpus.len() * (gpus.len() - 1) / 2;
    for (rate, pairs) in &direct {
        if pairs.len() == every {
            parts.push(format!("every two by {rate} each way"));
        } else {
            let pairs: Vec<String> = pairs.iter().map(|(a, b)| format!("{a}-{b}")).collect();
            parts.push(format!("{rate} each way between {}", pairs.join(", ")));
        }
    }
    parts.join("; ")
}

/// `0-3, 6`.
fn ranges(numbers: &[usize]) -> String {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a + 1 == *b);
    let runs: Vec<String> = runs
        .map(|run| match run {
            [only] => only.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        })
        .collect();
    runs.join(", ")
}

/// Switches between nodes, with what leads into each.
fn networks(cluster: &Cluster) -> String {
    let mut into: BTreeMap<u32, (BTreeSet<u32>, usize, f64)> = BTreeMap::new();
    for link in &cluster.links {
        if let (Endpoint::Nic(node, _), Endpoint::Switch(switch)) = (link.from, link.to) {
            let entry = into.entry(switch.0).or_default();
            entry.0.insert(node.0);
            entry.1 += 1;
            entry.2 += link.bandwidth.per_second();
        }
    }
    into.iter()
        .map(|(switch, (nodes, nics, sum))| {
            let name = cluster
                .switches
                .get(*switch as usize)
                .map_or("switch", |switch| &switch.name);
            let rate = BytesPerSec::new(*sum).map_or(String::new(), |rate| format!(", {rate} in all"));
            format!("{name}: {nics} NICs of {} nodes{rate}\n", nodes.len())
        })
        .collect()
}
