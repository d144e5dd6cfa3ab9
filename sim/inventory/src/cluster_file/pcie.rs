//! The PCI Express tree of a node: devices and NICs below switches or right below their socket, sockets
//! joined by their own link. Where the file groups nothing, everything hangs on one host bridge.
//!
//! Bridges of a node are numbered sockets first, then switches. A switch reaches its socket through one slot
//! as fast as the fastest below it, so what hangs on one switch shares that slot.

use std::collections::BTreeMap;

use infercluster_spec::cluster::{Endpoint, LinkKind};
use infercluster_spec::{BytesPerSec, GpuId, NodeId, SimDuration};

use super::connect::connect;
use super::expand::{Expansion, Parts};
use super::form::{FabricKind, GroupForm, NodeForm};
use crate::catalogue::LinkEntry;
use crate::error::InventoryError;

/// What hangs where, by number of a bridge.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Tree {
    sockets: u32,
    /// The socket of each switch.
    switches: Vec<u32>,
    gpus: Vec<u32>,
    nics: Vec<u32>,
}

impl Expansion<'_> {
    /// Checks the groups and lists of a node, and says what hangs where.
    pub(super) fn tree(
        &self,
        path: &str,
        form: &NodeForm,
        gpus: usize,
        nics: usize,
    ) -> Result<Tree, InventoryError> {
        for (position, pairs) in form.links.iter().enumerate() {
            let field = format!("{path}.links[{position}].between");
            self.members(&field, &pairs.between, gpus, "devices")?;
            if pairs.between.len() < 2 {
                return Err(self.bad(&field, &format!("{:?}", pairs.between), "at least two devices"));
            }
            if !matches!(pairs.kind, LinkKind::Nvlink | LinkKind::Xgmi) {
                let field = format!("{path}.links[{position}].kind");
                return Err(self.bad(&field, "another kind of link", "nvlink or xgmi"));
            }
        }
        let sockets = self.groups(&format!("{path}.sockets"), &form.sockets, gpus, nics)?;
        let switches = self.groups(&format!("{path}.switches"), &form.switches, gpus, nics)?;
        let mut tree = Tree {
            sockets: form.sockets.len().max(1) as u32,
            ..Tree::default()
        };
        let socket_of = |member: Member| sockets.get(&member).copied().unwrap_or(0);
        for (position, group) in form.switches.iter().enumerate() {
            let mut members = members(group).map(socket_of);
            let own = members.next().unwrap_or(0);
            if members.any(|other| other != own) {
                let field = format!("{path}.switches[{position}]");
                return Err(self.bad(&field, "members of two sockets", "members of one socket"));
            }
            tree.switches.push(own);
        }
        let bridge = |member: Member| match switches.get(&member) {
            Some(switch) => tree.sockets + switch,
            None => socket_of(member),
        };
        tree.gpus = (0..gpus as u32).map(|gpu| bridge(Member::Gpu(gpu))).collect();
        tree.nics = (0..nics as u32).map(|nic| bridge(Member::Nic(nic))).collect();
        Ok(tree)
    }

    /// The group of each member; none is in two.
    fn groups(
        &self,
        field: &str,
        groups: &[GroupForm],
        gpus: usize,
        nics: usize,
    ) -> Result<BTreeMap<Member, u32>, InventoryError> {
        let mut group_of = BTreeMap::new();
        for (position, group) in groups.iter().enumerate() {
            let field = format!("{field}[{position}]");
            self.members(&format!("{field}.gpus"), &group.gpus, gpus, "devices")?;
            self.members(&format!("{field}.nics"), &group.nics, nics, "NICs")?;
            for member in members(group) {
                if group_of.insert(member, position as u32).is_some() {
                    let found = format!("{member:?}");
                    return Err(self.bad(&field, &found, "members that no other group has"));
                }
            }
        }
        Ok(group_of)
    }

    fn members(&self, field: &str, found: &[u32], count: usize, what: &str) -> Result<(), InventoryError> {
        let mut seen = found.to_vec();
        seen.sort_unstable();
        let is_twice = seen.windows(2).any(|pair| pair[0] == pair[1]);
        let beyond = seen.last().is_some_and(|last| *last as usize >= count);
        if is_twice || beyond {
            let expected = format!("each at most once, and below {count}, the number of {what}");
            return Err(self.bad(field, &format!("{found:?}"), &expected));
        }
        Ok(())
    }

    /// The tree, where anything needs it: several devices, or a NIC.
    pub(super) fn pcie(&mut self, node: NodeId, parts: &Parts, form: &NodeForm, ids: &[GpuId]) {
        let in_host_memory = parts.gpus.iter().all(|entry| entry.in_host_memory);
        if parts.nics.is_empty() && (ids.len() < 2 || (in_host_memory && form.pcie.is_none())) {
            return;
        }
        let slots: Vec<Option<&LinkEntry>> = parts
            .gpus
            .iter()
            .map(|entry| {
                let own = || self.catalogue.link(entry.pcie.as_ref()?).ok();
                parts.pcie.or_else(own)
            })
            .collect();
        let has_fabric = form
            .fabric
            .as_ref()
            .is_some_and(|fabric| fabric.kind != FabricKind::None);
        let missing = parts.gpus.iter().zip(&slots).find(|(_, slot)| slot.is_none());
        if let Some((entry, _)) = missing {
            if !parts.nics.is_empty() || !has_fabric {
                self.ask(format!(
                    "{}.pcie: how a {} reaches its host, such as pcie = \"pcie5x16\"",
                    parts.path, entry.name
                ));
            }
            return;
        }
        let latency = self.latency(None, "[[link]] latency of the pcie link");
        for (position, (slot, id)) in slots.iter().flatten().zip(ids).enumerate() {
            let latency = SimDuration(slot.latency.unwrap_or(latency).0.div_ceil(2));
            let bridge = Endpoint::Bridge(node, parts.tree.gpus[position]);
            let gpu = Endpoint::Gpu(*id);
            connect(
                &mut self.cluster.links,
                gpu,
                bridge,
                LinkKind::Pcie,
                slot.bandwidth,
                latency,
            );
        }
        let fastest = slots
            .iter()
            .flatten()
            .map(|slot| slot.bandwidth)
            .max_by(|a, b| a.per_second().total_cmp(&b.per_second()));
        if let Some(fastest) = fastest {
            self.bridges(node, parts, form, fastest);
        }
    }

    /// Links between bridges, and from bridges to NICs.
    fn bridges(&mut self, node: NodeId, parts: &Parts, form: &NodeForm, fastest: BytesPerSec) {
        let tree = &parts.tree;
        let bridge = |number: u32| Endpoint::Bridge(node, number);
        if !tree.switches.is_empty() {
            self.assume(format!("{}.switches: each on a slot of {fastest}", parts.path));
        }
        for (position, socket) in tree.switches.iter().enumerate() {
            let switch = bridge(tree.sockets + position as u32);
            let (links, kind) = (&mut self.cluster.links, LinkKind::Pcie);
            connect(links, switch, bridge(*socket), kind, fastest, SimDuration::ZERO);
        }
        if tree.sockets > 1 {
            match form.socket {
                None => self.ask(format!(
                    "{}.socket: the rate between two sockets, such as socket = \"60 GB/s\"",
                    parts.path
                )),
                Some(rate) => {
                    for first in 0..tree.sockets {
                        for second in first + 1..tree.sockets {
                            let (a, b) = (bridge(first), bridge(second));
                            let (links, kind) = (&mut self.cluster.links, LinkKind::Socket);
                            connect(links, a, b, kind, rate, SimDuration::ZERO);
                        }
                    }
                }
            }
        }
        if !parts.nics.is_empty() {
            self.assume(format!(
                "{}.nics: each on a PCI Express slot of {fastest}",
                parts.path
            ));
        }
        for (position, own) in tree.nics.iter().enumerate() {
            let nic = Endpoint::Nic(node, position as u32);
            let (links, kind) = (&mut self.cluster.links, LinkKind::Pcie);
            connect(links, bridge(*own), nic, kind, fastest, SimDuration::ZERO);
        }
    }
}

/// A member of a group, by position in the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    Gpu(u32),
    Nic(u32),
}

fn members(group: &GroupForm) -> impl Iterator<Item = Member> {
    let gpus = group.gpus.iter().map(|gpu| Member::Gpu(*gpu));
    gpus.chain(group.nics.iter().map(|nic| Member::Nic(*nic)))
}
