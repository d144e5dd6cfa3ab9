//! From what dumps say to a cluster file of the product's own form.
//!
//! The file is written as text and read by `cluster_file` like any other, so that there is one way from a
//! file to a cluster. What the dumps leave open is listed with the flag that gives it; what is taken by a
//! rule is listed as assumed. Figures of devices come from the catalogue.

mod nics;
mod scale_up;
mod sketch;
mod tree;
mod types;

use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Bytes, BytesPerSec};

use self::sketch::{NodeSketch, Sketch, counted};
use self::types::Clue;
use super::merge::{Host, Merged, Node};
use crate::catalogue::{Catalogue, DeviceEntry};
use crate::cluster_file::{self, ClusterFile};
use crate::error::InventoryError;

/// Facts that the user adds where dumps leave them open.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Given {
    /// Name of the cluster.
    pub name: Option<String>,
    /// How many nodes are like the host.
    pub nodes: Option<u32>,
    /// Type of devices that no dump names.
    pub gpu_type: Option<String>,
    /// Types of devices by what a dump calls them or by their number.
    pub gpu_types: Vec<(String, String)>,
    /// Rate of one scale-up link, one direction.
    pub link_bandwidth: Option<BytesPerSec>,
    /// `nvswitch`, `mesh` or `none`.
    pub fabric: Option<String>,
    /// Catalogue name of the devices' slot.
    pub pcie: Option<String>,
    /// Rate between sockets.
    pub socket_bandwidth: Option<BytesPerSec>,
    /// Interfaces of every node, such as `8 x ndr`.
    pub nics: Vec<String>,
    /// Rate, or catalogue name, of interfaces whose speed no dump tells.
    pub nic_speed: Option<String>,
    /// Network of interfaces where no dump tells.
    pub network: Option<LinkKind>,
}

/// A cluster as far as dumps and flags describe it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Assembly {
    /// The cluster file as text and as a cluster; `None` where something is open.
    pub file: Option<(String, ClusterFile)>,
    /// What is open, each with the flag or dump that gives it.
    pub needs: Vec<String>,
    /// What was taken by a rule.
    pub assumed: Vec<String>,
}

/// Collects what is open and what is assumed, each once.
#[derive(Debug, Default)]
pub(super) struct Open {
    needs: Vec<String>,
    assumed: Vec<String>,
}

impl Open {
    fn need(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.needs.contains(&what) {
            self.needs.push(what);
        }
    }

    fn assume(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.assumed.contains(&what) {
            self.assumed.push(what);
        }
    }
}

/// Makes a cluster of what dumps and the user say.
pub fn assemble(merged: &Merged, given: &Given, catalogue: &Catalogue) -> Result<Assembly, InventoryError> {
    let mut open = Open::default();
    let mut file = Sketch {
        name: given.name.clone().unwrap_or_else(|| "cluster".to_owned()),
        ..Sketch::default()
    };
    for group in groups(merged, given, &mut open) {
        let node = group.node(merged, given, catalogue, &mut file, &mut open);
        file.node.push(node);
    }
    if file.node.iter().map(|node| node.names.len()).sum::<usize>() > 1
        && file.node.iter().any(|node| node.nics.is_empty())
        && !open.needs.iter().any(|need| need.contains("--nic"))
    {
        open.need("how nodes reach each other: give --nics such as \"8 x ndr\", or the output of ibstat");
    }
    let Open {
        mut needs,
        mut assumed,
    } = open;
    if !needs.is_empty() {
        return Ok(Assembly {
            file: None,
            needs,
            assumed,
        });
    }
    let text = toml::to_string(&file).expect("a sketch holds texts, numbers and lists of them");
    match cluster_file::read("cluster", &text, catalogue) {
        Ok(cluster) => {
            assumed.extend(cluster.assumed.iter().cloned());
            Ok(Assembly {
                file: Some((text, cluster)),
                needs,
                assumed,
            })
        }
        Err(InventoryError::Open { open, .. }) => {
            needs.extend(
                open.into_iter()
                    .map(|item| format!("{item} (--catalogue, --pcie or --fabric)")),
            );
            Ok(Assembly {
                file: None,
                needs,
                assumed,
            })
        }
        Err(other) => Err(other),
    }
}

/// Nodes that are alike.
struct Group {
    names: Vec<String>,
    clues: Vec<Clue>,
    /// Whether the host that dumps describe stands for them.
    is_like_host: bool,
}

