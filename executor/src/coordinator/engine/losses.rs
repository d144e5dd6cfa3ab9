//! Workers that fail or are lost, and what that ends.

use std::time::{Duration, Instant};

use infercluster_spec::{GpuId, ReplicaId, StepId};

use super::Engine;
use crate::clock;
use crate::coordinator::RequestError;
use crate::coordinator::replica::Replica;
use crate::wire::message::ToWorker;

/// How long a failed step waits for the news which worker is lost, which names the cause and not a witness.
const SUSPICION: Duration = Duration::from_millis(300);

/// A step failed on a worker, maybe because another is lost.
pub(super) struct Suspicion {
    pub(super) due: Instant,
    pub(super) replica: ReplicaId,
    error: RequestError,
}

impl Engine {
    /// A step failed: at once where the worker blames itself, else after a moment in which the loss of the
    /// blamed worker may become known.
    pub(super) fn suspect(&mut self, gpu: GpuId, step: StepId, reason: &str, peer: Option<GpuId>) {
        let Some(replica) = self.replica_of(gpu) else {
            return;
        };
        let is_gone = |peer: &GpuId| self.fleet.description_of_lost(*peer).is_some();
        let computes = |peer: &GpuId| {
            self.replicas[replica.index()]
                .seating
                .gpus()
                .any(|seated| seated == peer)
        };
        if peer.is_some_and(|peer| is_gone(&peer) && !computes(&peer)) {
            // A step of a layout that was in force before: its loss is dealt with, its KV computed again.
            return;
        }
        let blamed = peer.unwrap_or(gpu);
        let description = format!("{gpu} cannot compute {step}: {reason}");
        let error = RequestError::WorkerLost {
            gpu: blamed,
            description,
        };
        if peer.is_none() {
            self.fail(replica, &error);
        } else {
            self.suspect_soon(replica, error);
        }
    }

    /// Fails a replica after a moment in which a better reason may become known.
    pub(super) fn suspect_soon(&mut self, replica: ReplicaId, error: RequestError) {
        if self.replicas[replica.index()].failure().is_none() {
            self.suspicions.push(Suspicion {
                due: clock::now() + SUSPICION,
                replica,
                error,
            });
        }
    }

    pub(super) fn judge_suspicions(&mut self) {
        let now = clock::now();
        let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.suspicions)
            .into_iter()
            .partition(|suspicion| suspicion.due <= now);
        self.suspicions = later;
        for suspicion in due {
            self.fail(suspicion.replica, &suspicion.error);
        }
    }

    pub(super) fn lose(&mut self, gpu: GpuId, reason: &str) {
        let known = self.fleet.description_of_lost(gpu).is_some();
        let description = self.fleet.note_lost(gpu, reason);
        if known {
            return;
        }
        self.collect(gpu, None);
        let computes = |replica: &&Replica| replica.seating.gpus().any(|seated| *seated == gpu);
        match self.replicas.iter().find(computes).map(|replica| replica.id) {
            Some(replica) => self.fail(replica, &RequestError::WorkerLost { gpu, description }),
            None => self.lose_helper(gpu, description),
        }
    }

    /// Ends a replica's requests, takes it out of routing and frees what its workers hold.
    pub(super) fn fail(&mut self, id: ReplicaId, error: &RequestError) {
        let replica = &mut self.replicas[id.index()];
        if replica.failure().is_some() {
            return;
        }
        match error {
            RequestError::Stopped => tracing::debug!("{id} stops"),
            _ => tracing::error!("{id} answers no more: {error}"),
        }
        let ended = replica.fail(error);
        self.router.set_available(id, false);
        self.suspicions.retain(|suspicion| suspicion.replica != id);
        let give_up = ToWorker::GiveUp {
            term: self.protocols[id.index()].stamp().term,
        };
        // A worker that cannot be reached is noticed by its reading thread.
        let _ = self.fleet.send(self.replicas[id.index()].gpus(), &give_up);
        self.release(id, &ended);
        self.fail_migration(&error.to_string());
    }

    pub(super) fn tick(&mut self) {
        self.judge_migration();
        for (gpu, error) in self.fleet.broadcast(&ToWorker::Ping) {
            self.lose(gpu, &format!("cannot be reached: {error}"));
        }
        let limits = self.options.limits;
        for gpu in self.fleet.silent(limits.silence) {
            self.lose(
                gpu,
                &format!("has said nothing for {} s", limits.silence.as_secs()),
            );
        }
        for index in 0..self.replicas.len() {
            let replica = &self.replicas[index];
            let Some((step, gpu, started)) = replica.oldest_step() else {
                continue;
            };
            if started.elapsed() > limits.step {
                let description = format!("{gpu} did not finish {step} within {} s", limits.step.as_secs());
                self.fail(
                    ReplicaId(index as u32),
                    &RequestError::WorkerLost { gpu, description },
                );
            }
        }
    }
}
