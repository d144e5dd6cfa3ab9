//! From what a cluster file says to a full cluster.
//!
//! Types are looked up and counts are checked here, before anything is made of them; links are in
//! `connect`. What is open or assumed is collected, each once.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::cluster::{DeviceType, Gpu, Link, LinkKind, Nic, Node};
use infercluster_spec::{Bytes, Cluster, Fraction, GpuId, NodeId, SwitchId};

use super::form::{ClusterForm, Counted, NetworkForm, NodeForm};
use super::pcie::Tree;
use super::{ClusterFile, GPUS_LIMIT, GPUS_PER_NODE_LIMIT, NICS_PER_NODE_LIMIT};
use crate::catalogue::{Catalogue, DeviceEntry, LinkEntry};
use crate::error::InventoryError;
use crate::toml_file::OneOrMany;

pub(super) fn expand(
    file: &str,
    form: ClusterForm,
    catalogue: &Catalogue,
) -> Result<ClusterFile, InventoryError> {
    let mut catalogue = catalogue.clone();
    for (index, link) in form.link.into_iter().enumerate() {
        catalogue.merge_link(file, &format!("link[{index}]"), link)?;
    }
    for (index, device) in form.device.into_iter().enumerate() {
        catalogue.merge_device(file, &format!("device[{index}]"), device)?;
    }
    if form.node.is_empty() {
        return Err(InventoryError::Missing {
            file: file.to_owned(),
            field: "node".to_owned(),
            expected: "at least one [[node]] with `gpus`".to_owned(),
        });
    }
    let mut expansion = Expansion {
        file,
        catalogue: &catalogue,
        network: form.network,
        cluster: Cluster {
            name: form.name.unwrap_or_else(|| "cluster".to_owned()),
            device_types: BTreeMap::new(),
            nodes: Vec::new(),
            switches: Vec::new(),
            links: Vec::new(),
        },
        next_gpu: 0,
        network_switches: BTreeMap::new(),
        networks: Vec::new(),
        names: BTreeSet::new(),
        stated_memory: BTreeMap::new(),
        open: Vec::new(),
        assumed: Vec::new(),
    };
    let mut network_links = Vec::new();
    for (index, node) in form.node.iter().enumerate() {
        expansion.nodes(index, node, &mut network_links)?;
    }
    expansion.finish(network_links)
}

pub(super) struct Expansion<'a> {
    file: &'a str,
    pub(super) catalogue: &'a Catalogue,
    pub(super) network: NetworkForm,
    pub(super) cluster: Cluster,
    next_gpu: u32,
    pub(super) network_switches: BTreeMap<LinkKind, SwitchId>,
    /// Kinds of network of each node.
    networks: Vec<BTreeSet<LinkKind>>,
    names: BTreeSet<String>,
    /// Largest memory that a node gives to a device of a type.
    stated_memory: BTreeMap<String, Bytes>,
    open: Vec<String>,
    assumed: Vec<String>,
}

/// A node of the file with its types looked up.
pub(super) struct Parts<'a> {
    pub(super) path: String,
    pub(super) gpus: Vec<&'a DeviceEntry>,
    pub(super) nics: Vec<&'a LinkEntry>,
    /// What stands in for the slots of the devices.
    pub(super) pcie: Option<&'a LinkEntry>,
    /// Between every two devices.
    pub(super) mesh: Option<&'a LinkEntry>,
    pub(super) tree: Tree,
    memory: Vec<Option<Bytes>>,
    speed: Vec<Fraction>,
}

