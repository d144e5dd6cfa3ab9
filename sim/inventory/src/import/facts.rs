//! What dumps say that a cluster is made of, each with the line that says so.

use infercluster_spec::{Bytes, BytesPerSec, cluster::LinkKind};

use super::topo_matrix::Connection;

/// Facts of one dump.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Facts {
    /// The host that it was taken on.
    pub host: HostFacts,
    /// Nodes of a cluster that it lists.
    pub nodes: Vec<NodeFacts>,
    /// Facts of other dumps in the same file.
    pub more: Vec<Facts>,
}

/// Facts of the host that a dump was taken on.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostFacts {
    /// Its devices, in the order of the dump.
    pub gpus: Vec<GpuFacts>,
    /// Its network interfaces, in the order of the dump.
    pub nics: Vec<NicFacts>,
    /// How its devices and interfaces are connected, by position.
    pub pairs: Vec<PairFacts>,
    /// How many devices the dump announces, with the line.
    pub announced_gpus: Option<(u64, usize)>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GpuFacts {
    /// The line that shows it.
    pub line: usize,
    /// Its number on the host.
    pub index: Option<u32>,
    /// Its PCI address, lower case, domain of four digits.
    pub bus: Option<String>,
    /// What the dump calls its type.
    pub name: Option<String>,
    /// Vendor and device of its PCI function.
    pub pci_id: Option<(u16, u16)>,
    /// Memory that the driver reports.
    pub memory: Option<Bytes>,
    /// Generation and lanes of its slot, the most that it can do.
    pub slot: Option<(u32, u32)>,
    /// Rates of its active scale-up links, one direction.
    pub link_rates: Vec<BytesPerSec>,
    /// NVLinks that lead into a switch.
    pub switch_links: u32,
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NicFacts {
    /// The line that shows it.
    pub line: usize,
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Line rate of an active port.
    pub rate: Option<BytesPerSec>,
    /// InfiniBand or Ethernet.
    pub network: Option<LinkKind>,
    /// Whether no port of it is active.
    pub is_down: bool,
    /// Its PCI address, lower case.
    pub bus: Option<String>,
}

/// An end of a connection inside a host, by position in the dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// A device.
    Gpu(usize),
    /// A network interface.
    Nic(usize),
}

/// How two devices of a host are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairFacts {
    /// The line that says so.
    pub line: usize,
    /// One end.
    pub a: Device,
    /// The other end.
    pub b: Device,
    /// The connection.
    pub connection: Connection,
}

/// Nodes of a cluster that are alike.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeFacts {
    /// The line that lists them.
    pub line: usize,
    /// Their names; empty where only their number is known.
    pub names: Vec<String>,
    /// How many there are.
    pub count: u64,
    /// Devices of each: what the dump calls the type, how many, and the memory of one.
    pub gpus: Vec<(Option<String>, u64, Option<Bytes>)>,
}

impl HostFacts {
    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.nics.is_empty()
    }
}

/// A PCI address in one spelling: `00000000:83:00.0`, `0000:83:00.0` and `83:00.0` are one.
pub(super) fn bus(text: &str) -> Option<String> {
    let lower = text.trim().to_ascii_lowercase();
    let parts: Vec<&str> = lower.split(':').collect();
    let (domain, bus, function) = match parts[..] {
        [bus, function] => ("0", bus, function),
        [domain, bus, function] => (domain, bus, function),
        _ => return None,
    };
    let (device, function) = function.split_once('.')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let (domain, bus) = (number(domain)?, number(bus)?);
    let (device, function) = (number(device)?, number(function)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// `81920 MiB`, `81920MiB` or `80 GiB`.
pub(super) fn memory(text: &str) -> Option<Bytes> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let amount: u64 = text[..digits].parse().ok()?;
    let unit = match text[digits..].trim() {
        "KiB" | "Ki" => 1 << 10,
        "MiB" | "Mi" | "MB" => 1 << 20,
        "GiB" | "Gi" => 1 << 30,
        _ => return None,
    };
    amount.checked_mul(unit).map(Bytes)
}

/// Vendor and device of `0x233510DE` (device first), as nvidia-smi writes them.
pub(super) fn packed_pci_id(text: &str) -> Option<(u16, u16)> {
    let digits = text.trim().trim_start_matches("0x").trim_start_matches("0X");
    let packed = u32::from_str_radix(digits, 16)
        .ok()
        .filter(|_| digits.len() == 8)?;
    Some(((packed & 0xffff) as u16, (packed >> 16) as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_amounts_have_one_spelling() {
        assert_eq!(bus("00000000:83:00.0").unwrap(), "0000:83:00.0");
        assert_eq!(bus("83:00.0"), bus("0000:83:00.0"));
        assert_eq!(bus("00000001:0A:1E.1").unwrap(), "0001:0a:1e.1");
        for bad in ["", "83", "x:y.z", "1:2:3:4.5", "123456789:0:0.0"] {
            assert_eq!(bus(bad), None, "{bad}");
        }
        assert_eq!(memory("143771MiB"), Some(Bytes(143_771 << 20)));
        assert_eq!(memory("99999999999999999999 MiB"), None);
        assert_eq!(memory("18446744073709551615 MiB"), None);
        assert_eq!(packed_pci_id("0x233510DE"), Some((0x10de, 0x2335)));
        assert_eq!(packed_pci_id("N/A"), None);
    }
}
