//! NCCL and RCCL topology XML, dumped or written by hand: a PCI tree below sockets, with `<gpu>` and
//! `<net>` elements where NCCL wrote it, with bare PCI classes where a cloud did.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::BytesPerSec;
use infercluster_spec::cluster::LinkKind;

use super::error::ImportError;
use super::facts::{Device, GpuFacts, NicFacts, PairFacts, bus};
use super::pcie_tree::Place;
use super::text::Text;
use super::topo_matrix::Connection;
use super::xml::{Element, Xml};
use super::{Import, Kind};

/// Devices and interfaces of one host, together.
const DEVICES_LIMIT: usize = 320;

pub(super) fn read(xml: &Xml, text: &Text) -> Result<Import, ImportError> {
    let mut import = Import::new(Kind::NcclXml);
    let named = |name: &'static str| all(xml, move |element| element.name == name);
    let of_class = |classes: &'static [&'static str]| {
        all(xml, move |element| {
            let class = element.attribute("class").map(str::to_lowercase);
            element.name == "pci"
                && class.is_some_and(|class| classes.iter().any(|own| class.starts_with(own)))
        })
    };
    let (gpus, nets) = (named("gpu"), named("net"));
    let nic_functions = of_class(&["0x02"]);
    import.count("cpus", named("cpu").len());
    import.count("gpu_elems", gpus.len());
    import.count("net_elems", nets.len());
    import.count("nic_class_pci", nic_functions.len());
    for kind in ["nvlink", "xgmi"] {
        let links = named(kind);
        let sum = links
            .iter()
            .filter_map(|link| xml.elements[*link].number("count"));
        import.count(
            &format!("{kind}_count_sum"),
            sum.fold(0, u64::saturating_add) as usize,
        );
        import.count(&format!("{kind}_entries"), links.len());
    }
    let gpus = if gpus.is_empty() {
        of_class(&["0x03", "0x12"])
    } else {
        gpus
    };
    let nics = if nets.is_empty() { nic_functions } else { nets };
    import.gpus = Some(gpus.len() as u64);
    import.nics = Some(nics.len() as u64);
    if let Some((line, what)) = &xml.cut {
        import.lost(*line, what.clone());
    }
    refuse_loops(xml, text, &mut import)?;
    for interface in named("nic") {
        if !xml.below(interface).any(|(_, element)| element.name == "net") {
            import.lost(xml.elements[interface].line, "the interface lists no network");
        }
    }
    let damaged = xml.elements.iter().find(|element| is_damaged(element));
    if gpus.len() + nics.len() > DEVICES_LIMIT {
        let line = xml.elements[0].line;
        return Err(text.too_many(line, "devices and interfaces in one host", DEVICES_LIMIT as u64));
    }
    import.facts.host.gpus = gpus.iter().map(|position| gpu(xml, *position)).collect();
    import.facts.host.nics = nics.iter().map(|position| nic(xml, *position)).collect();
    match damaged {
        // A bridge that is not known as one would bring devices closer than they are.
        Some(element) => {
            let what = format!("<{}> is damaged, no links are taken from this dump", element.name);
            import.lost(element.line, what);
        }
        None => connect(xml, &gpus, &nics, &mut import),
    }
    Ok(import)
}

/// An element of no name that NCCL writes, a PCI function without its place, or attributes that are damaged.
fn is_damaged(element: &Element) -> bool {
    const NAMES: [&str; 9] = [
        "system", "cpu", "pci", "gpu", "nic", "net", "nvlink", "xgmi", "c2c",
    ];
    let is_known = NAMES.contains(&element.name.as_str());
    let is_placed = element.name != "pci" || element.attribute("busid").is_some();
    element.is_damaged || !is_known || !is_placed
}

fn all(xml: &Xml, is_one: impl Fn(&Element) -> bool) -> Vec<usize> {
    let found = xml
        .elements
        .iter()
        .enumerate()
        .filter(|(_, element)| is_one(element));
    found.map(|(position, _)| position).collect()
}

