//! A layout of one replica from its stages.

use infercluster_spec::layout::{KvCache, Layout, Reduction, Replica, ReplicaRole, Stage};
use infercluster_spec::{GpuId, Model};

/// What a layout says beside its stages.
pub(crate) struct Frame<'a> {
    pub(crate) model: &'a Model,
    pub(crate) reduction: Reduction,
    pub(crate) numerics: &'a str,
    pub(crate) quantum: u32,
    pub(crate) kv: KvCache,
}

impl Frame<'_> {
    /// The layout of one replica for prefill and decode over the devices of its stages.
    pub(crate) fn one_replica(&self, stages: Vec<Stage>) -> Layout {
        let mut gpus: Vec<GpuId> = stages.iter().flat_map(Stage::gpus).collect();
        gpus.sort_unstable();
        Layout {
            model: self.model.name.clone(),
            gpus,
            reduction: self.reduction,
            numerics: self.numerics.to_owned(),
            quantum: self.quantum,
            kv: self.kv,
            replicas: vec![Replica {
                role: ReplicaRole::Mixed,
                stages,
            }],
        }
    }
}
