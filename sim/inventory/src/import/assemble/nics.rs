//! Network interfaces of a node: their catalogue link by rate and network, or one of the file's own.

use infercluster_spec::BytesPerSec;
use infercluster_spec::cluster::LinkKind;

use super::sketch::{LinkSketch, NodeSketch, Sketch, counted};
use super::{Given, Open};
use crate::catalogue::Catalogue;
use crate::import::merge::{Host, Nic};

/// Positions of the interfaces that carry traffic; the others are said to be left out.
pub(super) fn active(host: &Host, open: &mut Open) -> Vec<usize> {
    let down: Vec<&str> = host
        .nics
        .iter()
        .filter(|nic| nic.is_down)
        .map(|nic| nic.name.as_str())
        .collect();
    if !down.is_empty() {
        open.assume(format!("nics: {} left out, no port is active", down.join(", ")));
    }
    (0..host.nics.len())
        .filter(|nic| !host.nics[*nic].is_down)
        .collect()
}

/// Writes the interfaces of a host into the node.
pub(super) fn put(
    host: &Host,
    active: &[usize],
    given: &Given,
    catalogue: &Catalogue,
    file: &mut Sketch,
    node: &mut NodeSketch,
    open: &mut Open,
) {
    if !given.nics.is_empty() {
        node.nics = given.nics.clone();
        return;
    }
    let mut names = Vec::new();
    let mut unknown = Vec::new();
    for position in active {
        let nic = &host.nics[*position];
        match link(nic, given, catalogue, file) {
            Ok(name) => names.push(name),
            Err(what) => unknown.push((nic.name.as_str(), what)),
        }
    }
    if let Some((_, what)) = unknown.first() {
        let nics: Vec<&str> = unknown.iter().map(|(name, _)| *name).take(12).collect();
        open.need(format!("{what} of {}: give {}", nics.join(", "), what.flag()));
        return;
    }
    node.nics = counted(&names);
    node.nic_names = active.iter().map(|nic| host.nics[*nic].name.clone()).collect();
}

/// What an interface lacks.
#[derive(Debug, Clone, Copy)]
enum Missing {
    Speed,
    Network,
}

impl Missing {
    fn flag(self) -> &'static str {
        match self {
            Self::Speed => {
                "--nic-speed such as ndr or \"200 Gbit/s\", or the output of ibstat or ibv_devinfo -v"
            }
            Self::Network => "--network infiniband or ethernet",
        }
    }
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Self::Speed => "the speed",
            Self::Network => "the kind of network",
        })
    }
}

/// The catalogue's name for the link of an interface; one of the file's own where there is none.
fn link(nic: &Nic, given: &Given, catalogue: &Catalogue, file: &mut Sketch) -> Result<String, Missing> {
    let rate = match (&nic.rate, &given.nic_speed) {
        (Some(rate), _) => rate.value,
        (None, Some(speed)) => match speed.parse::<BytesPerSec>() {
            Ok(rate) => rate,
            // Not a rate: the name of a link.
            Err(_) => return Ok(speed.clone()),
        },
        (None, None) => return Err(Missing::Speed),
    };
    let network = nic.network.or(given.network).ok_or(Missing::Network)?;
    let is_it = |kind: LinkKind, own: BytesPerSec| {
        kind == network && (own.per_second() - rate.per_second()).abs() < rate.per_second() * 1e-6
    };
    if let Some(entry) = catalogue
        .links()
        .iter()
        .find(|entry| is_it(entry.kind, entry.bandwidth))
    {
        return Ok(entry.name.clone());
    }
    let kind = if network == LinkKind::Infiniband {
        "infiniband"
    } else {
        "ethernet"
    };
    let name = format!("{kind}-{}g", (rate.per_second() * 8e-9).round());
    let own = LinkSketch {
        name: name.clone(),
        kind: kind.to_owned(),
        bandwidth: rate.to_file_text(),
    };
    if !file.link.contains(&own) {
        file.link.push(own);
    }
    Ok(name)
}
