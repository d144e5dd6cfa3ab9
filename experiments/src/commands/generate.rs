//! `generate`: one-shot generation, for scripts and checks.

use std::str::FromStr;

use anyhow::bail;
use clap::Args;
use infercluster_executor::coordinator::{Coordinator, FinishReason};
use infercluster_executor::generate::{GenerateOptions, Generated, generate};
use infercluster_executor::speed::SpeedCheck;
use serde::Serialize;

use crate::Outcome;
use crate::running::{self, RunFlags};
use crate::screen::Screen;

/// Generates for one or several prompts and ends.
///
/// Decoding is greedy, ties go to the lowest id. Prompt ids are taken verbatim. Repeated --prompt-ids run as
/// one batch and are answered by a list.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster generate --model-dir tiny --prompt-ids 1,2,3 --max-tokens 8\n  \
    infercluster generate --model-dir tiny --layout uneven.json --prompt-ids 1,2,3 --prompt-ids 9 --max-tokens 8 \
    --logits --json\n  \
    infercluster generate --model-dir tiny --layout uneven.json --speed 1.0:0.4 --prompt-ids 5 --max-tokens 32")]
pub(crate) struct Generate {
    #[command(flatten)]
    run: RunFlags,
    /// Token ids of a prompt; may stand several times.
    #[arg(long, required = true)]
    prompt_ids: Vec<PromptIds>,
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

/// The answer to one prompt.
#[derive(Debug, Serialize)]
struct Answer {
    tokens: Vec<u32>,
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
    let coordinator = Coordinator::start(arguments.run.options()?)?;
    let prompts: Vec<Vec<u32>> = arguments.prompt_ids.iter().map(|ids| ids.0.clone()).collect();
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
    let answers: Vec<Answer> = generated.into_iter().map(|one| answer(one, &emulated)).collect();
    match answers.as_slice() {
        [one] => screen.answer(one, people)?,
        all => screen.answer(&all, |all| all.iter().map(people).collect::<String>())?,
    }
    running::demand_speeds(&emulated)?;
    Ok(Outcome::Done)
}

fn answer(generated: Generated, emulated: &[SpeedCheck]) -> Answer {
    Answer {
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
    }
}

/// The double whose shortest decimal is that of the single, so that JSON shows `0.1` and not
/// `0.10000000149011612`; both read back to the same single.
fn shortest(logit: f32) -> f64 {
    logit.to_string().parse().expect("a float prints as a number")
}

fn people(answer: &Answer) -> String {
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
