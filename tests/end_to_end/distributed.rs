//! Tokens out of worker processes: every cut of the reference models gives the reference answers.
//!
//! The reference data (`INFERCLUSTER_REFERENCE_DATA`, else `shared` beside the repository) holds tiny checkpoints
//! with greedy tokens and logits that another implementation computed. Where it is absent these tests say so.

use std::path::PathBuf;

use infercluster_tests::scratch::Scratch;
use serde::Deserialize;
use serde_json::Value;

use crate::program;

/// The bar for f32 arithmetic on the stored weights.
const LOGIT_TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<f64>,
}

/// A reference model; `None`, with a word, where it is absent.
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn reference(name: &str) -> Option<(String, Expected)> {
    let root = std::env::var_os("INFERCLUSTER_REFERENCE_DATA").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")),
        PathBuf::from,
    );
    let folder = root.join("oracle").join(name);
    let Ok(text) = std::fs::read_to_string(folder.join("expected.json")) else {
        eprintln!("skipped: {} is absent", folder.display());
        return None;
    };
    let folder = folder
        .to_str()
        .expect("the path of the reference data is text")
        .to_owned();
    Some((
        folder,
        serde_json::from_str(&text).expect("expected.json has the form that its README gives"),
    ))
}

/// Makes a layout with these flags and compares all prompts, as one batch, with the reference.
fn check(name: &str, flags: &[&str]) {
    let Some((folder, expected)) = reference(name) else {
        return;
    };
    let scratch = Scratch::new(program());
    let make = ["layout", "make", "--model-dir", &folder, "-o", "layout.json"];
    scratch.run(&[&make, flags].concat()).done();
    let ids: Vec<String> = expected
        .cases
        .iter()
        .map(|case| case.ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
        .collect();
    let mut arguments = vec![
        "generate",
        "--model-dir",
        &folder,
        "--layout",
        "layout.json",
        "--max-tokens",
        "32",
    ];
    arguments.extend(["--ignore-eos", "--logits", "--json"]);
    arguments.extend(ids.iter().flat_map(|ids| ["--prompt-ids", ids]));
    let answers = scratch.run(&arguments).done().json();
    let answers = answers.as_array().expect("a batch is answered by a list");
    assert_eq!(answers.len(), expected.cases.len());
    for (answer, case) in answers.iter().zip(&expected.cases) {
        let context = format!("{name} {flags:?}, a prompt of {}", case.ids.len());
        assert_eq!(answer["tokens"], Value::from(case.greedy.clone()), "{context}");
        let logits = answer["logits"].as_array().expect("logits were asked for");
        assert_eq!(logits.len(), case.logits.len(), "{context}");
        let gap = logits
            .iter()
            .zip(&case.logits)
            .map(|(found, expected)| (found.as_f64().expect("a logit is a number") - expected).abs())
            .fold(0.0, f64::max);
        assert!(gap <= LOGIT_TOLERANCE, "{context}: logits differ by {gap}");
    }
}

const LLAMA: &str = "llama_gqa_f32";
const QWEN2: &str = "qwen2_bias_bf16";

#[test]
fn llama_is_cut_in_every_direction() {
    let cuts: [&[&str]; 7] = [
        &["--devices", "1"],
        &["--devices", "2", "--heads", "5:1"],
        &["--devices", "3", "--heads", "3:2:1"],
        &["--devices", "2", "--mlp", "90:10", "--quantum", "1"],
        &["--devices", "2", "--stages", "2:1"],
        &[
            "--devices",
            "4",
            "--stages",
            "2:1",
            "--heads",
            "5:1",
            "--mlp",
            "70:30",
        ],
        &["--devices", "2", "--heads", "5:1", "--mlp", "70:30"],
    ];
    for (index, cut) in cuts.iter().enumerate() {
        // The last one checks the other reduction.
        let reduction = if index + 1 == cuts.len() {
            "fast"
        } else {
            "invariant"
        };
        check(LLAMA, &[cut, &["--reduction", reduction][..]].concat());
    }
}

#[test]
fn qwen2_is_cut_in_every_direction() {
    let cuts: [&[&str]; 5] = [
        &["--devices", "2", "--heads", "1:1"],
        &["--devices", "2", "--heads", "1:0"],
        &["--devices", "3", "--heads", "1:1:0"],
        &["--devices", "2", "--heads", "9:5", "--split-groups"],
        &["--devices", "2", "--stages", "3:1"],
    ];
    for cut in cuts {
        check(QWEN2, &[cut, &["--reduction", "invariant"][..]].concat());
    }
}
