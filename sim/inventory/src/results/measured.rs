//! What a vLLM engine measured of itself: requests, a time series, and the facts of the run.
//!
//! Arrivals there are Unix time and all else a monotonic clock, so latencies count from when the engine
//! queued a request, not from its arrival.

use infercluster_spec::report::{PartialReport, PartialSummary};
use infercluster_spec::stats::Summary;
use serde_json::{Map, Value};

use super::{EngineState, Loss, ResultKind, ServingResults, ServingRun};

const CLOCKS: [&str; 3] = ["queued_ts", "first_token_ts", "last_token_ts"];

/// Facts of a run: which engine, which arguments.
pub(super) fn is_meta(object: &Map<String, Value>) -> bool {
    object.contains_key("engine_kwargs") && object.contains_key("vllm_version")
}

pub(super) fn meta(object: &Map<String, Value>) -> ServingRun {
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    let other = object
        .iter()
        .filter(|(key, _)| !["model"].contains(&key.as_str()));
    ServingRun {
        model: text("model").map(str::to_owned),
        backend: text("vllm_version").map(|version| format!("vllm {version}")),
        report: PartialReport {
            completed: object.get("num_requests").and_then(Value::as_u64),
            ..PartialReport::default()
        },
        other: other.map(|(key, value)| (key.clone(), value.clone())).collect(),
        ..ServingRun::default()
    }
}

/// Requests with their instants on the engine's clock; `None` where lines hold something else.
pub(super) fn requests(objects: &[Map<String, Value>]) -> Option<ServingRun> {
    let first = objects.first()?;
    if !CLOCKS.iter().all(|key| first.contains_key(*key)) {
        return None;
    }
    let (mut ttft, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
    let (mut input, mut output) = (0_u64, 0_u64);
    let (mut start, mut end) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut failed = 0;
    for object in objects {
        let number = |key: &str| {
            object
                .get(key)
                .and_then(Value::as_f64)
                .filter(|number| number.is_finite())
        };
        let count = |key: &str| {
            object
                .get(key)
                .and_then(Value::as_u64)
                .filter(|count| *count <= 1 << 40)
        };
        let instants = (number(CLOCKS[0]), number(CLOCKS[1]), number(CLOCKS[2]));
        let (Some(queued), Some(first), Some(last)) = instants else {
            failed += 1;
            continue;
        };
        if first < queued || last < first {
            failed += 1;
            continue;
        }
        let tokens = count("output_toks").unwrap_or(0);
        input = input.saturating_add(count("input_toks").unwrap_or(0));
        output = output.saturating_add(tokens);
        ttft.push(first - queued);
        e2e.push(last - queued);
        if tokens > 1 {
            tpot.push((last - first) / (tokens - 1) as f64);
        }
        start = start.min(queued);
        end = end.max(last);
    }
    let completed = ttft.len() as u64;
    let duration = (end - start > 0.0).then_some(end - start);
    let rate = |count: u64| duration.map(|duration| count as f64 / duration);
    let partial = |samples: Vec<f64>| PartialSummary::from(Summary::of(samples));
    Some(ServingRun {
        backend: Some("vllm".to_owned()),
        report: PartialReport {
            completed: Some(completed),
            failed: Some(failed),
            duration_s: duration,
            input_tokens: Some(input),
            output_tokens: Some(output),
            requests_per_s: rate(completed),
            input_tokens_per_s: rate(input),
            output_tokens_per_s: rate(output),
            total_tokens_per_s: rate(input.saturating_add(output)),
            ttft_s: partial(ttft),
            tpot_s: partial(tpot),
            e2e_s: partial(e2e),
            ..PartialReport::default()
        },
        other: [("latencies_count_from".to_owned(), Value::from(CLOCKS[0]))].into(),
        ..ServingRun::default()
    })
}

const COLUMNS: [&str; 6] = [
    "t",
    "prompt_throughput",
    "gen_throughput",
    "running",
    "waiting",
    "kv_cache_pct",
];

/// States of an engine in rows; `None` where the header is another.
pub(super) fn time_series(text: &str) -> Option<ServingResults> {
    let mut lines = (1..).zip(text.lines());
    let (_, header) = lines.next()?;
    let cells: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| cells.iter().position(|cell| *cell == name);
    let columns: Option<Vec<usize>> = COLUMNS.iter().map(|name| column(name)).collect();
    let columns = columns?;
    let mut states = Vec::new();
    let mut problems = Vec::new();
    for (line, row) in lines.filter(|(_, row)| !row.trim().is_empty()) {
        let cells: Vec<&str> = row.split(',').map(str::trim).collect();
        let number = |column: usize| {
            cells
                .get(columns[column])?
                .parse::<f64>()
                .ok()
                .filter(|found| *found >= 0.0)
        };
        let numbers: Option<Vec<f64>> = (0..COLUMNS.len()).map(number).collect();
        match numbers.as_deref() {
            Some(&[_, prompt, generated, running, waiting, occupied]) => states.push(State {
                input_tokens_per_s: Some(prompt),
                output_tokens_per_s: Some(generated),
                running: Some(running as u64),
                waiting: Some(waiting as u64),
                kv_occupancy: Some(occupied / 100.0),
            }),
            _ => problems.push(Loss {
                line,
                what: format!("the row does not hold {} numbers of at least zero", COLUMNS.len()),
            }),
        }
    }
    Some(ServingResults {
        kind: ResultKind::VllmMeasured,
        runs: vec![ServingRun {
            backend: Some("vllm".to_owned()),
            engine: Some(summary(&states)),
            ..ServingRun::default()
        }],
        complete: problems.is_empty(),
        problems,
    })
}

/// One state of an engine.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct State {
    pub(super) input_tokens_per_s: Option<f64>,
    pub(super) output_tokens_per_s: Option<f64>,
    pub(super) running: Option<u64>,
    pub(super) waiting: Option<u64>,
    pub(super) kv_occupancy: Option<f64>,
}

pub(super) fn summary(states: &[State]) -> EngineState {
    let mean = |of: fn(&State) -> Option<f64>| {
        let found: Vec<f64> = states.iter().filter_map(of).collect();
        let mean = found.iter().sum::<f64>() / found.len() as f64;
        mean.is_finite().then_some(mean)
    };
    EngineState {
        samples: states.len() as u64,
        running_max: states.iter().filter_map(|state| state.running).max(),
        waiting_max: states.iter().filter_map(|state| state.waiting).max(),
        kv_occupancy_max: states
            .iter()
            .filter_map(|state| state.kv_occupancy)
            .max_by(f64::total_cmp),
        input_tokens_per_s_mean: mean(|state| state.input_tokens_per_s),
        output_tokens_per_s_mean: mean(|state| state.output_tokens_per_s),
    }
}
