//! Scale-up links of a host: one switch, or links between some of its devices.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::BytesPerSec;

use super::sketch::{FabricSketch, NodeSketch, PairsSketch};
use super::{Given, Open, types};
use crate::catalogue::{Catalogue, DeviceEntry};
use crate::import::merge::Host;
use crate::import::topo_matrix::Connection;

/// Most scale-up links that any device has; more between one device and its peers pass a switch.
const MOST_LINKS: u32 = 18;

/// Writes what connects the devices of a host into the node.
pub(super) fn connect(
    host: &Host,
    types: &[Option<&DeviceEntry>],
    given: &Given,
    catalogue: &Catalogue,
    node: &mut NodeSketch,
    open: &mut Open,
) {
    if let Some(kind) = &given.fabric {
        let kind = kind.clone();
        node.fabric = Some(FabricSketch {
            kind,
            bandwidth: None,
        });
        return;
    }
    if types.len() < 2 {
        return;
    }
    if host.scale_up.is_empty() {
        let has_links = types
            .iter()
            .flatten()
            .any(|entry| entry.scale_up.is_none_or(|rate| rate.per_second() > 0.0));
        if host.tells_scale_up || !has_links && types.iter().all(Option::is_some) {
            let kind = "none".to_owned();
            node.fabric = Some(FabricSketch {
                kind,
                bandwidth: None,
            });
        } else {
            open.need(
                "how the devices of a node reach each other: give --fabric nvswitch, mesh or none, or the output \
                 of nvidia-smi topo -m",
            );
        }
        return;
    }
    missing_pairs(host, open);
    let Some(link_rates) = rates(host, types, given, catalogue, open) else {
        return;
    };
    if let Some(links) = switched(host, types) {
        node.fabric = Some(FabricSketch {
            kind: "nvswitch".to_owned(),
            bandwidth: times(link_rates[0], links),
        });
        return;
    }
    node.links = pairs(host, &link_rates);
}

/// Pairs that no dump shows are asked for, not taken as unconnected.
fn missing_pairs(host: &Host, open: &mut Open) {
    let count = host.gpus.len();
    let is_shown = |first: usize, second: usize| {
        use crate::import::facts::Device::Gpu;
        host.scale_up.contains_key(&(first, second)) || host.pcie.contains_key(&(Gpu(first), Gpu(second)))
    };
    let missing: Vec<String> = (0..count)
        .flat_map(|first| (first + 1..count).map(move |second| (first, second)))
        .filter(|(first, second)| !is_shown(*first, *second))
        .map(|(first, second)| format!("{first}-{second}"))
        .take(8)
        .collect();
    if !missing.is_empty() {
        open.need(format!(
            "the links of GPU pairs {}, which the dumps do not show: give the whole of nvidia-smi topo -m",
            missing.join(", ")
        ));
    }
}

fn links_of(connection: Connection) -> u32 {
    match connection {
        Connection::Nvlink(links) | Connection::Xgmi(links) => links,
        _ => 0,
    }
}

/// The number of links of each device into a switch, where every pair shows the same and no device has so
/// many links to reach all peers directly.
fn switched(host: &Host, types: &[Option<&DeviceEntry>]) -> Option<u32> {
    let count = host.gpus.len();
    let links: BTreeSet<Connection> = host.scale_up.values().map(|stated| stated.value).collect();
    let only = links
        .first()
        .filter(|_| links.len() == 1 && host.scale_up.len() == count * (count - 1) / 2)?;
    let links = match only {
        Connection::Nvlink(links) => *links,
        _ => return None,
    };
    let most = types
        .iter()
        .flatten()
        .filter_map(|entry| types::link_count(&entry.name))
        .max();
    let needed = links.checked_mul(count as u32 - 1)?;
    (needed > most.unwrap_or(MOST_LINKS)).then_some(links)
}

/// The rate of one link of each device.
fn rates(
    host: &Host,
    types: &[Option<&DeviceEntry>],
    given: &Given,
    catalogue: &Catalogue,
    open: &mut Open,
) -> Option<Vec<BytesPerSec>> {
    if let Some(rate) = given.link_bandwidth {
        return Some(vec![rate; types.len()]);
    }
    let rates: Vec<Option<BytesPerSec>> = types
        .iter()
        .enumerate()
        .map(|(gpu, entry)| {
            let measured = host.gpus[gpu].link_rates.as_ref();
            let own = measured.and_then(|rates| rates.value.first().copied());
            own.or_else(|| nominal(host, gpu, (*entry)?, catalogue))
        })
        .collect();
    let found: Option<Vec<BytesPerSec>> = rates.into_iter().collect();
    if found.is_none() {
        let kinds: BTreeSet<String> = host
            .scale_up
            .values()
            .map(|stated| stated.value.to_string())
            .collect();
        let kinds: Vec<String> = kinds.into_iter().collect();
        open.need(format!(
            "the rate of one link of {}, one direction: give --link-bandwidth such as \"25 GB/s\", or the output \
             of nvidia-smi nvlink -s",
            kinds.join(", ")
        ));
    }
    found
}

/// All links of a device together, divided by how many it has.
fn nominal(host: &Host, gpu: usize, entry: &DeviceEntry, catalogue: &Catalogue) -> Option<BytesPerSec> {
    let own = host.scale_up.iter().filter(|((a, b), _)| *a == gpu || *b == gpu);
    let is_xgmi = own
        .clone()
        .any(|(_, stated)| matches!(stated.value, Connection::Xgmi(_)));
    if is_xgmi && let Ok(link) = catalogue.link(&format!("xgmi-{}", entry.name)) {
        return Some(link.bandwidth);
    }
    let all = entry.scale_up.filter(|rate| rate.per_second() > 0.0)?;
    let count = types::link_count(&entry.name)?;
    BytesPerSec::new(all.per_second() / f64::from(count))
}

fn times(rate: BytesPerSec, links: u32) -> Option<String> {
    BytesPerSec::new(rate.per_second() * f64::from(links)).map(BytesPerSec::to_file_text)
}

/// Links between devices; devices that are all joined alike stand together.
fn pairs(host: &Host, rates: &[BytesPerSec]) -> Vec<PairsSketch> {
    let kind = |connection| {
        if matches!(connection, Connection::Xgmi(_)) {
            "xgmi"
        } else {
            "nvlink"
        }
    };
    // Devices that are joined by equal links, as far as every two of them are.
    let mut left: BTreeMap<(usize, usize), Connection> = host
        .scale_up
        .iter()
        .map(|(pair, stated)| (*pair, stated.value))
        .collect();
    let mut sketches = Vec::new();
    while let Some(((first, second), connection)) = left.first_key_value().map(|(pair, own)| (*pair, *own)) {
        let mut members = vec![first, second];
        for next in second + 1..host.gpus.len() {
            if members
                .iter()
                .all(|member| left.get(&(*member, next)) == Some(&connection))
            {
                members.push(next);
            }
        }
        for (position, a) in members.iter().enumerate() {
            for b in &members[position + 1..] {
                left.remove(&(*a, *b));
            }
        }
        let slowest = members.iter().map(|member| rates[*member]);
        let slowest = slowest.min_by(|a, b| a.per_second().total_cmp(&b.per_second()));
        if let Some(bandwidth) = slowest.and_then(|rate| times(rate, links_of(connection))) {
            sketches.push(PairsSketch {
                between: members,
                kind: kind(connection),
                bandwidth,
            });
        }
    }
    sketches
}
