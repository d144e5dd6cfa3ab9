//! The hardware: nodes, devices, NICs, switches and directed links.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::ids::{GpuId, NodeId, SwitchId};
use crate::json::Document;
use crate::model::Dtype;
use crate::units::{Bytes, BytesPerSec, FlopsPerSec, Fraction, SimDuration};

/// Everything that can hold or carry a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// A name for reports.
    pub name: String,
    /// The types that [`Gpu::device_type`] names, so that a cluster file stands alone.
    pub device_types: BTreeMap<String, DeviceType>,
    /// Hosts; [`NodeId`] is the position.
    pub nodes: Vec<Node>,
    /// Switches of every kind; [`SwitchId`] is the position.
    #[serde(default)]
    pub switches: Vec<Switch>,
    /// Directed links; [`crate::LinkId`] is the position.
    #[serde(default)]
    pub links: Vec<Link>,
}

impl Document for Cluster {
    const SCHEMA: &'static str = "infercluster-cluster/1";
}

/// A device type as its datasheet gives it. Calibration corrects it, never replaces it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceType {
    /// Memory of one device.
    pub memory: Bytes,
    /// Memory bandwidth.
    pub memory_bandwidth: BytesPerSec,
    /// Dense matrix rate per precision; a precision without an entry does not run natively.
    pub peak: BTreeMap<Dtype, FlopsPerSec>,
    /// Streaming multiprocessors, compute units or cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// Last-level cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_level_cache: Option<Bytes>,
    /// Where the figures come from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Host name.
    pub name: String,
    /// Its devices.
    pub gpus: Vec<Gpu>,
    /// Its network interfaces.
    #[serde(default)]
    pub nics: Vec<Nic>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its number in the whole cluster.
    pub id: GpuId,
    /// Key of [`Cluster::device_types`].
    pub device_type: String,
    /// Memory that serving may use, where it is less than the type's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Share of the type's speed that this device reaches: throttled, shared or emulated below 1.
    #[serde(default = "full_speed", skip_serializing_if = "is_full_speed")]
    pub speed: Fraction,
}

fn full_speed() -> Fraction {
    Fraction::ONE
}

fn is_full_speed(speed: &Fraction) -> bool {
    *speed == Fraction::ONE
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Device name, such as `mlx5_0`.
    pub name: String,
    /// Line rate, one direction.
    pub bandwidth: BytesPerSec,
}

/// A switch: NVSwitch inside a host, InfiniBand or Ethernet between hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// A name for reports.
    pub name: String,
}

/// What a link is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkKind {
    /// NVLink, directly or into an NVSwitch.
    Nvlink,
    /// AMD xGMI.
    Xgmi,
    /// A PCI Express hop.
    Pcie,
    /// Between sockets of a host.
    Socket,
    /// InfiniBand.
    Infiniband,
    /// Ethernet, RoCE included.
    Ethernet,
    /// Shared memory or loopback between workers of one host.
    Loopback,
}

/// One direction of a connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Where data enters.
    pub from: Endpoint,
    /// Where data leaves.
    pub to: Endpoint,
    /// What it is made of.
    pub kind: LinkKind,
    /// Rate in this direction.
    pub bandwidth: BytesPerSec,
    /// Time of an empty message.
    pub latency: SimDuration,
}

/// An end of a link, written `gpu:3`, `nic:0/1` (node/position), `bridge:0/1` or `switch:2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// A device.
    Gpu(GpuId),
    /// A network interface of a node.
    Nic(NodeId, u32),
    /// A PCIe root or host bridge of a node.
    Bridge(NodeId, u32),
    /// A switch.
    Switch(SwitchId),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(f, "gpu:{}", gpu.0),
            Self::Nic(node, position) => write!(f, "nic:{}/{position}", node.0),
            Self::Bridge(node, position) => write!(f, "bridge:{}/{position}", node.0),
            Self::Switch(switch) => write!(f, "switch:{}", switch.0),
        }
    }
}

/// A text that is no [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is none of gpu:N, nic:NODE/N, bridge:NODE/N, switch:N")]
pub struct EndpointError {
    /// What was found.
    pub text: String,
}

impl FromStr for Endpoint {
    type Err = EndpointError;
    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let parse = || {
            let (kind, rest) = text.split_once(':')?;
            let pair = || {
                let (node, position) = rest.split_once('/')?;
                Some((NodeId(node.parse().ok()?), position.parse().ok()?))
            };
            match kind {
                "gpu" => rest.parse().ok().map(|id| Self::Gpu(GpuId(id))),
                "switch" => rest.parse().ok().map(|id| Self::Switch(SwitchId(id))),
                "nic" => pair().map(|(node, position)| Self::Nic(node, position)),
                "bridge" => pair().map(|(node, position)| Self::Bridge(node, position)),
                _ => None,
            }
        };
        parse().ok_or_else(|| EndpointError {
            text: text.to_owned(),
        })
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl Cluster {
    /// Every device with its node, in node order.
    pub fn gpus(&self) -> impl Iterator<Item = (NodeId, &Gpu)> {
        self.nodes
            .iter()
            .enumerate()
            .flat_map(|(node, host)| host.gpus.iter().map(move |gpu| (NodeId(node as u32), gpu)))
    }

    /// The device with that number.
    pub fn gpu(&self, id: GpuId) -> Option<&Gpu> {
        self.gpus().map(|(_, gpu)| gpu).find(|gpu| gpu.id == id)
    }

    /// The node that holds that device.
    pub fn node_of(&self, id: GpuId) -> Option<NodeId> {
        self.gpus().find(|(_, gpu)| gpu.id == id).map(|(node, _)| node)
    }

    /// The type of a device.
    pub fn device_type(&self, gpu: &Gpu) -> Option<&DeviceType> {
        self.device_types.get(&gpu.device_type)
    }

    /// Memory that serving may use on a device.
    pub fn memory(&self, gpu: &Gpu) -> Option<Bytes> {
        gpu.memory
            .or_else(|| self.device_type(gpu).map(|device| device.memory))
    }
}
