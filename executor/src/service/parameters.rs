//! The body of `/v1/completions`: what is served, what is neutral, what is refused by name.

use serde_json::{Map, Value};

use super::failure::{Failure, shortened};

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// A request that this service can answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parameters {
    /// The model that the client named.
    pub(super) model: Option<String>,
    pub(super) prompts: Vec<Prompt>,
    pub(super) max_tokens: u32,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) ignore_eos: bool,
    pub(super) logits_hash: bool,
}

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Prompts of one request.
const PROMPT_LIMIT: usize = 1024;

/// Parameters that change nothing in greedy decoding of one answer, with the values that say so.
fn is_neutral(name: &str, value: &Value) -> bool {
    match name {
        "temperature" | "frequency_penalty" | "presence_penalty" => value.as_f64() == Some(0.0),
        "top_p" | "repetition_penalty" => value.as_f64() == Some(1.0),
        "n" | "best_of" => value.as_u64() == Some(1),
        "echo" => value.as_bool() == Some(false),
        "user" => value.is_string(),
        _ => false,
    }
}

impl Parameters {
    pub(super) fn read(body: Map<String, Value>) -> Result<Self, Failure> {
        let mut read = Self {
            model: None,
            prompts: Vec::new(),
            max_tokens: DEFAULT_MAX_TOKENS,
            stream: false,
            include_usage: false,
            ignore_eos: false,
            logits_hash: false,
        };
        for (name, value) in body {
            // Clients write `null` for what they do not set.
            if !value.is_null() {
                read.set(&name, value)?;
            }
        }
        if read.prompts.is_empty() {
            return Err(Failure::bad_request("prompt", "there is no prompt"));
        }
        Ok(read)
    }

    fn set(&mut self, name: &str, value: Value) -> Result<(), Failure> {
        match name {
            "model" => self.model = Some(text(name, value)?),
            "prompt" => self.prompts = prompts(value)?,
            "max_tokens" => self.max_tokens = count(name, &value)?,
            "stream" => self.stream = switch(name, &value)?,
            "ignore_eos" => self.ignore_eos = switch(name, &value)?,
            "logits_hash" => self.logits_hash = switch(name, &value)?,
            "stream_options" => self.include_usage = include_usage(&value)?,
            other if is_neutral(other, &value) => {}
            other => {
                let message = format!(
                    "`{name}` = {} is not supported: decoding is greedy, one answer a prompt, and {name} may only be \
                     absent or neutral",
                    shown(&value),
                    name = shortened(other),
                );
                return Err(Failure::bad_request(&shortened(other), message));
            }
        }
        Ok(())
    }
}

/// The one option of a stream that is known; others are left for clients that set what they do not need.
fn include_usage(value: &Value) -> Result<bool, Failure> {
    let Some(options) = value.as_object() else {
        let message = format!("`stream_options` is {}, expected an object", shown(value));
        return Err(Failure::bad_request("stream_options", message));
    };
    match options.get("include_usage") {
        None | Some(Value::Null) => Ok(false),
        Some(wanted) => switch("stream_options.include_usage", wanted),
    }
}

fn text(name: &str, value: Value) -> Result<String, Failure> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(Failure::bad_request(
            name,
            format!("`{name}` is {}, expected a text", shown(&other)),
        )),
    }
}

fn switch(name: &str, value: &Value) -> Result<bool, Failure> {
    let expected = || format!("`{name}` is {}, expected true or false", shown(value));
    value
        .as_bool()
        .ok_or_else(|| Failure::bad_request(name, expected()))
}

fn count(name: &str, value: &Value) -> Result<u32, Failure> {
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
    let expected = || {
        format!(
            "`{name}` is {}, expected a whole number from 1 to {}",
            shown(value),
            u32::MAX
        )
    };
    count
        .filter(|count| *count > 0)
        .ok_or_else(|| Failure::bad_request(name, expected()))
}

/// A text, a list of ids, or a list of either.
fn prompts(value: Value) -> Result<Vec<Prompt>, Failure> {
    let prompts = match value {
        Value::String(text) => vec![Prompt::Text(text)],
        Value::Array(items) if items.iter().all(Value::is_number) && !items.is_empty() => {
            vec![Prompt::Tokens(tokens(&items)?)]
        }
        Value::Array(items) => items.into_iter().map(prompt).collect::<Result<_, _>>()?,
        other => return Err(bad_prompt(&other)),
    };
    if prompts.len() > PROMPT_LIMIT {
        let message = format!(
            "the request has {} prompts, the limit is {PROMPT_LIMIT}",
            prompts.len()
        );
        return Err(Failure::bad_request("prompt", message));
    }
    Ok(prompts)
}

fn prompt(value: Value) -> Result<Prompt, Failure> {
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(items) => tokens(&items).map(Prompt::Tokens),
        other => Err(bad_prompt(&other)),
    }
}

fn tokens(items: &[Value]) -> Result<Vec<u32>, Failure> {
    let token = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| bad_prompt(value))
    };
    items.iter().map(token).collect()
}

fn bad_prompt(found: &Value) -> Failure {
    let message = format!(
        "`prompt` holds {}, expected a text, a list of token ids or a list of either",
        shown(found)
    );
    Failure::bad_request("prompt", message)
}

/// A value as a message names it.
fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Parameters, Value> {
        let Value::Object(body) = body else {
            panic!("{body}");
        };
        Parameters::read(body).map_err(|failure| failure.body()["error"]["param"].clone())
    }

    #[test]
    fn prompts_have_four_forms() {
        let tokens = |ids: &[u32]| Prompt::Tokens(ids.to_vec());
        let text = |text: &str| Prompt::Text(text.to_owned());
        let cases = [
            (json!("a"), vec![text("a")]),
            (json!([1, 2]), vec![tokens(&[1, 2])]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([[1], [2, 3]]), vec![tokens(&[1]), tokens(&[2, 3])]),
        ];
        for (prompt, expected) in cases {
            assert_eq!(read(json!({ "prompt": prompt })).unwrap().prompts, expected);
        }
        for bad in [
            json!(1),
            json!([-1]),
            json!([1.5]),
            json!([4_294_967_296_u64]),
            json!([{}]),
            json!([]),
        ] {
            assert_eq!(read(json!({ "prompt": bad })), Err(json!("prompt")), "{bad}");
        }
    }

    #[test]
    fn sampling_is_refused_by_name_unless_it_is_neutral() {
        let neutral = json!({
            "prompt": [1], "temperature": 0, "top_p": 1.0, "n": 1, "presence_penalty": 0.0, "stop": null, "user": "me"
        });
        assert!(read(neutral).is_ok());
        let refused = [
            ("temperature", json!(0.7)),
            ("top_p", json!(0.9)),
            ("top_k", json!(5)),
            ("n", json!(2)),
            ("seed", json!(1)),
            ("stop", json!(["x"])),
            ("logprobs", json!(1)),
            ("max_tokens", json!(0)),
            ("stream", json!("yes")),
            ("stream_options", json!(7)),
        ];
        for (name, value) in refused {
            assert_eq!(read(json!({ "prompt": [1], name: value })), Err(json!(name)));
        }
        let options = json!({ "prompt": [1], "stream_options": { "include_usage": 5 } });
        assert_eq!(read(options), Err(json!("stream_options.include_usage")));
    }
}
