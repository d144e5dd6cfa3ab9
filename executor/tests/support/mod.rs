//! A small made model and layouts cut by hand, for tests that run a whole group of workers.

use std::collections::BTreeMap;
use std::path::Path;

use infercluster_executor::coordinator::{CoordinatorOptions, Launch, Limits};
use infercluster_spec::layout::{LayerGroup, Reduction, Replica, ReplicaRole, Shard, Stage};
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::{Dtype, EngineOptions, GpuId, IndexRange, Layout, Model};

/// Small enough for a test, uneven enough to be cut: 6 query heads on 3 KV heads, 4 layers.
pub(crate) fn model() -> Model {
    Model {
        name: "made".to_owned(),
        family: Family::Qwen2,
        layers: 4,
        hidden: 48,
        query_heads: 6,
        kv_heads: 3,
        head_dim: 8,
        ffn: 160,
        vocab: 97,
        tied_embeddings: false,
        qkv_bias: true,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            llama3: None,
        },
        max_positions: 512,
        dtype: Dtype::F32,
        experts: None,
        sliding_window: None,
    }
}

/// Where layers, heads, columns, rows and vocabulary are cut: each list has one more entry than there are parts.
pub(crate) struct Cuts {
    pub(crate) layers: &'static [u32],
    pub(crate) heads: &'static [u32],
    pub(crate) columns: &'static [u32],
    pub(crate) rows: &'static [u32],
    pub(crate) vocab: &'static [u32],
}

/// One worker that holds everything.
pub(crate) const WHOLE: Cuts = Cuts {
    layers: &[0, 4],
    heads: &[0, 6],
    columns: &[0, 160],
    rows: &[0, 48],
    vocab: &[0, 97],
};

/// One replica, every stage cut alike.
pub(crate) fn layout(cuts: &Cuts, reduction: Reduction) -> Layout {
    let ranks = cuts.heads.len() - 1;
    let stages = cuts.layers.len() - 1;
    let part = |bounds: &[u32], index: usize| IndexRange::new(bounds[index], bounds[index + 1]).unwrap();
    let shard = |stage: usize, rank: usize| Shard {
        gpu: GpuId((stage * ranks + rank) as u32),
        query_heads: part(cuts.heads, rank),
        mlp_columns: part(cuts.columns, rank),
        output_rows: (reduction == Reduction::Invariant).then(|| part(cuts.rows, rank)),
        vocab: (stage + 1 == stages).then(|| part(cuts.vocab, rank)),
        experts: Vec::new(),
    };
    let stage = |stage: usize| Stage {
        layer_groups: vec![LayerGroup {
            layers: part(cuts.layers, stage),
            shards: (0..ranks).map(|rank| shard(stage, rank)).collect(),
        }],
    };
    let mut layout = Layout::single(&model(), reduction);
    layout.quantum = 1;
    layout.numerics =
        infercluster_executor::backend::Backend::numerics(&infercluster_executor::backend::Cpu::new())
            .to_owned();
    layout.gpus = (0..(ranks * stages) as u32).map(GpuId).collect();
    layout.replicas = vec![Replica {
        role: ReplicaRole::Mixed,
        stages: (0..stages).map(stage).collect(),
    }];
    layout
}

/// Options with workers on threads.
pub(crate) fn options(model_dir: &Path, layout: Layout) -> CoordinatorOptions {
    CoordinatorOptions {
        model: model(),
        layout,
        model_dir: model_dir.to_owned(),
        engine: EngineOptions::default(),
        kv_blocks: None,
        memory: None,
        speeds: BTreeMap::new(),
        eos: Vec::new(),
        launch: Launch::Threads,
        limits: Limits::default(),
    }
}
