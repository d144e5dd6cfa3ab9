//! Names and shapes of the tensors of a Llama-like model, as Hugging Face spells them.

use infercluster_spec::Model;

/// The embedding table, `[vocab, hidden]`.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Gain of the last norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The LM head, `[vocab, hidden]`, absent where it is tied to the embedding.
pub const LM_HEAD: &str = "lm_head.weight";

/// The tensor of a layer, such as `layer(3, "mlp.up_proj.weight")`.
pub fn layer(layer: u32, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// The name of the table that the LM head reads.
pub fn lm_head(model: &Model) -> &'static str {
    if model.tied_embeddings { EMBEDDING } else { LM_HEAD }
}

/// Every tensor of the model with its shape, in the order of computation.
pub fn tensors(model: &Model) -> Vec<(String, Vec<usize>)> {
    let [hidden, ffn, vocab] = [model.hidden, model.ffn, model.vocab].map(|side| side as usize);
    let queries = model.query_heads as usize * model.head_dim as usize;
    let keys = model.kv_heads as usize * model.head_dim as usize;
    let mut tensors = vec![(EMBEDDING.to_owned(), vec![vocab, hidden])];
    for index in 0..model.layers {
        let mut add = |part: &str, shape: Vec<usize>| tensors.push((layer(index, part), shape));
        add("input_layernorm.weight", vec![hidden]);
        for (part, rows) in [("q", queries), ("k", keys), ("v", keys)] {
            add(&format!("self_attn.{part}_proj.weight"), vec![rows, hidden]);
            if model.qkv_bias {
                add(&format!("self_attn.{part}_proj.bias"), vec![rows]);
            }
        }
        add("self_attn.o_proj.weight", vec![hidden, queries]);
        add("post_attention_layernorm.weight", vec![hidden]);
        add("mlp.gate_proj.weight", vec![ffn, hidden]);
        add("mlp.up_proj.weight", vec![ffn, hidden]);
        add("mlp.down_proj.weight", vec![hidden, ffn]);
    }
    tensors.push((FINAL_NORM.to_owned(), vec![hidden]));
    if !model.tied_embeddings {
        tensors.push((LM_HEAD.to_owned(), vec![vocab, hidden]));
    }
    tensors
}
