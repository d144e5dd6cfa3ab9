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

#[test]
fn a_trace_has_the_keys_of_the_contract() {
    let scratch = Scratch::new(program());
    // Gaps 1 and 3 s; a failed request counts as a row and is no request.
    let text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n1,20,0\n4,30,5\n";
    scratch.write("trace.csv", text);
    let shown = scratch
        .run(&["trace", "show", "trace.csv", "--json"])
        .done()
        .json();
    let expected = json!({"rows": 3, "dropped_rows": 1, "has_arrivals": true, "span_s": 4.0, "rate_per_s": 0.75,
        "gap_cv": 0.5, "has_prefix_hashes": false});
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&shown[key], value, "{key}");
    }
    let input = &shown["input"];
    assert_eq!(
        (&input["mean"], &input["p50"], &input["max"]),
        (&json!(20.0), &json!(20.0), &json!(30))
    );
    assert!(
        (input["p99"].as_f64().unwrap() - 29.8).abs() < 1e-9,
        "position 1.98 of 10, 20 and 30"
    );
    assert!(shown.get("clients").is_none());
    scratch.write("lengths.csv", "num_prefill_tokens,num_decode_tokens\n5,6\n");
    let shown = scratch
        .run(&["trace", "show", "lengths.csv", "--json"])
        .done()
        .json();
    assert_eq!(
        (&shown["has_arrivals"], &shown["span_s"], &shown["gap_cv"]),
        (&json!(false), &Value::Null, &Value::Null)
    );
}

#[test]
fn a_folder_of_clients_is_shown_and_drawn_from() {
    let scratch = Scratch::new(program());
    std::fs::create_dir(scratch.path().join("pool")).unwrap();
    scratch.write("pool/chunk-3-trace.csv", "0,2,1,Gamma,0.5,1\n600,0,0,,0,0\n");
    scratch.write(
        "pool/chunk-3-dataset.json",
        r#"{"0": {"input_tokens": "{8: 1}", "output_tokens": "{4: 1}"}}"#,
    );
    let shown = scratch.run(&["trace", "show", "pool", "--json"]).done().json();
    assert_eq!(
        (&shown["clients"], &shown["rows"], &shown["input"]["max"]),
        (&json!(1), &json!(2), &json!(8))
    );
    scratch.run(&["trace", "convert", "pool"]).refused(&["--until"]);
    let draw = |seed: &str, to: &str| {
        scratch
            .run(&[
                "trace", "convert", "pool", "--until", "600s", "--seed", seed, "-o", to,
            ])
            .done();
        std::fs::read(scratch.path().join(to)).unwrap()
    };
    assert_eq!(draw("4", "a.jsonl"), draw("4", "b.jsonl"));
    assert_ne!(draw("4", "a.jsonl"), draw("5", "c.jsonl"));
    let drawn = scratch.run(&["trace", "show", "a.jsonl", "--json"]).done().json();
    assert!((1000..1400).contains(&drawn["rows"].as_u64().unwrap()), "{drawn}");
    // A folder that is none, one that leads to itself, one client on its own.
    std::fs::create_dir(scratch.path().join("empty")).unwrap();
    std::os::unix::fs::symlink(".", scratch.path().join("empty/chunk-1-trace.csv")).unwrap();
    scratch.run(&["trace", "show", "empty"]).refused(&["empty"]);
    scratch
        .run(&["trace", "show", "pool/chunk-3-trace.csv"])
        .refused(&["name the folder"]);
}

#[test]
fn hostile_traces_are_named_with_what_to_do() {
    let scratch = Scratch::new(program());
    let header = "arrived_at,num_prefill_tokens,num_decode_tokens\n";
    let cases: [(&str, Vec<u8>, &str); 8] = [
        (
            "pointer.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 52428800\n".to_vec(),
            "git lfs pull",
        ),
        ("page.csv", b"<!DOCTYPE html><html>".to_vec(), "raw file"),
        ("wide.csv", b"\xff\xfea\0r\0".to_vec(), "UTF-8"),
        (
            "cut.csv.gz",
            b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x01".to_vec(),
            "cut off",
        ),
        ("nan.csv", format!("{header}NaN,1,1\n").into_bytes(), "finite"),
        (
            "negative.csv",
            format!("{header}0,-5,1\n").into_bytes(),
            "whole number",
        ),
        (
            "twice.csv",
            format!("arrived_at,{header}0,0,1,1\n").into_bytes(),
            "twice",
        ),
        (
            "huge.csv",
            format!("{header}0,1152921504606846976,1\n").into_bytes(),
            "up to",
        ),
    ];
    for (name, content, needle) in cases {
        scratch.write(name, content);
        scratch.run(&["trace", "show", name]).refused(&[name, needle]);
    }
}

