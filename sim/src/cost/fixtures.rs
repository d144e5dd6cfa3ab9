//! A small model and a host of CPU workers, for the tests of costs and calibrations.

use infercluster_spec::cluster::{DeviceType, Gpu, Node};
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::{
    Bytes, BytesPerSec, Cluster, Dtype, FlopsPerSec, Fraction, GpuId, IndexRange, Model,
};

/// Two layers whose every product can be worked out by hand.
pub(crate) fn model() -> Model {
    Model {
        name: "tiny".to_owned(),
        family: Family::Llama,
        layers: 2,
        hidden: 8,
        query_heads: 4,
        kv_heads: 2,
        head_dim: 2,
        ffn: 16,
        vocab: 32,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 1e4,
            llama3: None,
        },
        max_positions: 64,
        dtype: Dtype::F32,
        experts: None,
        sliding_window: None,
    }
}

/// One host with a worker of each speed: 1 GFLOP/s in single precision, 1 GB/s, no links.
pub(crate) fn cluster(speeds: &[f64]) -> Cluster {
    let device = DeviceType {
        memory: Bytes(1 << 30),
        memory_bandwidth: BytesPerSec::new(1e9).unwrap(),
        peak: [(Dtype::F32, FlopsPerSec::new(1e9).unwrap())].into(),
        multiprocessors: None,
        last_level_cache: None,
        source: String::new(),
    };
    let gpus = speeds.iter().enumerate().map(|(id, speed)| Gpu {
        id: GpuId(id as u32),
        device_type: "worker".to_owned(),
        memory: None,
        speed: Fraction::new(*speed).unwrap(),
    });
    Cluster {
        name: "host".to_owned(),
        device_types: [("worker".to_owned(), device)].into(),
        nodes: vec![Node {
            name: "host".to_owned(),
            gpus: gpus.collect(),
            nics: Vec::new(),
        }],
        switches: Vec::new(),
        links: Vec::new(),
    }
}

/// `start..end`.
pub(crate) fn range(start: u32, end: u32) -> IndexRange {
    IndexRange::new(start, end).unwrap()
}
