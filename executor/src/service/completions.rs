//! `/v1/completions`, whole and as a stream.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;
use tokio::sync::mpsc::{Receiver, channel};

use super::Shared;
use super::body::WholeBody;
use super::detokenize::Detokenizer;
use super::failure::{Failure, shortened};
use super::parameters::{Parameters, Prompt};
use crate::clock;
use crate::coordinator::{FinishReason, GenerationRequest, StreamEvent, TokenStream};

/// Events that wait for a slow client; the rest waits in the coordinator.
const CLIENT_BUFFER: usize = 64;

static NEXT_ANSWER: AtomicU64 = AtomicU64::new(0);

/// The handler.
pub(super) async fn complete(
    State(shared): State<Arc<Shared>>,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let object: Map<String, Value> = serde_json::from_slice(&body).map_err(|error| {
        Failure::malformed(
            StatusCode::BAD_REQUEST,
            format!("the body is no JSON object: {error}"),
        )
    })?;
    let parameters = Parameters::read(object)?;
    if let Some(model) = parameters
        .model
        .as_ref()
        .filter(|model| **model != shared.model_name)
    {
        let message = format!(
            "model `{}` is not served, `{}` is",
            shortened(model),
            shared.model_name
        );
        return Err(Failure::malformed(StatusCode::NOT_FOUND, message));
    }
    let prompts = tokenize(&shared, parameters.prompts.clone()).await?;
    let answer = Answer::new(&shared, &parameters, prompts.iter().map(Vec::len).sum());
    let streams = prompts
        .into_iter()
        .map(|prompt| {
            shared.coordinator.submit(GenerationRequest {
                prompt,
                max_tokens: parameters.max_tokens,
                ignore_eos: parameters.ignore_eos,
                logits_hash: parameters.logits_hash,
                prompt_logits: false,
            })
        })
        .collect();
    if parameters.stream {
        answer.stream(streams).await
    } else {
        answer.whole(streams).await
    }
}

/// Turns texts into ids, away from the threads that serve sockets.
async fn tokenize(shared: &Arc<Shared>, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, Failure> {
    let shared = Arc::clone(shared);
    let work = move || {
        prompts
            .into_iter()
            .map(|prompt| ids_of(&shared, prompt))
            .collect()
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        Failure::malformed(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("tokenizing failed: {error}"),
        )
    })?
}

fn ids_of(shared: &Shared, prompt: Prompt) -> Result<Vec<u32>, Failure> {
    let text = match prompt {
        Prompt::Tokens(ids) => return Ok(ids),
        Prompt::Text(text) => text,
    };
    let Some(tokenizer) = &shared.tokenizer else {
        let message = "this model has no tokenizer.json: send the prompt as token ids";
        return Err(Failure::bad_request("prompt", message));
    };
    let encoded = tokenizer.encode(text, true).map_err(|error| {
        Failure::bad_request("prompt", format!("the prompt cannot be tokenized: {error}"))
    })?;
    Ok(encoded.get_ids().to_vec())
}

/// What all parts of one answer share.
struct Answer {
    shared: Arc<Shared>,
    id: String,
    created: u64,
    include_usage: bool,
    prompt_tokens: usize,
}

/// How one choice ended.
#[derive(Clone, Copy)]
struct End {
    reason: FinishReason,
    logits_hash: Option<u64>,
    preemptions: u32,
}

/// The parts of one choice as they come.
enum Part {
    Token { text: String, token: u32 },
    End { text: String, end: End },
    Failed(Failure),
}

impl Answer {
    fn new(shared: &Arc<Shared>, parameters: &Parameters, prompt_tokens: usize) -> Self {
        let number = NEXT_ANSWER.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(shared),
            id: format!("cmpl-{number}"),
            created: clock::unix_seconds(),
            include_usage: parameters.include_usage,
            prompt_tokens,
        }
    }

    fn envelope(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created,
            "model": self.shared.model_name, "choices": choices,
        })
    }

    fn usage(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        })
    }

    /// Waits for every choice. Where the client goes away this future is dropped, and its streams cancel.
    async fn whole(self, streams: Vec<TokenStream>) -> Result<Response, Failure> {
        let mut choices = Vec::with_capacity(streams.len());
        let mut completion_tokens = 0;
        for (index, stream) in streams.into_iter().enumerate() {
            let mut parts = Parts::new(stream, self.shared.tokenizer.clone());
            let (mut text, mut tokens) = (String::new(), Vec::new());
            loop {
                match parts.next().await {
                    Part::Token { text: more, token } => {
                        text.push_str(&more);
                        tokens.push(token);
                    }
                    Part::Failed(failure) => return Err(failure),
                    Part::End { text: more, end } => {
                        text.push_str(&more);
                        completion_tokens += tokens.len();
                        choices.push(choice(index, &text, &tokens, Some(end)));
                        break;
                    }
                }
            }
        }
        let mut answer = self.envelope(choices);
        answer["usage"] = self.usage(completion_tokens);
        Ok(Json(answer).into_response())
    }

    /// Answers with the first part already known, so that a request that cannot run gets a status of its own.
    async fn stream(self, streams: Vec<TokenStream>) -> Result<Response, Failure> {
        let open = streams.len();
        let mut parts = merge(streams, self.shared.tokenizer.clone());
        let first = match parts.recv().await {
            Some((_, Part::Failed(failure))) => return Err(failure),
            first => first,
        };
        let state = Chunks {
            answer: self,
            parts,
            first,
            open,
            completion_tokens: 0,
            tail: Vec::new(),
        };
        let events = futures_util::stream::unfold(state, |mut state| async move {
            let event = state.next().await?;
            Some((Ok::<_, Infallible>(event), state))
        });
        Ok(Sse::new(events).into_response())
    }
}

