//! Cluster files: what they expand to, what they ask for, and what they refuse.

use infercluster_inventory::{Catalogue, ClusterFile, InventoryError, cluster_file};
use infercluster_spec::cluster::{Endpoint, LinkKind};
use infercluster_spec::{Bytes, Cluster, GpuId, NodeId, SimDuration, SwitchId, json};

fn read(text: &str) -> Result<ClusterFile, InventoryError> {
    cluster_file::read("lab.toml", text, &Catalogue::builtin())
}

fn refuse(text: &str, parts: &[&str]) -> InventoryError {
    let error = read(text).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("lab.toml"), "{message}");
    for part in parts {
        assert!(message.contains(part), "`{message}` should hold `{part}`");
    }
    error
}

/// Rate in GB/s and latency in nanoseconds of the link between two ends, the same both ways.
fn link(cluster: &Cluster, from: Endpoint, to: Endpoint) -> (LinkKind, f64, u64) {
    let find = |from, to| {
        let mut found = cluster
            .links
            .iter()
            .filter(|link| (link.from, link.to) == (from, to));
        let link = found
            .next()
            .unwrap_or_else(|| panic!("no link from {from} to {to}"));
        assert!(found.next().is_none(), "two links from {from} to {to}");
        (
            link.kind,
            link.bandwidth.per_second() / 1e9,
            link.latency.as_nanoseconds(),
        )
    };
    assert_eq!(find(from, to), find(to, from));
    find(from, to)
}

#[test]
fn an_nvswitch_host_is_a_star_a_tree_and_ports() {
    let text = "[[node]]\nname = \"a\"\ncount = 2\ngpus = \"8 x h100-sxm\"\nfabric = \"nvswitch\"\n\
                nics = \"8 x hdr\"\n";
    let read = read(text).unwrap();
    let cluster = &read.cluster;
    assert_eq!((cluster.nodes.len(), cluster.gpus().count()), (2, 16));
    assert_eq!(
        (cluster.nodes[1].name.as_str(), cluster.nodes[1].nics.len()),
        ("a-1", 8)
    );
    // Two NVSwitches and one network; per node 8 star, 8 slot, 8 NIC slot and 8 port links, two ways each.
    assert_eq!((cluster.switches.len(), cluster.links.len()), (3, 2 * 2 * 32));
    let (gpu, nic) = (Endpoint::Gpu(GpuId(9)), Endpoint::Nic(NodeId(1), 7));
    let bridge = Endpoint::Bridge(NodeId(1), 0);
    let star = cluster.links.iter().find(|link| link.from == gpu).unwrap();
    assert_eq!(link(cluster, gpu, star.to), (LinkKind::Nvlink, 450.0, 5000));
    assert_eq!(link(cluster, gpu, bridge), (LinkKind::Pcie, 63.0, 5000));
    assert_eq!(link(cluster, bridge, nic), (LinkKind::Pcie, 63.0, 0));
    // Half of the published 0.6 us at either end.
    let network = cluster
        .switches
        .iter()
        .position(|switch| switch.name == "network infiniband")
        .unwrap();
    let network = Endpoint::Switch(SwitchId(network as u32));
    assert_eq!(link(cluster, nic, network), (LinkKind::Infiniband, 25.0, 300));
    assert_eq!(link(cluster, Endpoint::Nic(NodeId(0), 0), network).1, 25.0);
    assert!(
        read.assumed.iter().any(|item| item.contains("10 us")),
        "{:?}",
        read.assumed
    );
    let h100 = &cluster.device_types["h100-sxm-80gb"];
    assert_eq!(h100.memory, Bytes(80_000_000_000));
    assert!(h100.source.contains("vendor datasheets"));
    // A cluster file is a document that reads back.
    let again: Cluster = json::read("cluster.json", &json::write(cluster)).unwrap();
    assert_eq!(&again, cluster);
}

#[test]
fn one_line_says_the_same_as_the_file() {
    let line = cluster_file::read_line("8 x h100-sxm, nvswitch, 8 x ndr", &Catalogue::builtin()).unwrap();
    let file =
        read("[[node]]\ngpus = \"8 x h100-sxm\"\nfabric = \"nvswitch\"\nnics = \"8 x ndr\"\n").unwrap();
    assert_eq!(line, file);
    let read_line = |line: &str| cluster_file::read_line(line, &Catalogue::builtin());
    let mesh = read_line("4 x mi300x, xgmi-mi300x").unwrap().cluster;
    // Six pairs and four slots, two ways each.
    assert_eq!(mesh.links.len(), 2 * (6 + 4));
    for (bad, part) in [
        ("", "devices"),
        ("8 x h100-smx", "h100-sxm"),
        ("0 x l4", "devices"),
        ("2 x 8 x l4", "8 x l4"),
        ("x (l4)", "count before"),
        ("99999999999999999999 x l4", "devices"),
        ("4000000000 x l4", "at most 256"),
        ("4000000000 x (8 x l4, 1 x ndr)", "at most 65536"),
        ("8 x ndr", "gpus"),
        ("8 x l4, ", "devices"),
        ("4 x l4; 4 x l4", "how node1 reaches node0"),
        ("8 x h100-sxm", "scale-up links"),
    ] {
        let message = read_line(bad).unwrap_err().to_string();
        assert!(message.contains(part), "{bad}: `{message}` should hold `{part}`");
    }
}

