//! The hardware catalogue: nominal figures of accelerators and links with their sources.
//!
//! The entries are data (`catalogue/devices.toml`, `catalogue/links.toml`); a file of the same form adds
//! entries or overrides single figures of known ones. A figure that no source gives is absent.

mod names;

use std::collections::BTreeMap;

use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Bytes, BytesPerSec, Dtype, FlopsPerSec, SimDuration};
use serde::Deserialize;

use crate::error::InventoryError;
use crate::toml_file;

/// Everything that is known about types of hardware.
#[derive(Debug, Clone, PartialEq)]
pub struct Catalogue {
    devices: Vec<DeviceEntry>,
    links: Vec<LinkEntry>,
    sources: BTreeMap<String, String>,
    point_to_point: PointToPoint,
}

/// One type of accelerator. What is `None` was not read anywhere.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceEntry {
    /// Its name, lower case with dashes.
    pub name: String,
    /// Other names for it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Who makes it.
    #[serde(default)]
    pub vendor: String,
    /// The maker's name of the generation.
    #[serde(default)]
    pub architecture: String,
    /// Memory of one device.
    pub memory: Option<Bytes>,
    /// Memory bandwidth.
    pub memory_bandwidth: Option<BytesPerSec>,
    /// Dense matrix rate per precision.
    #[serde(default)]
    pub peak: BTreeMap<Dtype, FlopsPerSec>,
    /// Precisions that the device lacks; one that is neither here nor in `peak` is an open figure.
    #[serde(default)]
    pub not_native: Vec<Dtype>,
    /// All scale-up links together, one direction; zero where there are none.
    pub scale_up: Option<BytesPerSec>,
    /// Catalogue link of its PCI Express slot.
    pub pcie: Option<String>,
    /// Whether it is a worker in the host's own memory: such workers talk over loopback.
    #[serde(default)]
    pub in_host_memory: bool,
    /// Board power limit.
    pub board_power_watts: Option<u32>,
    /// Streaming multiprocessors, compute units or cores.
    pub multiprocessors: Option<u32>,
    /// Last-level cache.
    pub last_level_cache: Option<Bytes>,
    /// What to know about the figures.
    #[serde(default)]
    pub note: String,
    /// Keys of the catalogue's sources.
    #[serde(default)]
    pub sources: Vec<String>,
}

/// One type of link.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkEntry {
    /// Its name, lower case with dashes.
    pub name: String,
    /// Other names for it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// What it is made of.
    pub kind: LinkKind,
    /// Nominal rate of one direction.
    pub bandwidth: BytesPerSec,
    /// Published time of an empty message across it.
    pub latency: Option<SimDuration>,
    /// What large transfers were seen to reach.
    pub achieved: Option<BytesPerSec>,
    /// What to know about the figures.
    #[serde(default)]
    pub note: String,
    /// Keys of the catalogue's sources.
    #[serde(default)]
    pub sources: Vec<String>,
}

/// Time of an empty message from device to device, software included.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PointToPoint {
    /// The time.
    pub latency: SimDuration,
    /// What to know about it.
    #[serde(default)]
    pub note: String,
    /// Keys of the catalogue's sources.
    pub sources: Vec<String>,
}

/// A catalogue file, the built-in ones included.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FileForm {
    sources: BTreeMap<String, String>,
    point_to_point: Option<PointToPoint>,
    device: Vec<DeviceEntry>,
    link: Vec<LinkForm>,
}

/// A link of a file: one that overrides need not say everything.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinkForm {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    kind: Option<LinkKind>,
    bandwidth: Option<BytesPerSec>,
    latency: Option<SimDuration>,
    achieved: Option<BytesPerSec>,
    #[serde(default)]
    note: String,
    #[serde(default)]
    sources: Vec<String>,
}

const DEVICES: &str = include_str!("../../catalogue/devices.toml");
const LINKS: &str = include_str!("../../catalogue/links.toml");

