//! Several dumps into one cluster: what each adds, what they contradict in, what is still needed.

use infercluster_inventory::import::assemble::{Assembly, Given, assemble};
use infercluster_inventory::import::merge::merge;
use infercluster_inventory::import::{self, Import};
use infercluster_inventory::{Catalogue, cluster_file};
use infercluster_spec::cluster::{Endpoint, LinkKind};
use infercluster_spec::{BytesPerSec, GpuId};

use crate::import_fixtures as fixtures;

fn read(texts: &[&str]) -> Vec<Import> {
    texts
        .iter()
        .map(|text| import::read(text.as_bytes(), "dump").unwrap())
        .collect()
}

fn assembled(texts: &[&str], given: &Given) -> Assembly {
    let dumps = read(texts);
    let named: Vec<(&str, &Import)> = dumps.iter().map(|dump| (dump.kind.name(), dump)).collect();
    let merged = merge(&named);
    assert_eq!(merged.contradictions, []);
    assemble(&merged, given, &Catalogue::builtin()).unwrap()
}

fn rate(text: &str) -> BytesPerSec {
    text.parse().unwrap()
}

#[test]
fn every_dump_of_the_host_adds_its_part() {
    let dumps = [
        fixtures::topo_matrix(),
        fixtures::table(),
        fixtures::ibstat(),
        fixtures::nvlinks(),
        fixtures::csv(),
    ];
    let texts: Vec<&str> = dumps.iter().map(String::as_str).collect();
    let found = assembled(&texts, &Given::default());
    assert_eq!(found.needs, [""; 0]);
    let (text, file) = found.file.unwrap();
    let cluster = &file.cluster;
    assert_eq!(cluster.nodes[0].gpus[3].device_type, "a100-sxm4-40gb");
    assert_eq!(cluster.nodes[0].nics[1].name, "mlx5_1");
    // NV4 at 25 GB/s a link between every two of four devices, both directions.
    let nvlinks: Vec<_> = cluster
        .links
        .iter()
        .filter(|link| link.kind == LinkKind::Nvlink)
        .collect();
    assert_eq!(nvlinks.len(), 12);
    assert!(
        nvlinks.iter().all(|link| link.bandwidth == rate("100 GB/s")),
        "{text}"
    );
    // GPU0 and GPU1 share a switch with NIC0.
    let bridge = |end| {
        cluster
            .links
            .iter()
            .find(|link| link.from == end && link.kind == LinkKind::Pcie)
            .unwrap()
            .to
    };
    let nic = Endpoint::Nic(infercluster_spec::NodeId(0), 0);
    assert_eq!(bridge(Endpoint::Gpu(GpuId(0))), bridge(nic));
    assert_ne!(bridge(Endpoint::Gpu(GpuId(2))), bridge(nic));
    // What was written reads back as the same cluster.
    let again = cluster_file::read("again", &text, &Catalogue::builtin()).unwrap();
    assert_eq!(again.cluster, file.cluster);
}

#[test]
fn topology_xml_alone_is_enough() {
    let text = fixtures::nccl_xml();
    let found = assembled(&[&text], &Given::default());
    let (_, file) = found.file.unwrap_or_else(|| panic!("{:?}", found.needs));
    let nics = &file.cluster.nodes[0].nics;
    assert!(nics.iter().all(|nic| nic.bandwidth == rate("200 Gbit/s")));
    let infiniband = file
        .cluster
        .links
        .iter()
        .filter(|link| link.kind == LinkKind::Infiniband);
    assert_eq!(infiniband.count(), 4);
}

#[test]
fn more_links_than_a_device_has_pass_a_switch() {
    let matrix = fixtures::topo_matrix().replace("NV4", "NV12");
    let given = Given {
        gpu_type: Some("a100-sxm4-80gb".to_owned()),
        nic_speed: Some("hdr".to_owned()),
        ..Given::default()
    };
    let (text, file) = assembled(&[&matrix], &given).file.unwrap();
    assert_eq!(file.cluster.switches[0].name, "node nvswitch");
    assert!(text.contains("kind = \"nvswitch\""), "{text}");
    let up = file
        .cluster
        .links
        .iter()
        .find(|link| link.kind == LinkKind::Nvlink)
        .unwrap();
    assert_eq!(up.bandwidth, rate("300 GB/s"));
}

#[test]
fn what_is_open_is_asked_for_with_its_flag() {
    let matrix = fixtures::topo_matrix();
    let needs = assembled(&[&matrix], &Given::default()).needs.join("\n");
    for flag in ["--gpu-type", "--link-bandwidth", "--nic-speed"] {
        assert!(needs.contains(flag), "{flag}: {needs}");
    }
    let adapters = fixtures::ibstat();
    let needs = assembled(&[&adapters], &Given::default()).needs.join("\n");
    assert!(needs.contains("no dump lists them"), "{needs}");
    // A pair that was cut away is asked for, not taken as unconnected.
    let cut = matrix
        .replacen("GPU3\tNV4\tNV4\tNV4\t X ", "GPU3\tNV", 1)
        .replacen(" X \tNV4\tSYS\tPXB", " X \tN\tSYS\tPXB", 1);
    let dumps = read(&[&cut]);
    assert!(!dumps[0].complete);
    let merged = merge(&[("cut", &dumps[0])]);
    let needs = assemble(&merged, &Given::default(), &Catalogue::builtin())
        .unwrap()
        .needs
        .join("\n");
    assert!(needs.contains("GPU pairs") && needs.contains("2-3"), "{needs}");
}

#[test]
fn listed_nodes_take_their_inside_from_a_dump() {
    let (topology, list) = (fixtures::topo_matrix(), fixtures::list());
    let given = Given {
        nic_speed: Some("hdr".to_owned()),
        ..Given::default()
    };
    let found = assembled(&[fixtures::SINFO, &topology, &list], &given);
    let (_, file) = found.file.unwrap_or_else(|| panic!("{:?}", found.needs));
    let names: Vec<&str> = file.cluster.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["gpu01", "gpu02", "gpu03", "gpu04", "gpu05", "gpu07"]);
    assert_eq!(file.cluster.gpus().count(), 24);
}

#[test]
fn contradictions_name_both_places() {
    let check = |texts: [&str; 2], line: usize, parts: [&str; 2]| {
        let dumps = read(&texts);
        let merged = merge(&[("a", &dumps[0]), ("b", &dumps[1])]);
        let named = merged.contradictions.iter().find(|(dump, at, what)| {
            (*dump, *at) == (1, line) && parts.iter().all(|part| what.contains(part))
        });
        assert!(named.is_some(), "{:?}", merged.contradictions);
    };
    let list = fixtures::list();
    check(
        [&list, &list.replacen("A100-SXM4-40GB", "H100 NVL", 1)],
        1,
        ["GPU 0 is", "a:1"],
    );
    let two = list
        .lines()
        .take(2)
        .map(|line| format!("{line}\n"))
        .collect::<String>();
    check([&list, &two], 1, ["2 devices", "a:1"]);
    check([&two, &list], 3, ["not one of the 2", "a:1"]);
    let matrix = fixtures::topo_matrix();
    let other = matrix.replace("NV4", "NV2");
    check([&matrix, &other], 2, ["NV2 here, NV4", "a:2"]);
    let sinfo = fixtures::SINFO;
    check(
        [sinfo, &sinfo.replace("a100:4", "a100:8")],
        2,
        ["gpu01 has 8", "a:2"],
    );
    let slow = fixtures::ibstat().replace("Rate: 200", "Rate: 100");
    check([&fixtures::ibstat(), &slow], 1, ["mlx5_0", "a:1"]);
}
