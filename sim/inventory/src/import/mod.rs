//! What tools of a host or a cluster print, read as people paste it: colour codes, a prompt before the
//! table, any width of columns, a missing end.
//!
//! The kind of a dump is told by its content, never by its name. Nothing is invented: what is lost or
//! contradicts becomes a [`Problem`] with its line; [`merge`] puts several dumps together, and [`assemble`]
//! makes a cluster file of them. Markup and data formats go through libraries; every pasted table goes through `table`.

pub mod assemble;
mod error;
pub mod facts;
mod gpu_lists;
mod host_list;
mod infiniband;
mod json;
mod kubernetes;
mod labels;
pub mod merge;
mod nccl_tests;
mod nccl_xml;
mod nvbandwidth;
mod pcie_tree;
mod query_csv;
mod ray;
mod slurm;
mod smi_table;
mod smi_xml;
mod table;
mod text;
pub mod topo_matrix;
mod tree;
mod worker;
mod xml;
mod yaml;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

pub use error::ImportError;
use facts::Facts;
use text::Text;
pub use topo_matrix::TopoMatrix;

/// Longest dump that is read: far above any real one.
pub const FILE_LIMIT: u64 = 16 << 20;
/// Problems that are listed one by one.
const PROBLEMS_LIMIT: usize = 200;

/// Something that a dump lost or contradicts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// Line of the dump, from 1.
    pub line: usize,
    /// What is wrong there.
    pub what: String,
}

/// Which tool wrote a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kind {
    /// `nvidia-smi topo -m`.
    TopoMatrix,
    /// The plain `nvidia-smi` table.
    SmiTable,
    /// `nvidia-smi -L`.
    SmiList,
    /// `nvidia-smi nvlink -s`.
    NvlinkStatus,
    /// `nvidia-smi --query-gpu=... --format=csv`.
    QueryCsv,
    /// `nvidia-smi -q -x`.
    SmiXml,
    /// NCCL or RCCL topology XML.
    NcclXml,
    /// A table of nccl-tests.
    NcclTests,
    /// The log of nvbandwidth.
    Nvbandwidth,
    /// `ibstat`.
    Ibstat,
    /// `ibv_devinfo`.
    IbvDevinfo,
    /// `sinfo`.
    SlurmSinfo,
    /// `scontrol show node`, or node lines of `slurm.conf`.
    SlurmNode,
    /// A Kubernetes node, as YAML, JSON or described.
    KubernetesNode,
    /// Labels of GPU feature discovery.
    GfdLabels,
    /// `ray status`.
    RayStatus,
    /// A worker as a GPU manager reports it, in JSON.
    WorkerJson,
}

impl Kind {
    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::TopoMatrix => "topo-m",
            Self::SmiTable => "smi-table",
            Self::SmiList => "smi-L",
            Self::NvlinkStatus => "nvlink-s",
            Self::QueryCsv => "query-csv",
            Self::SmiXml => "smi-xml",
            Self::NcclXml => "nccl-xml",
            Self::NcclTests => "nccl-tests",
            Self::Nvbandwidth => "nvbandwidth",
            Self::Ibstat => "ibstat",
            Self::IbvDevinfo => "ibv-devinfo",
            Self::SlurmSinfo => "slurm-sinfo",
            Self::SlurmNode => "slurm-node",
            Self::KubernetesNode => "k8s-node",
            Self::GfdLabels => "gfd-labels",
            Self::RayStatus => "ray-status",
            Self::WorkerJson => "worker-json",
        }
    }

    /// Whether a dump of it describes the one host that it was taken on.
    pub fn is_of_one_host(self) -> bool {
        !matches!(
            self,
            Self::SlurmSinfo | Self::SlurmNode | Self::KubernetesNode | Self::RayStatus | Self::WorkerJson
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A count or a measured figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Figure {
    /// How many.
    Count(u64),
    /// A figure as the tool prints it.
    Measured(f64),
}

/// What one dump says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Import {
    /// Which tool wrote it.
    pub kind: Kind,
    /// Devices that it shows; `None` where the kind cannot tell.
    pub gpus: Option<u64>,
    /// Network interfaces that it shows; `None` where the kind cannot tell.
    pub nics: Option<u64>,
    /// Further counts; `None` for one that belongs to the kind but is absent here.
    pub counts: BTreeMap<String, Option<Figure>>,
    /// Whether everything that its own header or counters announce is there in full.
    pub complete: bool,
    /// What is lost or contradicts, by line.
    pub problems: Vec<Problem>,
    /// What a cluster still needs.
    pub needs: Vec<String>,
    /// Other kinds of dumps that the same file holds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Kind>,
    /// What was learnt for a cluster.
    #[serde(skip)]
    pub facts: Facts,
}

impl Import {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            gpus: None,
            nics: None,
            counts: BTreeMap::new(),
            complete: true,
            problems: Vec::new(),
            needs: Vec::new(),
            also: Vec::new(),
            facts: Facts::default(),
        }
    }

    fn count(&mut self, key: &str, count: usize) {
        self.counts
            .insert(key.to_owned(), Some(Figure::Count(count as u64)));
    }

    /// Notes a contradiction, which leaves the dump whole.
    fn problem(&mut self, line: usize, what: impl Into<String>) {
        if self.problems.len() < PROBLEMS_LIMIT {
            self.problems.push(Problem {
                line,
                what: what.into(),
            });
        } else if self.problems.len() == PROBLEMS_LIMIT {
            self.problems.push(Problem {
                line,
                what: "more problems follow that are not listed".to_owned(),
            });
        }
    }

    /// Notes that something which belongs there is not.
    fn lost(&mut self, line: usize, what: impl Into<String>) {
        self.complete = false;
        self.problem(line, what);
    }
}

