//! What workers answer: tokens go to their streams, ended sequences leave.

use std::time::Instant;

use infercluster_serving::StepOutcome;
use infercluster_serving::handover::Stamp;
use infercluster_spec::{SequenceId, StepId};
use xxhash_rust::xxh3::Xxh3;

use super::{Completed, MEASURED_STEPS, Replica};
use crate::clock;
use crate::coordinator::request::{FinishReason, StreamEvent};
use crate::wire::message::StepOutput;

/// Why a worker's answer cannot be used: a bug on one of the two sides.
#[derive(Debug, thiserror::Error)]
pub(in crate::coordinator) enum AnswerError {
    #[error("{0}")]
    Order(#[from] infercluster_serving::SchedulerError),
    #[error("it gave tokens for {found:?} where {expected:?} wanted them")]
    Sequences {
        found: Vec<SequenceId>,
        expected: Vec<SequenceId>,
    },
    #[error("{sequence} asked for a logits hash and none came")]
    NoHash { sequence: SequenceId },
}

impl Replica {
    /// Takes an answer in; answers who ended with it and with later ones that waited for it. Answers of another
    /// reign or layout than their step's are none.
    pub(in crate::coordinator) fn hear(
        &mut self,
        (step, stamp): (StepId, Stamp),
        outputs: Vec<StepOutput>,
        at: Instant,
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        if !self
            .in_flight
            .iter()
            .any(|sent| (sent.step, sent.stamp) == (step, stamp))
        {
            return Ok(Vec::new());
        }
        let is_oldest = self.in_flight.front().is_some_and(|oldest| oldest.step == step);
        if !is_oldest {
            // Two layouts answer from two devices, so the later step's word may come first.
            self.early.insert(step, (outputs, at));
            return Ok(Vec::new());
        }
        let mut ended = self.complete(step, outputs, at, eos)?;
        while let Some(next) = self.in_flight.front().map(|oldest| oldest.step)
            && let Some((outputs, at)) = self.early.remove(&next)
        {
            ended.extend(self.complete(next, outputs, at, eos)?);
        }
        Ok(ended)
    }

    /// Takes the answer to the oldest step in flight; answers who ended with it.
    fn complete(
        &mut self,
        step: StepId,
        outputs: Vec<StepOutput>,
        at: Instant,
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        let ended_early = self.ended_early(step, &outputs, eos)?;
        let outcome = self.scheduler.complete_step(step, &ended_early)?;
        if let Some(done) = self.in_flight.pop_front() {
            let wall_s = at.saturating_duration_since(done.started).as_secs_f64();
            self.last_result = Some(clock::now());
            self.counters.steps += 1;
            self.counters.step_s += wall_s;
            if self.completed.len() == MEASURED_STEPS {
                self.completed.pop_front();
            }
            self.completed.push_back(Completed {
                step,
                epoch: done.stamp.epoch,
                shape: done.shape,
                wall_s,
            });
        }
        for output in outputs {
            self.take_token(output, step, at)?;
        }
        Ok(self.finish(&outcome))
    }

    /// Compares the answer with what was asked, and finds the sequences whose token ends a text.
    fn ended_early(
        &self,
        step: StepId,
        outputs: &[StepOutput],
        eos: &[u32],
    ) -> Result<Vec<SequenceId>, AnswerError> {
        let oldest = self.in_flight.front().filter(|oldest| oldest.step == step);
        let expected = oldest.map_or(&[][..], |oldest| &oldest.yields);
        if !outputs.iter().map(|output| &output.sequence).eq(expected) {
            return Err(AnswerError::Sequences {
                found: outputs.iter().map(|output| output.sequence).collect(),
                expected: expected.to_vec(),
            });
        }
        let ends = |output: &&StepOutput| {
            let sequence = self.sequences.get(&output.sequence);
            sequence.is_some_and(|sequence| !sequence.request.ignore_eos) && eos.contains(&output.token)
        };
        Ok(outputs
            .iter()
            .filter(ends)
            .map(|output| output.sequence)
            .collect())
    }

    fn take_token(&mut self, output: StepOutput, step: StepId, at: Instant) -> Result<(), AnswerError> {
        // A request that was cancelled while its step ran has nobody to tell.
        let Some(sequence) = self.sequences.get_mut(&output.sequence) else {
            return Ok(());
        };
        if sequence.request.logits_hash {
            let hash = output.logits_hash.ok_or(AnswerError::NoHash {
                sequence: output.sequence,
            })?;
            sequence.logits_chain = chain(sequence.logits_chain, hash);
        }
        if let Some((before, from)) = sequence.last_token.replace((at, step)) {
            let gap_s = at.saturating_duration_since(before).as_secs_f64();
            self.gaps.note(gap_s, from, step);
        }
        sequence.tokens.push(output.token);
        self.counters.generated_tokens += 1;
        if let Some(logits) = output.logits {
            self.outbox
                .push((sequence.stream.clone(), StreamEvent::PromptLogits(logits)));
        }
        let token = StreamEvent::Token {
            token: output.token,
            at,
        };
        self.outbox.push((sequence.stream.clone(), token));
        Ok(())
    }

    fn finish(&mut self, outcome: &StepOutcome) -> Vec<SequenceId> {
        let mut ended = Vec::new();
        for finished in &outcome.finished {
            let Some(sequence) = self.sequences.remove(&finished.sequence) else {
                continue;
            };
            let reason = match finished.reason {
                infercluster_serving::FinishReason::Length => FinishReason::Length,
                infercluster_serving::FinishReason::EndedEarly => FinishReason::Stop,
            };
            match reason {
                FinishReason::Length => self.counters.finished_length += 1,
                FinishReason::Stop => self.counters.finished_stop += 1,
            }
            let event = StreamEvent::Finished {
                reason,
                logits_hash: sequence.request.logits_hash.then_some(sequence.logits_chain),
                preemptions: finished.preemptions,
            };
            self.outbox.push((sequence.stream, event));
            ended.push(finished.sequence);
        }
        ended
    }
}

/// The next link of a request's logits chain: xxh3 over the chain so far and the hash of the new row.
fn chain(so_far: u64, row: u64) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&so_far.to_le_bytes());
    hash.update(&row.to_le_bytes());
    hash.digest()
}
