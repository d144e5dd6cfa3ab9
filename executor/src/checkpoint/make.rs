//! Small random models with a fixed seed: something to serve where nothing can be downloaded.
//!
//! Weights are uniform, so that no logarithm or cosine of the platform enters the bits. Linear maps keep
//! the size of what they are given, the LM head spreads logits by a few units, norm gains and biases differ
//! from one and zero so that forgetting one changes every token.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use infercluster_spec::{Dtype, Model, model::Family};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use safetensors::tensor::TensorInfo;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::names;

/// Standard deviation of the logits of a made model.
const LOGIT_SPREAD: f32 = 3.0;
/// Norm gains lie in one plus or minus this.
const GAIN_SPREAD: f32 = 0.25;
/// Biases lie in plus or minus this.
const BIAS_SPREAD: f32 = 0.5;

/// Why a model was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeError {
    /// A file that cannot be written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A model that this executor would not run.
    #[error("models of family {family:?} with {what} cannot be made")]
    Unsupported {
        /// How the layers compute.
        family: Family,
        /// What is not known.
        what: &'static str,
    },
    /// A weight dtype that this executor would not run.
    #[error("weights cannot be made in {found}, known are f32, bf16 and f16")]
    Dtype {
        /// The model's dtype.
        found: Dtype,
    },
    /// Dimensions whose bytes overflow.
    #[error("tensor {tensor} of shape {shape:?} overflows")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

/// Writes `config.json` and `model.safetensors` of a random model with these dimensions, stored in the
/// model's dtype. The same model and seed give the same bytes everywhere.
pub fn make(folder: &Path, model: &Model, seed: u64) -> Result<(), MakeError> {
    check(model)?;
    let io = |file: &Path| {
        let file = file.to_owned();
        move |source| MakeError::Io { file, source }
    };
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let config = folder.join("config.json");
    std::fs::write(&config, config_json(model)).map_err(io(&config))?;
    let weights = folder.join("model.safetensors");
    let tensors = names::tensors(model);
    let header = header(&tensors, model.dtype)?;
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&weights)?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (name, shape) in &tensors {
            write_tensor(&mut out, model, name, shape, seed)?;
        }
        out.into_inner()?.sync_all()
    };
    write().map_err(io(&weights))
}

fn check(model: &Model) -> Result<(), MakeError> {
    let unsupported = |what| MakeError::Unsupported {
        family: model.family,
        what,
    };
    if !matches!(model.family, Family::Llama | Family::Qwen2) {
        return Err(unsupported("layers other than Llama's and Qwen2's"));
    }
    if model.experts.is_some() {
        return Err(unsupported("experts"));
    }
    if model.qkv_bias != (model.family == Family::Qwen2) {
        return Err(unsupported("q/k/v biases that are not Qwen2's"));
    }
    if !matches!(model.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
        return Err(MakeError::Dtype { found: model.dtype });
    }
    Ok(())
}

/// The header as JSON, padded so that data starts at a multiple of eight bytes.
fn header(tensors: &[(String, Vec<usize>)], dtype: Dtype) -> Result<Vec<u8>, MakeError> {
    let stored = match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        _ => safetensors::Dtype::F16,
    };
    let mut start = 0usize;
    let mut infos = BTreeMap::new();
    for (name, shape) in tensors {
        let end = shape
            .iter()
            .try_fold(stored.bitsize() / 8, |bytes, &side| bytes.checked_mul(side))
            .and_then(|bytes| start.checked_add(bytes))
            .ok_or_else(|| MakeError::Overflow {
                tensor: name.clone(),
                shape: shape.clone(),
            })?;
        let info = TensorInfo {
            dtype: stored,
            shape: shape.clone(),
            data_offsets: (start, end),
        };
        infos.insert(name, info);
        start = end;
    }
    let mut json = serde_json::to_vec(&infos).expect("names, shapes and offsets are plain JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok(json)
}

fn write_tensor(
    out: &mut impl Write,
    model: &Model,
    name: &str,
    shape: &[usize],
    seed: u64,
) -> std::io::Result<()> {
    let mut random = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(name.as_bytes(), seed));
    // A uniform variable of plus or minus `reach` has the standard deviation reach / sqrt(3).
    let reach = |deviation: f32| deviation * 3f32.sqrt();
    let (center, reach) = match shape {
        [_, inputs] if name == names::lm_head(model) => (0.0, reach(LOGIT_SPREAD / (*inputs as f32).sqrt())),
        [_, _] if name == names::EMBEDDING => (0.0, reach(1.0)),
        [_, inputs] => (0.0, reach(1.0 / (*inputs as f32).sqrt())),
        _ if name.ends_with(".bias") => (0.0, BIAS_SPREAD),
        _ => (1.0, GAIN_SPREAD),
    };
    for _ in 0..shape.iter().product::<usize>() {
        // 24 bits in -1..1, exact in f32.
        let unit = (random.next_u32() >> 8) as f32 * (1.0 / 8_388_608.0) - 1.0;
        let number = center + reach * unit;
        match model.dtype {
            Dtype::F32 => out.write_all(&number.to_le_bytes())?,
            Dtype::Bf16 => out.write_all(&bf16::from_f32(number).to_le_bytes())?,
            _ => out.write_all(&f16::from_f32(number).to_le_bytes())?,
        }
    }
    Ok(())
}

/// The model as a Hugging Face config.
fn config_json(model: &Model) -> String {
    let (architecture, model_type) = match model.family {
        Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        _ => ("LlamaForCausalLM", "llama"),
    };
    let torch_dtype = match model.dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
        _ => "float16",
    };
    let scaling = model.rope.llama3.map(|scaling| {
        json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        })
    });
    let config = json!({
        "_name_or_path": model.name,
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.rms_epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": false,
        "mlp_bias": false,
        "use_sliding_window": false,
        "torch_dtype": torch_dtype,
    });
    let mut text = serde_json::to_string_pretty(&config).expect("a config is plain JSON");
    text.push('\n');
    text
}
