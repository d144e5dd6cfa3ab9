//! Traces: made, converted, shown, refused.

use infercluster_tests::scratch::Scratch;

use crate::program;

const SHORT: [&str; 10] = [
    "trace",
    "synth",
    "--arrivals",
    "poisson:4",
    "--input",
    "8-64",
    "--output-tokens",
    "16",
    "--count",
    "50",
];

#[test]
fn the_same_seed_makes_the_same_trace() {
    let scratch = Scratch::new(program());
    let text = |seed: &str| {
        scratch
            .run(&[&SHORT[..], &["--seed", seed]].concat())
            .done()
            .stdout
    };
    assert_eq!(text("3"), text("3"));
    assert_ne!(text("3"), text("4"));
}

#[test]
fn a_conversion_keeps_what_its_format_holds() {
    let scratch = Scratch::new(program());
    scratch.run(&[&SHORT[..], &["-o", "made.jsonl"]].concat()).done();
    scratch
        .run(&[
            "trace",
            "convert",
            "made.jsonl",
            "--scale",
            "0.5",
            "--format",
            "vidur",
            "-o",
            "fast.csv",
        ])
        .done();
    let show = |file: &str| scratch.run(&["trace", "show", file, "--json"]).done().json();
    let (made, fast) = (show("made.jsonl"), show("fast.csv"));
    assert_eq!(
        (&made["format"], &fast["format"]),
        (&"lines".into(), &"vidur".into())
    );
    for key in ["rows", "input", "output"] {
        assert_eq!(made[key], fast[key], "{key}");
    }
    let rate = |shown: &serde_json::Value| shown["rate_per_s"].as_f64().unwrap();
    assert!(
        (rate(&fast) / rate(&made) - 2.0).abs() < 1e-6,
        "half the time is twice the rate"
    );
}

#[test]
fn what_is_no_trace_is_refused_with_its_place() {
    let scratch = Scratch::new(program());
    let cases: [(&str, &[u8], &str); 5] = [
        ("empty.csv", b"", "no request"),
        ("page.html", b"<!doctype html>", "web page"),
        ("unknown.csv", b"a,b\n1,2\n", "no known trace format"),
        (
            "back.csv",
            b"arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,5,5\n1.0,5,5\n",
            "back.csv:3",
        ),
        ("binary", &[0xff, 0xfe, 0x00, 0x81], "binary"),
    ];
    for (name, content, needle) in cases {
        scratch.write(name, content);
        scratch.run(&["trace", "show", name]).refused(&[name, needle]);
    }
    let synth = |flags: &[&str]| scratch.run(&[&["trace", "synth", "--count", "3"], flags].concat());
    synth(&["--arrivals", "poisson:0"]).refused(&["rate", "above zero"]);
    synth(&["--arrivals", "poisson:NaN"]).refused(&["rate", "finite"]);
    synth(&["--arrivals", "often"]).refused(&["poisson:RATE"]);
    synth(&["--input", "9-x"]).refused(&["64-256"]);
    scratch
        .run(&["trace", "synth", "--duration", "60"])
        .refused(&["`60` has no unit", "s"]);
}