fn choice(index: usize, text: &str, tokens: &[u32], end: Option<End>) -> Value {
    let mut choice = json!({
        "index": index, "text": text, "token_ids": tokens, "logprobs": null, "finish_reason": null,
    });
    if let Some(end) = end {
        choice["finish_reason"] = match end.reason {
            FinishReason::Length => "length".into(),
            FinishReason::Stop => "stop".into(),
        };
        choice["preemptions"] = end.preemptions.into();
        // A number of 64 bits does not survive every JSON reader.
        choice["logits_hash"] = end.logits_hash.map(|hash| format!("{hash:016x}")).into();
    }
    choice
}

/// One stream of tokens as parts with text.
struct Parts {
    stream: TokenStream,
    tokenizer: Option<Arc<Tokenizer>>,
    detokenizer: Detokenizer,
}

impl Parts {
    fn new(stream: TokenStream, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        Self {
            stream,
            tokenizer,
            detokenizer: Detokenizer::default(),
        }
    }

    async fn next(&mut self) -> Part {
        loop {
            match self.stream.next().await {
                Some(StreamEvent::PromptLogits(_)) => {}
                Some(StreamEvent::Token { token, .. }) => {
                    return match self.text_of(|detokenizer, tokenizer| detokenizer.push(tokenizer, token)) {
                        Ok(text) => Part::Token { text, token },
                        Err(failure) => Part::Failed(failure),
                    };
                }
                Some(StreamEvent::Finished {
                    reason,
                    logits_hash,
                    preemptions,
                }) => {
                    let end = End {
                        reason,
                        logits_hash,
                        preemptions,
                    };
                    return match self.text_of(|detokenizer, tokenizer| detokenizer.finish(tokenizer)) {
                        Ok(text) => Part::End { text, end },
                        Err(failure) => Part::Failed(failure),
                    };
                }
                Some(StreamEvent::Failed(error)) => return Part::Failed(error.into()),
                None => return Part::Failed(crate::coordinator::RequestError::Stopped.into()),
            }
        }
    }

    fn text_of(
        &mut self,
        read: impl FnOnce(&mut Detokenizer, &Tokenizer) -> Result<String, tokenizers::Error>,
    ) -> Result<String, Failure> {
        let Some(tokenizer) = &self.tokenizer else {
            return Ok(String::new());
        };
        read(&mut self.detokenizer, tokenizer).map_err(|error| {
            Failure::malformed(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("a token has no text: {error}"),
            )
        })
    }
}

/// The parts of all choices in the order in which they come. Every task ends when the receiver does, and its
/// stream cancels then.
fn merge(streams: Vec<TokenStream>, tokenizer: Option<Arc<Tokenizer>>) -> Receiver<(usize, Part)> {
    let (sender, receiver) = channel(CLIENT_BUFFER);
    for (index, stream) in streams.into_iter().enumerate() {
        let (sender, mut parts) = (sender.clone(), Parts::new(stream, tokenizer.clone()));
        tokio::spawn(async move {
            loop {
                let part = tokio::select! {
                    () = sender.closed() => return,
                    part = parts.next() => part,
                };
                let last = !matches!(part, Part::Token { .. });
                if sender.send((index, part)).await.is_err() || last {
                    return;
                }
            }
        });
    }
    receiver
}

/// The state of a streamed answer.
struct Chunks {
    answer: Answer,
    parts: Receiver<(usize, Part)>,
    first: Option<(usize, Part)>,
    open: usize,
    completion_tokens: usize,
    /// What follows the last choice, last first.
    tail: Vec<String>,
}

impl Chunks {
    async fn next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return self.tail.pop().map(|data| Event::default().data(data));
        }
        let part = match self.first.take() {
            Some(first) => Some(first),
            None => self.parts.recv().await,
        };
        let chunk = match part {
            Some((index, Part::Token { text, token })) => {
                self.completion_tokens += 1;
                self.answer.envelope(vec![choice(index, &text, &[token], None)])
            }
            Some((index, Part::End { text, end })) => {
                self.open -= 1;
                self.answer.envelope(vec![choice(index, &text, &[], Some(end))])
            }
            Some((_, Part::Failed(failure))) => {
                // The others are cancelled with the end of this stream.
                self.open = 0;
                failure.body()
            }
            None => {
                self.open = 0;
                Failure::from(crate::coordinator::RequestError::Stopped).body()
            }
        };
        if self.open == 0 {
            self.tail = self.last_chunks();
        }
        Some(Event::default().data(chunk.to_string()))
    }

    fn last_chunks(&self) -> Vec<String> {
        let mut tail = vec!["[DONE]".to_owned()];
        if self.answer.include_usage {
            let mut usage = self.answer.envelope(Vec::new());
            usage["usage"] = self.answer.usage(self.completion_tokens);
            tail.push(usage.to_string());
        }
        tail
    }
}
