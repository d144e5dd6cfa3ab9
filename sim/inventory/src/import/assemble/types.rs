//! Which catalogue entry a dump means: by its name, by its PCI device, by its memory, or as the user says.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use infercluster_spec::Bytes;
use serde::Deserialize;

use super::Given;
use crate::catalogue::{Catalogue, DeviceEntry};
use crate::toml_file;

/// What dumps call things; data, not code.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DumpNames {
    pci: BTreeMap<String, String>,
    links: BTreeMap<String, u32>,
}

const DUMP_NAMES: &str = include_str!("../../../catalogue/dump_names.toml");

static NAMES: LazyLock<DumpNames> = LazyLock::new(|| {
    toml_file::read("dump_names.toml", DUMP_NAMES).unwrap_or_else(|error| panic!("built-in names: {error}"))
});

/// Scale-up links of a device of that type, where it is known.
pub(super) fn link_count(device: &str) -> Option<u32> {
    NAMES.links.get(device).copied()
}

/// Everything that a dump says of one device's type.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Clue {
    pub(super) index: Option<u32>,
    pub(super) name: Option<String>,
    pub(super) pci_id: Option<(u16, u16)>,
    pub(super) memory: Option<Bytes>,
}

impl Clue {
    /// How a message calls it.
    fn shown(&self) -> String {
        match (&self.name, self.index) {
            (Some(name), _) => format!("`{}`", name.chars().take(60).collect::<String>()),
            (None, Some(index)) => format!("GPU {index}"),
            (None, None) => "the devices".to_owned(),
        }
    }
}

/// The entry, or what has to be said.
pub(super) fn resolve<'a>(
    clue: &Clue,
    given: &Given,
    catalogue: &'a Catalogue,
) -> Result<&'a DeviceEntry, String> {
    let asked = |name: &str| {
        catalogue
            .device(name)
            .map_err(|error| format!("--gpu-type {name}: {error}"))
    };
    if let Some(name) = said(clue, given) {
        return asked(name);
    }
    if let Some(name) = &clue.name
        && let Ok(entry) = catalogue.device(name.trim_end_matches('.'))
    {
        return Ok(entry);
    }
    if let Some((vendor, device)) = clue.pci_id
        && let Some(name) = NAMES.pci.get(&format!("{vendor:04x}:{device:04x}"))
        && let Ok(entry) = catalogue.device(name)
    {
        return Ok(entry);
    }
    let near = candidates(clue, catalogue);
    if let [only] = near[..] {
        return Ok(only);
    }
    if let Some(name) = &given.gpu_type {
        return asked(name);
    }
    let shown = clue.shown();
    let key = match &clue.name {
        Some(name) => format!(
            "--gpu-type \"{}=NAME\"",
            name.chars().take(60).collect::<String>()
        ),
        None => "--gpu-type NAME".to_owned(),
    };
    Err(if near.is_empty() && clue.name.is_none() {
        format!("the type of {shown}: give {key}, or the output of nvidia-smi -L")
    } else if near.is_empty() {
        format!(
            "the type of {shown}, which the catalogue does not have: give {key}, or its figures with --catalogue"
        )
    } else {
        let names: Vec<&str> = near.iter().map(|entry| entry.name.as_str()).collect();
        format!("which type {shown} is ({}): give {key}", names.join(", "))
    })
}

/// What the user says of this very device, by what the dump calls it or by its number.
fn said<'a>(clue: &Clue, given: &'a Given) -> Option<&'a str> {
    let is_it = |key: &str| {
        clue.name
            .as_ref()
            .is_some_and(|name| name.eq_ignore_ascii_case(key))
            || clue.index.is_some_and(|index| key.parse() == Ok(index))
    };
    let found = given.gpu_types.iter().find(|(key, _)| is_it(key));
    found.map(|(_, name)| name.as_str())
}

/// Entries whose name or alias has all words of the dump's name in order from its start, and whose memory
/// is what the driver reports, less what it keeps.
fn candidates<'a>(clue: &Clue, catalogue: &'a Catalogue) -> Vec<&'a DeviceEntry> {
    let Some(name) = &clue.name else {
        return Vec::new();
    };
    let words = words(name);
    let fits = |entry: &&DeviceEntry| {
        let own = std::iter::once(&entry.name).chain(&entry.aliases);
        let is_named = own.into_iter().any(|own| starts(&self::words(own), &words));
        let has_memory = match (clue.memory, entry.memory) {
            (Some(found), Some(own)) => {
                let share = found.as_f64() / own.as_f64();
                (0.88..1.09).contains(&share)
            }
            _ => true,
        };
        is_named && has_memory
    };
    catalogue.devices().iter().filter(fits).collect()
}

fn words(name: &str) -> Vec<String> {
    let lower = name.trim_end_matches('.').to_lowercase();
    let words = lower.split([' ', '-', '_']).filter(|word| !word.is_empty());
    let makers = ["nvidia", "amd", "intel", "tesla", "geforce", "instinct", "radeon"];
    words
        .filter(|word| !makers.contains(word))
        .map(str::to_owned)
        .collect()
}

/// Whether `name` starts with `prefix`; the last word may be cut.
fn starts(name: &[String], prefix: &[String]) -> bool {
    let Some((last, whole)) = prefix.split_last() else {
        return false;
    };
    name.len() >= prefix.len() && name.starts_with(whole) && name[whole.len()].starts_with(last.as_str())
        // `rtx-40` is no beginning of a type, `v100-sxm2` is.
        && (name[whole.len()] == *last || last.len() >= 3 && !last.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(name: &str, memory: Option<u64>) -> Result<String, String> {
        let clue = Clue {
            name: Some(name.to_owned()),
            memory: memory.map(|mib| Bytes(mib << 20)),
            ..Clue::default()
        };
        resolve(&clue, &Given::default(), &Catalogue::builtin()).map(|entry| entry.name.clone())
    }

    #[test]
    fn every_name_of_the_data_is_in_the_catalogue() {
        let catalogue = Catalogue::builtin();
        for name in NAMES.pci.values().chain(NAMES.links.keys()) {
            assert_eq!(&catalogue.device(name).unwrap().name, name);
        }
    }

    #[test]
    fn drivers_and_schedulers_spell_types_in_their_own_ways() {
        assert_eq!(resolved("NVIDIA H100 80GB HBM3", None).unwrap(), "h100-sxm-80gb");
        assert_eq!(resolved("NVIDIA A100-SXM4-40GB", None).unwrap(), "a100-sxm4-40gb");
        assert_eq!(
            resolved("Tesla V100-SXM2...", Some(32_510)).unwrap(),
            "v100-sxm2-32gb"
        );
        assert_eq!(
            resolved("v100", Some(16_160))
                .unwrap_err()
                .matches("v100-")
                .count(),
            2
        );
        let open = resolved("v100", None).unwrap_err();
        assert!(
            open.contains("v100-sxm2-16gb") && open.contains("--gpu-type \"v100=NAME\""),
            "{open}"
        );
        assert!(
            resolved("NVIDIA GeForce RTX 3060", Some(12_288))
                .unwrap_err()
                .contains("--catalogue")
        );
        assert!(resolved("rtx-40", None).is_err());
    }
}
