//! `generate`: one-shot generation, for scripts and checks.

use std::path::Path;
use std::str::FromStr;

use anyhow::{anyhow, bail};
use clap::{ArgGroup, Args};
use infercluster_executor::coordinator::{Coordinator, FinishReason};
use infercluster_executor::generate::{GenerateOptions, Generated, generate};
use infercluster_executor::service::load_tokenizer;
use infercluster_executor::speed::SpeedCheck;
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::Outcome;
use crate::failure::WithFix as _;
use crate::running::{self, RunFlags};
use crate::screen::Screen;

/// Generates for one or several prompts and ends.
///
/// Decoding is greedy, ties go to the lowest id. Prompt ids are taken verbatim; a text becomes ids by the model's
/// tokenizer, which may put its begin-of-text before them. Repeated prompts run as one batch and are answered by a
/// list.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("prompts").required(true).args(["prompt_ids", "prompt"])))]
#[command(after_help = "Examples:\n  \
    infercluster generate --model-dir tiny --prompt-ids 1,2,3 --max-tokens 8\n  \
    infercluster generate --model-dir tiny --layout uneven.json --prompt-ids 1,2,3 --prompt-ids 9 --max-tokens 8 \
    --logits --json\n  \
    infercluster generate --model-dir tiny --layout uneven.json --speed 1.0:0.4 --prompt-ids 5 --max-tokens 32\n  \
    infercluster generate --model-dir SmolLM2 --prompt \"Once upon a time\" --max-tokens 32")]
pub(crate) struct Generate {
    #[command(flatten)]
    run: RunFlags,
    /// Token ids of a prompt, such as 1,2,3; may stand several times.
    #[arg(long)]
    prompt_ids: Vec<PromptIds>,
    /// Text of a prompt, for a model folder with a tokenizer.json; may stand several times.
    #[arg(long)]
    prompt: Vec<String>,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 16)]
    max_tokens: u32,
    /// Answer with the logits of each prompt's last position.
    #[arg(long)]
    logits: bool,
    /// Go on after a token that ends a text.
    #[arg(long)]
    ignore_eos: bool,
}

/// Token ids between commas.
#[derive(Debug, Clone)]
struct PromptIds(Vec<u32>);

impl FromStr for PromptIds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let id = |part: &str| {
            let part = part.trim();
            part.parse().map_err(|_| format!("`{part}` is no token id"))
        };
        text.split(',').map(id).collect::<Result<_, _>>().map(Self)
    }
}

/// The tokenizer of a model folder, where there is one.
struct Texts(Option<Tokenizer>);

impl Texts {
    fn of(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self(load_tokenizer(folder)?))
    }

    fn ids(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let Some(tokenizer) = &self.0 else {
            let refused = Err(anyhow!(
                "--prompt needs a tokenizer.json in the model folder, there is none"
            ));
            return refused.fix("give token ids instead: --prompt-ids 1,2,3");
        };
        let encoded = tokenizer
            .encode(text, true)
            .map_err(|error| anyhow!("--prompt: {error}"))?;
        Ok(encoded.get_ids().to_vec())
    }

    fn text(&self, tokens: &[u32]) -> anyhow::Result<Option<String>> {
        let decode = |tokenizer: &Tokenizer| {
            let text = tokenizer.decode(tokens, true);
            text.map_err(|error| anyhow!("the tokenizer cannot decode the answer: {error}"))
        };
        self.0.as_ref().map(decode).transpose()
    }
}

/// The answer to one prompt.
#[derive(Debug, Serialize)]
struct Answer {
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    finish: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logits: Option<Vec<f64>>,
    /// Chain over the logit bits of all steps, 16 hexadecimal digits.
    logits_hash: Option<String>,
    preemptions: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    emulated: Vec<SpeedCheck>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Generate, screen: &Screen) -> anyhow::Result<Outcome> {
    if arguments.max_tokens == 0 {
        bail!("--max-tokens is 0, at least 1 is needed");
    }
    let texts = Texts::of(&arguments.run.model_dir)?;
    let from_texts = arguments.prompt.iter().map(|text| texts.ids(text));
    let given = arguments.prompt_ids.iter().map(|ids| Ok(ids.0.clone()));
    let prompts: Vec<Vec<u32>> = given.chain(from_texts).collect::<anyhow::Result<_>>()?;
    let coordinator = Coordinator::start(arguments.run.options()?)?;
    let options = GenerateOptions {
        max_tokens: arguments.max_tokens,
        ignore_eos: arguments.ignore_eos,
        logits: arguments.logits,
        logits_hash: true,
    };
    let generated = generate(&coordinator, &prompts, &options)?;
    let checks = coordinator.measurements_blocking()?.speed_checks();
    if let Some(line) = running::speed_line(&checks) {
        screen.say(line);
    }
    let emulated: Vec<SpeedCheck> = checks.into_iter().filter(|check| check.asked != 1.0).collect();
    let answer = |one| answer(one, &texts, &emulated);
    let answers = generated
        .into_iter()
        .map(answer)
        .collect::<anyhow::Result<Vec<Answer>>>()?;
    match answers.as_slice() {
        [one] => screen.answer(one, people)?,
        all => screen.answer(&all, |all| all.iter().map(people).collect::<String>())?,
    }
    running::demand_speeds(&emulated)?;
    Ok(Outcome::Done)
}

fn answer(generated: Generated, texts: &Texts, emulated: &[SpeedCheck]) -> anyhow::Result<Answer> {
    Ok(Answer {
        text: texts.text(&generated.tokens)?,
        tokens: generated.tokens,
        finish: match generated.finish {
            FinishReason::Length => "length",
            FinishReason::Stop => "stop",
        },
        logits: generated
            .logits
            .map(|logits| logits.iter().map(|logit| shortest(*logit)).collect()),
        logits_hash: generated.logits_hash.map(|hash| format!("{hash:016x}")),
        preemptions: generated.preemptions,
        emulated: emulated.to_vec(),
    })
}

/// The double whose shortest decimal is that of the single, so that JSON shows `0.1` and not
/// `0.10000000149011612`; both read back to the same single.
fn shortest(logit: f32) -> f64 {
    logit.to_string().parse().expect("a float prints as a number")
}

fn people(answer: &Answer) -> String {
    if let Some(text) = &answer.text {
        return format!("{text}\n");
    }
    let tokens: Vec<String> = answer.tokens.iter().map(ToString::to_string).collect();
    format!("{}\n", tokens.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_are_short_and_exact() {
        for logit in [0.1_f32, -3.402_823_5e38, 1.0e-45, 16_777_216.0, -0.0] {
            let text = serde_json::to_string(&shortest(logit)).unwrap();
            assert!(text.len() <= 14, "{text}");
            assert_eq!(text.parse::<f32>().unwrap().to_bits(), logit.to_bits(), "{text}");
        }
    }
}