#[test]
fn cpu_workers_have_speeds_and_memory_caps() {
    let read = read(include_str!("../../examples/cpu_workers.toml")).unwrap();
    let gpus: Vec<_> = read.cluster.gpus().map(|(_, gpu)| gpu).collect();
    assert_eq!((gpus[0].speed.value(), gpus[1].speed.value()), (1.0, 0.4));
    assert_eq!(read.cluster.memory(gpus[1]), Some(Bytes(400 << 20)));
    // The type holds what the largest worker has; workers of one host talk over loopback without links.
    assert_eq!(read.cluster.device_types["cpu-core"].memory, Bytes(600 << 20));
    assert!(read.cluster.links.is_empty() && read.assumed.is_empty());
}

#[test]
fn the_examples_expand() {
    let mixed = read(include_str!("../../examples/mixed.toml")).unwrap().cluster;
    assert_eq!((mixed.nodes.len(), mixed.gpus().count()), (3, 24));
    assert_eq!(mixed.nodes[2].gpus[4].device_type, "l40s-48gb");
    assert_eq!(mixed.nodes[2].gpus[4].memory, Some(Bytes(40_000_000_000)));
    let nic = Endpoint::Nic(NodeId(2), 0);
    let port = mixed
        .links
        .iter()
        .find(|link| link.from == nic && link.kind == LinkKind::Infiniband);
    assert_eq!(port.map(|link| link.latency), Some(SimDuration(1_000_000)));
    let line = include_str!("../../examples/one_line.txt");
    let line = cluster_file::read_line(line.trim(), &Catalogue::builtin()).unwrap();
    assert_eq!(line.cluster.gpus().count(), 20);
}

#[test]
fn what_is_open_is_asked_for_all_at_once() {
    let text = "[[node]]\nname = \"a\"\ngpus = \"2 x t4\"\nnics = \"1 x ndr\"\n\
                [[node]]\nname = \"b\"\ngpus = [\"1 x h20-96gb\", \"2 x cpu-core\"]\nfabric = \"nvswitch\"\n\
                [[node]]\nname = \"c\"\ngpus = \"1 x rtx-4090\"\nnics = \"1 x 25gbe\"\n";
    let parts = [
        "memory bandwidth of t4-16gb",
        "node[1].memory: the memory of a cpu-core",
        "node[1].fabric: the rate of a cpu-core",
        "how b reaches a",
        "how c reaches a",
    ];
    let error = refuse(text, &parts);
    assert!(matches!(error, InventoryError::Open { .. }));
    // The answers close it, inside the file.
    let answered = "[[node]]\nname = \"a\"\ngpus = \"2 x t4\"\n\n[[device]]\nname = \"t4\"\n\
                    memory_bandwidth = \"300 GB/s\"\n";
    assert!(read(answered).is_ok());
    refuse(
        "[[node]]\ngpus = \"2 x gb200-186gb\"\nfabric = \"none\"\n",
        &["node[0].pcie"],
    );
    refuse(
        "[[node]]\ngpus = \"2 x mi300x\"\nfabric = \"mesh\"\n",
        &["node[0].fabric.link"],
    );
}

#[test]
fn bad_files_name_line_field_and_units() {
    let node = |extra: &str| format!("[[node]]\ngpus = \"2 x l4\"\n{extra}\n");
    refuse(
        &node("memory = 20"),
        &["lab.toml:3", "node[0].memory", "no unit", "GiB"],
    );
    refuse(
        &node("memory = [\"1 GiB\", 20]"),
        &[":3", "node[0].memory", "no unit"],
    );
    refuse(&node("memory = \"NaN GiB\""), &[":3", "node[0].memory"]);
    refuse(
        &node("memory = \"48 GB\""),
        &["node[0].memory", "at most", "l4-24gb"],
    );
    refuse(&node("memory = [\"1 GiB\"]"), &["node[0].memory", "a list of 2"]);
    refuse(&node("speed = 1.5"), &[":3", "node[0].speed", "between 0 and 1"]);
    refuse(&node("speed = [1.0, nan]"), &["node[0].speed"]);
    refuse(
        &node("fabric = \"nvswich\""),
        &[":3", "node[0].fabric", "nvswitch"],
    );
    refuse(
        &node("fabric = { kind = \"nvswitch\", bandwidth = 450 }"),
        &[":3", "fabric.bandwidth", "GB/s"],
    );
    refuse(
        &node("fabric = { kind = \"mesh\", link = \"nvlnk4\" }"),
        &["fabric.link", "nvlink4"],
    );
    refuse(&node("nics = \"8 x nvlink4\""), &["node[0].nics", "InfiniBand"]);
    refuse(&node("nics = \"9000 x ndr\""), &["node[0].nics", "at most 64"]);
    refuse(&node("pcie = \"ndr\""), &["node[0].pcie", "PCI Express"]);
    refuse(&node("pcie = \"pcie9x16\""), &["node[0].pcie", "pcie5x16"]);
    refuse(&node("count = 0"), &["node[0].count"]);
    refuse(&node("count = -1"), &[":3", "node[0].count"]);
    refuse(&node("colour = \"red\""), &[":3", "colour"]);
    refuse(&node("[network]\nlatency = 2"), &[":4", "network.latency", "us"]);
    refuse(
        "[[node]]\ngpus = \"8 x h100-smx\"\n",
        &["node[0].gpus", "h100-smx", "h100-sxm"],
    );
    refuse("[[node]]\ngpus = 8\n", &[":2", "node[0].gpus"]);
    refuse("[[node]]\nname = \"a\"\n", &["gpus"]);
    refuse("", &["[[node]]"]);
    refuse("[[node]\n", &["lab.toml:1"]);
    let twice = "[[node]]\nname = \"a\"\ngpus = \"l4\"\nnics = \"ndr\"\n".repeat(2);
    refuse(&twice, &["node[1].name", "no other node"]);
}
