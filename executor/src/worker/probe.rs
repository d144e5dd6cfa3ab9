//! Runs the probe through a runtime that is about to be ready, on a small KV pool of its own.

use infercluster_spec::layout::Reduction;
use infercluster_spec::{Epoch, KvBlockId, Layout, Model, SequenceId, StepId, Term};

use super::runtime::{PrepareError, Runtime, StepError};
use crate::backend::{Backend, Cpu};
use crate::kv::KvStore;
use crate::model::{ModelError, NoMeter};
use crate::probe::{ProbeState, ProbeTrace, probe_tokens};
use crate::step::{StepDescriptor, StepItem};
use crate::wire::message::{StepOrder, Wants};

/// Every rank of the layout makes this call at the same time. An error where something differs from `expected`.
pub(super) fn run(
    runtime: &mut Runtime,
    model: &Model,
    layout: &Layout,
    expected: Option<&ProbeTrace>,
) -> Result<ProbeTrace, PrepareError> {
    let order = order(model, layout);
    let blocks = order.descriptor.items[0].block_table.len() as u32;
    let scratch = KvStore::new(Cpu::new(), model, layout, runtime.seat, blocks)?;
    let pool = std::mem::replace(runtime.kv_mut(), scratch);
    let traced = trace(runtime, &order, layout.reduction);
    *runtime.kv_mut() = pool;
    let trace = traced.map_err(PrepareError::ProbeFailed)?;
    let own = expected.and_then(|expected| trace.first_difference(expected, layout.reduction, model.layers));
    let differs = runtime.share_difference(own).map_err(PrepareError::ProbeFailed)?;
    match differs {
        Some(layer) => Err(PrepareError::ProbeDiffers {
            layer,
            layers: model.layers,
        }),
        None => Ok(trace),
    }
}

fn order(model: &Model, layout: &Layout) -> StepOrder {
    let tokens = probe_tokens(model.vocab, model.max_positions);
    let blocks = (tokens.len() as u32).div_ceil(layout.kv.block_size.max(1));
    let item = StepItem {
        sequence: SequenceId(0),
        start: 0,
        tokens,
        block_table: (0..blocks).map(KvBlockId).collect(),
        wants_logits: true,
    };
    StepOrder {
        // Only the items are looked at.
        descriptor: StepDescriptor {
            term: Term(0),
            epoch: Epoch(0),
            step: StepId(0),
            items: vec![item],
        },
        wants: vec![Wants {
            logits: true,
            hash: false,
        }],
        incarnations: vec![0],
        released: Vec::new(),
        carried: None,
    }
}

fn trace(runtime: &mut Runtime, order: &StepOrder, reduction: Reduction) -> Result<ProbeTrace, StepError> {
    let (tokens, hidden) = (order.descriptor.items[0].tokens.len(), runtime.hidden());
    let mut trace = ProbeTrace::default();
    let mut state = vec![0.0; tokens * hidden];
    let mut observe = |layer, backend: &Cpu, found: &<Cpu as Backend>::Buffer| {
        backend.synchronize().map_err(ModelError::Backend)?;
        backend
            .download(found, 0, &mut state)
            .map_err(ModelError::Backend)?;
        trace
            .layers
            .insert(layer, ProbeState::of(&state, hidden, reduction));
        Ok(())
    };
    let result = runtime.run_observed(order, &mut NoMeter, &mut observe)?;
    let logits = result
        .choices
        .and_then(|choices| choices.into_iter().next()?.logits);
    trace.logits = logits.map(|row| ProbeState::of(&row, row.len(), reduction));
    Ok(trace)
}
