//! Logs of engines: the lines in which they report their state every few seconds, among all others.

use super::measured::{State, summary};
use super::{ResultKind, ServingResults, ServingRun, whole};

/// `None` where no line reports a state.
pub(super) fn read(text: &str) -> Option<ServingResults> {
    let vllm: Vec<State> = text.lines().filter_map(vllm).collect();
    let (kind, backend, states) = match vllm.is_empty() {
        false => (ResultKind::VllmLog, "vllm", vllm),
        true => (
            ResultKind::SglangLog,
            "sglang",
            text.lines().filter_map(sglang).collect(),
        ),
    };
    (!states.is_empty()).then(|| {
        let run = ServingRun {
            backend: Some(backend.to_owned()),
            engine: Some(summary(&states)),
            ..ServingRun::default()
        };
        whole(kind, vec![run])
    })
}

/// The number that follows a label: `Running: 18 reqs` gives 18.
fn after(line: &str, label: &str) -> Option<f64> {
    let (_, rest) = line.split_once(label)?;
    let rest = rest.trim_start_matches([':', ' ', '=']);
    let end = rest
        .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
        .unwrap_or(rest.len());
    rest[..end].parse().ok().filter(|number: &f64| number.is_finite())
}

fn count(line: &str, label: &str) -> Option<u64> {
    after(line, label).map(|number| number as u64)
}

/// `Avg prompt throughput: 0.0 tokens/s, ..., GPU KV cache usage: 95.9%`; older lines say `GPU cache usage`
/// or `Pending`.
fn vllm(line: &str) -> Option<State> {
    let state = State {
        input_tokens_per_s: after(line, "Avg prompt throughput"),
        output_tokens_per_s: after(line, "Avg generation throughput"),
        running: count(line, "Running"),
        waiting: count(line, "Waiting").or_else(|| count(line, "Pending")),
        kv_occupancy: after(line, "KV cache usage")
            .or_else(|| after(line, "GPU cache usage"))
            .map(|percent| percent / 100.0),
    };
    state.output_tokens_per_s.map(|_| state)
}

/// `Decode batch, #running-req: 32, ..., gen throughput (token/s): 1635.11, #queue-req: 0`.
fn sglang(line: &str) -> Option<State> {
    let is_prefill = line.contains("Prefill batch");
    if !is_prefill && !line.contains("Decode batch") {
        return None;
    }
    Some(State {
        input_tokens_per_s: after(line, "input throughput (token/s)"),
        output_tokens_per_s: after(line, "gen throughput (token/s)"),
        running: count(line, "#running-req"),
        waiting: count(line, "#queue-req"),
        kv_occupancy: after(line, "token usage"),
    })
}
