//! Model configs: both key styles, defaults, refusals, and the published models of the reference data.

use infercluster_inventory::{InventoryError, ModelConfig, config};
use infercluster_spec::model::{Dtype, Family};
use serde_json::{Value, json};

use crate::reference;

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 192,
        "intermediate_size": 320, "num_attention_heads": 12, "num_key_value_heads": 6,
        "num_hidden_layers": 3, "vocab_size": 384, "head_dim": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "max_position_embeddings": 1024, "torch_dtype": "float32",
        "tie_word_embeddings": false, "eos_token_id": [2, 7], "bos_token_id": 1,
    })
}

fn with(changes: Value) -> Value {
    let mut config = llama();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn without(keys: &[&str]) -> Value {
    let mut config = llama();
    for key in keys {
        config.as_object_mut().unwrap().remove(*key);
    }
    config
}

fn read(config: &Value) -> Result<ModelConfig, InventoryError> {
    config::read("config.json", "tiny", &config.to_string())
}

#[test]
fn a_full_config_is_read_as_it_is() {
    let config = read(&llama()).unwrap();
    let model = &config.model;
    assert_eq!(
        (model.layers, model.hidden, model.ffn, model.vocab),
        (3, 192, 320, 384)
    );
    assert_eq!((model.query_heads, model.kv_heads, model.head_dim), (12, 6, 16));
    assert_eq!((model.rms_epsilon, model.rope.theta), (1e-5, 5e5));
    assert_eq!((model.dtype, model.max_positions), (Dtype::F32, 1024));
    assert_eq!((config.eos_ids, config.bos_id), (vec![2, 7], Some(1)));
    assert!(config.assumed.is_empty(), "{:?}", config.assumed);
}

#[test]
fn both_key_styles_give_the_same_model() {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"});
    let old = read(&with(json!({"rope_scaling": scaling}))).unwrap();
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(5e5);
    let mut new = without(&["rope_theta", "torch_dtype"]);
    new["rope_parameters"] = parameters;
    new["dtype"] = json!("float32");
    let new = read(&new).unwrap();
    assert_eq!(old, new);
    let llama3 = new.model.rope.llama3.unwrap();
    assert_eq!((llama3.factor, llama3.original_max_position), (8.0, 8192));
}

#[test]
fn absent_keys_take_family_defaults_and_are_listed() {
    let keys = [
        "head_dim",
        "num_key_value_heads",
        "rope_theta",
        "tie_word_embeddings",
    ];
    let config = read(&without(&keys)).unwrap();
    let model = &config.model;
    assert_eq!((model.head_dim, model.kv_heads, model.rope.theta), (16, 12, 1e4));
    assert!(!model.tied_embeddings);
    assert_eq!(
        config.assumed,
        [
            "num_key_value_heads",
            "head_dim",
            "tie_word_embeddings",
            "rope_theta"
        ]
    );
    let family = |model_type: &str| {
        let mut config = without(&["architectures", "head_dim"]);
        config["model_type"] = json!(model_type);
        config["sliding_window"] = json!(512);
        read(&config).unwrap().model
    };
    assert!(family("qwen2").qkv_bias && !family("llama").qkv_bias);
    assert_eq!(family("qwen2").sliding_window, None);
    assert_eq!(family("mistral").sliding_window, Some(512));
    assert_eq!(
        (family("qwen3").head_dim, family("qwen3").family),
        (128, Family::Qwen3)
    );
}

#[test]
fn non_finite_words_do_not_stop_the_reader_but_are_no_numbers() {
    let text = llama().to_string();
    let text = text.replacen('{', r#"{"time_step_limit": [0.0, Infinity], "#, 1);
    assert!(config::read("config.json", "tiny", &text).is_ok());
    let text = text.replace("500000.0", "NaN");
    let error = config::read("config.json", "tiny", &text).unwrap_err();
    assert!(
        matches!(&error, InventoryError::BadField { field, .. } if field == "rope_theta"),
        "{error}"
    );
}

#[test]
fn what_is_no_model_is_refused_by_file_and_field() {
    let field = |config: Value, name: &str| {
        let error = read(&config).unwrap_err().to_string();
        assert!(error.starts_with("config.json: "), "{error}");
        assert!(error.contains(name), "{error} should name {name}");
    };
    let cases = [
        (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
        (json!({"num_hidden_layers": 1_u64 << 60}), "num_hidden_layers"),
        (json!({"hidden_size": -1}), "hidden_size"),
        (json!({"hidden_size": 192.5}), "hidden_size"),
        (json!({"vocab_size": "384"}), "vocab_size"),
        (json!({"vocab_size": null}), "vocab_size"),
        (json!({"num_key_value_heads": 5}), "num_key_value_heads"),
        (json!({"num_key_value_heads": 24}), "num_key_value_heads"),
        (json!({"head_dim": 15}), "head_dim"),
        (
            json!({"head_dim": null, "num_attention_heads": 10, "num_key_value_heads": 5}),
            "hidden_size",
        ),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps"),
        (json!({"rope_theta": -1.0}), "rope_theta"),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "rope_scaling.type",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}),
            "rope_scaling.low_freq_factor",
        ),
        (json!({"rope_scaling": 3}), "rope_scaling"),
        (json!({"torch_dtype": "complex64"}), "torch_dtype"),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"mlp_bias": true}), "mlp_bias"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"eos_token_id": -1}), "eos_token_id"),
        (json!({"eos_token_id": [1, "x"]}), "eos_token_id"),
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes"}}),
            "quantization_config.quant_method",
        ),
        (
            json!({"hidden_size": 2_000_000_000, "intermediate_size": 2_000_000_000}),
            "hidden size",
        ),
        (
            json!({"max_position_embeddings": 2_000_000_000, "num_hidden_layers": 100_000}),
            "max_position",
        ),
    ];
    for (changes, name) in cases {
        field(with(changes), name);
    }
    field(without(&["intermediate_size"]), "intermediate_size");
}

