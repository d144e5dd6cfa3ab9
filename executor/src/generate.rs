//! One-shot generation: a batch of prompts through a running coordinator.

use std::path::{Path, PathBuf};

use crate::coordinator::{
    Coordinator, FinishReason, GenerationRequest, RequestError, StreamEvent, TokenStream,
};

/// What is asked of every prompt of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Go on after a token that ends a text.
    pub ignore_eos: bool,
    /// Hand out the logits of each prompt's last position.
    pub logits: bool,
    /// Chain the hashes of all logits.
    pub logits_hash: bool,
}

/// What one prompt gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// New tokens only.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The logits of the prompt's last position, where they were asked for.
    pub logits: Option<Vec<f32>>,
    /// The chain over all logits, where it was asked for.
    pub logits_hash: Option<u64>,
    /// How often its KV was lost and computed again.
    pub preemptions: u32,
}

/// Generates for all prompts at once, as one batch, and answers in their order.
pub fn generate(
    coordinator: &Coordinator,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<Vec<Generated>, RequestError> {
    let submit = |prompt: &Vec<u32>| {
        coordinator.submit(GenerationRequest {
            prompt: prompt.clone(),
            max_tokens: options.max_tokens,
            ignore_eos: options.ignore_eos,
            logits_hash: options.logits_hash,
            prompt_logits: options.logits,
        })
    };
    let streams: Vec<TokenStream> = prompts.iter().map(submit).collect();
    streams.into_iter().map(collect).collect()
}

fn collect(mut stream: TokenStream) -> Result<Generated, RequestError> {
    let (mut tokens, mut prompt_logits) = (Vec::new(), None);
    while let Some(event) = stream.next_blocking() {
        match event {
            StreamEvent::PromptLogits(logits) => prompt_logits = Some(logits),
            StreamEvent::Token { token, .. } => tokens.push(token),
            StreamEvent::Failed(error) => return Err(error),
            StreamEvent::Finished {
                reason,
                logits_hash,
                preemptions,
            } => {
                return Ok(Generated {
                    tokens,
                    finish: reason,
                    logits: prompt_logits,
                    logits_hash,
                    preemptions,
                });
            }
        }
    }
    Err(RequestError::Stopped)
}

/// Why the ids that end a text are not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EosError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is no JSON.
    #[error("{}: {source}", file.display())]
    Syntax {
        /// Which file.
        file: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// The field holds something else.
    #[error("{}: field `eos_token_id` is {found}, expected a token id or a list of them", file.display())]
    Field {
        /// Which file.
        file: PathBuf,
        /// What was found.
        found: String,
    },
}

/// The token ids that end a text: `eos_token_id` of `generation_config.json` where it names any, else of
/// `config.json`; none where neither does.
pub fn eos_ids(model_dir: &Path) -> Result<Vec<u32>, EosError> {
    for name in ["generation_config.json", "config.json"] {
        let file = model_dir.join(name);
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(source) => return Err(EosError::Io { file, source }),
        };
        let ids = read_eos(&file, &text)?;
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

fn read_eos(file: &Path, text: &str) -> Result<Vec<u32>, EosError> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|source| EosError::Syntax {
        file: file.to_owned(),
        source,
    })?;
    let found = match value.get("eos_token_id") {
        None | Some(serde_json::Value::Null) => return Ok(Vec::new()),
        Some(found) => found,
    };
    let id = |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match found {
        serde_json::Value::Array(list) => list.iter().map(id).collect(),
        single => id(single).map(|id| vec![id]),
    };
    ids.ok_or_else(|| EosError::Field {
        file: file.to_owned(),
        found: found.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eos_is_an_id_or_a_list() {
        let read = |text: &str| read_eos(Path::new("config.json"), text);
        assert_eq!(read(r#"{"eos_token_id": 2}"#).unwrap(), [2]);
        assert_eq!(read(r#"{"eos_token_id": [7, 9]}"#).unwrap(), [7, 9]);
        assert!(read(r#"{"eos_token_id": null}"#).unwrap().is_empty());
        assert!(read("{}").unwrap().is_empty());
        for bad in [r#"{"eos_token_id": -1}"#, r#"{"eos_token_id": [1, "x"]}"#, "["] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
