//! `nvidia-smi -L` and `nvidia-smi nvlink -s`: a line for each device, with what belongs to it below.

use std::collections::BTreeMap;

use infercluster_spec::BytesPerSec;

use super::error::ImportError;
use super::facts::GpuFacts;
use super::table::{Line, lines};
use super::text::Text;
use super::{Import, Kind};

/// Devices of one host.
const GPUS_LIMIT: u32 = 256;
/// Scale-up links of one device.
const LINKS_LIMIT: usize = 64;

/// `GPU 0: NVIDIA H200 (UUID: GPU-...)`; some reports leave the UUID out.
struct Heading<'a> {
    index: u32,
    name: &'a str,
    /// Whether the line is closed by the parenthesis around the UUID.
    has_uuid: bool,
}

fn heading<'a>(line: &'a Line) -> Option<Heading<'a>> {
    let rest = line.text.trim().strip_prefix("GPU ")?;
    let (index, rest) = rest.split_once(':')?;
    let index = index.trim().parse().ok().filter(|index| *index < GPUS_LIMIT)?;
    let name = rest.split("(UUID").next().unwrap_or_default().trim();
    let has_uuid = rest.contains("(UUID:") && rest.trim_end().ends_with(')');
    (!name.is_empty()).then_some(Heading {
        index,
        name,
        has_uuid,
    })
}

/// One device of a list.
struct Listed {
    facts: GpuFacts,
    has_uuid: bool,
    is_ended: bool,
    links: BTreeMap<u32, (usize, Option<BytesPerSec>)>,
    /// Whether a line says that there are no links to show.
    is_told: bool,
}

/// Whether a word is the first of a device's line, or the start of it.
fn begins_device(word: &str) -> bool {
    "GPU".starts_with(word) || "MIG".starts_with(word)
}

/// `nvidia-smi -L`.
pub(super) fn list(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(Kind::SmiList);
    let mut devices: Vec<Listed> = Vec::new();
    let mut mig_devices = 0;
    for line in lines(text.body()) {
        if link(&line).is_some() || is_told(&line) {
            return Ok(None);
        }
        if let Some(heading) = heading(&line) {
            take(&mut devices, &heading, &line, &mut import);
        } else if !devices.is_empty() && line.first() == "MIG" && line.text.contains("Device") {
            mig_devices += 1;
            if !line.text.trim_end().ends_with(')') {
                import.lost(line.number, "the line of a MIG device is cut");
            }
        } else if !devices.is_empty() && !line.is_ended && begins_device(line.first()) {
            import.lost(line.number, "the text ends within the line of a device");
        }
    }
    if devices.is_empty() {
        return Ok(None);
    }
    import.count("mig_devices", mig_devices);
    finish(import, devices, text)
}

/// `nvidia-smi nvlink -s`.
pub(super) fn nvlink_status(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(Kind::NvlinkStatus);
    let mut devices: Vec<Listed> = Vec::new();
    for line in lines(text.body()) {
        if let Some(heading) = heading(&line) {
            take(&mut devices, &heading, &line, &mut import);
        } else if let Some(device) = devices.last_mut() {
            if let Some((number, rate)) = link(&line) {
                put_link(device, number, rate, &line, &mut import);
            } else if is_told(&line) {
                device.is_told = true;
            } else if line.first() == "Link" {
                import.lost(line.number, "the line of a link is cut");
            }
        }
    }
    let has_links = devices
        .iter()
        .any(|device| device.is_told || !device.links.is_empty());
    if !has_links {
        return Ok(None);
    }
    let most = devices.iter().map(|device| device.links.len()).max().unwrap_or(0);
    for device in &mut devices {
        let count = device.links.len();
        if count < most && !device.is_told {
            let what = format!("the device lists {count} links, another one lists {most}");
            import.lost(device.facts.line, what);
        } else if count == 0 && !device.is_told {
            import.lost(
                device.facts.line,
                "nothing about the links of this device follows",
            );
        }
        device.facts.link_rates = device.links.values().filter_map(|(_, rate)| *rate).collect();
    }
    let active: usize = devices.iter().map(|device| device.facts.link_rates.len()).sum();
    import.count("links", active);
    finish(import, devices, text)
}