/// Groups of equal nodes: the host alone, or the nodes of lists, those with as many devices like the host.
fn groups(merged: &Merged, given: &Given, open: &mut Open) -> Vec<Group> {
    let host = &merged.host;
    if merged.nodes.is_empty() {
        if host.gpus.is_empty() {
            open.need("the devices: no dump lists them, give the output of nvidia-smi topo -m, -L or -q -x");
            return Vec::new();
        }
        let count = given.nodes.unwrap_or(1).max(1);
        let name = |node: u32| {
            if count == 1 {
                "node".to_owned()
            } else {
                format!("node-{node}")
            }
        };
        return vec![Group {
            names: (0..count).map(name).collect(),
            clues: clues(host),
            is_like_host: true,
        }];
    }
    let is_like = |node: &Node| !host.gpus.is_empty() && node.gpu_count() == host.gpus.len() as u64;
    if !host.gpus.is_empty() && !merged.nodes.iter().any(is_like) {
        let counts: Vec<String> = merged
            .nodes
            .iter()
            .map(|node| node.gpu_count().to_string())
            .take(4)
            .collect();
        open.need(format!(
            "a dump of a listed node: the host that was dumped has {} devices, listed nodes have {}",
            host.gpus.len(),
            counts.join(", ")
        ));
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut unnamed = 0;
    for node in merged.nodes.iter().filter(|node| node.gpu_count() > 0) {
        let names: Vec<String> = match &node.name {
            Some(name) => vec![name.clone()],
            None => (0..node.count)
                .map(|copy| format!("node-{}", unnamed + copy))
                .collect(),
        };
        unnamed += if node.name.is_none() { node.count } else { 0 };
        let clues = listed(node, host, is_like(node));
        match groups.last_mut().filter(|last| last.clues == clues) {
            Some(last) => last.names.extend(names),
            None => groups.push(Group {
                names,
                clues,
                is_like_host: is_like(node),
            }),
        }
    }
    if groups.is_empty() {
        open.need("the devices: no listed node has one");
    }
    groups
}

fn clues(host: &Host) -> Vec<Clue> {
    let clue = |gpu: &super::merge::Gpu| Clue {
        index: gpu.index,
        name: gpu.name.as_ref().map(|name| name.value.clone()),
        pci_id: gpu.pci_id,
        memory: gpu.memory.as_ref().map(|memory| memory.value),
    };
    host.gpus.iter().map(clue).collect()
}

/// A listed node's devices; a dump of its like says more than a list.
fn listed(node: &Node, host: &Host, is_like_host: bool) -> Vec<Clue> {
    if is_like_host
        && host
            .gpus
            .iter()
            .all(|gpu| gpu.name.is_some() || gpu.pci_id.is_some())
    {
        return clues(host);
    }
    let each = node.gpus.iter().flat_map(|(name, count, memory)| {
        let clue = Clue {
            name: name.clone(),
            memory: *memory,
            ..Clue::default()
        };
        (0..(*count).min(cluster_file::GPUS_PER_NODE_LIMIT + 1)).map(move |_| clue.clone())
    });
    each.collect()
}

impl Group {
    fn node(
        self,
        merged: &Merged,
        given: &Given,
        catalogue: &Catalogue,
        file: &mut Sketch,
        open: &mut Open,
    ) -> NodeSketch {
        let types: Vec<Option<&DeviceEntry>> = self
            .clues
            .iter()
            .map(|clue| match types::resolve(clue, given, catalogue) {
                Ok(entry) => Some(entry),
                Err(need) => {
                    open.need(need);
                    None
                }
            })
            .collect();
        let names: Vec<String> = types.iter().flatten().map(|entry| entry.name.clone()).collect();
        let mut node = NodeSketch {
            names: self.names,
            gpus: counted(&names),
            memory: memory(&self.clues, &types),
            pcie: given.pcie.clone(),
            ..NodeSketch::default()
        };
        let nothing = Host::default();
        let host = if self.is_like_host { &merged.host } else { &nothing };
        scale_up::connect(host, &types, given, catalogue, &mut node, open);
        let active = nics::active(host, open);
        nics::put(host, &active, given, catalogue, file, &mut node, open);
        // Groups name interfaces by place, which only holds for the host's own.
        let grouped: &[usize] = if given.nics.is_empty() { &active } else { &[] };
        tree::group(host, grouped, given, &mut node, open);
        if node.pcie.is_none() {
            node.pcie = slot(host, catalogue);
        }
        node
    }
}

/// Memory of each device, where the driver reports less than the catalogue, or the catalogue has none.
fn memory(clues: &[Clue], types: &[Option<&DeviceEntry>]) -> Vec<String> {
    let own: Vec<Option<Bytes>> = clues
        .iter()
        .zip(types)
        .map(
            |(clue, entry)| match (clue.memory, entry.and_then(|entry| entry.memory)) {
                (Some(found), Some(own)) => Some(found.min(own)),
                (found, own) => found.or(own),
            },
        )
        .collect();
    let differs = own
        .iter()
        .zip(types)
        .any(|(own, entry)| *own != entry.and_then(|entry| entry.memory));
    let all: Option<Vec<Bytes>> = own.into_iter().collect();
    all.filter(|_| differs)
        .map(|all| all.into_iter().map(Bytes::to_file_text).collect())
        .unwrap_or_default()
}

/// The catalogue's slot of that generation and width, where all devices have the same.
fn slot(host: &Host, catalogue: &Catalogue) -> Option<String> {
    let (generation, lanes) = host.gpus.first()?.slot?;
    let is_same = host.gpus.iter().all(|gpu| gpu.slot == Some((generation, lanes)));
    let name = format!("pcie{generation}x{lanes}");
    (is_same && catalogue.link(&name).is_ok()).then_some(name)
}
