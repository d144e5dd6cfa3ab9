//! Layouts on this device: known, loading, standing, freed.

use std::sync::Arc;

use infercluster_serving::handover::{HandoverId, RankEvent, RefusalReason};

use super::StepLoop;
use crate::speed::Speed;
use crate::wire::WireError;
use crate::wire::message::{FromWorker, Prepare};
use crate::worker::kv_line;
use crate::worker::preparing::{Loaded, Preparation};

impl StepLoop {
    /// Notes a layout, and makes the KV connections that lead to it.
    pub(super) fn describe(&mut self, prepare: Box<Prepare>) -> Result<(), WireError> {
        let (layout_id, wanted) = (prepare.layout_id, prepare.shadow.is_some());
        if wanted {
            kv_line::connect(&prepare, self.gpu, &self.switchboard, &self.commands)?;
        }
        // What is neither served nor loading will not be asked for again.
        let (runtimes, loading) = (&self.runtimes, &self.loading);
        self.known
            .retain(|known, _| runtimes.contains_key(known) || loading.contains(known));
        self.known.insert(layout_id, prepare);
        Ok(())
    }

    pub(super) fn loaded(
        &mut self,
        layout_id: HandoverId,
        speed: Speed,
        result: Result<Box<Loaded>, RefusalReason>,
    ) -> Result<(), WireError> {
        if !self.loading.remove(&layout_id) {
            // It was given up meanwhile.
            return Ok(());
        }
        let is_shadow = self
            .known
            .get(&layout_id)
            .is_some_and(|prepare| prepare.shadow.is_some());
        match result {
            Ok(loaded) => {
                self.pacer.set_speed(speed);
                self.runtimes.insert(layout_id, loaded);
                self.unsaid = Some(layout_id);
                self.say_loaded(layout_id)
            }
            // There is nothing to fall back to, and another try would fail alike: the coordinator knows why.
            Err(_) if !is_shadow => Ok(()),
            Err(reason) => self.feed(RankEvent::Loaded {
                layout: layout_id,
                result: Err(reason),
            }),
        }
    }

    /// Tells the protocol of a layout that stands, once its KV connections do: a rank that computes the first step
    /// of a layout could not take one up any more, and others may wait for what goes through it.
    pub(super) fn say_loaded(&mut self, layout: HandoverId) -> Result<(), WireError> {
        let is_connected = self
            .copying_of(layout)
            .is_none_or(|copying| copying.is_connected());
        if !is_connected || self.unsaid != Some(layout) {
            return Ok(());
        }
        self.unsaid = None;
        self.feed(RankEvent::Loaded {
            layout,
            result: Ok(()),
        })
    }

    pub(super) fn load(&mut self, layout: HandoverId) -> Result<(), WireError> {
        let Some(prepare) = self.known.get(&layout) else {
            // An order about a layout that was never described.
            return self.answers.send(&FromWorker::LoadFailed {
                layout_id: layout,
                refusal: RefusalReason::Load,
                reason: format!("layout {} is not known here", layout.0),
            });
        };
        self.loading.insert(layout);
        let preparation = Preparation {
            prepare: Prepare::clone(prepare),
            gpu: self.gpu,
            switchboard: Arc::clone(&self.switchboard),
            account: self.account.clone(),
            answers: self.answers.clone(),
            commands: self.commands.clone(),
        };
        preparation.start()
    }

    pub(super) fn free(&mut self, layout: HandoverId) {
        self.loading.remove(&layout);
        self.unsaid.take_if(|unsaid| *unsaid == layout);
        self.known.remove(&layout);
        self.switchboard.close_layout(layout);
        if let Some(loaded) = self.runtimes.remove(&layout) {
            loaded.free();
        }
    }
}
