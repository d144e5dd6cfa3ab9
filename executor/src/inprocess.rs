//! A whole replica in one process: one thread a rank, stages one after another.
//!
//! What `worker` processes do over sockets, for tests and for a replica that fits one host process.

use std::time::Duration;

use infercluster_spec::layout::Seat;
use infercluster_spec::{Layout, Model, Rank, ReplicaId, StageId};

use crate::backend::Backend;
use crate::checkpoint::Checkpoint;
use crate::comm::local::{LocalCommunicator, group};
use crate::kv::KvStore;
use crate::model::{ModelError, NoMeter, SeatModel, StageOutput};
use crate::step::StepItem;

/// How long a rank waits for the others: more than any step on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// One replica of a layout.
pub struct InProcess<B: Backend> {
    /// Ranks of every stage.
    stages: Vec<Vec<Seated<B>>>,
}

struct Seated<B: Backend> {
    model: SeatModel<B>,
    kv: KvStore<B>,
    comm: LocalCommunicator,
}

impl<B: Backend<Buffer = Vec<f32>>> InProcess<B> {
    /// Loads every seat of a replica, each with a pool of `blocks` KV blocks.
    pub fn load(
        backend: &B,
        checkpoint: &Checkpoint,
        model: &Model,
        layout: &Layout,
        replica: ReplicaId,
        blocks: u32,
    ) -> Result<Self, ModelError> {
        let copy = layout.replicas.get(replica.index());
        let mut stages = Vec::new();
        for (index, stage) in copy.iter().flat_map(|copy| copy.stages.iter().enumerate()) {
            let mut ranks = Vec::new();
            for (rank, comm) in group(stage.tp_size(), DEADLINE).into_iter().enumerate() {
                let seat = Seat {
                    replica,
                    stage: StageId(index as u32),
                    rank: Rank(rank as u32),
                };
                ranks.push(Seated {
                    model: SeatModel::load(backend.clone(), checkpoint, model, layout, seat)?,
                    kv: KvStore::new(backend.clone(), model, layout, seat, blocks)?,
                    comm,
                });
            }
            stages.push(ranks);
        }
        Ok(Self { stages })
    }

    /// Computes a step: the whole vocabulary's logits of every item that wants them, in item order.
    pub fn step(&mut self, items: &[StepItem]) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut hidden: Option<Vec<f32>> = None;
        let mut slices = Vec::new();
        for stage in &mut self.stages {
            let mut outputs = run_stage(stage, items, hidden.as_ref())?;
            if let Some(StageOutput::Hidden { .. }) = outputs.first() {
                let StageOutput::Hidden { state, .. } = outputs.swap_remove(0) else {
                    continue;
                };
                hidden = Some(state);
            } else {
                slices = outputs;
            }
        }
        let wanted = items.iter().filter(|item| item.wants_logits).count();
        let mut joined = vec![Vec::new(); wanted];
        for slice in slices {
            if let StageOutput::Logits { logits, vocab, .. } = slice {
                let width = vocab.len() as usize;
                for (row, joined) in joined.iter_mut().enumerate() {
                    joined.extend_from_slice(&logits[row * width..][..width]);
                }
            }
        }
        Ok(joined)
    }

    /// The KV caches of a stage, in rank order.
    pub fn kv(&mut self, stage: StageId) -> impl Iterator<Item = &mut KvStore<B>> {
        self.stages
            .get_mut(stage.index())
            .into_iter()
            .flatten()
            .map(|seated| &mut seated.kv)
    }
}

/// One stage's part of a step on all its ranks at once.
fn run_stage<B: Backend<Buffer = Vec<f32>>>(
    stage: &mut [Seated<B>],
    items: &[StepItem],
    hidden: Option<&Vec<f32>>,
) -> Result<Vec<StageOutput<B>>, ModelError> {
    let run = |seated: &mut Seated<B>| {
        let Seated { model, kv, comm } = seated;
        model.forward(kv, items, hidden, comm, &mut NoMeter)
    };
    if let [alone] = stage {
        return Ok(vec![run(alone)?]);
    }
    std::thread::scope(|scope| {
        let ranks: Vec<_> = stage
            .iter_mut()
            .map(|seated| scope.spawn(|| run(seated)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank does not panic"))
            .collect()
    })
}
