//! A request and the stream of its tokens.

use std::sync::mpsc::Sender;
use std::time::Instant;

use infercluster_spec::SequenceId;
use tokio::sync::mpsc::UnboundedReceiver;

use super::RequestError;
use super::engine::Event;

/// What is asked for. Decoding is greedy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GenerationRequest {
    /// Token ids, taken verbatim.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Go on after a token that ends a text.
    pub ignore_eos: bool,
    /// Chain the hashes of all logits.
    pub logits_hash: bool,
    /// Hand out the logits of the prompt's last position.
    pub prompt_logits: bool,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It has all the tokens that it may have.
    Length,
    /// Its last token ends a text.
    Stop,
}

/// What a stream carries.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamEvent {
    /// The logits of the prompt's last position, before the first token.
    PromptLogits(Vec<f32>),
    /// The next token.
    Token {
        /// Its id.
        token: u32,
        /// When the coordinator had it.
        at: Instant,
    },
    /// The end; nothing follows.
    Finished {
        /// Why.
        reason: FinishReason,
        /// The chain over all logits, where it was asked for.
        logits_hash: Option<u64>,
        /// How often its KV was lost and computed again.
        preemptions: u32,
    },
    /// The end without success; nothing follows.
    Failed(RequestError),
}

/// The tokens of one request; dropping it cancels what is not finished.
#[derive(Debug)]
pub struct TokenStream {
    sequence: SequenceId,
    receiver: UnboundedReceiver<StreamEvent>,
    events: Sender<Event>,
    ended: bool,
}

impl TokenStream {
    pub(super) fn new(
        sequence: SequenceId,
        receiver: UnboundedReceiver<StreamEvent>,
        events: Sender<Event>,
    ) -> Self {
        Self {
            sequence,
            receiver,
            events,
            ended: false,
        }
    }

    /// Its id in this service.
    pub fn sequence(&self) -> SequenceId {
        self.sequence
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<StreamEvent> {
        let event = self.receiver.recv().await;
        self.note(event)
    }

    /// [`Self::next`] for threads outside a runtime.
    pub fn next_blocking(&mut self) -> Option<StreamEvent> {
        let event = self.receiver.blocking_recv();
        self.note(event)
    }

    /// A stream that breaks off without an end belongs to a service that stopped.
    fn note(&mut self, event: Option<StreamEvent>) -> Option<StreamEvent> {
        if self.ended {
            return None;
        }
        let event = event.unwrap_or(StreamEvent::Failed(RequestError::Stopped));
        self.ended = matches!(event, StreamEvent::Finished { .. } | StreamEvent::Failed(_));
        Some(event)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            // An engine that ended has nothing to cancel.
            let _ = self.events.send(Event::Cancel(self.sequence));
        }
    }
}
