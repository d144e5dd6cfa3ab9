//! KV on its way, as the step thread moves it between steps.

use std::time::Duration;

use infercluster_serving::handover::{HandoverId, LaneData, RankEvent};
use infercluster_spec::{GpuId, Model};

use super::StepLoop;
use crate::clock::{self, Deadline};
use crate::wire::message::FromWorker;
use crate::wire::{LaneFrame, LaneHeader, WireError};
use crate::worker::copying::{Arrival, CopyError, Copying, Work};

/// The share of a step's time that copying may add to it while more steps wait.
const GAP_SHARE: f64 = 0.1;

impl StepLoop {
    pub(super) fn work(&self) -> Work {
        self.copying.as_ref().map_or(Work::None, Copying::work)
    }

    pub(super) fn copying_of(&mut self, handover: HandoverId) -> Option<&mut Copying> {
        self.copying
            .as_mut()
            .filter(|copying| copying.handover == handover)
    }

    /// Gets ready to move KV for a handover.
    pub(super) fn start_copying(&mut self, handover: HandoverId) {
        if self.copying_of(handover).is_some() {
            return;
        }
        let described = self.known.get(&handover);
        let Some(shadow) = described.and_then(|prepare| prepare.shadow.as_ref()) else {
            return;
        };
        let model = described.and_then(|prepare| prepare.model.read::<Model>().ok());
        let head_dim = model.map_or(0, |model| model.head_dim);
        let source = self.serving.unwrap_or(handover);
        let mut copying = Copying::new(self.gpu, (handover, source), shadow, head_dim);
        for (layout_id, peer, line) in std::mem::take(&mut self.early_lines) {
            if layout_id == handover {
                copying.line_up(peer, line);
            }
        }
        self.copying = Some(copying);
    }

    /// Copies in the gap after a step: a chunk, and more as long as they take a small share of the step's time.
    pub(super) fn copy_in_gap(&mut self) -> Result<(), WireError> {
        let budget = Deadline::after(self.last_step.mul_f64(GAP_SHARE));
        while self.work() == Work::Now {
            self.copy_chunk()?;
            if budget.remaining().is_none() {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn lane(
        &mut self,
        layout_id: HandoverId,
        peer: GpuId,
        frame: LaneFrame,
    ) -> Result<(), WireError> {
        let Some(copying) = self.copying_of(layout_id) else {
            return Ok(());
        };
        match frame.header.clone() {
            LaneHeader::Data { data, blocks } => copying.arrive(peer, data, blocks, frame),
            LaneHeader::Ack(ack) => {
                copying.note_consumed(peer, &frame);
                return self.feed(RankEvent::Ack(ack));
            }
        }
        Ok(())
    }

    /// Takes one chunk in, or sends one.
    pub(super) fn copy_chunk(&mut self) -> Result<(), WireError> {
        let Some(copying) = &mut self.copying else {
            return Ok(());
        };
        if let Some(arrival) = copying.take_arrival() {
            let event = RankEvent::Data(arrival.data);
            return self.feed_with(event, Some(&arrival));
        }
        if copying.work() == Work::Now {
            let sent = self.send_chunk();
            return self.report_copy(sent.map(drop));
        }
        Ok(())
    }

    /// Sends a chunk; `false` where nothing can be sent.
    pub(super) fn send_chunk(&mut self) -> Result<bool, CopyError> {
        let Some(copying) = &mut self.copying else {
            return Ok(false);
        };
        match self.runtimes.get(&copying.source) {
            Some(loaded) => copying.send_chunk(loaded.runtime.kv(), &self.tables),
            None => Ok(false),
        }
    }

    /// Sends all that is left of KV and answers how long that took: a step of the new layout may wait for it
    /// elsewhere.
    pub(super) fn send_tail(&mut self) -> Result<Duration, WireError> {
        let started = clock::now();
        let tables = &self.tables;
        let sent = match &mut self.copying {
            Some(copying) => match self.runtimes.get(&copying.source) {
                Some(loaded) => loop {
                    match copying.send_tail_chunk(loaded.runtime.kv(), tables) {
                        Ok(true) => {}
                        Ok(false) => break Ok(()),
                        Err(error) => break Err(error),
                    }
                },
                None => Ok(()),
            },
            None => Ok(()),
        };
        self.report_copy(sent)?;
        Ok(started.elapsed())
    }

    /// A device that cannot move KV is of no use to the handover.
    pub(super) fn report_copy(&mut self, copied: Result<(), CopyError>) -> Result<(), WireError> {
        let (Err(error), Some(copying)) = (copied, &self.copying) else {
            return Ok(());
        };
        self.answers.send(&FromWorker::LaneFailed {
            layout_id: copying.handover,
            peer: self.gpu,
            reason: error.to_string(),
        })
    }

    pub(super) fn end_copying(&mut self, handover: HandoverId) {
        if self.copying_of(handover).is_some() {
            self.copying = None;
        }
        self.early_lines.retain(|(layout, _, _)| *layout != handover);
    }

    pub(super) fn apply(&mut self, fresh: &LaneData, arrival: Option<&Arrival>) -> Result<(), CopyError> {
        let (Some(copying), Some(arrival)) = (&self.copying, arrival) else {
            return Ok(());
        };
        match self.runtimes.get_mut(&fresh.handover) {
            Some(loaded) => copying.apply(arrival, fresh, loaded.runtime.kv_mut()),
            None => Ok(()),
        }
    }
}
