//! Readers as an operator meets them: models of every family, traces, results of others, and files that are
//! something else.

use infercluster_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::program;

/// A config of a family that plans do not take.
fn mixtral() -> Value {
    json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"})
}

#[test]
fn a_model_card_has_the_keys_of_the_contract() {
    let scratch = Scratch::new(program());
    scratch.write("config.json", mixtral().to_string());
    for model in ["config.json", "."] {
        let shown = scratch.run(&["model", "show", model, "--json"]).done().json();
        let expected = json!({"params": 46_702_792_704_u64, "active_params": 12_879_925_248_u64, "layers": 32,
            "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 32000,
            "experts": 8, "weight_bytes": 93_405_585_408_u64, "kv_bytes_per_token": 131_072});
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&shown[key], value, "{key} of {model}");
        }
        assert!(shown["model"].is_null(), "plans do not take experts");
    }
    let table = scratch.run(&["model", "show", "config.json"]).done().stdout;
    assert!(
        table.contains("46.703 billion, 12.880 billion a token"),
        "{table}"
    );
    // No formula: null, with the reason; absent keys are null as well.
    let mut strange = mixtral();
    strange["model_type"] = "brand_new".into();
    strange["architectures"] = json!(["BrandNewForCausalLM"]);
    scratch.write("strange.json", strange.to_string());
    let shown = scratch
        .run(&["model", "show", "strange.json", "--json"])
        .done()
        .json();
    assert!(shown["params"].is_null() && shown["reason"].as_str().unwrap().contains("brand_new"));
    assert_eq!(shown["layers"], 32);
    // Python's words for what JSON cannot write.
    let text =
        mixtral()
            .to_string()
            .replacen('{', r#"{"time_step_limit": [0.0, Infinity, -Infinity, NaN], "#, 1);
    scratch.write("infinite.json", text);
    scratch.run(&["model", "show", "infinite.json"]).done();
}

#[test]
fn a_gguf_header_is_enough_for_a_card() {
    let scratch = Scratch::new(program());
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(2_u64.to_le_bytes());
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    bytes.extend(text("general.architecture"));
    bytes.extend([&8_u32.to_le_bytes()[..], &text("llama")].concat());
    bytes.extend(text("llama.block_count"));
    bytes.extend([4_u32.to_le_bytes(), 7_u32.to_le_bytes()].concat());
    bytes.extend(text("output.weight"));
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend([256_u64.to_le_bytes(), 10_u64.to_le_bytes()].concat());
    bytes.extend(12_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    scratch.write("model.gguf", &bytes);
    let shown = scratch
        .run(&["model", "show", "model.gguf", "--json"])
        .done()
        .json();
    assert_eq!(
        (&shown["params"], &shown["weight_bytes"]),
        (&json!(2560), &json!(1440))
    );
    assert_eq!(
        (&shown["layers"], &shown["tensor_types"]["Q4_K"]),
        (&json!(7), &json!(1))
    );
    // A count that no file has, a file that ends in its header, a folder without a config.
    bytes[8..16].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    scratch.write("huge.gguf", &bytes);
    scratch
        .run(&["model", "show", "huge.gguf"])
        .refused(&["huge.gguf", "number of tensors", "at most"]);
    scratch.write("cut.gguf", &bytes[..30]);
    scratch.run(&["model", "show", "cut.gguf"]).refused(&["cut.gguf"]);
    scratch
        .run(&["model", "show", "."])
        .refused(&["config.json", "fix: "]);
}

#[test]
fn files_that_are_something_else_are_named_with_what_to_do() {
    let scratch = Scratch::new(program());
    let utf16: Vec<u8> = "{\"model_type\": 1}"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    let cases: [(&str, &[u8], &str); 6] = [
        (
            "pointer.json",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n",
            "git lfs pull",
        ),
        ("page.json", b"<!DOCTYPE html><html></html>", "raw file"),
        ("wide.json", &utf16, "UTF-8"),
        ("packed.json", b"\x1f\x8b\x08\0\0\0\0\0", "gunzip"),
        ("archive.json", b"PK\x03\x04rest", "unpack"),
        ("noise.json", b"{\"a\": \"\xc3\x28\"}", "no UTF-8"),
    ];
    for (name, content, needle) in cases {
        scratch.write(name, content);
        scratch.run(&["model", "show", name]).refused(&[name, needle]);
    }
    std::os::unix::fs::symlink(".", scratch.path().join("loop")).unwrap();
    std::os::unix::fs::symlink("self", scratch.path().join("self")).unwrap();
    scratch
        .run(&["model", "show", "loop/loop/loop"])
        .refused(&["config.json"]);
    scratch.run(&["model", "show", "self"]).refused(&["self"]);
}