impl<'a> Expansion<'a> {
    fn nodes(
        &mut self,
        index: usize,
        form: &NodeForm,
        network_links: &mut Vec<Link>,
    ) -> Result<(), InventoryError> {
        let parts = self.parts(index, form)?;
        let names = self.names(index, form)?;
        let total = names.len() as u64 * parts.gpus.len() as u64 + u64::from(self.next_gpu);
        self.limit(
            &format!("{}.count", parts.path),
            "devices in the cluster",
            total,
            GPUS_LIMIT,
        )?;
        for name in names {
            if !self.names.insert(name.clone()) {
                let field = format!("{}.name", parts.path);
                return Err(self.bad(&field, &name, "a name that no other node has"));
            }
            self.node(name, &parts, form, network_links);
            // Copies would ask and assume the same again.
            if !self.open.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// The names of the nodes that a form stands for.
    fn names(&self, index: usize, form: &NodeForm) -> Result<Vec<String>, InventoryError> {
        let path = format!("node[{index}]");
        if form.count == 0 {
            return Err(self.bad(&format!("{path}.count"), "0", "at least 1"));
        }
        if !form.names.is_empty() {
            if form.count != 1 || form.name.is_some() {
                let expected = "either `names`, or `name` and `count`";
                return Err(self.bad(
                    &format!("{path}.names"),
                    "a list beside `name` or `count`",
                    expected,
                ));
            }
            return Ok(form.names.clone());
        }
        self.limit(
            &format!("{path}.count"),
            "nodes",
            u64::from(form.count),
            GPUS_LIMIT,
        )?;
        let base = form.name.clone().unwrap_or_else(|| format!("node{index}"));
        if form.count == 1 {
            return Ok(vec![base]);
        }
        Ok((0..form.count).map(|copy| format!("{base}-{copy}")).collect())
    }

    fn parts(&self, index: usize, form: &NodeForm) -> Result<Parts<'a>, InventoryError> {
        let path = format!("node[{index}]");
        let counted = |field: &str, items: &OneOrMany<Counted>, what, limit| {
            let total = items
                .values
                .iter()
                .fold(0_u64, |sum, item| sum.saturating_add(item.count));
            self.limit(&format!("{path}.{field}"), what, total, limit)
        };
        counted("gpus", &form.gpus, "devices in one node", GPUS_PER_NODE_LIMIT)?;
        counted("nics", &form.nics, "NICs in one node", NICS_PER_NODE_LIMIT)?;
        let mut gpus = Vec::new();
        for item in &form.gpus.values {
            let entry = self.located(&format!("{path}.gpus"), self.catalogue.device(&item.name))?;
            gpus.extend((0..item.count).map(|_| entry));
        }
        if gpus.is_empty() {
            return Err(self.bad(
                &format!("{path}.gpus"),
                "nothing",
                "devices such as `8 x h100-sxm`",
            ));
        }
        let mut nics = Vec::new();
        for item in &form.nics.values {
            let field = format!("{path}.nics");
            let entry = self.located(&field, self.catalogue.link(&item.name))?;
            if !matches!(entry.kind, LinkKind::Infiniband | LinkKind::Ethernet) {
                return Err(self.bad(
                    &field,
                    &item.name,
                    "an InfiniBand or Ethernet link of the catalogue",
                ));
            }
            nics.extend((0..item.count).map(|_| entry));
        }
        let named = |field: &str, name: Option<&String>| match name {
            Some(name) => self
                .located(&format!("{path}.{field}"), self.catalogue.link(name))
                .map(Some),
            None => Ok(None),
        };
        let pcie = named("pcie", form.pcie.as_ref())?;
        let mesh = named(
            "fabric.link",
            form.fabric.as_ref().and_then(|fabric| fabric.link.as_ref()),
        )?;
        if let Some(entry) = pcie.filter(|entry| entry.kind != LinkKind::Pcie) {
            return Err(self.bad(
                &format!("{path}.pcie"),
                &entry.name,
                "a PCI Express link of the catalogue",
            ));
        }
        let tree = self.tree(&path, form, gpus.len(), nics.len())?;
        if !form.nic_names.is_empty() && form.nic_names.len() != nics.len() {
            let found = format!("a list of {}", form.nic_names.len());
            let expected = format!("a name for each of the {} NICs", nics.len());
            return Err(self.bad(&format!("{path}.nic_names"), &found, &expected));
        }
        let memory = self.spread(&format!("{path}.memory"), form.memory.as_ref(), gpus.len())?;
        let speed = self.spread(&format!("{path}.speed"), form.speed.as_ref(), gpus.len())?;
        for (entry, memory) in gpus.iter().zip(&memory) {
            if let Some((memory, limit)) = memory.zip(entry.memory).filter(|(memory, limit)| memory > limit) {
                let expected = format!("at most the {limit} of {}", entry.name);
                return Err(self.bad(&format!("{path}.memory"), &memory.to_string(), &expected));
            }
        }
        Ok(Parts {
            path,
            gpus,
            nics,
            pcie,
            mesh,
            tree,
            memory,
            speed: speed
                .into_iter()
                .map(|speed| speed.unwrap_or(Fraction::ONE))
                .collect(),
        })
    }

    /// One value for all devices, or one each.
    fn spread<T: Copy>(
        &self,
        field: &str,
        given: Option<&OneOrMany<T>>,
        count: usize,
    ) -> Result<Vec<Option<T>>, InventoryError> {
        match given {
            None => Ok(vec![None; count]),
            Some(OneOrMany {
                values,
                is_list: false,
            }) => Ok(vec![values.first().copied(); count]),
            Some(OneOrMany { values, .. }) if values.len() == count => {
                Ok(values.iter().copied().map(Some).collect())
            }
            Some(OneOrMany { values, .. }) => Err(self.bad(
                field,
                &format!("a list of {}", values.len()),
                &format!("one value, or a list of {count} for the {count} devices of the node"),
            )),
        }
    }

    fn node(&mut self, name: String, parts: &Parts<'a>, form: &NodeForm, network_links: &mut Vec<Link>) {
        let id = NodeId(self.cluster.nodes.len() as u32);
        let mut gpus = Vec::with_capacity(parts.gpus.len());
        for (position, entry) in parts.gpus.iter().enumerate() {
            let (memory, speed) = (parts.memory[position], parts.speed[position]);
            if let Some(memory) = memory {
                let stated = self.stated_memory.entry(entry.name.clone()).or_default();
                *stated = memory.max(*stated);
            }
            self.device_type(&parts.path, entry, memory);
            gpus.push(Gpu {
                id: GpuId(self.next_gpu),
                device_type: entry.name.clone(),
                memory,
                speed,
            });
            self.next_gpu += 1;
        }
        let ids: Vec<GpuId> = gpus.iter().map(|gpu| gpu.id).collect();
        self.fabric(&name, parts, form, &ids);
        self.pcie(id, parts, form, &ids);
        self.nics(id, parts, network_links);
        let nics = parts.nics.iter().enumerate().map(|(position, entry)| Nic {
            name: form
                .nic_names
                .get(position)
                .cloned()
                .unwrap_or_else(|| format!("{}-{position}", entry.name)),
            bandwidth: entry.bandwidth,
        });
        self.networks
            .push(parts.nics.iter().map(|entry| entry.kind).collect());
        self.cluster.nodes.push(Node {
            name,
            gpus,
            nics: nics.collect(),
        });
    }

    /// Notes the type, and asks for what it lacks.
    fn device_type(&mut self, path: &str, entry: &DeviceEntry, memory: Option<Bytes>) {
        let name = &entry.name;
        if entry.memory.is_none() && memory.is_none() {
            self.ask(format!(
                "{path}.memory: the memory of a {name}, such as memory = \"2 GiB\""
            ));
        }
        if entry.memory_bandwidth.is_none() {
            self.ask(format!(
                "the memory bandwidth of {name}: [[device]] name = \"{name}\" with memory_bandwidth = \"... GB/s\""
            ));
        }
        if entry.peak.is_empty() {
            self.ask(format!(
                "a compute rate of {name}: [[device]] name = \"{name}\" with peak = {{ bf16 = \"... TFLOP/s\" }}"
            ));
        }
        let (Some(memory_bandwidth), false) = (
            entry.memory_bandwidth,
            self.cluster.device_types.contains_key(name),
        ) else {
            return;
        };
        let device_type = DeviceType {
            memory: entry.memory.unwrap_or_default(),
            memory_bandwidth,
            peak: entry.peak.clone(),
            multiprocessors: entry.multiprocessors,
            last_level_cache: entry.last_level_cache,
            source: self.catalogue.cite(&entry.sources),
        };
        self.cluster.device_types.insert(name.clone(), device_type);
    }

    fn finish(mut self, network_links: Vec<Link>) -> Result<ClusterFile, InventoryError> {
        self.cluster.links.extend(network_links);
        for (name, device_type) in &mut self.cluster.device_types {
            if device_type.memory == Bytes::ZERO {
                device_type.memory = self.stated_memory.get(name).copied().unwrap_or_default();
            }
        }
        for apart in self.apart() {
            self.ask(format!(
                "how {apart} reaches {}: nics of one kind in both, such as nics = \"1 x ndr\"",
                self.cluster.nodes[0].name
            ));
        }
        if self.open.is_empty() {
            return Ok(ClusterFile {
                cluster: self.cluster,
                assumed: self.assumed,
            });
        }
        Err(InventoryError::Open {
            file: self.file.to_owned(),
            open: self.open,
        })
    }

    /// Nodes that share no network with those before them.
    fn apart(&self) -> Vec<String> {
        let Some(mut reached) = self.networks.first().cloned() else {
            return Vec::new();
        };
        let mut waiting: Vec<usize> = (1..self.networks.len()).collect();
        // A node with two kinds of NIC joins two networks, so nodes are tried until none joins any more.
        loop {
            let before = waiting.len();
            waiting.retain(|node| {
                let own = &self.networks[*node];
                let joins = !own.is_disjoint(&reached);
                if joins {
                    reached.extend(own);
                }
                !joins
            });
            if waiting.len() == before {
                break;
            }
        }
        waiting
            .iter()
            .map(|node| self.cluster.nodes[*node].name.clone())
            .collect()
    }

    pub(super) fn ask(&mut self, item: String) {
        if !self.open.contains(&item) {
            self.open.push(item);
        }
    }

    pub(super) fn assume(&mut self, item: String) {
        if !self.assumed.contains(&item) {
            self.assumed.push(item);
        }
    }

    pub(super) fn limit(
        &self,
        field: &str,
        what: &'static str,
        found: u64,
        limit: u64,
    ) -> Result<(), InventoryError> {
        if found <= limit {
            return Ok(());
        }
        Err(InventoryError::TooMany {
            file: self.file.to_owned(),
            field: field.to_owned(),
            what,
            found,
            limit,
        })
    }

    /// The catalogue's error with the place in this file.
    fn located<T>(&self, at: &str, result: Result<T, InventoryError>) -> Result<T, InventoryError> {
        result.map_err(|error| match error {
            InventoryError::UnknownType {
                kind, found, near, ..
            } => InventoryError::UnknownType {
                file: self.file.to_owned(),
                field: at.to_owned(),
                kind,
                found,
                near,
            },
            other => other,
        })
    }

    pub(super) fn bad(&self, field: &str, found: &str, expected: &str) -> InventoryError {
        InventoryError::BadField {
            file: self.file.to_owned(),
            field: field.to_owned(),
            found: found.to_owned(),
            expected: expected.to_owned(),
        }
    }
}