impl Catalogue {
    /// The catalogue that comes with the program.
    ///
    /// ```
    /// let catalogue = infercluster_inventory::Catalogue::builtin();
    /// let h100 = catalogue.device("H100 SXM").unwrap();
    /// assert_eq!(h100.name, "h100-sxm-80gb");
    /// assert_eq!(catalogue.link("ndr").unwrap().bandwidth, "400 Gbit/s".parse().unwrap());
    /// ```
    pub fn builtin() -> Self {
        let file = |name: &str, text: &str| -> FileForm {
            toml_file::read(name, text).unwrap_or_else(|error| panic!("built-in catalogue: {error}"))
        };
        let links = file("links.toml", LINKS);
        let mut catalogue = Self {
            devices: Vec::new(),
            links: Vec::new(),
            sources: BTreeMap::new(),
            point_to_point: links
                .point_to_point
                .clone()
                .expect("the built-in links say the point-to-point latency"),
        };
        for (name, form) in [
            ("links.toml", links),
            ("devices.toml", file("devices.toml", DEVICES)),
        ] {
            catalogue
                .merge(name, form)
                .unwrap_or_else(|error| panic!("built-in catalogue: {error}"));
        }
        catalogue
    }

    /// Adds the entries of a catalogue file; one with a known name overrides the figures that it gives.
    pub fn extend(&mut self, file: &str, text: &str) -> Result<(), InventoryError> {
        self.merge(file, toml_file::read(file, text)?)
    }

    /// Every device, in the order of the files.
    pub fn devices(&self) -> &[DeviceEntry] {
        &self.devices
    }

    /// Every link, in the order of the files.
    pub fn links(&self) -> &[LinkEntry] {
        &self.links
    }

    /// Time of an empty message from device to device where nothing better is known.
    pub fn point_to_point(&self) -> &PointToPoint {
        &self.point_to_point
    }

    /// The device with that name or alias; the error lists names like it.
    pub fn device(&self, name: &str) -> Result<&DeviceEntry, InventoryError> {
        lookup(&self.devices, name)
    }

    /// The link with that name or alias; the error lists names like it.
    pub fn link(&self, name: &str) -> Result<&LinkEntry, InventoryError> {
        lookup(&self.links, name)
    }

    /// The citations of an entry in one line.
    pub fn cite(&self, keys: &[String]) -> String {
        let texts: Vec<&str> = keys
            .iter()
            .map(|key| self.sources.get(key).map_or(key.as_str(), String::as_str))
            .collect();
        texts.join("; ")
    }

    fn merge(&mut self, file: &str, form: FileForm) -> Result<(), InventoryError> {
        self.sources.extend(form.sources);
        if let Some(point_to_point) = form.point_to_point {
            self.point_to_point = point_to_point;
        }
        for (index, link) in form.link.into_iter().enumerate() {
            self.merge_link(file, &format!("link[{index}]"), link)?;
        }
        for (index, device) in form.device.into_iter().enumerate() {
            self.merge_device(file, &format!("device[{index}]"), device)?;
        }
        Ok(())
    }

    /// `field` is the path of the entry in its file.
    pub(crate) fn merge_device(
        &mut self,
        file: &str,
        field: &str,
        mut entry: DeviceEntry,
    ) -> Result<(), InventoryError> {
        let position = place(&self.devices, file, field, (&entry.name, &entry.aliases))?;
        if entry.sources.is_empty() {
            entry.sources.push(file.to_owned());
        }
        match position {
            Some(position) => self.devices[position].override_with(entry),
            None => self.devices.push(entry),
        }
        Ok(())
    }

    /// `field` is the path of the entry in its file.
    pub(crate) fn merge_link(
        &mut self,
        file: &str,
        field: &str,
        form: LinkForm,
    ) -> Result<(), InventoryError> {
        let position = place(&self.links, file, field, (&form.name, &form.aliases))?;
        let known = position.map(|position| self.links[position].clone());
        let missing = |key: &str, expected: &str| InventoryError::Missing {
            file: file.to_owned(),
            field: format!("{field}.{key}"),
            expected: expected.to_owned(),
        };
        let mut sources = known
            .as_ref()
            .map_or_else(Vec::new, |known| known.sources.clone());
        sources.extend(form.sources);
        if sources.is_empty() {
            sources.push(file.to_owned());
        }
        let entry = LinkEntry {
            name: known.as_ref().map_or(form.name, |known| known.name.clone()),
            aliases: joined(known.as_ref().map(|known| &known.aliases), form.aliases),
            kind: form
                .kind
                .or(known.as_ref().map(|known| known.kind))
                .ok_or_else(|| {
                    missing(
                        "kind",
                        "nvlink, xgmi, pcie, socket, infiniband, ethernet or loopback",
                    )
                })?,
            bandwidth: form
                .bandwidth
                .or(known.as_ref().map(|known| known.bandwidth))
                .ok_or_else(|| missing("bandwidth", "a rate such as \"50 GB/s\""))?,
            latency: form.latency.or(known.as_ref().and_then(|known| known.latency)),
            achieved: form.achieved.or(known.as_ref().and_then(|known| known.achieved)),
            note: if form.note.is_empty() {
                known.map(|known| known.note).unwrap_or_default()
            } else {
                form.note
            },
            sources,
        };
        match position {
            Some(position) => self.links[position] = entry,
            None => self.links.push(entry),
        }
        Ok(())
    }
}

