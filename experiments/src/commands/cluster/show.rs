//! `cluster show`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use infercluster_inventory::{ClusterFile, InventoryError};
use infercluster_spec::cluster::{Link, LinkKind};
use infercluster_spec::{Bytes, BytesPerSec, Cluster, FlopsPerSec};
use serde::Serialize;

use super::picture;
use crate::Outcome;
use crate::screen::{Columns, Screen};
use crate::{clusters, io};

/// Shows nodes, devices and links of a cluster, and what was assumed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster cluster show cluster.toml\n  \
    infercluster cluster show \"2 x (8 x h100-sxm, nvswitch, 8 x ndr)\" -o cluster.json")]
pub(super) struct Show {
    /// A short cluster file, a cluster document, or one line that names catalogue types.
    cluster: PathBuf,
    /// Write the full cluster document here.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Runs the command.
pub(super) fn run(arguments: &Show, screen: &Screen) -> anyhow::Result<Outcome> {
    let file = match clusters::read(&arguments.cluster) {
        Err(error) => return incomplete(error, screen),
        Ok(file) => file,
    };
    if let Some(output) = &arguments.output {
        io::write_document(output, &file.cluster)?;
    }
    screen.document(&file.cluster, |_| people(&file))?;
    Ok(Outcome::Done)
}

/// A file that was understood but leaves figures open is an answer: what it still has to say.
fn incomplete(error: anyhow::Error, screen: &Screen) -> anyhow::Result<Outcome> {
    let Some(InventoryError::Open { file, open }) = error.downcast_ref() else {
        return Err(error);
    };
    let answer = Incomplete { file, open };
    screen.answer(&answer, |_| format!("{error}\n"))?;
    Ok(Outcome::GoalNotMet)
}

#[derive(Debug, Serialize)]
struct Incomplete<'a> {
    file: &'a str,
    open: &'a [String],
}

pub(super) fn people(file: &ClusterFile) -> String {
    let cluster = &file.cluster;
    let devices = cluster.gpus().count();
    let mut text = format!(
        "{}: {} nodes, {devices} devices\n\n",
        cluster.name,
        cluster.nodes.len()
    );
    text.push_str(&picture::draw(cluster));
    text.push_str(&nodes(cluster));
    text.push('\n');
    text.push_str(&types(cluster));
    if !cluster.links.is_empty() {
        text.push('\n');
        text.push_str(&links(cluster));
    }
    if !file.assumed.is_empty() {
        text.push_str("\nassumed, since the file does not say:\n");
        file.assumed
            .iter()
            .for_each(|line| text.push_str(&picture::item(line)));
    }
    text
}

fn nodes(cluster: &Cluster) -> String {
    let mut table = Columns::new(["node", "devices", ">memory", "nics"]);
    let mut rows: Vec<(Vec<&str>, [String; 3])> = Vec::new();
    for node in &cluster.nodes {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        node.gpus
            .iter()
            .for_each(|gpu| *counts.entry(&gpu.device_type).or_default() += 1);
        let devices: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{count} x {name}"))
            .collect();
        let memory: Bytes = node.gpus.iter().filter_map(|gpu| cluster.memory(gpu)).sum();
        let cells = [
            devices.join(", "),
            memory.to_string(),
            nics(node.nics.iter().map(|nic| nic.bandwidth)),
        ];
        match rows.last_mut().filter(|(_, last)| *last == cells) {
            Some((names, _)) => names.push(&node.name),
            None => rows.push((vec![&node.name], cells)),
        }
    }
    for (names, [devices, memory, nics]) in rows {
        table.row([picture::names(&names), devices, memory, nics]);
    }
    table.to_string()
}

/// Equal NICs counted together, in order of their rate.
fn nics(rates: impl Iterator<Item = BytesPerSec>) -> String {
    let mut rates: Vec<BytesPerSec> = rates.collect();
    rates.sort_by(|a, b| b.per_second().total_cmp(&a.per_second()));
    let runs = rates.chunk_by(|a, b| a.per_second().total_cmp(&b.per_second()).is_eq());
    let parts: Vec<String> = runs.map(|run| format!("{} x {}", run.len(), run[0])).collect();
    parts.join(", ")
}

fn types(cluster: &Cluster) -> String {
    let mut table = Columns::new(["device type", ">memory", ">bandwidth"]);
    let mut peaks = String::new();
    for (name, device) in &cluster.device_types {
        let peak = |(dtype, rate): (_, &FlopsPerSec)| format!("{dtype} {rate}");
        let own: Vec<String> = device.peak.iter().map(peak).collect();
        table.row([
            name.clone(),
            device.memory.to_string(),
            device.memory_bandwidth.to_string(),
        ]);
        peaks.push_str(&picture::item(&format!("{name} dense peak: {}", own.join(", "))));
    }
    format!("{table}{peaks}")
}

/// Links by kind, rate and latency: a cluster has many and few kinds.
fn links(cluster: &Cluster) -> String {
    let alike = |link: &Link| (link.kind, link.bandwidth.per_second().to_bits(), link.latency.0);
    let mut groups: BTreeMap<(LinkKind, u64, u64), (usize, &Link)> = BTreeMap::new();
    for link in &cluster.links {
        groups.entry(alike(link)).or_insert((0, link)).0 += 1;
    }
    let mut table = Columns::new(["links, each one direction", ">count", ">bandwidth", ">latency"]);
    for (count, link) in groups.values() {
        table.row([
            format!("{:?}", link.kind),
            count.to_string(),
            link.bandwidth.to_string(),
            link.latency.to_string(),
        ]);
    }
    table.to_string()
}
