//! `cluster import`: dumps of a host or a cluster into a cluster file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use infercluster_inventory::import::assemble::{Assembly, Given, assemble};
use infercluster_inventory::import::merge::merge;
use infercluster_inventory::import::{self, Import as Dump, ImportError};
use infercluster_inventory::{Catalogue, ClusterFile};
use infercluster_sim::topology::Topology;
use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Bytes, BytesPerSec, Cluster};
use serde::Serialize;

use super::{picture, show};
use crate::Outcome;
use crate::failure::WithFix as _;
use crate::io;
use crate::screen::Screen;

/// Reads what tools of a host or a cluster print, tells what it holds, and writes a cluster file.
///
/// The kind of each dump is found by its content: nvidia-smi (topo -m, the table, -L, nvlink -s, -q -x,
/// --query-gpu), NCCL and RCCL topology XML, nccl-tests, nvbandwidth, ibstat, ibv_devinfo, sinfo, scontrol
/// show node, Kubernetes nodes and GPU feature labels, ray status, worker JSON. Dumps of one host are put
/// together; lists of nodes take the inside of their nodes from it. What they leave open is listed and can be
/// given by flags. Exit code 1: a dump is cut or contradicts, or something is still open.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster cluster import topo.txt list.txt ibstat.txt -o cluster.toml\n  \
    infercluster cluster import topo.txt --gpu-type h100-sxm --nic-speed ndr --nodes 4 -o cluster.json\n  \
    infercluster cluster import sinfo.txt --gpu-type v100=v100-sxm2-32gb --fabric nvswitch --nics \"1 x edr\"\n  \
    infercluster cluster import topology.xml --json")]
