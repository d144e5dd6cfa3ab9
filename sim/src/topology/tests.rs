//! Routes and collectives worked out by hand.

use infercluster_spec::cluster::{DeviceType, Gpu, Link, Node, Switch};
use infercluster_spec::ids::SwitchId;
use infercluster_spec::{Bytes, BytesPerSec, Fraction, Operator, SimDuration};

use super::*;

/// Devices of one type, `per_node` of them on each node, with these directed links.
fn cluster(per_node: &[u32], links: &[(Endpoint, Endpoint, f64, u64)]) -> Cluster {
    let device = DeviceType {
        memory: Bytes(1),
        memory_bandwidth: BytesPerSec::new(1.0).unwrap(),
        peak: BTreeMap::new(),
        multiprocessors: None,
        last_level_cache: None,
        source: String::new(),
    };
    let mut next = 0;
    let mut nodes = Vec::new();
    for count in per_node {
        let gpus = (next..next + count).map(|id| Gpu {
            id: GpuId(id),
            device_type: "card".to_owned(),
            memory: None,
            speed: Fraction::ONE,
        });
        nodes.push(Node {
            name: format!("node {}", nodes.len()),
            gpus: gpus.collect(),
            nics: Vec::new(),
        });
        next += count;
    }
    let links = links.iter().map(|(from, to, rate, latency_s)| Link {
        from: *from,
        to: *to,
        kind: LinkKind::Pcie,
        bandwidth: BytesPerSec::new(*rate).unwrap(),
        latency: SimDuration(latency_s * 1_000_000_000_000),
    });
    Cluster {
        name: "test".to_owned(),
        device_types: [("card".to_owned(), device)].into(),
        nodes,
        switches: vec![Switch {
            name: "switch".to_owned(),
        }],
        links: links.collect(),
    }
}

fn gpu(id: u32) -> Endpoint {
    Endpoint::Gpu(GpuId(id))
}

fn topology(cluster: &Cluster) -> Topology {
    Topology::new(cluster, &BTreeMap::new(), 1.0).unwrap()
}

const SWITCH: Endpoint = Endpoint::Switch(SwitchId(0));

#[test]
fn latency_then_hops_then_lowest_link() {
    let bridge = |position| Endpoint::Bridge(NodeId(0), position);
    // Two equal ways over bridges 1 and 0, a direct link that is slower to answer, one over device 2 that
    // would be the quickest.
    let cluster = cluster(
        &[3],
        &[
            (gpu(0), gpu(1), 100.0, 9),
            (gpu(0), bridge(1), 8.0, 2),
            (gpu(0), bridge(0), 8.0, 2),
            (bridge(0), gpu(1), 5.0, 3),
            (bridge(1), gpu(1), 7.0, 3),
            (gpu(0), gpu(2), 9.0, 1),
            (gpu(2), gpu(1), 9.0, 1),
        ],
    );
    let route = topology(&cluster).route(GpuId(0), GpuId(1)).unwrap();
    assert_eq!(route.links, [LinkId(1), LinkId(4)]);
    assert_eq!((route.alpha_s, route.bytes_per_s), (5.0, 7.0));
    assert_eq!(
        topology(&cluster).route(GpuId(1), GpuId(0)),
        Err(TopologyError::NoRoute {
            from: GpuId(1),
            to: GpuId(0)
        })
    );
}

#[test]
fn ring_over_a_switch_by_hand() {
    let mut links = Vec::new();
    for id in 0..4 {
        links.push((gpu(id), SWITCH, 10.0, 1));
        links.push((SWITCH, gpu(id), 10.0, 1));
    }
    let topology = topology(&cluster(&[4], &links));
    let group = topology.group(&[GpuId(0), GpuId(1), GpuId(2), GpuId(3)]).unwrap();
    assert_eq!(group.algorithm, Algorithm::Ring);
    // Six rounds of 2 s latency; 6/4 of 40 bytes at 10 byte/s: 12 + 6.
    let reduce = Operator::AllReduce {
        ranks: 4,
        bytes: Bytes(40),
    };
    assert_eq!(group.seconds(&reduce), Some(18.0));
    // Three rounds paced by 20 bytes: 6 + 6.
    let gather = Operator::AllGather {
        ranks: 4,
        largest: Bytes(20),
        total: Bytes(40),
    };
    assert_eq!(group.seconds(&gather), Some(12.0));
    let transfer = Operator::Transfer { bytes: Bytes(50) };
    assert_eq!(group.seconds(&transfer), None);
    let pair = topology.group(&[GpuId(3), GpuId(1)]).unwrap();
    assert_eq!(pair.seconds(&transfer), Some(7.0));
}

