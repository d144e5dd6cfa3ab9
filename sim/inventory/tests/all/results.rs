//! Results of others: own examples of every kind, and the published files of the reference data.

use infercluster_inventory::results::{ResultKind, ServingResults, read};
use infercluster_spec::report::{PartialReport, PartialSummary, Report, RequestRecord};
use infercluster_spec::{RequestId, SimTime, Tokens, json};
use proptest::prelude::*;

use crate::reference;

fn one(text: &str, kind: ResultKind) -> PartialReport {
    let found = read("bench", text).unwrap();
    assert_eq!((found.kind, found.runs.len()), (kind, 1), "{text}");
    found.runs[0].report.clone()
}

#[test]
fn units_are_those_of_the_file() {
    let milliseconds = r#"{"backend": "vllm", "model_id": "m", "completed": 40, "failed": 1, "duration": 20.0,
        "total_input_tokens": 400, "total_output_tokens": 800, "request_throughput": 2.0,
        "output_throughput": 40.0, "total_token_throughput": 60.0, "mean_ttft_ms": 250.0, "median_ttft_ms": 200,
        "std_ttft_ms": 3.0, "p99_ttft_ms": 900.0, "mean_itl_ms": 20.0, "p99_e2el_ms": 4000,
        "ttfts": [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2],
        "request_goodput": null}"#;
    let report = one(milliseconds, ResultKind::ServingJson);
    assert_eq!(
        (report.completed, report.failed, report.duration_s),
        (Some(40), Some(1), Some(20.0))
    );
    let expected = PartialSummary {
        mean: Some(0.25),
        p50: Some(0.2),
        p99: Some(0.9),
        ..PartialSummary::default()
    };
    assert_eq!(
        (report.ttft_s, report.e2e_s.p99, report.goodput_per_s),
        (expected, Some(4.0), None)
    );
    let found = read("bench", milliseconds).unwrap();
    let run = &found.runs[0];
    assert_eq!(
        (run.model.as_deref(), run.backend.as_deref()),
        (Some("m"), Some("vllm"))
    );
    assert_eq!(run.other["std_ttft_ms"], 3.0);
    assert_eq!(run.other["ttfts"], "a list of 17 entries");
    let seconds = one(
        r#"{"completed": 4, "median_ttft": 0.25, "p99_tpot": 0.05}"#,
        ResultKind::ServingJson,
    );
    assert_eq!((seconds.ttft_s.p50, seconds.tpot_s.p99), (Some(0.25), Some(0.05)));
    let lines = "{\"completed\": 1, \"duration\": 2.0}\n{\"completed\": 3, \"mean_e2e_latency_ms\": 5}\n";
    let found = read("bench.jsonl", lines).unwrap();
    assert_eq!(
        (found.runs.len(), found.runs[1].report.e2e_s.mean),
        (2, Some(0.005))
    );
    let genai = r#"{"request_throughput": {"unit": "requests/sec", "avg": 3.5},
        "time_to_first_token": {"unit": "ms", "avg": 12.0, "p99": 30.0, "p90": 20.0, "std": 1},
        "request_latency": {"unit": "ms", "avg": 1500.0, "max": 2000}, "input_config": {"x": 1}}"#;
    let genai = one(genai, ResultKind::GenaiPerf);
    assert_eq!(
        (genai.requests_per_s, genai.ttft_s.p90, genai.e2e_s.max),
        (Some(3.5), Some(0.02), Some(2.0))
    );
}

#[test]
fn an_own_report_is_one_too() {
    let record = RequestRecord {
        id: RequestId(0),
        arrival: SimTime(0),
        input: Tokens(5),
        token_times: vec![SimTime(100_000_000_000), SimTime(150_000_000_000)],
        preemptions: 0,
        completed: true,
    };
    let report = Report::from_records(&[record], None);
    let read = one(&json::write(&report), ResultKind::Report);
    assert_eq!((read.ttft_s.mean, read.itl_s.max), (Some(0.1), Some(0.05)));
    assert_eq!(read, PartialReport::from(&report));
}

const TABLE: &str = "\u{1b}[1m============ Serving Benchmark Result ============\u{1b}[0m  \r\n\
    Backend:                                 sglang    \n\
    Successful requests:                     16        \n\
    Benchmark duration (s):                  20.87     \n\
    Request throughput (req/s):              0.77      \n\
    Peak concurrent requests:                16.00     \n\
    ---------------Time to First Token----------------\n\
    Mean TTFT (ms):                          2633.55   \n\
    P99 TTFT (ms):                           4610.48   \n\
    Mean E2E Latency (ms):                   26530.12  \n\
    ==================================================\n";

#[test]
fn printed_tables_are_read_and_cuts_are_told() {
    let found = read("table", TABLE).unwrap();
    assert!(found.complete, "{:?}", found.problems);
    let report = one(TABLE, ResultKind::ServingText);
    assert_eq!(
        (report.completed, report.ttft_s.mean, report.e2e_s.mean),
        (Some(16), Some(2.63355), Some(26.53012))
    );
    assert_eq!(found.runs[0].other["peak concurrent requests"], 16.0);
    let cut = TABLE.split("4610.48").next().unwrap();
    let found = read("table", cut).unwrap();
    assert!(
        !found.complete && found.problems.iter().any(|problem| problem.line == 9),
        "{:?}",
        found.problems
    );
    assert_eq!(found.runs[0].report.ttft_s.p99, None);
    let negative = read("table", &TABLE.replace("16        ", "-16")).unwrap();
    assert_eq!(
        (negative.runs[0].report.completed, negative.problems[0].line),
        (None, 3)
    );
}

