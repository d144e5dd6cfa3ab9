//! Every reader of files that this program has, with a few good inputs each.

use std::path::Path;

use infercluster_executor::checkpoint;
use infercluster_inventory::{Catalogue, cluster_file, config, gguf, import, results};
use infercluster_spec::calibration::Calibration;
use infercluster_spec::migration::MigrationPlan;
use infercluster_spec::operator::{Profile, StepRun};
use infercluster_spec::{Cluster, Document, Layout, Model, Report, Trace, json};
use infercluster_traces::servegen;
use serde_json::Value;

use crate::models;

/// A reader and what it takes.
pub(crate) struct Reader {
    pub(crate) name: &'static str,
    /// Whether it accepted the input.
    pub(crate) read: fn(&[u8]) -> bool,
    pub(crate) seeds: fn() -> Vec<Vec<u8>>,
}

pub(crate) const READERS: [Reader; 10] = [
    Reader {
        name: "topology",
        read: topology,
        seeds: seeds::topology,
    },
    Reader {
        name: "config",
        read: model_config,
        seeds: seeds::config,
    },
    Reader {
        name: "gguf",
        read: gguf_header,
        seeds: seeds::gguf,
    },
    Reader {
        name: "safetensors",
        read: safetensors,
        seeds: seeds::safetensors,
    },
    Reader {
        name: "trace",
        read: trace,
        seeds: seeds::trace,
    },
    Reader {
        name: "clients",
        read: clients,
        seeds: seeds::clients,
    },
    Reader {
        name: "cluster-file",
        read: cluster,
        seeds: seeds::cluster,
    },
    Reader {
        name: "catalogue",
        read: catalogue,
        seeds: seeds::catalogue,
    },
    Reader {
        name: "document",
        read: document,
        seeds: seeds::document,
    },
    Reader {
        name: "results",
        read: serving_results,
        seeds: seeds::results,
    },
];

/// Most readers take text; what is none goes no further, as in the commands.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or("")
}

fn topology(bytes: &[u8]) -> bool {
    import::read(bytes, "input").is_ok()
}

fn model_config(bytes: &[u8]) -> bool {
    let text = text(bytes);
    let usable = config::read("input", "input", text).is_ok_and(|config| config.model.params() > 0);
    config::read_card("input", "input", text).is_ok() || usable
}

fn gguf_header(bytes: &[u8]) -> bool {
    match gguf::read("input", bytes) {
        Ok(header) => gguf::card("input", &[header]).tensors < usize::MAX,
        Err(_) => false,
    }
}

fn safetensors(bytes: &[u8]) -> bool {
    checkpoint::check_bytes(Path::new("input"), bytes).is_ok()
}

fn trace(bytes: &[u8]) -> bool {
    match infercluster_traces::read("input", bytes) {
        Ok(loaded) => infercluster_traces::statistics_of_file(&loaded).rows > 0,
        Err(_) => false,
    }
}

fn clients(bytes: &[u8]) -> bool {
    let text = text(bytes);
    let rates = servegen::rates("input", text);
    let lengths = servegen::lengths("input", text);
    let accepted = rates.is_ok() || lengths.is_ok();
    let pool = servegen::ClientPool {
        name: "input".to_owned(),
        clients: vec![servegen::Client {
            number: 0,
            rates: rates.unwrap_or_default(),
            lengths: lengths.unwrap_or_default(),
        }],
    };
    pool.statistics().clients == 1 && accepted
}

thread_local! {
    static BUILTIN: Catalogue = Catalogue::builtin();
}

fn cluster(bytes: &[u8]) -> bool {
    BUILTIN.with(|catalogue| {
        let text = text(bytes);
        cluster_file::read("input", text, catalogue).is_ok()
            || cluster_file::read_line(text, catalogue).is_ok()
    })
}

fn catalogue(bytes: &[u8]) -> bool {
    let mut catalogue = BUILTIN.with(Catalogue::clone);
    catalogue.extend("input", text(bytes)).is_ok()
}

/// Every document by its schema, with the checks that commands make on entry.
fn document(bytes: &[u8]) -> bool {
    let text = text(bytes);
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        return json::read::<Layout>("input", text).is_ok();
    };
    let schema = value.get("schema").and_then(Value::as_str).unwrap_or_default();
    match schema {
        Cluster::SCHEMA => json::read::<Cluster>("input", text).is_ok(),
        Model::SCHEMA => {
            let model = json::read::<Model>("input", text);
            model.is_ok_and(|model| models::check(&model).is_ok() && model.weight_bytes().0 > 0)
        }
        MigrationPlan::SCHEMA => json::read::<MigrationPlan>("input", text).is_ok(),
        Calibration::SCHEMA => json::read::<Calibration>("input", text).is_ok(),
        Profile::SCHEMA => json::read::<Profile>("input", text).is_ok(),
        StepRun::SCHEMA => json::read::<StepRun>("input", text).is_ok(),
        Trace::SCHEMA => json::read::<Trace>("input", text).is_ok(),
        Report::SCHEMA => json::read::<Report>("input", text).is_ok(),
        _ => json::read::<Layout>("input", text).is_ok(),
    }
}

