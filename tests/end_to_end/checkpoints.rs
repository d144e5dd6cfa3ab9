//! Weight files that lie about themselves.

use infercluster_tests::safetensors::Parts;
use infercluster_tests::scratch::Scratch;
use serde_json::json;

use crate::program;

/// A change of a well-formed file, and what the refusal must say.
type Break = (&'static str, fn(&mut Parts), &'static [&'static str]);

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";
const NORM: &str = "model.norm.weight";

/// Each way in which a file lies.
const BREAKS: [Break; 12] = [
    (
        "truncated data",
        |parts| parts.data.truncate(1000),
        &["ends at byte", "but there are 1000"],
    ),
    (
        "trailing data",
        |parts| parts.data.extend([0; 5]),
        &["5 bytes", "belong to none"],
    ),
    (
        "a header of 2^60 bytes",
        |parts| parts.length = 1 << 60,
        &["1152921504606846976", "limit"],
    ),
    (
        "a header past the end",
        |parts| parts.length = 90_000_000,
        &["90000008 bytes", "the file has"],
    ),
    (
        "overlapping tensors",
        |parts| parts.header[NORM]["data_offsets"] = json!([0, 384]),
        &["overlaps"],
    ),
    (
        "a range that goes back",
        |parts| parts.header[NORM]["data_offsets"] = json!([384, 0]),
        &[NORM, "384"],
    ),
    (
        "a negative offset",
        |parts| parts.header[NORM]["data_offsets"] = json!([-4, 380]),
        &["model.safetensors"],
    ),
    (
        "a shape that overflows",
        |parts| parts.header[QUERY]["shape"] = json!([1_u64 << 40, 1_u64 << 40]),
        &["overflow", QUERY],
    ),
    (
        "another shape than the model's",
        |parts| parts.header[QUERY]["shape"] = json!([48, 192]),
        &["[48, 192]", "[96, 96]"],
    ),
    ("a missing tensor", rename, &["no tensor model.norm.weight"]),
    (
        "a dtype that nobody computes with",
        |parts| parts.header[QUERY]["dtype"] = json!("I32"),
        &["I32", QUERY],
    ),
    (
        "a header that is no object",
        |parts| parts.header = json!([1, 2]),
        &["model.safetensors"],
    ),
];

fn rename(parts: &mut Parts) {
    let norm = parts.header[NORM].take();
    let header = parts.header.as_object_mut().unwrap();
    header.remove(NORM);
    header.insert("model.gone.weight".to_owned(), norm);
}

#[test]
fn every_lie_is_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    let shown = scratch.run(&["model", "show", "model", "--json"]).done().json();
    assert_eq!(shown["checkpoint"]["complete"], true, "the good file is taken");
    let path = scratch.path().join("model/model.safetensors");
    let good = Parts::read(&path);
    for (what, change, needles) in BREAKS {
        let mut parts = good.clone();
        let length = parts.length;
        change(&mut parts);
        if parts.length == length {
            parts.relength();
        }
        std::fs::write(&path, parts.bytes()).unwrap();
        let answer = scratch.run(&["model", "show", "model"]);
        assert_eq!(answer.code, Some(2), "{what} was taken: {answer}");
        answer.refused(needles);
    }
}

#[test]
fn files_too_short_for_a_header_are_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    for length in [0, 1, 7, 8] {
        scratch.write("model/model.safetensors", vec![0; length]);
        scratch
            .run(&["model", "show", "model"])
            .refused(&["model.safetensors"]);
    }
}

#[test]
fn an_index_stays_inside_its_folder() {
    let scratch = Scratch::with_model(program(), &[]);
    let from = scratch.path().join("model/model.safetensors");
    std::fs::rename(from, scratch.path().join("outside.safetensors")).unwrap();
    for named in ["../outside.safetensors", "/etc/hostname", ".", "a/../b", ""] {
        let index = json!({"weight_map": {NORM: named}}).to_string();
        scratch.write("model/model.safetensors.index.json", index);
        scratch
            .run(&["model", "show", "model"])
            .refused(&["plain file name inside the folder"]);
    }
}