/// What both kinds of entries have: a name, and other names for it.
trait Named {
    const KIND: &'static str;
    fn names(&self) -> (&str, &[String]);
}

impl Named for DeviceEntry {
    const KIND: &'static str = "device";
    fn names(&self) -> (&str, &[String]) {
        (&self.name, &self.aliases)
    }
}

impl Named for LinkEntry {
    const KIND: &'static str = "link";
    fn names(&self) -> (&str, &[String]) {
        (&self.name, &self.aliases)
    }
}

fn answers_to(entry: &impl Named, asked: &str) -> bool {
    let (name, aliases) = entry.names();
    names::all(name, aliases).any(|own| names::same(own, asked))
}

fn lookup<'a, T: Named>(entries: &'a [T], name: &str) -> Result<&'a T, InventoryError> {
    let found = entries.iter().find(|entry| answers_to(*entry, name));
    found.ok_or_else(|| InventoryError::UnknownType {
        file: "catalogue".to_owned(),
        field: "name".to_owned(),
        kind: T::KIND,
        found: name.to_owned(),
        near: names::near(
            name,
            entries.iter().flat_map(|entry| {
                let (name, aliases) = entry.names();
                names::all(name, aliases)
            }),
        ),
    })
}

/// Where the entry of that name stands, if there is one; fails where another entry has one of the names.
fn place<T: Named>(
    entries: &[T],
    file: &str,
    field: &str,
    (name, aliases): (&str, &[String]),
) -> Result<Option<usize>, InventoryError> {
    let owner = |name: &str| entries.iter().position(|known| answers_to(known, name));
    let position = owner(name);
    for name in names::all(name, aliases) {
        if let Some(other) = owner(name).filter(|other| Some(*other) != position) {
            return Err(InventoryError::NameTaken {
                file: file.to_owned(),
                field: field.to_owned(),
                name: name.to_owned(),
                kind: T::KIND,
                owner: entries[other].names().0.to_owned(),
            });
        }
    }
    Ok(position)
}

fn joined(known: Option<&Vec<String>>, more: Vec<String>) -> Vec<String> {
    let mut all = known.cloned().unwrap_or_default();
    all.extend(more);
    all
}

impl DeviceEntry {
    /// Whether `name` is its name or an alias, whatever the case, spaces and maker's prefix.
    pub fn answers_to(&self, name: &str) -> bool {
        answers_to(self, name)
    }

    fn override_with(&mut self, other: Self) {
        self.aliases.extend(other.aliases);
        self.memory = other.memory.or(self.memory);
        self.memory_bandwidth = other.memory_bandwidth.or(self.memory_bandwidth);
        self.peak.extend(other.peak);
        self.not_native.extend(other.not_native);
        let peak = &self.peak;
        self.not_native.retain(|dtype| !peak.contains_key(dtype));
        self.scale_up = other.scale_up.or(self.scale_up);
        self.pcie = other.pcie.or_else(|| self.pcie.take());
        self.in_host_memory |= other.in_host_memory;
        self.board_power_watts = other.board_power_watts.or(self.board_power_watts);
        self.multiprocessors = other.multiprocessors.or(self.multiprocessors);
        self.last_level_cache = other.last_level_cache.or(self.last_level_cache);
        for (text, new) in [
            (&mut self.vendor, other.vendor),
            (&mut self.architecture, other.architecture),
            (&mut self.note, other.note),
        ] {
            if !new.is_empty() {
                *text = new;
            }
        }
        self.sources.extend(other.sources);
    }
}

impl LinkEntry {
    /// Whether `name` is its name or an alias, whatever the case and spaces.
    pub fn answers_to(&self, name: &str) -> bool {
        answers_to(self, name)
    }
}
