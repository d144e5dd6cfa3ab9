//! Simulations by the command line: the same twice, complete, and refused where they cannot be.

use infercluster_tests::scratch::Scratch;

use crate::program;

/// A made model on two devices, one layout and a short trace.
fn prepared() -> Scratch {
    let scratch = Scratch::with_model(program(), &[]);
    scratch.layout("layout.json", "--devices 2");
    scratch
        .run(&["cluster", "show", "2 x l40s", "-o", "cluster.json"])
        .done();
    scratch
        .call("trace synth --arrivals poisson:50 --input 8-64 --output-tokens 4-16 --count 40 -o trace.jsonl")
        .done();
    scratch
}

const SIMULATE: [&str; 9] = [
    "simulate",
    "--cluster",
    "cluster.json",
    "--model",
    "model",
    "--layout",
    "layout.json",
    "--trace",
    "trace.jsonl",
];

#[test]
fn the_same_run_gives_the_same_bytes() {
    let scratch = prepared();
    let arguments = [&SIMULATE[..], &["--slo", "ttft=1s,itl=100ms", "--json"]].concat();
    let first = scratch.run(&arguments).done();
    assert_eq!(first.stdout, scratch.run(&arguments).done().stdout);
    let report = first.json();
    assert_eq!((&report["completed"], &report["failed"]), (&40.into(), &0.into()));
    for key in [
        "duration_s",
        "requests_per_s",
        "output_tokens_per_s",
        "total_tokens_per_s",
        "goodput_per_s",
    ] {
        assert!(report[key].as_f64().unwrap() > 0.0, "{key}");
    }
    for key in ["ttft_s", "itl_s", "tpot_s", "e2e_s"] {
        for part in ["mean", "p50", "p90", "p99"] {
            assert!(report[key][part].as_f64().unwrap() > 0.0, "{key}.{part}");
        }
    }
}

#[test]
fn every_request_has_its_row() {
    let scratch = prepared();
    scratch
        .run(&[&SIMULATE[..], &["--requests-csv", "requests.csv"]].concat())
        .done();
    let text = std::fs::read_to_string(scratch.path().join("requests.csv")).unwrap();
    let mut rows = text.lines();
    let header = rows.next().unwrap();
    assert!(
        header.starts_with("request,arrival_s,input_tokens,output_tokens,ttft_s"),
        "{header}"
    );
    let rows: Vec<&str> = rows.collect();
    assert_eq!(rows.len(), 40);
    assert!(rows.iter().all(|row| row.ends_with(",true")));
}

#[test]
fn a_trace_of_lengths_needs_a_closed_loop() {
    let scratch = prepared();
    scratch
        .run(&[
            "trace",
            "convert",
            "trace.jsonl",
            "--format",
            "vidur-lengths",
            "-o",
            "trace.jsonl",
        ])
        .done();
    scratch.run(&SIMULATE).refused(&["arrival"]);
    let closed = scratch
        .run(&[&SIMULATE[..], &["--clients", "4", "--json"]].concat())
        .done();
    assert_eq!(closed.json()["completed"], 40);
    scratch
        .run(&[&SIMULATE[..], &["--clients", "0"]].concat())
        .refused(&["0 clients"]);
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    let scratch = prepared();
    scratch
        .run(&["cluster", "show", "1 x l40s", "-o", "cluster.json"])
        .done();
    scratch.run(&SIMULATE).refused(&["gpu 1"]);
    scratch
        .run(&["cluster", "show", "2 x l40s", "-o", "cluster.json"])
        .done();
    scratch
        .run(&[&SIMULATE[..], &["--slo", "ttft=2"]].concat())
        .refused(&["`2` has no unit"]);
    scratch
        .run(&[&SIMULATE[..], &["--chunk", "0"]].concat())
        .refused(&["0"]);
}

#[test]
fn a_layout_without_memory_for_requests_is_an_answer() {
    let scratch = prepared();
    let answer = scratch.run(&[&SIMULATE[..], &["--memory-reserve", "80 GiB", "--json"]].concat());
    assert_eq!(answer.code, Some(1), "{answer}");
    assert_eq!(answer.json()["skipped"], 40);
    assert!(answer.stderr.contains("40 requests can never fit"), "{answer}");
}
