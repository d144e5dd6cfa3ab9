//! Generation by real worker processes: every layout says what one worker says.

use std::os::unix::ffi::OsStrExt as _;

use infercluster_tests::scratch::Scratch;
use serde_json::Value;

use crate::program;

const PROMPTS: &str = "--prompt-ids 1,2,3 --prompt-ids 400,7,7,7,250,90,1";

fn generate(scratch: &Scratch, flags: &str) -> Value {
    let line = format!("generate --model-dir model --max-tokens 12 --ignore-eos --json {PROMPTS} {flags}");
    scratch.call(&line).done().json()
}

/// Cuts of six query heads on two KV heads, four layers, 320 columns.
const CUTS: [(&str, &str); 5] = [
    (
        "uneven heads and columns",
        "--devices 2 --heads 5:1 --mlp 90:10 --split-groups --quantum 1",
    ),
    (
        "three ranks",
        "--devices 3 --heads 3:2:1 --mlp 1:1:1 --split-groups",
    ),
    (
        "a rank without heads or columns",
        "--devices 2 --heads 1:0 --mlp 0:1",
    ),
    ("uneven stages", "--devices 2 --stages 3:1"),
    (
        "two stages of two ranks",
        "--devices 4 --stages 1:3 --heads 1:2 --split-groups",
    ),
];

#[test]
fn every_invariant_layout_gives_one_worker_s_bits() {
    let scratch = Scratch::with_model(program(), &[]);
    let alone = generate(&scratch, "");
    assert_eq!(alone[0]["tokens"].as_array().unwrap().len(), 12);
    for (what, flags) in CUTS {
        scratch.layout("cut.json", &format!("{flags} --reduction invariant"));
        assert_eq!(generate(&scratch, "--layout cut.json"), alone, "{what}");
    }
    // Neither chunks nor blocks change a bit.
    assert_eq!(generate(&scratch, "--chunk 2 --block-size 8"), alone);
}

#[test]
fn a_fast_layout_stays_close() {
    let scratch = Scratch::with_model(program(), &["--family", "qwen2", "--dtype", "bf16"]);
    scratch.layout("cut.json", "--devices 2 --heads 2:1 --split-groups --mlp 60:40");
    let alone = generate(&scratch, "--logits");
    let cut = generate(&scratch, "--logits --layout cut.json");
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
    generate(&[]).refused(&["--prompt-ids", "--prompt "]);
    generate(&["--prompt-ids", "1", "--prompt", "a"]).refused(&["cannot be used with"]);
    generate(&["--prompt-ids", "1,x"]).refused(&["`x` is no token id"]);
    generate(&["--prompt-ids", ""]).refused(&["no token id"]);
    generate(&["--prompt-ids", "512"]).refused(&["token 512", "vocabulary of 512"]);
    generate(&["--prompt-ids", "1", "--max-tokens", "0"]).refused(&["--max-tokens is 0"]);
    generate(&["--prompt-ids", "1", "--max-tokens", "5000"]).refused(&["4096"]);
    generate(&["--prompt-ids", "1", "--speed", "1.0:0.4"]).refused(&["2 factors", "1 devices"]);
    generate(&["--prompt-ids", "1", "--speed", "1.5"]).refused(&["speed 1.5 is not above 0 and at most 1"]);
    generate(&["--prompt-ids", "1", "--speed", "NaN"]).refused(&["speed NaN"]);
    generate(&["--prompt-ids", "1", "--speed", "1e-300"]).refused(&["is below 0.001"]);
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

/// A made model that speaks: a SentencePiece-like tokenizer with 259 special and byte tokens and a few words.
pub(crate) fn with_tokenizer() -> Scratch {
    let scratch = Scratch::with_model(program(), &["--vocab", "281"]);
    scratch.write("model/tokenizer.json", TOKENIZER);
    scratch
}

const TOKENIZER: &str = include_str!("../../executor/tests/data/tokenizer.json");

/// By hand: begin of text, two words, a letter with its space, and four bytes of one without a token.
pub(crate) const TEXT: (&str, &str) = ("hello world é🦀", "1,273,278,280,243,162,169,131");

/// The text of ids, by the rules of such tokenizers: a run of bytes that is no text becomes a mark a byte, special
/// tokens are nothing, and one space before all is dropped.
fn text_of(ids: &[u64]) -> String {
    let words: Value = serde_json::from_str(TOKENIZER).unwrap();
    let words = words["model"]["vocab"].as_object().unwrap();
    let (mut text, mut run) = (String::new(), Vec::new());
    // The end of the list ends a run, as a word does.
    for id in ids.iter().filter(|id| **id > 2).chain([&u64::MAX]) {
        if let Some(byte) = id.checked_sub(3).and_then(|byte| u8::try_from(byte).ok()) {
            run.push(byte);
            continue;
        }
        text += &String::from_utf8(run.clone()).unwrap_or_else(|_| "\u{fffd}".repeat(run.len()));
        run.clear();
        if let Some((word, _)) = words.iter().find(|(_, number)| number.as_u64() == Some(*id)) {
            text += &word.replace('▁', " ");
        }
    }
    text.strip_prefix(' ').unwrap_or(&text).to_owned()
}

#[test]
fn a_text_is_its_ids_on_the_way_in_and_out() {
    let scratch = with_tokenizer();
    let generate = |prompt: &[&str]| {
        let flags = [
            "generate",
            "--model-dir",
            "model",
            "--ignore-eos",
            "--max-tokens",
            "200",
            "--json",
        ];
        scratch.run(&[&flags, prompt].concat()).done().json()
    };
    let (text, ids) = TEXT;
    let answer = generate(&["--prompt", text]);
    assert_eq!(answer, generate(&["--prompt-ids", ids]));
    let tokens: Vec<u64> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    assert_eq!(answer["text"], text_of(&tokens));
    assert!(tokens.iter().any(|id| (3..259).contains(id)) && tokens.iter().any(|id| *id > 258));
    let two = generate(&["--prompt", text, "--prompt", "hello"]);
    assert_eq!(
        (&two[0]["tokens"], two.as_array().unwrap().len()),
        (&answer["tokens"], 2)
    );
}

#[test]
fn a_text_that_cannot_be_read_is_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    let generate = ["generate", "--model-dir", "model", "--prompt"];
    scratch
        .run(&[&generate[..], &["hello"]].concat())
        .refused(&["needs a tokenizer.json", "--prompt-ids"]);
    let not_utf8 = std::ffi::OsStr::from_bytes(b"hello \xff");
    let arguments: Vec<&std::ffi::OsStr> = generate
        .iter()
        .map(std::ffi::OsStr::new)
        .chain([not_utf8])
        .collect();
    scratch
        .program()
        .run(scratch.path(), &arguments)
        .refused(&["invalid UTF-8"]);
    scratch.write("model/tokenizer.json", &TOKENIZER[..TOKENIZER.len() / 2]);
    scratch
        .run(&[&generate[..], &["hello"]].concat())
        .refused(&["tokenizer.json", "EOF"]);
    // A tokenizer with more words than the model has: the id that the model lacks is named.
    scratch.call("model make --vocab 270 -o model").done();
    scratch.write("model/tokenizer.json", TOKENIZER);
    scratch
        .run(&[&generate[..], &["hello"]].concat())
        .refused(&["token 273", "vocabulary of 270"]);
}