#[test]
fn results_of_others_are_shown_in_our_words() {
    let scratch = Scratch::new(program());
    scratch.write(
        "bench.json",
        r#"{"backend": "vllm", "completed": 40, "duration": 20.0, "mean_ttft_ms": 250.0, "p99_e2el_ms": 4000}"#,
    );
    let shown = scratch
        .run(&["report", "show", "bench.json", "--json"])
        .done()
        .json();
    let report = &shown["runs"][0]["report"];
    assert_eq!(
        (&shown["kind"], &report["completed"]),
        (&json!("serving-json"), &json!(40))
    );
    assert_eq!(
        (&report["ttft_s"]["mean"], &report["ttft_s"]["p50"]),
        (&json!(0.25), &Value::Null)
    );
    let cut = "============ Serving Benchmark Result ============\nSuccessful requests:  16\nP95 ITL (ms):";
    scratch.write("cut.txt", cut);
    let answer = scratch.run(&["report", "show", "cut.txt", "--json"]);
    assert_eq!(
        answer.code,
        Some(1),
        "a cut table is shown as far as it goes: {answer}"
    );
    assert_eq!(answer.json()["problems"][0]["line"], 2);
    scratch.write("strange.json", "{\"a\": 1}");
    scratch
        .run(&["report", "show", "strange.json"])
        .refused(&["strange.json", "GuideLLM"]);
}

#[test]
fn readers_stand_some_thousand_changed_inputs_each() {
    let scratch = Scratch::new(program());
    let answers = scratch
        .run(&["fuzz", "all", "--runs", "3000", "--json"])
        .done()
        .json();
    let answers = answers.as_array().unwrap();
    assert_eq!(answers.len(), 10);
    for answer in answers {
        assert_eq!(
            (&answer["failed_runs"], &answer["runs"]),
            (&json!(0), &json!(3000)),
            "{answer}"
        );
        assert!(answer["accepted"].as_u64().unwrap() > 0, "{answer}");
        assert!(
            answer["most_held_bytes"].as_u64().unwrap() > 0,
            "the allocator counts: {answer}"
        );
    }
    scratch.write("one.gguf", b"GGUF");
    let read = scratch.run(&["fuzz", "gguf", "--input", "one.gguf"]).done();
    assert!(read.stdout.contains("gguf: refused"), "{read}");
    scratch
        .run(&["fuzz", "nothing"])
        .refused(&["no reader", "topology"]);
}

#[test]
fn a_catalogue_file_adds_and_overrides_hardware() {
    let scratch = Scratch::new(program());
    let text = "[[device]]\nname = \"own-chip\"\nmemory = \"64 GiB\"\nmemory_bandwidth = \"1 TB/s\"\n\
                scale_up = \"0 B/s\"\npcie = \"pcie5x16\"\npeak = { bf16 = \"100 TFLOP/s\" }\n";
    scratch.write("mine.toml", text);
    let show = ["cluster", "show", "1 x own-chip", "--json"];
    scratch.run(&show).refused(&["own-chip"]);
    let shown = scratch
        .run(&[&show[..], &["--hardware", "mine.toml"]].concat())
        .done()
        .json();
    assert_eq!(shown["device_types"]["own-chip"]["memory"], "64 GiB");
    scratch.write("bad.toml", "[[device]]\nname = \"x\"\nmemory = 80\n");
    scratch
        .run(&[&show[..], &["--hardware", "bad.toml"]].concat())
        .refused(&["bad.toml:3", "device[0].memory", "GiB"]);
}
