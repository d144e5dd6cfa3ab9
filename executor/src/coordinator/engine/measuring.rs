//! Answers about the state and about where time went.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use infercluster_spec::GpuId;
use tokio::sync::oneshot;

use super::Engine;
use crate::clock;
use crate::coordinator::measure::{Measurements, Status, WorkerStatus, step_records};
use crate::coordinator::replica::Replica;
use crate::wire::message::{ToWorker, WorkerTimes};

/// An answer about times that is being collected.
pub(super) struct Collection {
    reply: oneshot::Sender<Measurements>,
    missing: BTreeSet<GpuId>,
    workers: BTreeMap<GpuId, WorkerTimes>,
    elapsed: Duration,
}

impl Engine {
    pub(super) fn status(&self) -> Status {
        let workers = self.fleet.processes().into_iter();
        Status {
            replicas: self.replicas.iter().map(Replica::status).collect(),
            workers: workers
                .map(|(gpu, process)| WorkerStatus { gpu, process })
                .collect(),
            refused: self.refused,
        }
    }

    pub(super) fn measure(&mut self, reply: oneshot::Sender<Measurements>) {
        // Dropping an older question's reply answers it with "stopped"; only one is collected at a time.
        let now = clock::now();
        self.collection = Some(Collection {
            reply,
            missing: self.fleet.living(),
            workers: BTreeMap::new(),
            elapsed: now - self.window,
        });
        self.window = now;
        for (gpu, error) in self.fleet.broadcast(&ToWorker::TakeTimes) {
            self.lose(gpu, &format!("cannot be reached: {error}"));
        }
        self.finish_collection();
    }

    pub(super) fn collect(&mut self, gpu: GpuId, times: Option<WorkerTimes>) {
        if let Some(collection) = &mut self.collection
            && collection.missing.remove(&gpu)
        {
            collection.workers.extend(times.map(|times| (gpu, times)));
            self.finish_collection();
        }
    }

    pub(super) fn finish_collection(&mut self) {
        let Some(collection) = self
            .collection
            .take_if(|collection| collection.missing.is_empty())
        else {
            return;
        };
        let mut steps = Vec::new();
        for replica in &mut self.replicas {
            let completed = replica.take_completed();
            steps.extend(step_records(replica, &completed, &collection.workers));
        }
        // Whoever asked may have given up.
        let _ = collection.reply.send(Measurements {
            elapsed: collection.elapsed,
            workers: collection.workers,
            speeds: self.options.speeds.clone(),
            steps,
        });
    }
}
