//! Where a replay sends its requests: a service behind a URL, or a coordinator of this process.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use infercluster_spec::StepRecord;
use infercluster_spec::report::BusyFraction;
use serde::Deserialize;
use serde_json::json;

use super::ReplayError;
use crate::clock;
use crate::coordinator::{Coordinator, GenerationRequest, StreamEvent};
use crate::speed::SpeedCheck;

/// How long connecting, and every wait for the next piece of an answer, may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
const ANSWER_DEADLINE: Duration = Duration::from_secs(3600);
/// Longest line of a streamed answer.
const LINE_LIMIT: u64 = 1 << 20;

/// What receives the requests.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// A service, such as `http://127.0.0.1:8000`.
    Url(&'a str),
    /// A coordinator of this process.
    Coordinator(&'a Coordinator),
}

/// What one request gave.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Received {
    pub(super) tokens: Vec<u32>,
    pub(super) times: Vec<Instant>,
    pub(super) logits_hash: Option<u64>,
    pub(super) preemptions: u32,
    /// Why it did not end well.
    pub(super) error: Option<String>,
}

/// Where time went during a replay.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Times {
    pub(super) busy_fraction: BusyFraction,
    pub(super) speeds: Vec<SpeedCheck>,
    /// A service behind a URL keeps its steps to itself.
    #[serde(skip)]
    pub(super) steps: Vec<StepRecord>,
}

/// What a service says about its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct ServedModel {
    /// Longest context.
    #[serde(rename = "max_model_len")]
    pub max_context: u32,
    /// Size of the vocabulary.
    #[serde(rename = "vocab_size")]
    pub vocab: u32,
}

/// Sends requests; one for every thread of a replay.
pub(super) struct Sender<'a> {
    target: Target<'a>,
    agent: ureq::Agent,
}

impl<'a> Sender<'a> {
    pub(super) fn new(target: Target<'a>) -> Self {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_DEADLINE))
            .timeout_global(Some(ANSWER_DEADLINE))
            .build()
            .new_agent();
        Self { target, agent }
    }

    /// Sends one request and waits for its end.
    pub(super) fn send(&self, prompt: Vec<u32>, max_tokens: u32, logits_hash: bool) -> Received {
        match self.target {
            Target::Coordinator(coordinator) => send_inside(coordinator, prompt, max_tokens, logits_hash),
            Target::Url(url) => {
                let mut received = Received::default();
                let body = json!({
                    "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "stream": true,
                    "logits_hash": logits_hash,
                });
                if let Err(error) = self.send_over(url, &body, &mut received) {
                    received.error = Some(error);
                }
                received
            }
        }
    }

    fn send_over(&self, url: &str, body: &serde_json::Value, received: &mut Received) -> Result<(), String> {
        let sent = self.agent.post(format!("{url}/v1/completions")).send_json(body);
        let mut answer = sent.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            let text = answer.body_mut().read_to_string();
            return Err(text.map_or_else(|error| error.to_string(), |text| message_of(&text)));
        }
        let mut lines = BufReader::new(answer.into_body().into_reader());
        loop {
            let mut line = String::new();
            let read = std::io::Read::take(&mut lines, LINE_LIMIT).read_line(&mut line);
            if read.map_err(|error| error.to_string())? == 0 {
                return Err("the stream broke off".to_owned());
            }
            let Some(data) = line.trim_end().strip_prefix("data: ") else {
                continue;
            };
            if data == "[DONE]" {
                return Ok(());
            }
            take_chunk(data, received)?;
        }
    }

    /// What the service says about its model.
    pub(super) fn model(&self, url: &str) -> Result<ServedModel, ReplayError> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<ServedModel>,
        }
        let error = |reason: String| ReplayError::Service {
            url: url.to_owned(),
            reason,
        };
        let mut answer = self
            .agent
            .get(format!("{url}/v1/models"))
            .call()
            .map_err(|reason| error(reason.to_string()))?;
        let models: Models = answer
            .body_mut()
            .read_json()
            .map_err(|reason| error(reason.to_string()))?;
        let first = models.data.first().copied();
        first.ok_or_else(|| error("it serves no model".to_owned()))
    }

    /// Where time went since the last call; `None` where the service does not say.
    pub(super) fn times(&self) -> Option<Times> {
        match self.target {
            Target::Coordinator(coordinator) => {
                let measured = coordinator.measurements_blocking().ok()?;
                Some(Times {
                    busy_fraction: measured.busy_fraction(),
                    speeds: measured.speed_checks(),
                    steps: measured.steps,
                })
            }
            Target::Url(url) => {
                let mut answer = self
                    .agent
                    .post(format!("{url}/admin/measurements"))
                    .send_empty()
                    .ok()?;
                answer.body_mut().read_json().ok()
            }
        }
    }
}