/// Notes a device, once however often it is listed.
fn take(devices: &mut Vec<Listed>, heading: &Heading, line: &Line, import: &mut Import) {
    let known = devices
        .iter()
        .position(|device| device.facts.index == Some(heading.index));
    if let Some(known) = known {
        let first = &devices[known].facts;
        if first.name.as_deref() != Some(heading.name) {
            let name = first.name.as_deref().unwrap_or_default();
            let what = format!(
                "GPU {} is {} here and {name} in line {}",
                heading.index, heading.name, first.line
            );
            import.problem(line.number, what);
        }
        // What follows belongs to it again.
        let again = devices.remove(known);
        devices.push(again);
        return;
    }
    devices.push(Listed {
        facts: GpuFacts {
            line: line.number,
            index: Some(heading.index),
            name: Some(heading.name.to_owned()),
            ..GpuFacts::default()
        },
        has_uuid: heading.has_uuid,
        is_ended: line.is_ended,
        links: BTreeMap::new(),
        is_told: false,
    });
}

fn put_link(device: &mut Listed, number: u32, rate: Option<BytesPerSec>, line: &Line, import: &mut Import) {
    if device.links.len() >= LINKS_LIMIT {
        return import.lost(
            line.number,
            format!("more than {LINKS_LIMIT} links of one device"),
        );
    }
    let first = device.links.entry(number).or_insert((line.number, rate));
    if first.1 != rate {
        let what = format!("link {number} has another rate than in line {}", first.0);
        import.problem(line.number, what);
    }
}

/// `Link 3: 26.562 GB/s`, `Link 3: <inactive>`; a rate that breaks off is no link.
fn link(line: &Line) -> Option<(u32, Option<BytesPerSec>)> {
    let rest = line.text.trim().strip_prefix("Link ")?;
    let (number, rest) = rest.split_once(':')?;
    let number = number.trim().parse().ok()?;
    if rest.trim() == "<inactive>" {
        return Some((number, None));
    }
    let rate: f64 = rest.trim().strip_suffix("GB/s")?.trim().parse().ok()?;
    Some((number, BytesPerSec::new(rate * 1e9)))
}

/// A sentence in place of links.
fn is_told(line: &Line) -> bool {
    let lower = line.text.to_lowercase();
    lower.contains("nvlink")
        && (lower.contains("support") || lower.contains("inactive") || lower.contains("unable"))
}

fn finish(mut import: Import, mut devices: Vec<Listed>, text: &Text) -> Result<Option<Import>, ImportError> {
    devices.sort_by_key(|device| device.facts.index);
    import.gpus = Some(devices.len() as u64);
    // Lines that were wrapped have their UUIDs below.
    let have_uuids = ["UUID", "(UU", "UID:"]
        .iter()
        .any(|part| text.body().contains(part));
    for (position, device) in devices.iter().enumerate() {
        let index = device.facts.index.unwrap_or_default();
        let before = position
            .checked_sub(1)
            .and_then(|before| devices[before].facts.index);
        let expected = before.map_or(0, |before| before + 1);
        if index != expected {
            import.lost(
                device.facts.line,
                format!("GPU {expected} is not listed before GPU {index}"),
            );
        }
        if !device.has_uuid && (have_uuids || !device.is_ended) {
            import.lost(device.facts.line, format!("the line of GPU {index} is cut"));
        }
        if let Some((missing, (line, _))) = (0..)
            .zip(&device.links)
            .find_map(|(expected, (number, seen))| (*number != expected).then_some((expected, seen)))
        {
            import.lost(*line, format!("link {missing} of GPU {index} is not listed"));
        }
    }
    import.facts.host.gpus = devices
        .into_iter()
        .map(|device| GpuFacts {
            // A cut line may cut the name.
            name: device
                .facts
                .name
                .filter(|_| device.has_uuid || !have_uuids && device.is_ended),
            ..device.facts
        })
        .collect();
    Ok(Some(import))
}
