//! Loading of the first layout: sizing of KV pools, preparing of workers, the probe.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_serving::{BlockLedger, Scheduler};
use infercluster_spec::layout::Reduction;
use infercluster_spec::memory;
use infercluster_spec::{Bytes, Epoch, GpuId, KvBlockId, Layout, Model, ReplicaId, SequenceId, StepId};

use super::CoordinatorOptions;
use super::engine::{Engine, Event, FIRST_EPOCH, FIRST_TERM};
use super::error::ExecutorError;
use super::replica::Replica;
use crate::clock::Deadline;
use crate::speed::Speed;
use crate::step::{StepDescriptor, StepItem};
use crate::wire::message::{DocumentText, FromWorker, Prepare, StepOrder, ToWorker, Wants};

impl Engine {
    /// Prepares the first layout on all its workers and waits until every one is ready.
    pub(super) fn load(&mut self, pools: &[u32]) -> Result<(), ExecutorError> {
        let mut missing = BTreeSet::new();
        for (seat, gpu) in self.options.layout.seats() {
            let prepare = self.prepare(gpu, pools[seat.replica.index()]);
            missing.insert(gpu);
            self.fleet.send([&gpu], &ToWorker::Prepare(Box::new(prepare)));
        }
        self.await_all(
            missing,
            |_, message| matches!(message, FromWorker::Ready { epoch, .. } if *epoch == FIRST_EPOCH),
        )?;
        self.probe(pools)
    }

    /// Runs one step outside the numbering on every replica: it warms what is cold, and where bits do not depend
    /// on the layout all replicas must agree. A checksum proves bytes, not the right slice.
    fn probe(&mut self, pools: &[u32]) -> Result<(), ExecutorError> {
        let mut missing = BTreeSet::new();
        for (replica, &blocks) in self.replicas.iter().zip(pools) {
            let order = probe_order(&self.options, replica.epoch, KvBlockId(blocks));
            self.fleet.send(replica.gpus(), &ToWorker::Probe(order));
            missing.insert(replica.answerer());
        }
        let mut hashes = BTreeMap::new();
        self.await_all(missing, |gpu, message| {
            let FromWorker::Probed { outputs, .. } = message else {
                return false;
            };
            let hash = outputs.first().and_then(|output| output.logits_hash);
            hashes.insert(gpu, hash.unwrap_or_default());
            true
        })?;
        if self.options.layout.reduction != Reduction::Invariant {
            return Ok(());
        }
        let hash_of = |replica: &Replica| hashes.get(&replica.answerer()).copied().unwrap_or_default();
        let expected = self.replicas.first().map(hash_of).unwrap_or_default();
        match self.replicas.iter().find(|replica| hash_of(replica) != expected) {
            Some(replica) => Err(ExecutorError::Probe {
                replica: replica.id,
                found: hash_of(replica),
                expected,
            }),
            None => Ok(()),
        }
    }

    /// Waits until every missing worker has said what is waited for.
    fn await_all(
        &mut self,
        mut missing: BTreeSet<GpuId>,
        mut is_awaited: impl FnMut(GpuId, &FromWorker) -> bool,
    ) -> Result<(), ExecutorError> {
        let deadline = Deadline::after(self.options.limits.load);
        while let Some(&first) = missing.first() {
            let event = deadline
                .remaining()
                .and_then(|left| self.queue.recv_timeout(left).ok());
            match event {
                Some(Event::Worker { gpu, message, .. }) => {
                    if is_awaited(gpu, &message) {
                        missing.remove(&gpu);
                    } else if let FromWorker::PrepareFailed { epoch, reason }
                    | FromWorker::StepFailed { epoch, reason, .. } = message
                    {
                        return Err(ExecutorError::Prepare { gpu, epoch, reason });
                    }
                }
                Some(Event::Lost { gpu, reason }) => {
                    let description = self.fleet.note_lost(gpu, &reason);
                    return Err(ExecutorError::Lost { gpu, description });
                }
                Some(_) => {}
                None => {
                    return Err(ExecutorError::Load {
                        gpu: first,
                        epoch: FIRST_EPOCH,
                        waited_ms: deadline.waited().as_millis() as u64,
                    });
                }
            }
        }
        Ok(())
    }