/// A PCI function below itself makes paths without end, whether by nesting or by a `parent` attribute.
fn refuse_loops(xml: &Xml, text: &Text, import: &mut Import) -> Result<(), ImportError> {
    let is_loop = |position: usize, bus: &str, first: usize| ImportError::Loop {
        file: text.name().to_owned(),
        line: xml.elements[position].line,
        bus: bus.chars().take(24).collect(),
        first: xml.elements[first].line,
    };
    let mut first_of: BTreeMap<&str, usize> = BTreeMap::new();
    let functions = all(xml, |element| element.name == "pci");
    for position in &functions {
        let Some(bus) = xml.elements[*position].attribute("busid") else {
            continue;
        };
        if let Some(first) = first_of.get(bus).copied() {
            if xml.above(*position).any(|above| above == first) {
                return Err(is_loop(*position, bus, first));
            }
            let line = xml.elements[*position].line;
            let what = format!("PCI device {bus} stands in line {} too", xml.elements[first].line);
            import.problem(line, what);
        } else {
            first_of.insert(bus, *position);
        }
    }
    let mut is_rooted: BTreeSet<&str> = BTreeSet::new();
    for (bus, first) in &first_of {
        let mut path = Vec::new();
        let mut at = *bus;
        while let Some(position) = first_of.get(at).filter(|_| !is_rooted.contains(at)) {
            path.push(at);
            let Some(parent) = xml.elements[*position].attribute("parent") else {
                break;
            };
            // A path without a loop passes no function twice.
            if path.len() > first_of.len() {
                return Err(is_loop(*position, at, *first));
            }
            at = parent;
        }
        is_rooted.extend(path);
    }
    Ok(())
}

/// The PCI function that an element is or belongs to.
fn function(xml: &Xml, position: usize) -> Option<usize> {
    let own = Some(position).filter(|position| xml.elements[*position].name == "pci");
    own.or_else(|| {
        xml.above(position)
            .find(|above| xml.elements[*above].name == "pci")
    })
}

fn place(xml: &Xml, position: usize) -> Place {
    let function = function(xml, position);
    let above = xml.above(function.unwrap_or(position));
    let (bridges, rest): (Vec<usize>, Vec<usize>) =
        above.partition(|above| xml.elements[*above].name == "pci");
    let socket = rest.into_iter().find(|above| xml.elements[*above].name == "cpu");
    Place { bridges, socket }
}

fn gpu(xml: &Xml, position: usize) -> GpuFacts {
    let element = &xml.elements[position];
    let function = function(xml, position).map(|function| &xml.elements[function]);
    let attribute = |name: &str| function?.attribute(name);
    let id = |name: &str| {
        let digits = attribute(name)?.trim_start_matches("0x");
        u16::from_str_radix(digits, 16)
            .ok()
            .filter(|id| *id != 0 && *id != 0xffff)
    };
    let switch_links = links(xml, position)
        .filter(|link| is_switch(&xml.elements[*link]))
        .filter_map(|link| xml.elements[link].number("count"))
        .fold(0, u64::saturating_add);
    GpuFacts {
        line: element.line,
        index: element.number("dev").and_then(|dev| u32::try_from(dev).ok()),
        bus: attribute("busid").and_then(bus),
        pci_id: id("vendor").zip(id("device")),
        slot: attribute("link_speed").and_then(generation).zip(
            attribute("link_width")
                .and_then(|lanes| lanes.parse().ok())
                .filter(|lanes| *lanes > 0),
        ),
        switch_links: u32::try_from(switch_links).unwrap_or(u32::MAX),
        ..GpuFacts::default()
    }
}

/// `32.0 GT/s PCIe` is generation 5.
fn generation(speed: &str) -> Option<u32> {
    let rate: f64 = speed.split_whitespace().next()?.parse().ok()?;
    [(2.5, 1), (5.0, 2), (8.0, 3), (16.0, 4), (32.0, 5), (64.0, 6)]
        .into_iter()
        .find(|(own, _)| *own == rate)
        .map(|(_, generation)| generation)
}

fn nic(xml: &Xml, position: usize) -> NicFacts {
    let element = &xml.elements[position];
    let function = function(xml, position).map(|function| &xml.elements[function]);
    let bus_id = function.and_then(|function| function.attribute("busid"));
    let class = function
        .and_then(|function| function.attribute("class"))
        .unwrap_or_default();
    let name = element.attribute("name").or(bus_id).unwrap_or("nic");
    let network = if class.starts_with("0x0207") {
        Some(LinkKind::Infiniband)
    } else if class.starts_with("0x0200") || name.starts_with("eth") || name.starts_with("en") {
        Some(LinkKind::Ethernet)
    } else {
        None
    };
    // In Mbit/s.
    let speed = element.number("speed").filter(|speed| *speed > 0);
    NicFacts {
        line: element.line,
        name: name.to_owned(),
        rate: speed.and_then(|speed| BytesPerSec::new(speed as f64 * 125_000.0)),
        network,
        is_down: false,
        bus: bus_id.and_then(bus),
    }
}

/// Scale-up links that an element lists below itself.
fn links(xml: &Xml, position: usize) -> impl Iterator<Item = usize> {
    let below = xml.below(position);
    below
        .filter(|(_, element)| matches!(element.name.as_str(), "nvlink" | "xgmi"))
        .map(|(position, _)| position)
}