#[test]
fn unknown_architectures_are_named_beside_the_known() {
    for changes in [
        json!({"model_type": "mamba"}),
        json!({"architectures": ["MambaForCausalLM"]}),
        json!({"model_type": null, "architectures": ["MambaForCausalLM"]}),
        json!({"model_type": null, "architectures": []}),
        json!({"model_type": null, "architectures": null}),
    ] {
        let error = read(&with(changes)).unwrap_err();
        assert!(
            matches!(error, InventoryError::UnknownArchitecture { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("qwen2 (Qwen2ForCausalLM)"), "{error}");
    }
}

#[test]
fn what_is_no_json_object_is_refused() {
    for text in [
        "",
        "[1]",
        "{",
        "version https://git-lfs.github.com/spec/v1",
        "<html>",
        "null",
        "\u{feff}{}",
    ] {
        assert!(config::read("config.json", "tiny", text).is_err(), "{text}");
    }
    let deep = "[".repeat(100_000);
    assert!(config::read("config.json", "tiny", &deep).is_err());
}

#[test]
fn every_prefix_of_a_config_is_an_error() {
    let text = llama().to_string();
    for end in 0..text.len() {
        assert!(config::read("config.json", "tiny", &text[..end]).is_err());
    }
}

#[test]
fn published_models_have_their_published_parameters() {
    let Some(root) = reference::folder("published model configs") else {
        return;
    };
    // Parameter counts of data/models/INDEX.csv, for the families that are read.
    let expected = [
        ("llama-2-7b-hf", 6_738_415_616_u64),
        ("meta-llama-3.1-405b", 405_853_388_800),
        ("meta-llama-3.1-8b", 8_030_261_248),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("mistral-nemo-instruct-2407", 12_247_782_400),
        ("qwen2-72b-instruct", 72_706_203_648),
        ("qwen3-32b-fp8", 32_762_123_264),
        ("qwen3-8b", 8_190_735_360),
        ("yi-34b", 34_388_917_248),
    ];
    for (name, params) in expected {
        let config = config::load(&root.join(format!("data/models/{name}.json"))).unwrap();
        assert_eq!(
            (config.model.name.as_str(), config.model.params()),
            (name, params)
        );
    }
    let fp8 = config::load(&root.join("data/models/qwen3-32b-fp8.json")).unwrap();
    assert_eq!(
        (fp8.model.dtype, fp8.torch_dtype),
        (Dtype::Fp8, Some(Dtype::Bf16))
    );
    // A config with a bare `Infinity` fails for its family, not for its syntax.
    let nemotron = config::load(&root.join("data/models/nemotron-h-56b-base-8k.json")).unwrap_err();
    assert!(
        matches!(nemotron, InventoryError::UnknownArchitecture { .. }),
        "{nemotron}"
    );
    for oracle in ["llama_gqa_f32", "qwen2_bias_bf16"] {
        let config = config::load(&root.join("oracle").join(oracle)).unwrap();
        assert_eq!((config.model.name.as_str(), config.model.vocab), (oracle, 384));
    }
}
