//! What a cluster file may say, before anything is looked up.

use std::fmt;
use std::str::FromStr;

use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Bytes, BytesPerSec, Fraction, SimDuration};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::catalogue::{DeviceEntry, LinkForm};
use crate::toml_file::OneOrMany;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClusterForm {
    pub(super) name: Option<String>,
    #[serde(default)]
    pub(super) node: Vec<NodeForm>,
    #[serde(default)]
    pub(super) network: NetworkForm,
    #[serde(default)]
    pub(super) device: Vec<DeviceEntry>,
    #[serde(default)]
    pub(super) link: Vec<LinkForm>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeForm {
    pub(super) name: Option<String>,
    #[serde(default = "one")]
    pub(super) count: u32,
    /// In place of `name` and `count`.
    #[serde(default)]
    pub(super) names: Vec<String>,
    pub(super) gpus: OneOrMany<Counted>,
    pub(super) fabric: Option<FabricForm>,
    #[serde(default)]
    pub(super) nics: OneOrMany<Counted>,
    #[serde(default)]
    pub(super) nic_names: Vec<String>,
    #[serde(default)]
    pub(super) links: Vec<PairsForm>,
    pub(super) pcie: Option<String>,
    #[serde(default)]
    pub(super) switches: Vec<GroupForm>,
    #[serde(default)]
    pub(super) sockets: Vec<GroupForm>,
    /// Between every two sockets.
    pub(super) socket: Option<BytesPerSec>,
    pub(super) memory: Option<OneOrMany<Bytes>>,
    pub(super) speed: Option<OneOrMany<Fraction>>,
}

/// Scale-up links between every two devices of a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PairsForm {
    /// Positions in the node.
    pub(super) between: Vec<u32>,
    #[serde(default = "nvlink")]
    pub(super) kind: LinkKind,
    pub(super) bandwidth: BytesPerSec,
    pub(super) latency: Option<SimDuration>,
}

fn nvlink() -> LinkKind {
    LinkKind::Nvlink
}

/// What hangs below one PCI Express switch or one socket, by position in the node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GroupForm {
    pub(super) gpus: Vec<u32>,
    pub(super) nics: Vec<u32>,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetworkForm {
    pub(super) name: Option<String>,
    pub(super) latency: Option<SimDuration>,
}

/// `"8 x h100-sxm"`: how many of what; a name alone is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) count: u64,
    pub(super) name: String,
}

impl FromStr for Counted {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("`{text}` is not a count and a name such as `8 x h100-sxm`");
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let after = trimmed[digits..].trim_start();
        let name = after
            .strip_prefix(['x', 'X', '*'])
            .or_else(|| after.strip_prefix('\u{d7}'))
            .filter(|_| digits > 0);
        let (count, name) = match name {
            Some(name) => (trimmed[..digits].parse().map_err(|_| refuse())?, name.trim()),
            None => (1, trimmed),
        };
        if name.is_empty() || count == 0 {
            return Err(refuse());
        }
        Ok(Self {
            count,
            name: name.to_owned(),
        })
    }
}

impl<'de> Deserialize<'de> for Counted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// How the devices of a node reach each other beside PCI Express.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FabricKind {
    /// All scale-up links of every device lead into one switch.
    Nvswitch,
    /// A link between every two devices.
    Mesh,
    /// PCI Express alone, whatever scale-up links the devices have.
    None,
}

/// `"nvswitch"`, or a table that says more.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FabricForm {
    pub(super) kind: FabricKind,
    pub(super) link: Option<String>,
    pub(super) bandwidth: Option<BytesPerSec>,
    pub(super) latency: Option<SimDuration>,
}

impl FabricForm {
    pub(super) fn plain(kind: FabricKind) -> Self {
        Self {
            kind,
            link: None,
            bandwidth: None,
            latency: None,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FabricTable {
    kind: FabricKind,
    link: Option<String>,
    bandwidth: Option<BytesPerSec>,
    latency: Option<SimDuration>,
}

impl<'de> Deserialize<'de> for FabricForm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FabricVisitor)
    }
}

struct FabricVisitor;

impl<'de> Visitor<'de> for FabricVisitor {
    type Value = FabricForm;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("\"nvswitch\", \"mesh\", \"none\" or a table with `kind`")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<FabricForm, E> {
        let kind = FabricKind::deserialize(de::value::StrDeserializer::new(text))?;
        Ok(FabricForm::plain(kind))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FabricForm, A::Error> {
        let table = FabricTable::deserialize(MapAccessDeserializer::new(map))?;
        Ok(FabricForm {
            kind: table.kind,
            link: table.link,
            bandwidth: table.bandwidth,
            latency: table.latency,
        })
    }
}
