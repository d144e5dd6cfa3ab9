//! Several dumps of one host, and lists of nodes, put together. What two dumps say differently becomes a
//! problem that names both places; what only one of them says is taken from it.

use std::collections::BTreeMap;

use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Bytes, BytesPerSec};

use super::facts::{Device, Facts, GpuFacts, HostFacts, NicFacts, NodeFacts};
use super::topo_matrix::Connection;
use super::{Figure, Import, Kind};

/// A place in one of the dumps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Position of the dump.
    pub dump: usize,
    /// Line, from 1.
    pub line: usize,
}

/// A value with the place that states it.
#[derive(Debug, Clone, PartialEq)]
pub struct Stated<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub at: At,
}

/// Everything that the dumps say together.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Merged {
    /// The host that single-host dumps were taken on.
    pub host: Host,
    /// Nodes that lists name.
    pub nodes: Vec<Node>,
    /// What contradicts: position of the dump, line, what.
    pub contradictions: Vec<(usize, usize, String)>,
}

/// One host.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// Its devices by index.
    pub gpus: Vec<Gpu>,
    /// Its network interfaces.
    pub nics: Vec<Nic>,
    /// Scale-up links between devices.
    pub scale_up: BTreeMap<(usize, usize), Stated<Connection>>,
    /// Distances over PCI Express.
    pub pcie: BTreeMap<(Device, Device), Stated<Connection>>,
    /// Whether a dump would show scale-up links if there were any.
    pub tells_scale_up: bool,
}

/// One device of the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    /// Where it is shown first.
    pub at: At,
    /// Its number.
    pub index: Option<u32>,
    /// Its PCI address.
    pub bus: Option<String>,
    /// What the driver calls its type.
    pub name: Option<Stated<String>>,
    /// PCI vendor and device.
    pub pci_id: Option<(u16, u16)>,
    /// Memory that the driver reports.
    pub memory: Option<Stated<Bytes>>,
    /// Generation and lanes of its slot.
    pub slot: Option<(u32, u32)>,
    /// Rates of its active scale-up links.
    pub link_rates: Option<Stated<Vec<BytesPerSec>>>,
}

/// One network interface of the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Nic {
    /// Where it is shown first.
    pub at: At,
    /// Its name.
    pub name: String,
    /// Its PCI address.
    pub bus: Option<String>,
    /// Line rate.
    pub rate: Option<Stated<BytesPerSec>>,
    /// InfiniBand or Ethernet.
    pub network: Option<LinkKind>,
    /// Whether no port is active.
    pub is_down: bool,
}

/// One node of a list, or several without names.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Where it is listed.
    pub at: At,
    /// Its name.
    pub name: Option<String>,
    /// How many there are; one where it has a name.
    pub count: u64,
    /// Types as the dump calls them, numbers, and memory of one.
    pub gpus: Vec<(Option<String>, u64, Option<Bytes>)>,
}

impl Node {
    /// Devices of each.
    pub fn gpu_count(&self) -> u64 {
        self.gpus
            .iter()
            .fold(0, |sum, (_, count, _)| sum.saturating_add(*count))
    }
}

/// Puts dumps together; each with the name that messages call it.
pub fn merge(dumps: &[(&str, &Import)]) -> Merged {
    let mut merging = Merging {
        names: dumps.iter().map(|(name, _)| *name).collect(),
        merged: Merged::default(),
        is_partial: false,
        by_name: BTreeMap::new(),
    };
    for (dump, (_, import)) in dumps.iter().enumerate() {
        merging.facts(dump, &import.facts, import);
    }
    merging.merged
}

struct Merging<'a> {
    names: Vec<&'a str>,
    merged: Merged,
    /// Whether a dump that was read may have lost devices.
    is_partial: bool,
    by_name: BTreeMap<String, usize>,
}

