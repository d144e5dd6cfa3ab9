//! Layouts by proportions, and layouts that break rules.

use infercluster_tests::scratch::Scratch;
use serde_json::Value;

use crate::program;

/// A tiny model with a layout of two uneven ranks in `good.json`.
fn uneven() -> Scratch {
    let scratch = Scratch::with_model(program(), &[]);
    let flags = "--devices 2 --heads 2:1 --mlp 60:40 --split-groups --reduction invariant";
    scratch.layout("good.json", flags);
    scratch
}

#[test]
fn proportions_become_shares() {
    let scratch = uneven();
    let shown = scratch
        .run(&["layout", "show", "good.json", "--model", "model", "--json"])
        .done()
        .json();
    let shards = &shown["replicas"][0]["stages"][0]["layer_groups"][0]["shards"];
    // By hand: 6 query heads as 2:1; 320 columns are 5 quanta of 64 as 60:40; 96 rows and 512 words as
    // 60:40 are 57.6 and 307.2.
    assert_eq!(shards[0]["query_heads"], "0..4");
    assert_eq!(shards[0]["mlp_columns"], "0..192");
    assert_eq!(shards[1]["output_rows"], "58..96");
    assert_eq!(shards[1]["vocab"], "307..512");
    let drawn = scratch.run(&["layout", "show", "good.json"]).done();
    assert!(drawn.stdout.contains("0..192 (192)"), "{drawn}");
}

/// A change of a good layout, and what the refusal must say.
type Break = (&'static str, fn(&mut Value), &'static [&'static str]);

/// Each way in which a layout breaks one rule.
const BREAKS: [Break; 8] = [
    (
        "a gap",
        |layout| shard(layout, 1)["query_heads"] = "5..6".into(),
        &["query heads 4..5", "no shard"],
    ),
    (
        "an overlap",
        |layout| shard(layout, 1)["query_heads"] = "3..6".into(),
        &["query heads 3..4", "twice"],
    ),
    (
        "heads past the end",
        |layout| shard(layout, 1)["query_heads"] = "4..7".into(),
        &["6..7", "model's 6"],
    ),
    (
        "an unknown device",
        |layout| shard(layout, 1)["gpu"] = 9.into(),
        &["gpu 9", "known devices"],
    ),
    (
        "one device twice",
        |layout| shard(layout, 1)["gpu"] = 0.into(),
        &["gpu 0", "already has a seat"],
    ),
    (
        "a range that goes back",
        |layout| shard(layout, 0)["mlp_columns"] = "9..3".into(),
        &["9..3", "mlp_columns"],
    ),
    (
        "another schema",
        |layout| layout["schema"] = "infercluster-layout/99".into(),
        &["infercluster-layout/1"],
    ),
    (
        "an unknown field",
        |layout| layout["wishes"] = 3.into(),
        &["unknown field `wishes`"],
    ),
];

fn shard(layout: &mut Value, rank: usize) -> &mut Value {
    &mut layout["replicas"][0]["stages"][0]["layer_groups"][0]["shards"][rank]
}

#[test]
fn every_broken_rule_is_named() {
    let scratch = uneven();
    for (what, change, needles) in BREAKS {
        scratch.change("good.json", "bad.json", change);
        let answer = scratch.run(&["layout", "show", "bad.json", "--model", "model"]);
        assert_eq!(answer.code, Some(2), "{what} was taken: {answer}");
        answer.refused(needles);
    }
}

#[test]
fn proportions_that_fit_nothing_are_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    let make = |flags: &str| scratch.call(&format!("layout make --model-dir model -o never.json {flags}"));
    make("--devices 3 --heads 2:1").refused(&["3 devices"]);
    make("--devices 0").refused(&["0 devices"]);
    make("--devices 4000000000").refused(&["4000000000 devices"]);
    make("--devices 2 --heads 2:1 --mlp 1:1:1").refused(&["2 ranks", "3"]);
    make("--devices 2 --heads 0:0").refused(&["at least one weight above 0"]);
    make("--devices 2 --heads 2:x").refused(&["`x` in `2:x`"]);
    make("--devices 2 --stages 1:0").refused(&["stage 1 gets no layer"]);
    make("--devices 2 --quantum 0").refused(&["quantum is 0"]);
    make("--devices 2 --numerics=").refused(&["no name of a profile", "cpu-f32/1"]);
    make("--devices 2 --numerics \u{1b}[31m").refused(&["no name of a profile"]);
    assert!(
        !scratch.path().join("never.json").exists(),
        "a refused layout leaves nothing behind"
    );
}
