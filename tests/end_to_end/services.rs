//! `serve` and `replay` as their users meet them: answers, lost workers, strangers at ports, no orphans.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use infercluster_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::generation::{TEXT, with_tokenizer};
use crate::program;

/// How long anything here may take, far above what a busy machine needs.
const DEADLINE: Duration = Duration::from_secs(60);

/// A service of two workers, ended with the test.
struct Served {
    child: Child,
    url: String,
    workers: Vec<u32>,
}

impl Served {
    fn start(scratch: &Scratch) -> Self {
        scratch.layout("even.json", "--devices 2");
        let serve = "serve --model-dir model --layout even.json --port 0 --json";
        let mut command = scratch.program().command(serve.split(' '));
        let mut child = command
            .current_dir(scratch.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        let workers = started["workers"].as_array().unwrap();
        Self {
            child,
            url: started["url"].as_str().unwrap().to_owned(),
            workers: workers
                .iter()
                .map(|worker| worker["process"].as_u64().unwrap() as u32)
                .collect(),
        }
    }

    fn complete(&self, max_tokens: u32, stream: bool) -> ureq::http::Response<ureq::Body> {
        self.post(
            json!({"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": true, "stream": stream}),
        )
    }

    fn post(&self, body: Value) -> ureq::http::Response<ureq::Body> {
        let request = agent().post(format!("{}/v1/completions", self.url));
        request.send_json(body).unwrap()
    }

    fn status(&self, path: &str) -> u16 {
        agent()
            .get(format!("{}{path}", self.url))
            .call()
            .unwrap()
            .status()
            .as_u16()
    }

    /// Asks it to end, and demands that it does and leaves no worker behind.
    fn end(mut self) {
        signal("-TERM", self.child.id());
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "a service that is asked to end ends well");
        let limit = Instant::now() + DEADLINE;
        for worker in &self.workers {
            while is_running(*worker) {
                assert!(Instant::now() < limit, "worker process {worker} is an orphan");
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(DEADLINE));
    config.build().new_agent()
}

fn signal(signal: &str, process: u32) {
    let sent = Command::new("kill")
        .args([signal, &process.to_string()])
        .status()
        .unwrap();
    assert!(sent.success(), "process {process} cannot be signalled");
}

/// A process that waits to be reaped by the init of a container runs no more.
fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Ports that a process listens on, as the system lists them.
fn listening_ports(process: u32) -> Vec<u16> {
    let links = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let inodes: Vec<String> = links
        .filter_map(|link| std::fs::read_link(link.ok()?.path()).ok())
        .filter_map(|target| {
            Some(
                target
                    .to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .to_owned(),
            )
        })
        .collect();
    let table = std::fs::read_to_string(Path::new("/proc/net/tcp")).unwrap();
    let rows = table
        .lines()
        .skip(1)
        .map(|row| row.split_ascii_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[3] == "0A" && inodes.iter().any(|inode| inode == row[9]))
        .map(|row| u16::from_str_radix(row[1].split_once(':').unwrap().1, 16).unwrap())
        .collect()
}

#[test]
fn a_lost_worker_is_told_and_nothing_is_orphaned() {
    let scratch = Scratch::with_model(program(), &[]);
    let served = Served::start(&scratch);
    assert_eq!(served.status("/readyz"), 200);
    let mut lines = BufReader::new(served.complete(4000, true).into_body().into_reader()).lines();
    lines.next().unwrap().unwrap();
    let killed = Instant::now();
    signal("-KILL", served.workers[1]);
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    let waited = killed.elapsed();
    let text = rest.join("\n");
    assert!(
        text.contains("\"error\"") && text.contains("gpu 1"),
        "the client hears: {text}"
    );
    assert!(waited < Duration::from_secs(5), "the client waited {waited:?}");
    assert_eq!(served.status("/healthz"), 200, "the coordinator lives");
    assert_eq!(served.status("/readyz"), 503, "but answers nothing");
    let refused = served.complete(4, false);
    assert!(refused.status().is_server_error(), "{}", refused.status());
    served.end();
}

#[test]
fn strangers_at_worker_ports_change_nothing() {
    let scratch = Scratch::with_model(program(), &[]);
    let served = Served::start(&scratch);
    let answer = |served: &Served| -> Value { served.complete(8, false).into_body().read_json().unwrap() };
    let before = answer(&served)["choices"].clone();
    let ports: Vec<u16> = served
        .workers
        .iter()
        .copied()
        .chain([served.child.id()])
        .flat_map(listening_ports)
        .collect();
    assert!(
        ports.len() >= 3,
        "two workers and the control port listen: {ports:?}"
    );
    // Bytes without meaning, from a fixed linear congruence.
    let noise: Vec<u8> = (0..4096_u32)
        .map(|at| (at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) >> 24) as u8)
        .collect();
    for port in ports {
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stranger.set_read_timeout(Some(DEADLINE)).unwrap();
        // The other side may close before it has everything.
        let _ = stranger.write_all(&noise);
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let mut reply = Vec::new();
        match stranger.read_to_end(&mut reply) {
            Ok(_) => {}
            Err(error) => assert_eq!(
                error.kind(),
                std::io::ErrorKind::ConnectionReset,
                "port {port}: {error}"
            ),
        }
    }
    assert_eq!(answer(&served)["choices"], before);
    served.end();
}

#[test]
fn a_replay_reports_what_a_simulation_reports() {
    let scratch = Scratch::with_model(program(), &[]);
    let served = Served::start(&scratch);
    scratch
        .call("trace synth --arrivals poisson:50 --input 4-16 --output-tokens 4-8 --count 12 -o trace.jsonl")
        .done();
    let open = format!("replay --trace trace.jsonl --url {} --json", served.url);
    let open = scratch.call(&open).done().json();
    served.end();
    let closed = "replay --trace trace.jsonl --model-dir model --layout even.json --concurrency 4 \
                  --steps even.steps.json --requests-csv requests.csv --json";
    let closed = scratch.call(closed).done().json();
    for report in [&open, &closed] {
        assert_eq!(
            (&report["completed"], &report["failed"]),
            (&12.into(), &0.into()),
            "{report}"
        );
        assert!(report["itl_s"]["p50"].as_f64().unwrap() > 0.0);
        assert!(report["busy_fraction"]["weighted"].as_f64().unwrap() > 0.0);
    }
    let steps = std::fs::read_to_string(scratch.path().join("even.steps.json")).unwrap();
    let steps: Value = serde_json::from_str(&steps).unwrap();
    assert!(!steps["steps"].as_array().unwrap().is_empty());
    scratch
        .call("replay --trace trace.jsonl --url http://127.0.0.1:1")
        .refused(&["http://127.0.0.1:1"]);
}

#[test]
fn a_streamed_text_is_the_whole_text() {
    let scratch = with_tokenizer();
    let served = Served::start(&scratch);
    let body =
        |stream: bool| json!({"prompt": TEXT.0, "max_tokens": 200, "ignore_eos": true, "stream": stream});
    let whole: Value = served.post(body(false)).into_body().read_json().unwrap();
    let lines = BufReader::new(served.post(body(true)).into_body().into_reader()).lines();
    let pieces: Vec<String> = lines
        .map_while(Result::ok)
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    served.end();
    assert_eq!(pieces.concat(), whole["choices"][0]["text"].as_str().unwrap());
    // Random weights mostly give bytes that are no text, and a run of those comes at once.
    let said = pieces.iter().filter(|piece| !piece.is_empty()).count();
    assert!(said > 3, "{pieces:?}");
    let generate = [
        "generate",
        "--model-dir",
        "model",
        "--ignore-eos",
        "--max-tokens",
        "200",
        "--json",
    ];
    let answer = scratch
        .run(&[&generate[..], &["--prompt", TEXT.0]].concat())
        .done();
    assert_eq!(answer.json()["text"], whole["choices"][0]["text"]);
    assert_eq!(whole["usage"]["prompt_tokens"], 8);
}
