//! The links of a node, in this order, since routes of equal latency take the lowest ids: scale-up links,
//! then the PCI Express tree (`pcie`), then NICs into one switch a kind of network.
//!
//! The point-to-point latency of the catalogue, software included, is charged half at each device's end;
//! what a network adds is charged half at each NIC's.

use infercluster_spec::cluster::{Endpoint, Link, LinkKind, Switch};
use infercluster_spec::{BytesPerSec, GpuId, NodeId, SimDuration, SwitchId};

use super::expand::{Expansion, Parts};
use super::form::{FabricForm, FabricKind, NodeForm};
use crate::catalogue::DeviceEntry;

impl Expansion<'_> {
    pub(super) fn fabric(&mut self, node: &str, parts: &Parts, form: &NodeForm, ids: &[GpuId]) {
        let half = |latency: SimDuration| SimDuration(latency.0.div_ceil(2));
        self.pairs(parts, form, ids);
        match form.fabric.as_ref().map(|form| (form, form.kind)) {
            None if !form.links.is_empty() => {}
            None => {
                let linked = parts
                    .gpus
                    .iter()
                    .find(|entry| entry.scale_up.is_some_and(|rate| rate.per_second() > 0.0));
                if let Some(entry) = linked.filter(|_| ids.len() > 1) {
                    let name = &entry.name;
                    self.ask(format!(
                        "{}.fabric: {name} has scale-up links; write \"nvswitch\", \"mesh\", or \"none\" where they are not connected",
                        parts.path
                    ));
                }
            }
            Some((_, FabricKind::None)) => {}
            Some((form, FabricKind::Nvswitch)) => {
                let latency = self.latency(form.latency, &format!("{}.fabric.latency", parts.path));
                let switch = SwitchId(self.cluster.switches.len() as u32);
                self.cluster.switches.push(Switch {
                    name: format!("{node} nvswitch"),
                });
                for (entry, id) in parts.gpus.iter().zip(ids) {
                    let kind = LinkKind::Nvlink;
                    if let Some(bandwidth) = self.scale_up(parts, form, entry) {
                        let (gpu, switch) = (Endpoint::Gpu(*id), Endpoint::Switch(switch));
                        connect(
                            &mut self.cluster.links,
                            gpu,
                            switch,
                            kind,
                            bandwidth,
                            half(latency),
                        );
                    }
                }
            }
            Some((form, FabricKind::Mesh)) => self.mesh(parts, form, ids),
        }
    }

    /// Scale-up links that the file lists one by one; their positions were checked.
    fn pairs(&mut self, parts: &Parts, form: &NodeForm, ids: &[GpuId]) {
        for (position, pairs) in form.links.iter().enumerate() {
            let latency = self.latency(
                pairs.latency,
                &format!("{}.links[{position}].latency", parts.path),
            );
            let members: Vec<GpuId> = pairs.between.iter().map(|gpu| ids[*gpu as usize]).collect();
            for (first, from) in members.iter().enumerate() {
                for to in &members[first + 1..] {
                    let (from, to) = (Endpoint::Gpu(*from), Endpoint::Gpu(*to));
                    connect(
                        &mut self.cluster.links,
                        from,
                        to,
                        pairs.kind,
                        pairs.bandwidth,
                        latency,
                    );
                }
            }
        }
    }

    /// What one device can send into the switch of its node.
    fn scale_up(&mut self, parts: &Parts, form: &FabricForm, entry: &DeviceEntry) -> Option<BytesPerSec> {
        let rate = form
            .bandwidth
            .or(entry.scale_up)
            .filter(|rate| rate.per_second() > 0.0);
        if rate.is_none() {
            self.ask(format!(
                "{}.fabric: the rate of a {} into the switch, such as fabric = {{ kind = \"nvswitch\", bandwidth = \"450 GB/s\" }}",
                parts.path, entry.name
            ));
        }
        rate
    }

    fn mesh(&mut self, parts: &Parts, form: &FabricForm, ids: &[GpuId]) {
        let latency = self.latency(form.latency, &format!("{}.fabric.latency", parts.path));
        let entry = parts.mesh;
        let bandwidth = form.bandwidth.or(entry.map(|entry| entry.bandwidth));
        let kind = entry.map(|entry| entry.kind);
        let (Some(kind), Some(bandwidth)) = (kind, bandwidth) else {
            self.ask(format!(
                "{}.fabric.link: the link between two devices, such as fabric = {{ kind = \"mesh\", link = \"xgmi-mi300x\" }}",
                parts.path
            ));
            return;
        };
        for (position, from) in ids.iter().enumerate() {
            for to in &ids[position + 1..] {
                let (from, to) = (Endpoint::Gpu(*from), Endpoint::Gpu(*to));
                connect(&mut self.cluster.links, from, to, kind, bandwidth, latency);
            }
        }
    }

    /// Every NIC into the one switch of its kind of network.
    pub(super) fn nics(&mut self, node: NodeId, parts: &Parts, network_links: &mut Vec<Link>) {
        for (position, entry) in parts.nics.iter().enumerate() {
            let latency = match self.network.latency.or(entry.latency) {
                Some(latency) => SimDuration(latency.0.div_ceil(2)),
                None => {
                    self.assume(format!(
                        "network.latency: nothing beyond the point-to-point latency for {}, whose own is not published",
                        entry.name
                    ));
                    SimDuration::ZERO
                }
            };
            let switch = self.network_switch(entry.kind);
            let nic = Endpoint::Nic(node, position as u32);
            connect(
                network_links,
                nic,
                Endpoint::Switch(switch),
                entry.kind,
                entry.bandwidth,
                latency,
            );
        }
    }

    fn network_switch(&mut self, kind: LinkKind) -> SwitchId {
        if let Some(switch) = self.network_switches.get(&kind) {
            return *switch;
        }
        let label = if kind == LinkKind::Infiniband {
            "infiniband"
        } else {
            "ethernet"
        };
        let name = self.network.name.as_deref().unwrap_or("network");
        let switch = SwitchId(self.cluster.switches.len() as u32);
        self.cluster.switches.push(Switch {
            name: format!("{name} {label}"),
        });
        self.network_switches.insert(kind, switch);
        switch
    }

    pub(super) fn latency(&mut self, stated: Option<SimDuration>, field: &str) -> SimDuration {
        stated.unwrap_or_else(|| {
            let point_to_point = self.catalogue.point_to_point();
            self.assume(format!(
                "{field}: {} from device to device, software included ({})",
                point_to_point.latency, point_to_point.note
            ));
            point_to_point.latency
        })
    }
}

/// Both directions of a connection.
pub(super) fn connect(
    links: &mut Vec<Link>,
    a: Endpoint,
    b: Endpoint,
    kind: LinkKind,
    bandwidth: BytesPerSec,
    latency: SimDuration,
) {
    for (from, to) in [(a, b), (b, a)] {
        links.push(Link {
            from,
            to,
            kind,
            bandwidth,
            latency,
        });
    }
}
