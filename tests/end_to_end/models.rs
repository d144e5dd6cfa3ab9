//! Models: made ones, shown ones, refused ones.

use infercluster_tests::scratch::Scratch;

use crate::program;

#[test]
fn the_same_seed_makes_the_same_bytes() {
    let scratch = Scratch::new(program());
    let bytes = |folder: &str, seed: &str| {
        let made = scratch
            .run(&["model", "make", "-o", folder, "--seed", seed, "--json"])
            .done();
        assert_eq!(made.json()["random"], true, "a made model says so: {made}");
        std::fs::read(scratch.path().join(folder).join("model.safetensors")).unwrap()
    };
    let first = bytes("a", "5");
    assert!(first == bytes("b", "5"), "seed 5 gave two models");
    assert!(first != bytes("c", "6"), "seeds 5 and 6 gave one model");
}

#[test]
fn a_made_model_shows_what_was_asked_for() {
    let flags = [
        "--preset",
        "tiny",
        "--family",
        "qwen2",
        "--layers",
        "3",
        "--kv-heads",
        "3",
        "--dtype",
        "bf16",
    ];
    let scratch = Scratch::with_model(program(), &flags);
    let shown = scratch.run(&["model", "show", "model", "--json"]).done().json();
    let model = &shown["model"];
    assert_eq!(model["family"], "qwen2");
    assert_eq!((&model["layers"], &model["kv_heads"]), (&3.into(), &3.into()));
    assert_eq!(
        (&model["dtype"], &model["qkv_bias"]),
        (&"bf16".into(), &true.into())
    );
}

#[test]
fn impossible_models_are_refused() {
    let scratch = Scratch::new(program());
    let make = |flags: &[&str]| scratch.run(&[&["model", "make", "-o", "never"], flags].concat());
    make(&["--kv-heads", "4"]).refused(&["4 KV heads do not divide 6 query heads"]);
    make(&["--head-dim", "15"]).refused(&["width 15", "even"]);
    make(&["--layers", "0"]).refused(&["--layers is 0"]);
    make(&["--vocab", "1000000", "--hidden", "1000000"]).refused(&["limit", "fix: "]);
    make(&["--dtype", "int4"]).refused(&["int4"]);
    make(&["--dtype", "f33"]).refused(&["f33"]);
    assert!(
        !scratch.path().join("never").exists(),
        "a refused model leaves nothing behind"
    );
}

#[test]
fn overflowing_dimensions_are_refused() {
    let scratch = Scratch::with_model(program(), &[]);
    for (field, value) in [
        ("hidden_size", 1_u64 << 32),
        ("num_hidden_layers", u64::MAX),
        ("vocab_size", 0),
    ] {
        scratch.change("model/config.json", "bad.json", |config| {
            config[field] = value.into()
        });
        scratch
            .run(&["model", "show", "bad.json"])
            .refused(&["bad.json", field]);
    }
    let most = i32::MAX;
    scratch.change("model/config.json", "huge.json", |config| {
        for field in [
            "hidden_size",
            "num_hidden_layers",
            "vocab_size",
            "intermediate_size",
        ] {
            config[field] = most.into();
        }
    });
    scratch
        .run(&["model", "show", "huge.json"])
        .refused(&["huge.json", "parameters"]);
}