impl Merging<'_> {
    fn facts(&mut self, dump: usize, facts: &Facts, import: &Import) {
        let gpus = self.gpus(dump, &facts.host, import);
        let nics = self.nics(dump, &facts.host.nics);
        self.pairs(dump, &facts.host, &gpus, &nics);
        let has_elements =
            matches!(import.counts.get("gpu_elems"), Some(Some(Figure::Count(count))) if *count > 0);
        let host = &mut self.merged.host;
        host.tells_scale_up |= import.kind == Kind::TopoMatrix
            || import.kind == Kind::NvlinkStatus
                && facts.host.gpus.iter().all(|gpu| gpu.link_rates.is_empty())
            || import.kind == Kind::NcclXml && has_elements;
        for node in &facts.nodes {
            self.node(dump, node);
        }
        for more in &facts.more {
            self.facts(dump, more, import);
        }
    }

    fn contradict(&mut self, at: At, what: String, other: At) {
        let name = self.names.get(other.dump).copied().unwrap_or_default();
        let what = format!("{what} in {name}:{}", other.line);
        self.merged.contradictions.push((at.dump, at.line, what));
    }

    /// Positions on the host of a dump's devices.
    fn gpus(&mut self, dump: usize, facts: &HostFacts, import: &Import) -> Vec<Option<usize>> {
        let before = self.merged.host.gpus.len();
        let (is_first, is_whole) = (before == 0, import.complete);
        let found = facts.gpus.len();
        if found == 0 {
            return Vec::new();
        }
        let at = |gpu: &GpuFacts| At { dump, line: gpu.line };
        if !is_first && found < before && is_whole {
            let other = self.merged.host.gpus[0].at;
            let what = format!("the host has {found} devices here, {before}");
            self.contradict(at(&facts.gpus[0]), what, other);
        }
        let mut positions = Vec::new();
        let mut extra = None;
        for (position, gpu) in facts.gpus.iter().enumerate() {
            let known = self.known(gpu, position, before, found);
            let own = match known {
                Some(known) => Some(known),
                None if is_first || self.is_partial => {
                    self.merged.host.gpus.push(Gpu::at(at(gpu)));
                    Some(self.merged.host.gpus.len() - 1)
                }
                None => {
                    extra.get_or_insert(at(gpu));
                    None
                }
            };
            if let Some(own) = own {
                self.gpu(own, gpu, at(gpu));
            }
            positions.push(own);
        }
        if let Some(extra) = extra {
            let other = self.merged.host.gpus[0].at;
            let what = format!("this device is not one of the {before} that are listed");
            self.contradict(extra, what, other);
        }
        self.is_partial = (is_first || self.is_partial) && !is_whole;
        positions
    }

    /// The same device by PCI address, by number, or, where neither is told on one side, by place.
    fn known(&self, gpu: &GpuFacts, position: usize, before: usize, found: usize) -> Option<usize> {
        let own = &self.merged.host.gpus[..before];
        let have_buses = own.iter().any(|own| own.bus.is_some());
        if let Some(bus) = gpu.bus.as_ref().filter(|_| have_buses)
            && let Some(known) = own.iter().position(|own| own.bus.as_ref() == Some(bus))
        {
            return Some(known);
        }
        if let Some(index) = gpu.index
            && let Some(known) = own.iter().position(|own| own.index == Some(index))
        {
            let is_same = own[known].bus.is_none() || gpu.bus.is_none() || own[known].bus == gpu.bus;
            return is_same.then_some(known);
        }
        let has_place = own
            .get(position)
            .is_some_and(|own| own.index.is_none() || gpu.index.is_none());
        (before == found && has_place && !(have_buses && gpu.bus.is_some())).then_some(position)
    }

    fn gpu(&mut self, position: usize, facts: &GpuFacts, at: At) {
        let own = self.merged.host.gpus[position].clone();
        let index = own
            .index
            .or(facts.index)
            .map_or(position.to_string(), |index| index.to_string());
        if let Some((name, other)) = facts.name.as_ref().zip(own.name.as_ref())
            && !alike(name, &other.value)
        {
            let what = format!("GPU {index} is {name} here, {}", other.value);
            self.contradict(at, what, other.at);
        }
        if let Some((memory, other)) = facts.memory.zip(own.memory.as_ref())
            && memory.0.abs_diff(other.value.0) > other.value.0 / 20
        {
            let what = format!("GPU {index} has {memory} here, {}", other.value);
            self.contradict(at, what, other.at);
        }
        let gpu = &mut self.merged.host.gpus[position];
        gpu.index = own.index.or(facts.index);
        gpu.bus = own.bus.or_else(|| facts.bus.clone());
        gpu.pci_id = own.pci_id.or(facts.pci_id);
        gpu.slot = own.slot.or(facts.slot);
        gpu.memory = own.memory.or(facts.memory.map(|value| Stated { value, at }));
        let name = || facts.name.clone().map(|value| Stated { value, at });
        gpu.name = own.name.or_else(name);
        if !facts.link_rates.is_empty() && gpu.link_rates.is_none() {
            let value = facts.link_rates.clone();
            gpu.link_rates = Some(Stated { value, at });
        }
    }

    fn nics(&mut self, dump: usize, facts: &[NicFacts]) -> Vec<Option<usize>> {
        let before = self.merged.host.nics.len();
        let is_numbered = |name: &str| {
            name.strip_prefix("NIC")
                .is_some_and(|rest| rest.parse::<u32>().is_ok())
        };
        // Numbers stand for names that a lost legend would give.
        let by_place = before == facts.len()
            && (facts.iter().all(|nic| is_numbered(&nic.name))
                || self.merged.host.nics.iter().all(|nic| is_numbered(&nic.name)));
        let mut positions = Vec::new();
        for (position, nic) in facts.iter().enumerate() {
            let at = At { dump, line: nic.line };
            let own = &self.merged.host.nics[..before];
            let known = own
                .iter()
                .position(|own| own.name == nic.name || own.bus.is_some() && own.bus == nic.bus)
                .or_else(|| by_place.then_some(position));
            let position = known.unwrap_or_else(|| {
                self.merged.host.nics.push(Nic::at(at, nic.name.clone()));
                self.merged.host.nics.len() - 1
            });
            self.nic(position, nic, at);
            positions.push(Some(position));
        }
        positions
    }

    fn nic(&mut self, position: usize, facts: &NicFacts, at: At) {
        let own = self.merged.host.nics[position].clone();
        if let Some((rate, other)) = facts.rate.zip(own.rate.as_ref())
            && (rate.per_second() - other.value.per_second()).abs() > other.value.per_second() * 0.2
        {
            let what = format!("{} runs at {rate} here, {}", facts.name, other.value);
            self.contradict(at, what, other.at);
        }
        let nic = &mut self.merged.host.nics[position];
        nic.rate = own.rate.or(facts.rate.map(|value| Stated { value, at }));
        nic.network = own.network.or(facts.network);
        nic.bus = own.bus.or_else(|| facts.bus.clone());
        nic.is_down |= facts.is_down;
        if nic.name.starts_with("NIC") {
            nic.name = facts.name.clone();
        }
    }

    fn pairs(&mut self, dump: usize, facts: &HostFacts, gpus: &[Option<usize>], nics: &[Option<usize>]) {
        let place = |device: Device| match device {
            Device::Gpu(own) => gpus.get(own).copied().flatten().map(Device::Gpu),
            Device::Nic(own) => nics.get(own).copied().flatten().map(Device::Nic),
        };
        for pair in &facts.pairs {
            let Some((a, b)) = place(pair.a).zip(place(pair.b)) else {
                continue;
            };
            let (a, b) = (a.min(b), a.max(b));
            let (value, at) = (
                pair.connection,
                At {
                    dump,
                    line: pair.line,
                },
            );
            let is_scale_up = matches!(value, Connection::Nvlink(_) | Connection::Xgmi(_));
            match (a, b) {
                (Device::Gpu(first), Device::Gpu(second)) if is_scale_up => {
                    let known = self.merged.host.scale_up.get(&(first, second)).cloned();
                    if let Some(other) = known.filter(|other| other.value != value) {
                        let what = format!("GPU {first} to GPU {second} is {value} here, {}", other.value);
                        self.contradict(at, what, other.at);
                    } else {
                        let stated = Stated { value, at };
                        self.merged.host.scale_up.entry((first, second)).or_insert(stated);
                    }
                }
                _ => {
                    let stated = Stated { value, at };
                    self.merged.host.pcie.entry((a, b)).or_insert(stated);
                }
            }
        }
    }

    fn node(&mut self, dump: usize, facts: &NodeFacts) {
        let at = At {
            dump,
            line: facts.line,
        };
        if facts.names.is_empty() {
            self.merged.nodes.push(Node {
                at,
                name: None,
                count: facts.count,
                gpus: facts.gpus.clone(),
            });
        }
        for name in &facts.names {
            let node = Node {
                at,
                name: Some(name.clone()),
                count: 1,
                gpus: facts.gpus.clone(),
            };
            let Some(known) = self.by_name.get(name).copied() else {
                self.by_name.insert(name.clone(), self.merged.nodes.len());
                self.merged.nodes.push(node);
                continue;
            };
            let own = self.merged.nodes[known].clone();
            if own.gpu_count() != node.gpu_count() {
                let what = format!(
                    "{name} has {} devices here, {}",
                    node.gpu_count(),
                    own.gpu_count()
                );
                self.contradict(at, what, own.at);
            } else if own.gpus.iter().any(|(name, _, _)| name.is_none()) {
                self.merged.nodes[known].gpus = node.gpus;
            }
        }
    }
}

impl Gpu {
    fn at(at: At) -> Self {
        Self {
            at,
            index: None,
            bus: None,
            name: None,
            pci_id: None,
            memory: None,
            slot: None,
            link_rates: None,
        }
    }
}

impl Nic {
    fn at(at: At, name: String) -> Self {
        Self {
            at,
            name,
            bus: None,
            rate: None,
            network: None,
            is_down: false,
        }
    }
}

/// Whether two spellings can be one type: a table shortens names with dots.
fn alike(a: &str, b: &str) -> bool {
    let plain = |name: &str| -> String {
        let name = name.trim_end_matches('.').to_lowercase();
        name.trim_start_matches("nvidia").replace([' ', '-', '_'], "")
    };
    let (a, b) = (plain(a), plain(b));
    a.starts_with(&b) || b.starts_with(&a)
}