/// Reads a dump of any kind; `name` is only what messages call it.
///
/// ```
/// let paste = b"GPU 0: NVIDIA L40S (UUID: GPU-0)\nGPU 1: NVIDIA L40S (UUID: GPU-1)\n";
/// let found = infercluster_inventory::import::read(paste, "paste")?;
/// assert_eq!((found.kind.name(), found.gpus, found.complete), ("smi-L", Some(2), true));
/// # Ok::<(), infercluster_inventory::import::ImportError>(())
/// ```
pub fn read(bytes: &[u8], name: &str) -> Result<Import, ImportError> {
    let text = text::decode(bytes, name)?;
    let Some(mut import) = detect(&text)? else {
        return Err(ImportError::UnknownKind {
            file: name.to_owned(),
            starts: text.first_words(),
        });
    };
    if let Some(line) = text.first_damaged() {
        import.problem(line, "bytes here are no UTF-8 and were left out");
    }
    if let Some((line, label)) = table::foreign_label(text.body()) {
        import.problem(
            line,
            format!("lines of task {label} are left out, import the output of one task at a time"),
        );
    }
    import.problems.sort();
    Ok(import)
}

/// What a reader finds; `None` where the text is not of its kind.
type Found = Result<Option<Import>, ImportError>;

/// Tables that people paste together, the one that says most of links first.
const PASTED: [fn(&Text) -> Found; 8] = [
    topo_matrix::import,
    smi_table::read,
    query_csv::read,
    gpu_lists::nvlink_status,
    gpu_lists::list,
    infiniband::ibstat,
    infiniband::ibv_devinfo,
    ray::read,
];

fn detect(text: &Text) -> Found {
    for read in [xml::import, json::import] {
        if let Some(import) = read(text)? {
            return Ok(Some(import));
        }
    }
    for read in [nccl_tests::read, nvbandwidth::read] {
        if let Some(import) = read(text)? {
            return Ok(Some(import));
        }
    }
    if let Some(import) = pasted(text)? {
        return Ok(Some(import));
    }
    for read in [
        slurm::sinfo,
        slurm::nodes,
        labels::read,
        kubernetes::described,
        yaml::import,
    ] {
        if let Some(import) = read(text)? {
            return Ok(Some(import));
        }
    }
    Ok(None)
}

/// The first table decides the kind; what others in the same paste say is kept with it.
fn pasted(text: &Text) -> Found {
    let mut found: Option<Import> = None;
    for read in PASTED {
        let Some(other) = read(text)? else { continue };
        match &mut found {
            None => found = Some(other),
            Some(first) => {
                first.also.push(other.kind);
                for problem in other.problems {
                    first.problem(problem.line, format!("{}: {}", other.kind, problem.what));
                }
                first.facts.more.push(other.facts);
            }
        }
    }
    Ok(found)
}
