//! The HTTP service over workers on threads.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;

use infercluster_executor::admin;
use infercluster_executor::coordinator::needed_transfers;
use infercluster_executor::generate::{GenerateOptions, generate};
use infercluster_executor::service::{Service, ServiceOptions};
use infercluster_spec::layout::Reduction;
use infercluster_spec::migration::MigrationPhase;
use infercluster_spec::{Layout, MigrationPlan};
use serde_json::{Value, json};

use crate::support::{Cuts, EVEN, UNEVEN, WHOLE, layout, made, model, start};

/// A service of one made model.
struct Running {
    service: Service,
    folder: tempfile::TempDir,
}

impl Running {
    fn start(cuts: &Cuts) -> Self {
        let folder = made();
        let coordinator = start(folder.path(), cuts);
        let options = ServiceOptions {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            model_name: "made".to_owned(),
            max_context: 512,
            vocab: 97,
            model_dir: folder.path().to_owned(),
        };
        let service = Service::start(coordinator, &options).unwrap();
        Self { service, folder }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.service.address())
    }

    fn post(&self, body: &Value) -> (u16, Value) {
        let request = ureq::post(self.url("/v1/completions"))
            .config()
            .http_status_as_error(false)
            .build();
        let mut answer = request.send_json(body).unwrap();
        (answer.status().as_u16(), answer.body_mut().read_json().unwrap())
    }

    fn get(&self, path: &str) -> (u16, String) {
        let request = ureq::get(self.url(path))
            .config()
            .http_status_as_error(false)
            .build();
        let mut answer = request.call().unwrap();
        (
            answer.status().as_u16(),
            answer.body_mut().read_to_string().unwrap(),
        )
    }

    /// The data lines of a streamed answer.
    fn stream(&self, body: &Value) -> Vec<String> {
        let answer = ureq::post(self.url("/v1/completions")).send_json(body).unwrap();
        let lines = BufReader::new(answer.into_body().into_reader()).lines();
        lines
            .map(Result::unwrap)
            .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
            .collect()
    }
}