/// Whether a link leads into an NVSwitch, a bridge of class 0x0680.
fn is_switch(link: &Element) -> bool {
    link.attribute("tclass")
        .is_some_and(|class| class.starts_with("0x0680"))
}

fn connect(xml: &Xml, gpus: &[usize], nics: &[usize], import: &mut Import) {
    let direct = direct(xml, gpus, import);
    let places: Vec<Place> = gpus
        .iter()
        .chain(nics)
        .map(|position| place(xml, *position))
        .collect();
    let end = |position: usize| match position.checked_sub(gpus.len()) {
        None => Device::Gpu(position),
        Some(nic) => Device::Nic(nic),
    };
    let (is_whole, is_torn) = (xml.cut.is_none(), xml.is_torn);
    let switch_links = |gpu: usize| import.facts.host.gpus.get(gpu).map_or(0, |gpu| gpu.switch_links);
    let mut pairs = Vec::new();
    for first in 0..places.len() {
        for second in first + 1..places.len() {
            let line = xml.elements[*gpus.get(first).unwrap_or_else(|| &nics[first - gpus.len()])].line;
            let least = switch_links(first).min(switch_links(second));
            let switched = (least > 0 && is_whole).then_some(Connection::Nvlink(least));
            // A cut dump may have lost the links between two devices, a torn one where anything hangs.
            let is_gpu_pair = second < gpus.len();
            let over_pcie = || {
                places[first]
                    .to(&places[second])
                    .filter(|_| !is_torn && (is_whole || !is_gpu_pair))
            };
            let connection = match direct.get(&(first, second)) {
                Some(settled) => *settled,
                None => switched.or_else(over_pcie),
            };
            if let Some(connection) = connection {
                let (a, b) = (end(first), end(second));
                pairs.push(PairFacts {
                    line,
                    a,
                    b,
                    connection,
                });
            }
        }
    }
    import.facts.host.pairs = pairs;
}

/// Links from device to device, by position; what only one end says, or both differently, is a problem and
/// no link.
fn direct(xml: &Xml, gpus: &[usize], import: &mut Import) -> BTreeMap<(usize, usize), Option<Connection>> {
    let position_of: BTreeMap<String, usize> = gpus
        .iter()
        .enumerate()
        .filter_map(|(position, gpu)| {
            let function = function(xml, *gpu)?;
            Some((
                xml.elements[function].attribute("busid")?.to_lowercase(),
                position,
            ))
        })
        .collect();
    let mut seen: BTreeMap<(usize, usize), (u64, usize, bool)> = BTreeMap::new();
    let mut unsure: BTreeSet<usize> = BTreeSet::new();
    for (from, gpu) in gpus.iter().enumerate() {
        for link in links(xml, *gpu) {
            let element = &xml.elements[link];
            let target = element.attribute("target").unwrap_or_default().to_lowercase();
            let count = element.number("count").unwrap_or(0);
            match position_of.get(&target) {
                Some(to) if *to != from && count > 0 => {
                    let entry = seen
                        .entry((from, *to))
                        .or_insert((0, element.line, element.name == "xgmi"));
                    entry.0 = entry.0.saturating_add(count);
                }
                None if element
                    .attribute("tclass")
                    .is_some_and(|class| class.starts_with("0x06")) => {}
                _ => {
                    let target: String = target.chars().take(24).collect();
                    let what =
                        format!("{count} links lead to `{target}`, which is no other device of the dump");
                    import.problem(element.line, what);
                    unsure.insert(from);
                }
            }
        }
    }
    let mut direct = BTreeMap::new();
    for ((from, to), (count, line, is_xgmi)) in &seen {
        let pair = (*from.min(to), *from.max(to));
        match seen.get(&(*to, *from)) {
            Some((other, _, _)) if other == count => {
                let links = u32::try_from(*count).unwrap_or(u32::MAX);
                let connection = if *is_xgmi {
                    Connection::Xgmi(links)
                } else {
                    Connection::Nvlink(links)
                };
                direct.insert(pair, Some(connection));
            }
            Some((other, other_line, _)) => {
                if from < to {
                    let what = format!("{count} links lead there, but {other} back in line {other_line}");
                    import.problem(*line, what);
                }
                direct.insert(pair, None);
            }
            None => {
                let what = format!("{count} links lead to a device that lists none back");
                import.problem(*line, what);
                direct.insert(pair, None);
            }
        }
    }
    // A link whose end is not known may lead to any device that has no other.
    for from in unsure {
        for to in (0..gpus.len()).filter(|to| *to != from) {
            direct.entry((from.min(to), from.max(to))).or_insert(None);
        }
    }
    direct
}