#[test]
fn what_is_no_result_is_refused() {
    for text in [
        "",
        "hello",
        "{}",
        "[]",
        "[1]",
        "{\"a\": 1}",
        "{\"completed\": 1}",
        "a,b\n1,2\n",
        "{",
        "null",
    ] {
        assert!(read("x", text).is_err(), "{text}");
    }
    let deep = "[".repeat(100_000);
    assert!(read("x", &deep).is_err());
    let hostile = one(
        r#"{"completed": -1, "duration": 5.0, "mean_ttft_ms": NaN, "request_throughput": 1e999,
        "output_throughput": 3.0}"#
            .replace("1e999", "Infinity")
            .as_str(),
        ResultKind::ServingJson,
    );
    assert_eq!(
        (hostile.completed, hostile.ttft_s.mean, hostile.requests_per_s),
        (None, None, None)
    );
}

proptest! {
    #[test]
    fn cut_and_changed_results_never_gain_a_figure(cut in 0..TABLE.len(), at in 0..TABLE.len(), byte in 1_u8..128) {
        let whole = read("table", TABLE).unwrap().runs[0].report.clone();
        let cut = TABLE.char_indices().map(|(at, _)| at).find(|at| *at >= cut).unwrap_or(0);
        if let Ok(found) = read("table", &TABLE[..cut]) {
            // Every figure is whole, or the line that lost it is told.
            let last = found.runs[0].report.clone();
            prop_assert!(!found.complete || TABLE[..cut].ends_with("===="));
            prop_assert!(last.completed.is_none() || last.completed == whole.completed);
            prop_assert!(last.ttft_s.mean.is_none() || last.ttft_s.mean == whole.ttft_s.mean);
            prop_assert!(last.e2e_s.p99.is_none() && last.itl_s.mean.is_none());
        }
        let mut bytes = TABLE.as_bytes().to_vec();
        bytes[at] = byte;
        if let Ok(text) = String::from_utf8(bytes) {
            let _ = read("table", &text);
        }
    }
}

fn published(name: &str) -> Option<ServingResults> {
    let root = reference::folder("published results")?;
    let text = std::fs::read_to_string(root.join("data/bench").join(name)).unwrap();
    Some(read(name, &text).unwrap())
}

#[test]
fn every_published_result_is_of_its_kind() {
    let Some(root) = reference::folder("published results") else {
        return;
    };
    let mut index = csv::Reader::from_path(root.join("data/bench/INDEX.csv")).unwrap();
    for row in index.records() {
        let row = row.unwrap();
        let found = published(&row[0]).unwrap();
        let kind = serde_json::to_value(found.kind).unwrap();
        assert_eq!(kind, row[1], "{}", &row[0]);
        assert_eq!(
            found.complete,
            !row[0].contains("_cut"),
            "{}: {:?}",
            &row[0],
            found.problems
        );
    }
}

#[test]
fn published_figures_are_those_of_the_files() {
    let report = |name: &str| published(name).map(|found| found.runs[0].report.clone());
    let Some(seconds) = report("inferencex_glm5_fp8_vllm_tp8_isl1024_osl128_conc16.json") else {
        return;
    };
    assert_eq!(seconds.ttft_s.p50, Some(0.29139942955225706));
    let mlperf = report("mlperf_v41_h100x8_llama2_70b_server.txt").unwrap();
    assert_eq!(
        (mlperf.requests_per_s, mlperf.output_tokens_per_s),
        (Some(74.42), Some(21605.79))
    );
    assert!((mlperf.ttft_s.p99.unwrap() - 0.461_278_089).abs() < 1e-12);
    assert!((mlperf.e2e_s.max.unwrap() - 175.395_150_969).abs() < 1e-9);
    let guide = published("guidellm_report_v2.json").unwrap();
    assert_eq!(
        (guide.runs.len(), guide.runs[0].model.as_deref()),
        (2, Some("e2e-mock-model"))
    );
    assert!((guide.runs[0].report.ttft_s.mean.unwrap() - 0.011_481_165_885_925_293).abs() < 1e-15);
    let measured = report("vllm_measured_rtxpro6000_llama31_8b_tp1_requests.jsonl").unwrap();
    assert_eq!((measured.completed, measured.failed), (Some(300), Some(0)));
    // The first row by hand: queued at .340626232, first token at .510151426.
    assert!(measured.ttft_s.p50.unwrap() > 0.0 && measured.e2e_s.max.unwrap() < 67.0);
    let log = published("vllm_v1_engine_log_kv_pressure.log").unwrap().runs[0]
        .engine
        .unwrap();
    assert_eq!(
        (log.samples, log.running_max, log.waiting_max),
        (5, Some(21), Some(43))
    );
    assert!((log.kv_occupancy_max.unwrap() - 0.984).abs() < 1e-12);
    let sglang = published("sglang_decode_prefill.log").unwrap().runs[0]
        .engine
        .unwrap();
    assert_eq!(
        (
            sglang.samples,
            sglang.running_max,
            sglang.output_tokens_per_s_mean
        ),
        (4, Some(32), Some(1635.11))
    );
}