    fn prepare(&self, gpu: GpuId, kv_blocks: u32) -> Prepare {
        let options = &self.options;
        Prepare {
            term: FIRST_TERM,
            epoch: FIRST_EPOCH,
            model: DocumentText::of(&options.model),
            layout: DocumentText::of(&options.layout),
            model_dir: options.model_dir.clone(),
            kv_blocks,
            token_budget: options.engine.token_budget,
            peers: self.fleet.addresses(),
            peer_deadline: options.limits.step,
            speed: options.speeds.get(&gpu).copied().unwrap_or(Speed::FULL),
        }
    }
}

/// A short prompt in a block that no sequence ever gets.
fn probe_order(options: &CoordinatorOptions, epoch: Epoch, block: KvBlockId) -> StepOrder {
    const TOKENS: u32 = 8;
    let count = TOKENS
        .min(options.layout.kv.block_size)
        .min(options.model.max_positions);
    let item = StepItem {
        sequence: SequenceId(u64::MAX),
        start: 0,
        tokens: (0..count)
            .map(|token| token % options.model.vocab.max(1))
            .collect(),
        block_table: vec![block],
        wants_logits: true,
    };
    StepOrder {
        descriptor: StepDescriptor {
            term: FIRST_TERM,
            epoch,
            step: StepId(0),
            items: vec![item],
        },
        wants: vec![Wants {
            logits: false,
            hash: true,
        }],
    }
}

/// Blocks of each replica's KV pool.
pub(super) fn kv_pools(options: &CoordinatorOptions) -> Result<Vec<u32>, ExecutorError> {
    let (layout, model) = (&options.layout, &options.model);
    let replicas = (0..layout.replicas.len()).map(|index| ReplicaId(index as u32));
    replicas
        .map(|replica| kv_pool(options, layout, model, replica))
        .collect()
}

fn kv_pool(
    options: &CoordinatorOptions,
    layout: &Layout,
    model: &Model,
    replica: ReplicaId,
) -> Result<u32, ExecutorError> {
    let fitting = options.memory.map(|memory| {
        let blocks = memory::kv_capacity_blocks(layout, model, replica, Bytes::ZERO, |_| Some(memory));
        (memory, blocks.unwrap_or(u64::from(u32::MAX)))
    });
    if let Some((memory, 0)) = fitting {
        return Err(ExecutorError::Memory {
            replica,
            blocks: 0,
            memory,
        });
    }
    let wanted = options.kv_blocks.map_or_else(|| usual_pool(options), u64::from);
    let blocks = fitting.map_or(wanted, |(_, fitting)| wanted.min(fitting));
    Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
}

/// Where nothing limits it, a pool holds what the batch may hold at once, up to 1 GiB on the fullest worker.
fn usual_pool(options: &CoordinatorOptions) -> u64 {
    const USUAL: u64 = 1 << 30;
    let (layout, model) = (&options.layout, &options.model);
    let context = options
        .engine
        .max_context
        .unwrap_or(model.max_positions)
        .min(model.max_positions);
    let sequence = u64::from(context.div_ceil(layout.kv.block_size.max(1)));
    let all = sequence.saturating_mul(u64::from(options.engine.max_sequences));
    let block = memory::seats(layout, model)
        .iter()
        .map(|seat| seat.memory.kv_block.0)
        .max();
    all.min(USUAL / block.unwrap_or(1).max(1)).max(sequence).max(1)
}

pub(super) fn build_replicas(
    options: &CoordinatorOptions,
    pools: &[u32],
) -> Result<Vec<Replica>, ExecutorError> {
    let limit = options.model.max_positions;
    let mut engine = options.engine;
    engine.max_context = Some(engine.max_context.map_or(limit, |context| context.min(limit)));
    let mut replicas = Vec::new();
    for (index, (copy, &blocks)) in options.layout.replicas.iter().zip(pools).enumerate() {
        let id = ReplicaId(index as u32);
        let ledger = BlockLedger::identifying(blocks, options.layout.kv.block_size)?;
        let scheduler = Scheduler::new(engine, copy.stages.len() as u32, ledger)?;
        let seats = options
            .layout
            .seats()
            .filter(|(seat, _)| seat.replica == id)
            .collect();
        replicas.push(Replica::new(id, FIRST_TERM, FIRST_EPOCH, seats, scheduler));
    }
    Ok(replicas)
}
