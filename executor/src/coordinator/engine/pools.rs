//! KV pools and the replicas of a layout.

use infercluster_serving::{BlockLedger, Scheduler};
use infercluster_spec::{Bytes, Epoch, Layout, Model, ReplicaId, memory};

use crate::coordinator::replica::{Replica, Seating};
use crate::coordinator::{CoordinatorOptions, ExecutorError};

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
    let fitting = options
        .memory
        .map(|memory| (memory, fitting_blocks(layout, model, replica, memory)));
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

/// The replicas of the first layout.
pub(super) fn build_replicas(
    options: &CoordinatorOptions,
    pools: &[u32],
    epoch: Epoch,
) -> Result<Vec<Replica>, ExecutorError> {
    let limit = options.model.max_positions;
    let mut engine = options.engine;
    engine.max_context = Some(engine.max_context.map_or(limit, |context| context.min(limit)));
    let mut replicas = Vec::new();
    for (index, (copy, &blocks)) in options.layout.replicas.iter().zip(pools).enumerate() {
        let id = ReplicaId(index as u32);
        let ledger = BlockLedger::identifying(blocks, options.layout.kv.block_size)?;
        let scheduler = Scheduler::new(engine, copy.stages.len() as u32, ledger)?;
        let seating = seating(&options.layout, id);
        replicas.push(Replica::new(id, epoch, seating, scheduler));
    }
    Ok(replicas)
}

/// Who computes a replica of a layout.
pub(super) fn seating(layout: &Layout, id: ReplicaId) -> Seating {
    Seating {
        seats: layout.seats().filter(|(seat, _)| seat.replica == id).collect(),
    }
}

/// KV blocks that fit beside a replica's weights on its fullest worker.
pub(super) fn fitting_blocks(layout: &Layout, model: &Model, replica: ReplicaId, memory: Bytes) -> u64 {
    let blocks = memory::kv_capacity_blocks(layout, model, replica, Bytes::ZERO, |_| Some(memory));
    blocks.unwrap_or(u64::from(u32::MAX))
}
