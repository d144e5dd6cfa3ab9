//! A small made model, layouts cut by hand and workers, for tests that run a whole group of them.

use std::collections::BTreeMap;
use std::path::Path;

use infercluster_executor::backend::{Backend as _, Cpu};
use infercluster_executor::checkpoint::make;
use infercluster_executor::coordinator::{Coordinator, CoordinatorOptions, Launch, Limits};
use infercluster_executor::launch::WorkerCommand;
use infercluster_executor::wire::handshake::TOKEN_VARIABLE;
use infercluster_executor::worker::{self, WorkerOptions};
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

/// A folder with the made model's checkpoint.
pub(crate) fn made() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), &model(), 11).unwrap();
    folder
}

/// Prompts of the given lengths, all different.
pub(crate) fn prompts(lengths: &[u32]) -> Vec<Vec<u32>> {
    let prompt = |&length: &u32| (0..length).map(|i| (i * 31 + length * 7) % 97).collect();
    lengths.iter().map(prompt).collect()
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

/// Two ranks with half of everything.
pub(crate) const EVEN: Cuts = Cuts {
    layers: &[0, 4],
    heads: &[0, 3, 6],
    columns: &[0, 80, 160],
    rows: &[0, 24, 48],
    vocab: &[0, 48, 97],
};

/// Two ranks, of which one carries most.
pub(crate) const UNEVEN: Cuts = Cuts {
    layers: &[0, 4],
    heads: &[0, 5, 6],
    columns: &[0, 112, 160],
    rows: &[0, 34, 48],
    vocab: &[0, 68, 97],
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
    layout.numerics = Cpu::new().numerics().to_owned();
    layout.gpus = (0..(ranks * stages) as u32).map(GpuId).collect();
    layout.replicas = vec![Replica {
        role: ReplicaRole::Mixed,
        stages: (0..stages).map(stage).collect(),
    }];
    layout
}

/// A coordinator with workers on threads.
pub(crate) fn start(model_dir: &Path, cuts: &Cuts) -> Coordinator {
    Coordinator::start(options(model_dir, layout(cuts, Reduction::Invariant))).unwrap()
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

/// Workers as real processes: the test binary, started through a shell that turns the options into a variable, runs
/// one test by its name, which becomes a worker.
pub(crate) fn processes(test: &str) -> Launch {
    let script = format!(r#"export WORKER_ARGUMENTS="$3 $5"; exec "$1" --exact {test} --quiet"#);
    let program = std::env::current_exe().unwrap();
    Launch::Processes(WorkerCommand {
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into(), "worker".into(), program.into()],
    })
}

/// What a worker was told, in a process that [`processes`] started; nothing in any other.
pub(crate) fn told() -> Option<WorkerOptions> {
    let token = std::env::var(TOKEN_VARIABLE).ok()?;
    let arguments = std::env::var("WORKER_ARGUMENTS").ok()?;
    let (address, gpu) = arguments.split_once(' ').unwrap();
    Some(WorkerOptions::local(
        address.parse().unwrap(),
        GpuId(gpu.parse().unwrap()),
        token.parse().unwrap(),
    ))
}

/// The name of [`worker_role`].
pub(crate) const WORKER: &str = "support::worker_role";

/// The test binary in the role `worker`. Run as a test it does nothing.
#[test]
fn worker_role() {
    if let Some(options) = told() {
        // The coordinator's end is a normal end here.
        let _ = worker::run(&options);
    }
}
