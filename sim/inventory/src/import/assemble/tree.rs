//! PCI Express switches and sockets of a host, from the classes of its paths.

use crate::import::facts::Device;
use crate::import::merge::Host;
use crate::import::topo_matrix::Connection;

use super::sketch::{GroupSketch, NodeSketch};
use super::{Given, Open};

/// Writes what hangs together into the node; `nics` are the positions of the interfaces that are kept.
pub(super) fn group(host: &Host, nics: &[usize], given: &Given, node: &mut NodeSketch, open: &mut Open) {
    let devices: Vec<Device> = (0..host.gpus.len())
        .map(Device::Gpu)
        .chain(nics.iter().map(|nic| Device::Nic(*nic)))
        .collect();
    let below_switch = |connection| matches!(connection, Connection::Pix | Connection::Pxb | Connection::Psb);
    let in_socket =
        |connection| below_switch(connection) || matches!(connection, Connection::Phb | Connection::Node);
    let switches = joined(host, &devices, below_switch);
    node.switches = switches
        .iter()
        .filter(|members| members.iter().any(|member| matches!(member, Device::Gpu(_))) && members.len() > 1)
        .map(|members| sketch(members, nics))
        .collect();
    let sockets = joined(host, &devices, in_socket);
    let are_apart = host
        .pcie
        .values()
        .any(|stated| matches!(stated.value, Connection::Sys | Connection::Soc));
    if !are_apart || sockets.len() < 2 {
        return;
    }
    match given.socket_bandwidth {
        Some(rate) => {
            node.sockets = sockets.iter().map(|members| sketch(members, nics)).collect();
            node.socket = Some(rate.to_file_text());
        }
        None => open.assume(
            "sockets: all devices of a node on one host bridge, since no dump tells the rate between sockets \
             (--socket-bandwidth)",
        ),
    }
}

/// Devices that chains of such paths join.
fn joined(host: &Host, devices: &[Device], is_near: impl Fn(Connection) -> bool) -> Vec<Vec<Device>> {
    let mut group_of: Vec<usize> = (0..devices.len()).collect();
    for (first, a) in devices.iter().enumerate() {
        for (second, b) in devices.iter().enumerate().skip(first + 1) {
            let pair = (*a.min(b), *a.max(b));
            if host.pcie.get(&pair).is_some_and(|stated| is_near(stated.value)) {
                let (from, to) = (group_of[second], group_of[first]);
                group_of
                    .iter_mut()
                    .filter(|group| **group == from)
                    .for_each(|group| *group = to);
            }
        }
    }
    let mut groups: Vec<Vec<Device>> = vec![Vec::new(); devices.len()];
    for (device, group) in devices.iter().zip(group_of) {
        groups[group].push(*device);
    }
    groups.retain(|members| !members.is_empty());
    groups
}

fn sketch(members: &[Device], nics: &[usize]) -> GroupSketch {
    let mut group = GroupSketch::default();
    for member in members {
        match member {
            Device::Gpu(gpu) => group.gpus.push(*gpu),
            Device::Nic(nic) => group.nics.extend(nics.iter().position(|own| own == nic)),
        }
    }
    group
}
