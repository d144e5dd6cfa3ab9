//! The first layout: described to every worker, loaded, probed.

use std::collections::BTreeSet;

use infercluster_serving::handover::{self, HandoverId, Stamp};
use infercluster_spec::GpuId;

use super::{Engine, Event};
use crate::clock::Deadline;
use crate::coordinator::ExecutorError;
use crate::probe::ProbeTrace;
use crate::speed::Speed;
use crate::wire::message::{DocumentText, FromWorker, Prepare, Shadow, ToWorker};

impl Engine {
    /// Has the first layout adopted by all its workers and waits until every one is ready.
    pub(super) fn load(&mut self, pools: &[u32]) -> Result<(), ExecutorError> {
        let seats: Vec<_> = self.options.layout.seats().collect();
        let mut missing = BTreeSet::new();
        for (seat, gpu) in seats {
            let stamp = self.protocols[seat.replica.index()].stamp();
            let layout = DocumentText::of(&self.options.layout);
            let prepare = self.prepare(
                gpu,
                (self.layout_id, stamp),
                layout,
                pools[seat.replica.index()],
                None,
            );
            missing.insert(gpu);
            self.fleet.send([&gpu], &ToWorker::Prepare(Box::new(prepare)));
        }
        for index in 0..self.replicas.len() {
            self.drive(index, handover::CoordinatorEvent::Tick);
        }
        let deadline = Deadline::after(self.options.limits.load);
        while let Some(&waited_for) = missing.first() {
            let event = deadline
                .remaining()
                .and_then(|left| self.queue.recv_timeout(left).ok());
            match event {
                Some(Event::Worker { gpu, message, .. }) => match message {
                    FromWorker::Loaded { trace, .. } => self.take_first_probe(gpu, trace)?,
                    FromWorker::LoadFailed { reason, .. } => {
                        let epoch = self.epoch;
                        return Err(ExecutorError::Prepare { gpu, epoch, reason });
                    }
                    FromWorker::Answer(answer) => {
                        self.listen(gpu, answer);
                        let replica = self.replica_of(gpu);
                        if replica.is_some_and(|replica| self.protocols[replica.index()].is_settled()) {
                            missing.retain(|gpu| self.replica_of(*gpu) != replica);
                        }
                    }
                    _ => {}
                },
                Some(Event::Lost { gpu, reason }) => {
                    let description = self.fleet.note_lost(gpu, &reason);
                    return Err(ExecutorError::Lost { gpu, description });
                }
                Some(_) => {}
                None => {
                    return Err(ExecutorError::Load {
                        gpu: waited_for,
                        epoch: self.epoch,
                        waited_ms: deadline.waited().as_millis() as u64,
                    });
                }
            }
        }
        Ok(())
    }

    /// Ranks of a stage, and replicas, see the same numbers.
    fn take_first_probe(&mut self, gpu: GpuId, trace: ProbeTrace) -> Result<(), ExecutorError> {
        let (reduction, layers) = (self.options.layout.reduction, self.options.model.layers);
        if let Some(layer) = trace.first_conflict(&self.probe, reduction, layers) {
            return Err(ExecutorError::Probe { gpu, layer });
        }
        self.probe.merge(trace);
        Ok(())
    }

    pub(super) fn prepare(
        &self,
        gpu: GpuId,
        (layout_id, stamp): (HandoverId, Stamp),
        layout: DocumentText,
        kv_blocks: u32,
        shadow: Option<Shadow>,
    ) -> Prepare {
        let options = &self.options;
        Prepare {
            term: stamp.term,
            layout_id,
            epoch: stamp.epoch,
            model: DocumentText::of(&options.model),
            layout,
            model_dir: options.model_dir.clone(),
            kv_blocks,
            token_budget: options.engine.token_budget,
            peers: self.fleet.addresses(),
            peer_deadline: options.limits.step,
            speed: options.speeds.get(&gpu).copied().unwrap_or(Speed::FULL),
            memory: options.memory,
            shadow,
        }
    }
}
