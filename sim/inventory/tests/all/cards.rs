//! Cards of models of every family: published models with their parameter counts, own configs for what the
//! families leave out, and the published files of the reference data.

use infercluster_inventory::config::{ModelCard, read_card};
use infercluster_spec::model::Dtype;
use serde_json::{Value, json};

use crate::reference;

fn card(config: &Value) -> ModelCard {
    read_card("config.json", "model", &config.to_string()).unwrap()
}

/// Published counts of parameters: what the model's files hold.
#[test]
fn published_models_are_counted_to_the_last_parameter() {
    let check = |config: Value, params: u64| {
        let card = card(&config);
        assert_eq!(card.params, Some(params), "{config}: {:?}", card.reason);
    };
    // GPT-2: biases everywhere, learned positions, tied table.
    let gpt2 = json!({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50257, "n_inner": null});
    check(gpt2, 124_439_808);
    let gptj = json!({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "vocab_size": 50400, "tie_word_embeddings": false});
    check(gptj, 6_050_882_784);
    let pythia = json!({"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 16, "vocab_size": 50304, "tie_word_embeddings": false});
    check(pythia, 1_011_781_632);
    let opt = json!({"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12,
        "num_hidden_layers": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768, "do_layer_norm_before": true});
    check(opt, 125_239_296);
    // OPT 350M projects a narrow embedding and has no final norm.
    let opt_350m = json!({"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 512, "do_layer_norm_before": false});
    check(opt_350m, 331_196_416);
    let bloom = json!({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
        "vocab_size": 250880});
    check(bloom, 559_214_592);
    let mpt = json!({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
        "expansion_ratio": 4, "vocab_size": 50432, "no_bias": true, "max_seq_len": 2048});
    check(mpt, 6_649_286_656);
    let falcon = json!({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
        "num_hidden_layers": 32, "vocab_size": 65024, "multi_query": true, "parallel_attn": true,
        "bias": false, "new_decoder_architecture": false});
    check(falcon, 6_921_720_704);
    let phi2 = json!({"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 51200});
    check(phi2, 2_779_683_840);
    let starcoder2 = json!({"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
        "num_attention_heads": 24, "num_key_value_heads": 2, "num_hidden_layers": 30, "vocab_size": 49152,
        "use_bias": true});
    check(starcoder2, 3_030_371_328);
    let qwen25 = json!({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936,
        "tie_word_embeddings": true});
    check(qwen25, 494_032_768);
    let qwen15_moe = json!({"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 24, "vocab_size": 151936,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "tie_word_embeddings": false});
    check(qwen15_moe, 14_315_784_192);
    let qwen3 = json!({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28,
        "vocab_size": 151936, "tie_word_embeddings": true});
    check(qwen3, 596_049_920);
    let gemma = json!({"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 18,
        "vocab_size": 256000});
    check(gemma, 2_506_172_416);
    let gemma2 = json!({"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42,
        "vocab_size": 256000});
    check(gemma2, 9_241_705_984);
    let gemma3 = json!({"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 26,
        "vocab_size": 262144});
    check(gemma3, 999_885_952);
    let olmo = json!({"model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 16, "vocab_size": 50304,
        "tie_word_embeddings": true});
    check(olmo, 1_176_764_416);
    let olmo2 = json!({"model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 100352,
        "tie_word_embeddings": false});
    check(olmo2, 7_298_617_344);
    let olmoe = json!({"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 16, "vocab_size": 50304,
        "num_experts": 64, "num_experts_per_tok": 8, "tie_word_embeddings": false});
    check(olmoe, 6_919_161_856);
    let command_r = json!({"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 40, "vocab_size": 256000});
    check(command_r, 34_980_831_232);
    let chatglm3 = json!({"model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13696,
        "num_attention_heads": 32, "multi_query_attention": true, "multi_query_group_num": 2,
        "kv_channels": 128, "num_layers": 28, "padded_vocab_size": 65024, "add_qkv_bias": true,
        "add_bias_linear": false, "seq_length": 8192});
    check(chatglm3, 6_243_584_000);
    let glm4 = json!({"model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 40,
        "vocab_size": 151552, "attention_bias": true, "tie_word_embeddings": false});
    check(glm4, 9_399_951_360);
    let baichuan2 = json!({"model_type": "baichuan", "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 125696,
        "tie_word_embeddings": false});
    check(baichuan2, 7_505_973_248);
    let internlm2 = json!({"model_type": "internlm2", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 92544,
        "bias": false, "tie_word_embeddings": false});
    check(internlm2, 7_737_708_544);
    let qwen = json!({"model_type": "qwen", "hidden_size": 4096, "intermediate_size": 22016,
        "num_attention_heads": 32, "kv_channels": 128, "num_hidden_layers": 32, "vocab_size": 151936,
        "no_bias": true, "tie_word_embeddings": false});
    check(qwen, 7_721_324_544);
    let dbrx = json!({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "vocab_size": 100352, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        "tie_word_embeddings": false});
    check(dbrx, 131_596_523_520);
    let gpt_oss = json!({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": true,
        "tie_word_embeddings": false});
    check(gpt_oss, 20_914_757_184);
    let deepseek_moe = json!({"model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 28, "vocab_size": 102400,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1});
    check(deepseek_moe, 16_375_728_128);
    let v2_lite = json!({"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "vocab_size": 102400,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": null,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1});
    check(v2_lite, 15_706_484_224);
    let mamba = json!({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
        "vocab_size": 50280, "state_size": 16, "conv_kernel": 4, "intermediate_size": 1536,
        "time_step_rank": 48, "expand": 2});
    check(mamba, 129_135_360);
    let jamba = json!({"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 65536,
        "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_dt_rank": 256});
    check(jamba, 51_570_323_328);
}

#[test]
fn wrappers_show_the_language_model_inside() {
    // The defaults of the family fill in what Gemma 3's files leave out.
    let gemma3 = card(
        &json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}, "torch_dtype": "bfloat16"}),
    );
    assert_eq!(
        (gemma3.layers, gemma3.heads, gemma3.kv_heads),
        (Some(34), Some(8), Some(4))
    );
    assert_eq!((gemma3.head_dim, gemma3.vocab), (Some(256), Some(262_208)));
    assert_eq!((gemma3.params, gemma3.text_params), (None, Some(3_880_263_168)));
    assert!(gemma3.reason.is_some() && gemma3.assumed.iter().any(|key| key == "vocab_size"));
    assert_eq!(gemma3.kv_bytes_per_token, Some(2 * 34 * 4 * 256 * 2));
    // Older files hold the language model at the top, beside the tower.
    let old = card(
        &json!({"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28, "vocab_size": 151936,
        "tie_word_embeddings": true, "vision_config": {"depth": 32}}),
    );
    assert_eq!((old.params, old.text_params), (None, Some(1_543_714_304)));
    // Two levels down, and a family that names only the class of the whole.
    let deep = card(
        &json!({"model_type": "whatever_omni", "thinker_config": {"text_config": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100}}}),
    );
    assert_eq!(
        (deep.layers, deep.text_model_type.as_deref()),
        (Some(2), Some("llama"))
    );
}

#[test]
fn only_layers_that_attend_keep_keys_and_values() {
    let attending = |changes: Value| {
        let mut config = json!({"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "torch_dtype": "float16"});
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let card = card(&config);
        let layers = card.attention_layers.unwrap();
        assert_eq!(
            card.kv_bytes_per_token,
            Some(2 * u64::from(layers) * 2 * 16 * 2),
            "{config}"
        );
        layers
    };
    let words = |words: [&str; 8]| json!({"model_type": "x", "layer_types": words});
    let (full, linear) = ("full_attention", "linear_attention");
    assert_eq!(attending(json!({"model_type": "llama"})), 8);
    let sliding = ["sliding_attention"; 8];
    assert_eq!(attending(words(sliding)), 8, "a window is attention");
    assert_eq!(
        attending(words([
            linear, linear, linear, full, linear, linear, linear, full
        ])),
        2
    );
    assert_eq!(
        attending(words([
            "mamba",
            "attention",
            "conv",
            full,
            "mamba",
            "mamba",
            "mamba",
            "hybrid"
        ])),
        3
    );
    assert_eq!(
        attending(json!({"model_type": "x", "hybrid_override_pattern": "M-M*M-*E"})),
        2
    );
    assert_eq!(
        attending(json!({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2})),
        2
    );
    assert_eq!(
        attending(json!({"model_type": "x", "full_attention_interval": 4})),
        2
    );
    assert_eq!(
        attending(json!({"model_type": "x", "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]})),
        1
    );
    assert_eq!(
        attending(json!({"model_type": "x", "_block_types": ["recurrent", "recurrent", "attention"]})),
        2
    );
    assert_eq!(
        attending(json!({"model_type": "bamba", "attn_layer_indices": [1, 5, 99]})),
        2
    );
    assert_eq!(
        attending(json!({"model_type": "x", "linear_attn_config": {"full_attn_layers": [4, 8]}})),
        2
    );
    let mamba = card(
        &json!({"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2,
        "vocab_size": 100, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
        "torch_dtype": "bfloat16"}),
    );
    assert_eq!((mamba.heads, mamba.kv_bytes_per_token), (None, Some(0)));
}

#[test]
fn latent_attention_and_absent_dtypes_have_no_bytes() {
    let config = json!({"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280});
    let v3 = card(&config);
    assert_eq!(
        (v3.params, v3.head_dim, v3.kv_bytes_per_token),
        (Some(671_026_419_200), None, None)
    );
    assert_eq!(v3.active_params.unwrap() / 1_000_000_000, 37);
    assert_eq!(v3.weight_bytes, None);
    let dense = json!({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936});
    let dense = card(&dense);
    assert_eq!((dense.weight_bytes, dense.kv_bytes_per_token), (None, None));
    assert!(
        dense.notes.iter().all(|note| note.contains("precision")),
        "{:?}",
        dense.notes
    );
}

#[test]
fn quantised_weights_are_counted_in_their_own_bytes() {
    let with = |quantisation: Value| {
        let config = json!({"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "head_dim": 64,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "quantization_config": quantisation});
        card(&config)
    };
    // 4 x 256 x 256 + 3 x 256 x 512 numbers in projections, 2 x 1000 x 256 + 3 x 256 beside them.
    let (covered, kept) = (655_360_u64, 512_768_u64);
    let fp8 = with(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    assert_eq!(fp8.params, Some(covered + kept));
    assert_eq!(fp8.weight_bytes, Some(covered + covered / 16_384 * 4 + 2 * kept));
    let gptq = with(json!({"quant_method": "gptq", "bits": 4, "group_size": 128}));
    assert_eq!(
        gptq.weight_bytes,
        Some(covered / 2 + covered / 128 * 20 / 8 + 2 * kept)
    );
    let unknown = with(json!({"quant_method": "new_method"}));
    assert_eq!(unknown.weight_bytes, None);
    assert_eq!(
        (unknown.dtype, unknown.quantisation.as_deref()),
        (Some(Dtype::Bf16), Some("new_method"))
    );
}

#[test]
fn what_no_description_backs_is_shown_without_a_count() {
    let strange = card(
        &json!({"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"],
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}),
    );
    assert_eq!(
        (strange.layers, strange.heads, strange.params),
        (Some(2), Some(4), None)
    );
    assert!(
        strange
            .reason
            .as_ref()
            .is_some_and(|reason| reason.contains("brand_new"))
    );
    let classifier = card(
        &json!({"model_type": "llama", "architectures": ["LlamaForTokenClassification"],
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 8}),
    );
    assert!(
        classifier
            .reason
            .is_some_and(|reason| reason.contains("LlamaForTokenClassification"))
    );
    // A new name for a known class.
    let renamed = card(
        &json!({"model_type": "mine", "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 8}),
    );
    assert!(renamed.params.is_some());
    let error = |text: &str| read_card("config.json", "model", text).unwrap_err().to_string();
    let named = error(r#"{"model_type": "clip", "projection_dim": 512}"#);
    assert!(named.contains("\"clip\"") && named.contains("llama"), "{named}");
    for text in ["[1]", "{", "", "null", "\u{feff}{}"] {
        assert!(error(text).starts_with("config.json"));
    }
}

#[test]
fn hostile_numbers_are_refused_by_name_and_never_multiplied() {
    let with = |key: &str, value: Value| {
        let mut config = json!({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 8,
            "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
        config[key] = value;
        read_card("config.json", "model", &config.to_string())
    };
    for (key, value) in [
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(u64::MAX)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(1.5)),
        ("num_key_value_heads", json!("8")),
        ("num_key_value_heads", json!([1, -1])),
        ("num_key_value_heads", json!([])),
        ("vocab_size", json!(1_u64 << 60)),
        ("head_dim", json!({})),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!([1, 2])),
        ("hybrid_override_pattern", json!("M-?")),
        ("mlp_only_layers", json!("all")),
        ("quantization_config", json!(3)),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    let most = json!(i32::MAX);
    for keys in [
        &["num_hidden_layers"][..],
        &["hidden_size", "vocab_size"],
        &["num_experts", "moe_intermediate_size"],
        &["num_attention_heads", "head_dim"],
    ] {
        let mut config = json!({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
            "intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
        for key in keys {
            config[*key] = most.clone();
        }
        let error = read_card("config.json", "model", &config.to_string()).unwrap_err();
        assert!(error.to_string().contains("parameters"), "{keys:?}: {error}");
    }
    assert_eq!(
        with("num_key_value_heads", json!([2, 2])).unwrap().kv_heads,
        Some(2)
    );
    assert_eq!(with("num_key_value_heads", json!([2, 1])).unwrap().params, None);
    assert!(with("time_step_limit", json!("Infinity")).is_ok());
}

#[test]
fn every_config_of_the_reference_data_is_read() {
    let Some(root) = reference::folder("published configs of every family") else {
        return;
    };
    let folder = root.join("data/models");
    let mut index = csv::Reader::from_path(folder.join("INDEX.csv")).unwrap();
    let header = index.headers().unwrap().clone();
    let mut cells = 0;
    for row in index.records() {
        let row = row.unwrap();
        let cell = |name: &str| &row[header.iter().position(|cell| cell == name).unwrap()];
        let file = cell("file");
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        let card = read_card(file, file, &text).unwrap();
        let mut judge = |name: &str, found: Option<u64>| {
            if !cell(name).is_empty() {
                assert_eq!(found, cell(name).parse().ok(), "{name} of {file}");
                cells += 1;
            }
        };
        for (name, found) in [
            ("layers", card.layers),
            ("hidden", card.hidden),
            ("heads", card.heads),
            ("kv_heads", card.kv_heads),
            ("head_dim", card.head_dim),
            ("ffn", card.ffn),
            ("vocab", card.vocab),
            ("experts", card.experts),
            ("topk", card.experts_per_token),
            ("moe_ffn", card.expert_ffn.filter(|_| !cell("moe_ffn").is_empty())),
        ] {
            judge(name, found.map(u64::from));
        }
        judge("computed_params", card.params);
        let tied = |text: &str| text == "True";
        if !cell("tie").is_empty() {
            assert_eq!(card.tied_embeddings, Some(tied(cell("tie"))), "{file}");
        }
        assert_eq!(card.latent_attention, tied(cell("mla")), "{file}");
        assert_eq!(card.model_type.as_deref(), Some(cell("model_type")), "{file}");
        // A count, or a reason; and a count is never far from what was published.
        let published: f64 = cell("published_total_B").parse().unwrap();
        match card.params {
            Some(params) => {
                let off = params as f64 / 1e9 / published - 1.0;
                assert!(off.abs() < 0.03, "{file}: {params} of {published} billion");
            }
            None => assert!(card.reason.is_some(), "{file}"),
        }
        assert_eq!(
            card.kv_bytes_per_token.is_some(),
            card.dtype.is_some() && !card.latent_attention,
            "{file}"
        );
    }
    assert!(cells > 150, "{cells} cells were judged");
}