pub(super) struct Import {
    /// Dumps, or - for standard input.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Write the cluster here: a full document where the name ends in .json, else the short form.
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// A file with devices and links that the catalogue does not have.
    #[arg(long, value_name = "FILE")]
    catalogue: Option<PathBuf>,
    /// Type of devices that no dump tells, or FOUND=NAME for those that a dump calls FOUND or numbers so.
    #[arg(long, value_name = "NAME")]
    gpu_type: Vec<String>,
    /// Rate of one NVLink or xGMI link, one direction.
    #[arg(long, value_name = "RATE")]
    link_bandwidth: Option<BytesPerSec>,
    /// How the devices of a node are joined where no dump tells.
    #[arg(long, value_enum)]
    fabric: Option<Fabric>,
    /// Slot of the devices, such as pcie4x16.
    #[arg(long, value_name = "LINK")]
    pcie: Option<String>,
    /// Rate between the sockets of a node.
    #[arg(long, value_name = "RATE")]
    socket_bandwidth: Option<BytesPerSec>,
    /// Network interfaces of every node, in place of those that dumps show, such as "8 x ndr".
    #[arg(long, value_name = "COUNT x LINK")]
    nics: Vec<String>,
    /// Speed of interfaces where no dump tells: a rate, or a link such as ndr.
    #[arg(long, value_name = "RATE or LINK")]
    nic_speed: Option<String>,
    /// Network of interfaces where no dump tells.
    #[arg(long, value_enum)]
    network: Option<Network>,
    /// How many nodes are like the host that was dumped.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    nodes: Option<u32>,
    /// Name of the cluster.
    #[arg(long)]
    name: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Fabric {
    /// All scale-up links lead into one switch.
    Nvswitch,
    /// A link between every two devices.
    Mesh,
    /// PCI Express alone.
    None,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Network {
    /// InfiniBand.
    Infiniband,
    /// Ethernet, RoCE included.
    Ethernet,
}

/// One dump as it is shown.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    file: &'a str,
    #[serde(flatten)]
    dump: &'a Dump,
}

/// Runs the command.
pub(super) fn run(arguments: &Import, screen: &Screen) -> anyhow::Result<Outcome> {
    let catalogue = catalogue(arguments)?;
    let mut dumps = Vec::new();
    for file in &arguments.files {
        dumps.push((io::name_of(file), read(file)?));
    }
    let named: Vec<(&str, &Dump)> = dumps.iter().map(|(name, dump)| (name.as_str(), dump)).collect();
    let merged = merge(&named);
    let assembly = assemble(&merged, &given(arguments)?, &catalogue)?;
    if let Some((_, file)) = &assembly.file {
        check(&file.cluster)?;
    }
    for (dump, line, what) in merged.contradictions {
        let problems = &mut dumps[dump].1.problems;
        problems.push(import::Problem { line, what });
        problems.sort();
    }
    for (_, dump) in &mut dumps {
        dump.needs.clone_from(&assembly.needs);
    }
    let is_written = write(arguments, &assembly)?;
    let shown: Vec<Shown> = dumps.iter().map(|(file, dump)| Shown { file, dump }).collect();
    match &shown[..] {
        [only] => screen.answer(only, |_| people(&shown, &assembly))?,
        _ => screen.answer(&shown, |_| people(&shown, &assembly))?,
    }
    if let Some(output) = arguments.output.as_ref().filter(|_| !is_written) {
        screen.say(format!(
            "{} is not written, since something is still open",
            output.display()
        ));
    }
    let is_clean = |dump: &Dump| dump.complete && dump.problems.is_empty();
    if assembly.file.is_some() && dumps.iter().all(|(_, dump)| is_clean(dump)) {
        Ok(Outcome::Done)
    } else {
        Ok(Outcome::GoalNotMet)
    }
}

fn catalogue(arguments: &Import) -> anyhow::Result<Catalogue> {
    let mut catalogue = Catalogue::builtin();
    if let Some(file) = &arguments.catalogue {
        let text = io::read_text(file, io::DOCUMENT_LIMIT)?;
        catalogue.extend(&io::name_of(file), &text)?;
    }
    Ok(catalogue)
}

fn read(file: &Path) -> anyhow::Result<Dump> {
    let name = io::name_of(file);
    let refused = |error: ImportError| {
        let fix = error.fix();
        Err(error).fix(fix)
    };
    if let Ok(found) = std::fs::metadata(file)
        && found.is_file()
        && found.len() > import::FILE_LIMIT
    {
        return refused(ImportError::TooLong {
            file: name,
            found: found.len(),
            limit: import::FILE_LIMIT,
        });
    }
    let bytes = io::read_bytes(file, Bytes(import::FILE_LIMIT))?;
    import::read(&bytes, &name).or_else(refused)
}

fn given(arguments: &Import) -> anyhow::Result<Given> {
    let mut gpu_type = None;
    let mut gpu_types = Vec::new();
    for text in &arguments.gpu_type {
        match text.rsplit_once('=') {
            Some((found, name)) => gpu_types.push((found.trim().to_owned(), name.trim().to_owned())),
            None if gpu_type.is_none() => gpu_type = Some(text.clone()),
            None => bail!(
                "--gpu-type {text}: a second type needs FOUND=NAME, so that it is known for which devices"
            ),
        }
    }
    Ok(Given {
        name: arguments.name.clone(),
        nodes: arguments.nodes,
        gpu_type,
        gpu_types,
        link_bandwidth: arguments.link_bandwidth,
        fabric: arguments.fabric.map(|fabric| {
            let name = match fabric {
                Fabric::Nvswitch => "nvswitch",
                Fabric::Mesh => "mesh",
                Fabric::None => "none",
            };
            name.to_owned()
        }),
        pcie: arguments.pcie.clone(),
        socket_bandwidth: arguments.socket_bandwidth,
        nics: arguments.nics.clone(),
        nic_speed: arguments.nic_speed.clone(),
        network: arguments.network.map(|network| match network {
            Network::Infiniband => LinkKind::Infiniband,
            Network::Ethernet => LinkKind::Ethernet,
        }),
    })
}

/// A cluster that routes cannot be found in is of no use, so that is found out here.
fn check(cluster: &Cluster) -> anyhow::Result<()> {
    let topology =
        Topology::new(cluster, &BTreeMap::new(), 1.0).context("the cluster that the dumps give")?;
    let Some((_, first)) = cluster.gpus().next() else {
        return Ok(());
    };
    for node in &cluster.nodes {
        for gpu in node.gpus.iter().filter(|gpu| gpu.id != first.id).take(1) {
            topology
                .route(first.id, gpu.id)
                .context("the cluster that the dumps give")?;
        }
    }
    Ok(())
}

/// Writes the cluster where it is whole; whether it was, or nothing was asked for.
fn write(arguments: &Import, assembly: &Assembly) -> anyhow::Result<bool> {
    let Some(output) = &arguments.output else {
        return Ok(true);
    };
    let Some((text, file)) = &assembly.file else {
        return Ok(false);
    };
    if output.extension().is_some_and(|extension| extension == "json") {
        io::write_document(output, &file.cluster)?;
    } else {
        io::write_bytes(output, short(text, file).as_bytes())?;
    }
    Ok(true)
}

/// The short form with what was assumed in front.
fn short(text: &str, file: &ClusterFile) -> String {
    let mut short = String::new();
    for line in &file.assumed {
        short.push_str(&format!("# assumed: {line}\n"));
    }
    short + text
}

fn people(shown: &[Shown], assembly: &Assembly) -> String {
    let mut text = String::new();
    for Shown { file, dump } in shown {
        let mut parts = vec![dump.kind.to_string()];
        parts.extend(dump.gpus.map(|gpus| format!("{gpus} GPUs")));
        parts.extend(dump.nics.map(|nics| format!("{nics} NICs")));
        parts.extend(dump.counts.iter().map(|(key, figure)| match figure {
            Some(import::Figure::Count(count)) => format!("{key}:{count}"),
            Some(import::Figure::Measured(value)) => format!("{key}:{value}"),
            None => format!("{key} absent"),
        }));
        parts.push(if dump.complete { "complete" } else { "incomplete" }.to_owned());
        text.push_str(picture::item(&format!("{file}: {}", parts.join(", "))).trim_start());
        for problem in &dump.problems {
            text.push_str(&picture::item(&format!(
                "line {}: {}",
                problem.line, problem.what
            )));
        }
    }
    if !assembly.needs.is_empty() {
        text.push_str("\nstill needed for a cluster:\n");
        assembly
            .needs
            .iter()
            .for_each(|need| text.push_str(&picture::item(need)));
    }
    if let Some((_, file)) = &assembly.file {
        let file = ClusterFile {
            cluster: file.cluster.clone(),
            assumed: assembly.assumed.clone(),
        };
        text.push('\n');
        text.push_str(&show::people(&file));
    }
    text
}