fn send_inside(coordinator: &Coordinator, prompt: Vec<u32>, max_tokens: u32, logits_hash: bool) -> Received {
    let mut received = Received::default();
    let mut stream = coordinator.submit(GenerationRequest {
        prompt,
        max_tokens,
        ignore_eos: true,
        logits_hash,
        prompt_logits: false,
    });
    while let Some(event) = stream.next_blocking() {
        match event {
            StreamEvent::PromptLogits(_) => {}
            StreamEvent::Token { token, at } => {
                received.tokens.push(token);
                received.times.push(at);
            }
            StreamEvent::Finished {
                logits_hash,
                preemptions,
                ..
            } => {
                received.logits_hash = logits_hash;
                received.preemptions = preemptions;
            }
            StreamEvent::Failed(error) => received.error = Some(error.to_string()),
        }
    }
    received
}

/// The part of a streamed chunk that a replay reads.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    token_ids: Vec<u32>,
    logits_hash: Option<String>,
    preemptions: Option<u32>,
}

#[derive(Deserialize)]
struct ErrorBody {
    message: String,
}

fn take_chunk(data: &str, received: &mut Received) -> Result<(), String> {
    let chunk: Chunk =
        serde_json::from_str(data).map_err(|error| format!("a chunk is unreadable: {error}"))?;
    if let Some(error) = chunk.error {
        return Err(error.message);
    }
    let at = clock::now();
    for choice in chunk.choices {
        received.times.extend(choice.token_ids.iter().map(|_| at));
        received.tokens.extend(choice.token_ids);
        if let Some(hash) = choice.logits_hash {
            let hash = u64::from_str_radix(&hash, 16);
            received.logits_hash =
                Some(hash.map_err(|_| "a logits hash is no hexadecimal number".to_owned())?);
        }
        received.preemptions = choice.preemptions.unwrap_or(received.preemptions);
    }
    Ok(())
}

/// The message of an error answer, or the answer as it is.
fn message_of(text: &str) -> String {
    let chunk: Option<Chunk> = serde_json::from_str(text).ok();
    chunk
        .and_then(|chunk| chunk.error)
        .map_or_else(|| text.trim().to_owned(), |error| error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_read_and_errors_end_them() {
        let mut received = Received::default();
        let token = r#"{"choices":[{"index":0,"text":"","token_ids":[5],"finish_reason":null}]}"#;
        let end =
            r#"{"choices":[{"index":0,"token_ids":[],"logits_hash":"00000000000000ff","preemptions":2}]}"#;
        take_chunk(token, &mut received).unwrap();
        take_chunk(end, &mut received).unwrap();
        assert_eq!((received.tokens.as_slice(), received.times.len()), (&[5][..], 1));
        assert_eq!((received.logits_hash, received.preemptions), (Some(255), 2));
        let error = take_chunk(r#"{"error":{"message":"gone"}}"#, &mut received);
        assert_eq!(error, Err("gone".to_owned()));
        assert_eq!(message_of(r#"{"error":{"message":"no"}}"#), "no");
        assert_eq!(message_of("plain\n"), "plain");
    }
}