#[test]
fn flows_of_a_ring_share_the_link_that_they_cross() {
    // Two hosts of two devices, one link each way between them: the ring crosses it once each way.
    let bridge = |node| Endpoint::Bridge(NodeId(node), 0);
    let mut links = vec![(bridge(0), bridge(1), 2.0, 1), (bridge(1), bridge(0), 2.0, 1)];
    for id in 0..4 {
        links.push((gpu(id), bridge(id / 2), 8.0, 1));
        links.push((bridge(id / 2), gpu(id), 8.0, 1));
    }
    let topology = topology(&cluster(&[2, 2], &links));
    // Rank order alternates hosts; the ring is laid in node order and still crosses once each way.
    let group = topology.group(&[GpuId(0), GpuId(2), GpuId(1), GpuId(3)]).unwrap();
    assert_eq!(group.seconds_per_byte, 0.5);
    assert_eq!(group.alpha_s, 3.0);
    // One half-duplex root: every flow of the ring crosses the same link.
    let root = |position| Endpoint::Bridge(NodeId(0), position);
    let mut links = vec![(root(0), root(1), 4.0, 0)];
    for id in 0..4 {
        links.push((gpu(id), root(0), 100.0, 1));
        links.push((root(1), gpu(id), 100.0, 1));
    }
    let topology = Topology::new(&cluster(&[4], &links), &BTreeMap::new(), 1.0).unwrap();
    let group = topology.group(&[GpuId(0), GpuId(1), GpuId(2), GpuId(3)]).unwrap();
    assert_eq!(group.seconds_per_byte, 1.0);
}

#[test]
fn workers_without_links_exchange_as_a_mesh_over_loopback() {
    let fit = LinkFit {
        provenance: Default::default(),
        alpha_s: 2.0,
        bytes_per_s: 10.0,
    };
    let topology = Topology::new(&cluster(&[3, 1], &[]), &[(LinkKind::Loopback, fit)].into(), 1.0).unwrap();
    let group = topology.group(&[GpuId(0), GpuId(1), GpuId(2)]).unwrap();
    assert_eq!(group.algorithm, Algorithm::Mesh);
    // The largest share goes to two others through one port: 2 + 2 x 30 / 10.
    let gather = Operator::AllGather {
        ranks: 3,
        largest: Bytes(30),
        total: Bytes(50),
    };
    assert_eq!(group.seconds(&gather), Some(8.0));
    // A short vector goes whole: 2 + 2 x 100 / 10. A long one in thirds, twice: 2 x 2 + 2 x 2 x 30000 / 3 / 10.
    let reduce = |bytes| Operator::AllReduce {
        ranks: 3,
        bytes: Bytes(bytes),
    };
    assert_eq!(group.seconds(&reduce(100)), Some(22.0));
    assert_eq!(group.seconds(&reduce(30_000)), Some(4004.0));
    let alone = topology.group(&[GpuId(3)]).unwrap();
    assert_eq!(alone.seconds(&gather), Some(0.0));
    assert!(matches!(
        topology.group(&[GpuId(0), GpuId(3)]),
        Err(TopologyError::NoRoute { .. })
    ));
    assert!(matches!(
        topology.group(&[GpuId(0), GpuId(0)]),
        Err(TopologyError::BadGroup { .. })
    ));
    assert!(matches!(
        topology.group(&[GpuId(9)]),
        Err(TopologyError::UnknownGpu { gpu: GpuId(9) })
    ));
}