fn serving_results(bytes: &[u8]) -> bool {
    results::read("input", text(bytes)).is_ok()
}

mod seeds {
    fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    }

    pub(super) fn topology() -> Vec<Vec<u8>> {
        texts(&[
            "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV12\tPXB\t0-31\t0\n\
             GPU1\tNV12\t X \tSYS\t32-63\t1\nNIC0\tPXB\tSYS\t X \n\nLegend:\n\n  X    = Self\nNIC Legend:\n\n  NIC0: mlx5_0\n",
            "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n",
            "index, name, memory.total [MiB], pci.bus_id\n0, NVIDIA L4, 23034 MiB, 00000000:00:03.0\n",
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n",
            "<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\" arch=\"x86_64\"><pci busid=\"0000:01:00.0\" \
             class=\"0x030200\" link_speed=\"16 GT/s\" link_width=\"16\"><gpu dev=\"0\" sm=\"80\" rank=\"0\" gdr=\"1\">\
             <nvlink target=\"0000:02:00.0\" count=\"12\" tclass=\"0x030200\"/></gpu></pci><nic><net name=\"mlx5_0\" \
             dev=\"0\" speed=\"200000\" port=\"1\" gdr=\"1\"/></nic></cpu></system>",
            "NodeName=gpu[01-04] CPUs=64 Gres=gpu:a100:4 RealMemory=512000 State=UNKNOWN\n",
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: n1\n  labels: &l\n    nvidia.com/gpu.product: NVIDIA-L40S\n\
             status:\n  capacity:\n    nvidia.com/gpu: \"8\"\n",
            "CA 'mlx5_0'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n\
             \t\tLink layer: InfiniBand\n",
            "# nThread 1 nGpus 8\n#       size         count      type   redop\n     1048576        262144     float     sum   50.1  20.9  36.6  0\n",
            "{\"nodes\": [{\"Resources\": {\"GPU\": 8.0, \"accelerator_type:H100\": 1.0}, \"Alive\": true}]}",
        ])
    }

    pub(super) fn config() -> Vec<Vec<u8>> {
        texts(&[
            "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 64, \
             \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"vocab_size\": 100, \
             \"intermediate_size\": 128, \"torch_dtype\": \"bfloat16\", \"time_step_limit\": [0.0, Infinity], \
             \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, \
             \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192}}",
            "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 64, \"num_hidden_layers\": 4, \"head_dim\": 16, \
             \"num_attention_heads\": 4, \"num_key_value_heads\": [2, 2], \"vocab_size\": 100, \"num_experts\": 8, \
             \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 8, \"mlp_only_layers\": [0], \
             \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}}",
            "{\"model_type\": \"nemotron_h\", \"hybrid_override_pattern\": \"M-M*E\", \"num_hidden_layers\": 5, \
             \"hidden_size\": 64, \"num_attention_heads\": 4, \"mamba_num_heads\": 8, \"mamba_head_dim\": 8, \
             \"ssm_state_size\": 16, \"vocab_size\": 10, \"n_routed_experts\": 4, \"num_experts_per_tok\": 2}",
            "{\"model_type\": \"deepseek_v3\", \"hidden_size\": 64, \"num_hidden_layers\": 3, \"q_lora_rank\": null, \
             \"kv_lora_rank\": 8, \"qk_rope_head_dim\": 4, \"qk_nope_head_dim\": 8, \"v_head_dim\": 8, \
             \"num_attention_heads\": 4, \"moe_layer_freq\": [0, 1, 1], \"intermediate_size\": 8}",
            "{\"model_type\": \"gemma3\", \"text_config\": {\"num_hidden_layers\": 2, \"layer_types\": \
             [\"sliding_attention\", \"full_attention\"]}, \"vision_config\": {\"depth\": 2}}",
        ])
    }

    pub(super) fn gguf() -> Vec<Vec<u8>> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend([2_u64.to_le_bytes(), 4_u64.to_le_bytes()].concat());
        bytes.extend(
            [
                text("general.architecture"),
                8_u32.to_le_bytes().to_vec(),
                text("llama"),
            ]
            .concat(),
        );
        bytes.extend(
            [
                text("llama.block_count"),
                [4_u32.to_le_bytes(), 2_u32.to_le_bytes()].concat(),
            ]
            .concat(),
        );
        let list = [9_u32, 4, 2, 0, 3, 5].map(u32::to_le_bytes).concat();
        bytes.extend([text("llama.attention.head_count_kv"), list].concat());
        let tokens = [
            &[9_u32, 8].map(u32::to_le_bytes).concat()[..],
            &1_u64.to_le_bytes(),
            &text("<s>"),
        ]
        .concat();
        bytes.extend([text("tokenizer.ggml.tokens"), tokens].concat());
        for (name, type_id, offset) in [
            ("blk.0.ffn_up_exps.weight", 12_u32, 0_u64),
            ("output.weight", 0, 288),
        ] {
            bytes.extend([text(name), 2_u32.to_le_bytes().to_vec()].concat());
            bytes.extend([256_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat());
            bytes.extend([&type_id.to_le_bytes()[..], &offset.to_le_bytes()].concat());
        }
        vec![bytes]
    }

    pub(super) fn safetensors() -> Vec<Vec<u8>> {
        let header = "{\"__metadata__\": {\"format\": \"pt\"}, \"a\": {\"dtype\": \"F32\", \"shape\": [2, 2], \
                      \"data_offsets\": [0, 16]}, \"b\": {\"dtype\": \"BF16\", \"shape\": [4], \"data_offsets\": [16, 24]}}";
        let file = [
            &(header.len() as u64).to_le_bytes()[..],
            header.as_bytes(),
            &[0; 24],
        ]
        .concat();
        vec![file]
    }

    pub(super) fn trace() -> Vec<Vec<u8>> {
        texts(&[
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9,396,109",
            "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n",
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n",
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,1,1,4096,32\n",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
            "{\"timestamp\": 27, \"input_length\": 513, \"output_length\": 6, \"hash_ids\": [0, 1]}\n",
            "{\"chat_id\": 0, \"parent_chat_id\": -1, \"timestamp\": 0.25, \"input_length\": 17, \"output_length\": 3, \"hash_ids\": [5, 6]}\n",
            "{\"input_toks\": 2358, \"output_toks\": 531, \"arrival_time_ns\": 46926808}\n",
            "{\"schema\": \"infercluster-trace-lines/1\", \"hash_block\": 4}\n{\"arrival_ps\": 5, \"input\": 3, \"output\": 4, \"block_hashes\": [7]}\n",
        ])
    }

    pub(super) fn clients() -> Vec<Vec<u8>> {
        texts(&[
            "0,0,0,,0,0\n600,0.5,1.2,Gamma,0.7,3\n1200,0.2,1.5,Weibull,0.8,3\n",
            "{\"0\": {\"input_tokens\": \"{}\", \"output_tokens\": \"{}\"}, \"600\": {\"input_tokens\": \
             \"{10: 0.5, 30: 0.5}\", \"output_tokens\": \"{4: 1.0}\"}}",
        ])
    }

    pub(super) fn cluster() -> Vec<Vec<u8>> {
        texts(&[
            "2 x (8 x h100-sxm, nvswitch, 8 x ndr)",
            "1 x h100-sxm, 1 x ndr; 2 x l40s, 1 x ndr",
            "name = \"c\"\n[[node]]\ncount = 2\ngpus = \"4 x l4\"\nnics = \"1 x hdr\"\n",
        ])
    }

    pub(super) fn catalogue() -> Vec<Vec<u8>> {
        texts(&[
            "[[device]]\nname = \"own-chip\"\naliases = [\"oc\"]\nmemory = \"64 GiB\"\npeak = { bf16 = \"120 TFLOP/s\" }\n\
             [[link]]\nname = \"fast\"\nkind = \"nvlink\"\nbandwidth = \"900 GB/s\"\nlatency = \"1 us\"\n",
        ])
    }

    pub(super) fn document() -> Vec<Vec<u8>> {
        texts(&[
            include_str!("../../../sim/spec/examples/model.json"),
            include_str!("../../../sim/spec/examples/layout.json"),
            include_str!("../../../sim/spec/examples/cluster.json"),
            include_str!("../../../sim/spec/examples/migration.json"),
            include_str!("../../../sim/spec/examples/calibration.json"),
            include_str!("../../../sim/spec/examples/profile.json"),
            include_str!("../../../sim/spec/examples/steps.json"),
            include_str!("../../../sim/spec/examples/trace.json"),
            include_str!("../../../sim/spec/examples/report.json"),
        ])
    }

    pub(super) fn results() -> Vec<Vec<u8>> {
        texts(&[
            "{\"backend\": \"vllm\", \"completed\": 40, \"duration\": 20.0, \"request_throughput\": 2.0, \"mean_ttft_ms\": 250.0}",
            "============ Serving Benchmark Result ============\nSuccessful requests:   16\nMean TTFT (ms):   2633.55\n\
             ==================================================\n",
            "MLPerf Results Summary\nCompleted tokens per second: 21605.79\n99.00 percentile latency (ns) : 144812821227\n\
             Test Parameters Used\n",
            "{\"benchmarks\": [{\"duration\": 5, \"metrics\": {\"request_totals\": {\"successful\": 2, \"errored\": 0, \
             \"incomplete\": 0}, \"request_latency\": {\"successful\": {\"mean\": 0.5, \"percentiles\": {\"p99\": 1}}}}}]}",
            "{\"input_toks\": 5, \"output_toks\": 5, \"queued_ts\": 1.5, \"first_token_ts\": 2.0, \"last_token_ts\": 3.0}\n",
            "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n1.0,9069.0,166.0,9,0,0.0\n",
            "INFO Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1055.3 tokens/s, Running: 18 \
             reqs, Waiting: 43 reqs, GPU KV cache usage: 95.9%\n",
        ])
    }
}