#[test]
fn completions_whole_and_streamed_agree_with_generate() {
    let running = Running::start(&WHOLE);
    let prompts = vec![vec![1, 2, 3], vec![4]];
    let body = json!({
        "model": "made", "prompt": prompts, "max_tokens": 5, "ignore_eos": true, "logits_hash": true, "temperature": 0
    });
    let direct = start(running.folder.path(), &WHOLE);
    let asked = GenerateOptions {
        max_tokens: 5,
        ignore_eos: true,
        logits: false,
        logits_hash: true,
    };
    let expected = generate(&direct, &prompts, &asked).unwrap();

    let (status, answer) = running.post(&body);
    assert_eq!(status, 200, "{answer}");
    for (choice, expected) in answer["choices"].as_array().unwrap().iter().zip(&expected) {
        assert_eq!(choice["token_ids"], json!(expected.tokens));
        assert_eq!(
            choice["logits_hash"],
            json!(format!("{:016x}", expected.logits_hash.unwrap()))
        );
        assert_eq!(choice["finish_reason"], "length");
    }
    let usage = json!({ "prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14 });
    assert_eq!(answer["usage"], usage);

    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let mut lines = running.stream(&streamed);
    assert_eq!(lines.pop().as_deref(), Some("[DONE]"));
    let chunks: Vec<Value> = lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(chunks.last().unwrap()["usage"], usage);
    for (index, expected) in expected.iter().enumerate() {
        let own = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == json!(index));
        let own: Vec<&Value> = own.collect();
        let tokens: Vec<u64> = own
            .iter()
            .flat_map(|choice| choice["token_ids"].as_array().unwrap())
            .map(|id| id.as_u64().unwrap())
            .collect();
        assert_eq!(json!(tokens), json!(expected.tokens));
        assert_eq!(own.len(), 6, "a chunk a token and one for the end");
        let last = own.last().unwrap();
        assert_eq!(
            last["logits_hash"],
            json!(format!("{:016x}", expected.logits_hash.unwrap()))
        );
    }
}

#[test]
fn refusals_name_the_parameter() {
    let running = Running::start(&WHOLE);
    let cases = [
        (
            json!({ "prompt": [1], "temperature": 0.7 }),
            400,
            json!("temperature"),
            "temperature",
        ),
        (json!({ "prompt": [1], "top_k": 4 }), 400, json!("top_k"), "top_k"),
        (json!({ "prompt": "text" }), 400, json!("prompt"), "token ids"),
        (json!({ "prompt": [97] }), 400, Value::Null, "vocabulary of 97"),
        (
            json!({ "prompt": [1], "max_tokens": 600 }),
            400,
            Value::Null,
            "the limit is 512",
        ),
        (
            json!({ "prompt": [1], "max_tokens": 600, "stream": true }),
            400,
            Value::Null,
            "the limit is 512",
        ),
        (
            json!({ "prompt": [1], "model": "other" }),
            404,
            Value::Null,
            "`made` is",
        ),
        (json!([1]), 400, Value::Null, "no JSON object"),
        (
            json!({ "prompt": [1], "stop": "x".repeat(100_000) }),
            400,
            json!("stop"),
            "xxx.. is not supported",
        ),
        (
            json!({ "prompt": [1], "model": "x".repeat(100_000) }),
            404,
            Value::Null,
            "xxx..` is not served",
        ),
        (
            // With its quotes and key one byte over the limit of 8 MiB: the refusal comes once all is sent, so the
            // connection is not closed on a client that still writes.
            json!({ "prompt": "x".repeat((8 << 20) - 12) }),
            413,
            Value::Null,
            "limit",
        ),
    ];
    for (body, status, param, message) in cases {
        let (found, answer) = running.post(&body);
        assert_eq!(found, status, "{answer}");
        assert!(answer.to_string().len() < 1000, "{answer}");
        assert_eq!(answer["error"]["param"], param, "{answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains(message),
            "{answer}"
        );
    }
}

#[test]
fn health_models_metrics_and_times_are_there() {
    let running = Running::start(&Cuts {
        layers: &[0, 1, 4],
        ..WHOLE
    });
    let (status, answer) = running.post(&json!({ "prompt": [1, 2], "max_tokens": 4, "ignore_eos": true }));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(running.get("/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(running.get("/readyz"), (200, "ready\n".to_owned()));
    assert_eq!(running.get("/nowhere").0, 404);
    let (status, answer) = running.get("/v1/completions");
    assert!(status == 405 && answer.contains("`allow`"), "{status} {answer}");
    // A page in a browser of this machine says where it is from.
    let from_a_page = ureq::get(running.url("/admin/layout"))
        .header("origin", "http://example.com")
        .config()
        .http_status_as_error(false)
        .build();
    assert_eq!(from_a_page.call().unwrap().status().as_u16(), 403);
    assert_eq!(running.get("/admin/layout").0, 200);
    let (_, models) = running.get("/v1/models");
    assert!(models.contains("\"id\":\"made\""), "{models}");
    let (_, page) = running.get("/metrics");
    for line in [
        "vllm:num_requests_running{model_name=\"made\"} 0",
        "vllm:prompt_tokens_total{model_name=\"made\"} 2",
        "vllm:generation_tokens_total{model_name=\"made\"} 4",
        "vllm:request_success_total{model_name=\"made\",finished_reason=\"length\"} 1",
        "infercluster:steps_total{model_name=\"made\",replica=\"0\"} 4",
        "infercluster:worker_up{model_name=\"made\",gpu=\"1\"} 1",
    ] {
        assert!(
            page.lines().any(|found| found == line),
            "{line} is not in\n{page}"
        );
    }
    let mut answer = ureq::post(running.url("/admin/measurements?steps=true"))
        .send_empty()
        .unwrap();
    let measured: Value = answer.body_mut().read_json().unwrap();
    // Four steps on two stages.
    assert_eq!(measured["steps"].as_array().unwrap().len(), 8);
    let busy = measured["busy_fraction"]["weighted"].as_f64().unwrap();
    assert!(busy > 0.0 && busy <= 1.0, "{measured}");
}

#[test]
fn a_replay_gives_the_same_over_http_and_inside() {
    use infercluster_executor::replay::{Pace, ReplayOptions, Target, replay, served_model};
    use infercluster_spec::{Request, RequestId, SimTime, Tokens, Trace};

    let running = Running::start(&WHOLE);
    let url = running.url("");
    let served = served_model(&url).unwrap();
    assert_eq!((served.max_context, served.vocab), (512, 97));
    // The last of nine requests can never fit.
    let request = |id: u64| Request {
        id: RequestId(id),
        arrival: Some(SimTime(id * 2_000_000_000)),
        input: Tokens(if id == 8 { 510 } else { 3 + id }),
        output: Tokens(4),
        block_hashes: Vec::new(),
    };
    let trace = Trace {
        name: "nine".to_owned(),
        requests: (0..9).map(request).collect(),
        hash_block: None,
    };
    let options_at = |pace| ReplayOptions {
        pace,
        seed: 1,
        max_context: served.max_context,
        vocab: served.vocab,
        logits_hash: true,
        slo: None,
    };
    let direct = start(running.folder.path(), &WHOLE);
    let closed = Pace::Closed {
        concurrency: 3,
        duration: None,
    };
    let open = Pace::Open { stretch: 0.5 };
    let mut all = Vec::new();
    for (target, pace) in [
        (Target::Url(&url), closed),
        (Target::Url(&url), open),
        (Target::Coordinator(&direct), closed),
        (Target::Coordinator(&direct), open),
    ] {
        let outcome = replay(target, &trace, &options_at(pace), &|_| {}).unwrap();
        let report = &outcome.report;
        assert_eq!(
            (report.completed, report.failed, report.skipped),
            (8, 0, 1),
            "{outcome:?}"
        );
        assert_eq!(report.itl_s.samples, 8 * 3);
        assert!(report.busy_fraction.as_ref().unwrap().weighted > 0.0 && outcome.is_valid());
        let mut answers = outcome.answers;
        answers.sort_by_key(|answer| answer.id);
        all.push(answers);
    }
    assert!(all.iter().all(|answers| *answers == all[0]));
    assert!(all[0].iter().all(|answer| answer.logits_hash.is_some()));
}

#[test]
fn a_client_that_goes_away_cancels() {
    let running = Running::start(&WHOLE);
    let body = json!({ "prompt": [1], "max_tokens": 500, "ignore_eos": true, "stream": true });
    let answer = ureq::post(running.url("/v1/completions"))
        .send_json(&body)
        .unwrap();
    let mut reader = BufReader::new(answer.into_body().into_reader());
    reader.read_line(&mut String::new()).unwrap();
    drop(reader);
    // The next request is answered while or after the first is cancelled; then the counters say so. A bounded
    // number of further requests gives the cancellation time to arrive without a clock.
    let cancelled = "vllm:request_success_total{model_name=\"made\",finished_reason=\"abort\"} 1";
    let seen = (0..500).any(|_| {
        let (status, _) = running.post(&json!({ "prompt": [2], "max_tokens": 1 }));
        assert_eq!(status, 200);
        running.get("/metrics").1.contains(cancelled)
    });
    assert!(seen, "{}", running.get("/metrics").1);
}

#[test]
fn the_layout_changes_over_http_and_refusals_say_why() {
    let running = Running::start(&EVEN);
    let url = running.url("");
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": true, "logits_hash": true });
    let (_, before) = running.post(&body);
    assert_eq!(
        admin::layout(&url).unwrap().replicas,
        layout(&EVEN, Reduction::Invariant).replicas
    );
    assert_eq!(admin::migration(&url).unwrap(), None);

    let to = layout(&UNEVEN, Reduction::Invariant);
    let reports = admin::migrate(&url, &to).unwrap();
    assert_eq!(reports.len(), 1);
    assert_eq!(admin::migration(&url).unwrap().as_ref(), reports.first());
    assert_eq!(admin::layout(&url).unwrap().replicas, to.replicas);
    let (_, after) = running.post(&body);
    assert_eq!(after["choices"], before["choices"]);

    // A plan starts where the service is, which is not where this one does.
    let phase = |from: &Layout, to: &Layout| MigrationPhase {
        to: to.clone(),
        transfers: needed_transfers(&model(), from, to),
        memory_peak: BTreeMap::new(),
        duration_bound: None,
        duration: None,
        pause: None,
    };
    let even = layout(&EVEN, Reduction::Invariant);
    let mut plan = MigrationPlan {
        from: even.clone(),
        phases: vec![phase(&to, &even), phase(&even, &to)],
    };
    let refusals = [
        admin::migrate(&url, &to).unwrap_err().to_string(),
        admin::migrate(&url, &plan).unwrap_err().to_string(),
        admin::migrate(&url, &model()).unwrap_err().to_string(),
    ];
    let reasons = [
        "answers 409: the new layout is the one in force",
        "answers 409: the plan does not start at the layout in force",
        "answers 400: body",
    ];
    for (refusal, reason) in refusals.iter().zip(reasons) {
        assert!(refusal.contains(reason), "{refusal}");
    }
    plan.from = to.clone();
    let mut short = plan.clone();
    short.phases[1].transfers.clear();
    let refusal = admin::migrate(&url, &short).unwrap_err().to_string();
    assert!(
        refusal.contains("answers 400: phase 2 does not carry"),
        "{refusal}"
    );
    assert_eq!(admin::migrate(&url, &plan).unwrap().len(), 2);
    assert_eq!(running.post(&body).1["choices"], before["choices"]);
}
