//! Generation by real worker processes: every layout says what one worker says.

use infercluster_tests::scratch::Scratch;
use serde_json::Value;

use crate::program;

const PROMPTS: [&str; 4] = ["--prompt-ids", "1,2,3", "--prompt-ids", "400,7,7,7,250,90,1"];

fn generate(scratch: &Scratch, flags: &[&str]) -> Value {
    let arguments = [
        &[
            "generate",
            "--model-dir",
            "model",
            "--max-tokens",
            "12",
            "--ignore-eos",
            "--json",
        ],
        &PROMPTS[..],
        flags,
    ];
    scratch.run(&arguments.concat()).done().json()
}

fn layout(scratch: &Scratch, name: &str, flags: &[&str]) {
    let make = ["layout", "make", "--model-dir", "model", "-o", name];
    scratch.run(&[&make[..], flags].concat()).done();
}

/// Cuts of six query heads on two KV heads, four layers, 320 columns.
const CUTS: [(&str, &[&str]); 5] = [
    (
        "uneven heads and columns",
        &[
            "--devices",
            "2",
            "--heads",
            "5:1",
            "--mlp",
            "90:10",
            "--split-groups",
            "--quantum",
            "1",
        ],
    ),
    (
        "three ranks",
        &[
            "--devices",
            "3",
            "--heads",
            "3:2:1",
            "--mlp",
            "1:1:1",
            "--split-groups",
        ],
    ),
    (
        "a rank without heads or columns",
        &["--devices", "2", "--heads", "1:0", "--mlp", "0:1"],
    ),
    ("uneven stages", &["--devices", "2", "--stages", "3:1"]),
    (
        "two stages of two ranks",
        &[
            "--devices",
            "4",
            "--stages",
            "1:3",
            "--heads",
            "1:2",
            "--split-groups",
        ],
    ),
];

#[test]
fn every_invariant_layout_gives_one_worker_s_bits() {
    let scratch = Scratch::with_model(program(), &[]);
    let alone = generate(&scratch, &[]);
    assert_eq!(alone[0]["tokens"].as_array().unwrap().len(), 12);
    for (what, flags) in CUTS {
        layout(
            &scratch,
            "cut.json",
            &[flags, &["--reduction", "invariant"]].concat(),
        );
        assert_eq!(generate(&scratch, &["--layout", "cut.json"]), alone, "{what}");
    }
    // Neither chunks nor blocks change a bit.
    assert_eq!(generate(&scratch, &["--chunk", "2", "--block-size", "8"]), alone);
}

#[test]
fn a_fast_layout_stays_close() {
    let scratch = Scratch::with_model(program(), &["--family", "qwen2", "--dtype", "bf16"]);
    layout(
        &scratch,
        "cut.json",
        &[
            "--devices",
            "2",
            "--heads",
            "2:1",
            "--split-groups",
            "--mlp",
            "60:40",
        ],
    );
    let alone = generate(&scratch, &["--logits"]);
    let cut = generate(&scratch, &["--logits", "--layout", "cut.json"]);
    for prompt in 0..2 {
        let logits = |answer: &Value| -> Vec<f64> {
            serde_json::from_value(answer[prompt]["logits"].clone()).unwrap()
        };
        let (alone, cut) = (logits(&alone), logits(&cut));
        assert_eq!(alone.len(), 512);
        let gap = alone
            .iter()
            .zip(&cut)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max);
        assert!(gap < 1e-3, "logits differ by {gap}");
    }
}

#[test]
fn bad_prompts_are_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    let generate = |flags: &[&str]| scratch.run(&[&["generate", "--model-dir", "model"], flags].concat());
    generate(&["--prompt-ids", "1,x"]).refused(&["`x` is no token id"]);
    generate(&["--prompt-ids", ""]).refused(&["no token id"]);
    generate(&["--prompt-ids", "512"]).refused(&["token 512", "vocabulary of 512"]);
    generate(&["--prompt-ids", "1", "--max-tokens", "0"]).refused(&["--max-tokens is 0"]);
    generate(&["--prompt-ids", "1", "--max-tokens", "5000"]).refused(&["4096"]);
    generate(&["--prompt-ids", "1", "--speed", "1.0:0.4"]).refused(&["2 factors", "1 devices"]);
    generate(&["--prompt-ids", "1", "--speed", "1.5"]).refused(&["speed 1.5 is not above 0 and at most 1"]);
    generate(&["--prompt-ids", "1", "--speed", "NaN"]).refused(&["speed NaN"]);
    generate(&["--prompt-ids", "1", "--memory", "1 MiB"]).refused(&["KV blocks", "1 MiB"]);
}

#[test]
fn a_broken_model_folder_is_refused_before_it_runs() {
    let scratch = Scratch::with_model(program(), &[]);
    let weights = scratch.path().join("model/model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    scratch
        .run(&["generate", "--model-dir", "model", "--prompt-ids", "1"])
        .refused(&["model.safetensors", "ends at byte"]);
    std::fs::remove_file(&weights).unwrap();
    scratch
        .run(&["generate", "--model-dir", "model", "--prompt-ids", "1"])
        .refused(&["model.safetensors"]);
}
