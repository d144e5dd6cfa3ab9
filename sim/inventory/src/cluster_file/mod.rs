//! The short hand-written cluster file: nodes that name catalogue types, expanded to a full
//! [`Cluster`] with its links.
//!
//! ```toml
//! name = "lab"
//!
//! [[node]]
//! name = "a"
//! count = 2
//! gpus = "8 x h100-sxm"
//! fabric = "nvswitch"
//! nics = "8 x ndr"
//! ```
//!
//! The same in one line: `2 x (8 x h100-sxm, nvswitch, 8 x ndr)`. Keys of a node: `name` and `count`, or
//! `names`; `gpus` (text or list), `fabric` (`"nvswitch"`, `"mesh"`, `"none"`, or a table with `kind`, `link`,
//! `bandwidth`, `latency`), `nics` and `nic_names`, `pcie`, `memory` and `speed` (one value for all devices or
//! a list). Where devices are not all alike connected, `links` lists scale-up links (`between` which devices,
//! `bandwidth`, `kind`), `switches` and `sockets` what hangs below each (`gpus`, `nics`), and `socket` the rate
//! between two sockets. `[network]` may say `latency`; `[[device]]` and `[[link]]` extend the catalogue for
//! this file.
//!
//! What the file and the catalogue leave open is asked for, all at once. What is taken by a rule is listed
//! in [`ClusterFile::assumed`].

mod connect;
mod expand;
mod form;
mod one_line;
mod pcie;

use infercluster_spec::Cluster;

use crate::catalogue::Catalogue;
use crate::error::InventoryError;
use crate::toml_file;
use form::ClusterForm;

/// Most devices of one node.
pub const GPUS_PER_NODE_LIMIT: u64 = 256;
/// Most NICs of one node.
pub const NICS_PER_NODE_LIMIT: u64 = 64;
/// Most devices of a cluster.
pub const GPUS_LIMIT: u64 = 65_536;

/// A cluster with what its file did not say.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterFile {
    /// The cluster, in full.
    pub cluster: Cluster,
    /// Figures that were taken by a rule, each with the key that would replace it.
    pub assumed: Vec<String>,
}

/// Reads a cluster file; `file` is only the name that errors carry.
pub fn read(file: &str, text: &str, catalogue: &Catalogue) -> Result<ClusterFile, InventoryError> {
    let form: ClusterForm = toml_file::read(file, text)?;
    expand::expand(file, form, catalogue)
}

/// Reads the one-line form, nodes apart by `;`.
///
/// ```
/// use infercluster_inventory::{Catalogue, cluster_file};
/// let line = "2 x (8 x h100-sxm, nvswitch, 8 x ndr); 4 x l40s, 2 x ndr";
/// let cluster = cluster_file::read_line(line, &Catalogue::builtin())?.cluster;
/// assert_eq!((cluster.nodes.len(), cluster.gpus().count()), (3, 20));
/// # Ok::<(), infercluster_inventory::InventoryError>(())
/// ```
pub fn read_line(line: &str, catalogue: &Catalogue) -> Result<ClusterFile, InventoryError> {
    let form = one_line::parse(line, catalogue)?;
    expand::expand(one_line::FILE, form, catalogue)
}
