//! Parameters, counted tensor by tensor as the families build their layers.
//!
//! Sums saturate: dimensions come from a file, and what is past every real model is refused by the caller.

use super::keys::Keys;
use super::layers::{Layers, Mixer, Mlp};
use super::table::{Biased, HeadNorm, MixerForm, MlpForm, Norm, Positions, Row, SharedExpert};
use crate::error::InventoryError;

/// Parameters by what a quantisation does to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Count {
    /// Embeddings, head, norms, biases, routers: kept as they are.
    pub(super) kept: u128,
    /// Projections of the layers.
    pub(super) linear: u128,
    /// Projections of routed experts.
    pub(super) experts: u128,
    /// Those of them that a token does not use.
    pub(super) idle: u128,
}

impl Count {
    pub(super) fn total(self) -> u128 {
        self.kept.saturating_add(self.linear).saturating_add(self.experts)
    }

    pub(super) fn active(self) -> u128 {
        self.total().saturating_sub(self.idle)
    }

    fn kept(kept: u128) -> Self {
        Self {
            kept,
            ..Self::default()
        }
    }

    fn linear(linear: u128) -> Self {
        Self {
            linear,
            ..Self::default()
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            kept: self.kept.saturating_add(other.kept),
            linear: self.linear.saturating_add(other.linear),
            experts: self.experts.saturating_add(other.experts),
            idle: self.idle.saturating_add(other.idle),
        }
    }

    fn times(self, factor: u32) -> Self {
        let factor = u128::from(factor);
        Self {
            kept: self.kept.saturating_mul(factor),
            linear: self.linear.saturating_mul(factor),
            experts: self.experts.saturating_mul(factor),
            idle: self.idle.saturating_mul(factor),
        }
    }
}

/// Dimensions that the count needs; a missing one is the reason that there is no count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) hidden: u32,
    pub(super) heads: Option<u32>,
    pub(super) kv_heads: Option<u32>,
    pub(super) head_dim: Option<u32>,
    pub(super) ffn: Option<u32>,
    pub(super) vocab: Option<u32>,
    pub(super) positions: Option<u32>,
    pub(super) tied: bool,
    pub(super) experts: Option<u32>,
    pub(super) experts_per_token: Option<u32>,
    pub(super) expert_ffn: Option<u32>,
}

/// Why a count is not there: a reason for people, or a field that cannot be read.
pub(super) enum Uncounted {
    Because(String),
    Bad(InventoryError),
}

impl From<InventoryError> for Uncounted {
    fn from(error: InventoryError) -> Self {
        Self::Bad(error)
    }
}

fn product(factors: &[u32]) -> u128 {
    factors.iter().fold(1_u128, |so_far, factor| {
        so_far.saturating_mul(u128::from(*factor))
    })
}

fn known<T>(value: Option<T>, what: &str) -> Result<T, Uncounted> {
    value.ok_or_else(|| Uncounted::Because(format!("the file does not say {what}")))
}

/// Counts the language model.
pub(super) fn count(keys: &mut Keys, row: &Row, shape: Shape, layers: &Layers) -> Result<Count, Uncounted> {
    if row.count.is_none() {
        let model_type = &row.model_type;
        return Err(Uncounted::Because(format!(
            "the layers of model type `{model_type}` are not described here"
        )));
    }
    if let Some((key, value)) = row.unless.iter().find(|(key, value)| keys.says(key, value)) {
        return Err(Uncounted::Because(format!(
            "with `{key}` {value} the layers of `{}` differ from those that are described here",
            row.model_type
        )));
    }
    let counter = Counter::new(keys, row, shape)?;
    let mut total = counter.outside(keys)?;
    let norms = Count::kept(
        counter
            .norm()
            .saturating_mul(u128::from(counter.norms_a_layer(keys)?)),
    );
    let attention = match layers.attending() {
        0 => Count::default(),
        _ => counter.attention(keys)?,
    };
    let recurrent = match layers.mixers.contains(&Mixer::Recurrent) || layers.mixers.contains(&Mixer::Both) {
        true => counter.mixer(keys)?,
        false => Count::default(),
    };
    let of = |mixer: &Mixer| match mixer {
        Mixer::Attention => attention,
        Mixer::Recurrent => recurrent,
        Mixer::Both => attention.plus(recurrent),
        Mixer::None => Count::default(),
    };
    let number = |mlp: Mlp| layers.mlps.iter().filter(|found| **found == mlp).count() as u32;
    if number(Mlp::Dense) > 0 {
        total = total.plus(counter.dense(keys)?.times(number(Mlp::Dense)));
    }
    if number(Mlp::Experts) > 0 {
        total = total.plus(counter.routed(keys)?.times(number(Mlp::Experts)));
    }
    total = layers.mixers.iter().map(of).fold(total, Count::plus);
    Ok(total.plus(norms.times(layers.mixers.len() as u32)))
}

struct Counter<'a> {
    row: &'a Row,
    shape: Shape,
    biased: Vec<Biased>,
}

impl<'a> Counter<'a> {
    fn new(keys: &mut Keys, row: &'a Row, shape: Shape) -> Result<Self, InventoryError> {
        let mut biased = row.bias.clone();
        for (key, covered) in &row.bias_keys {
            if keys.flag(key)? {
                biased.extend(covered);
            }
        }
        Ok(Self { row, shape, biased })
    }

    /// Numbers of a bias of that width, where the projection has one.
    fn bias(&self, which: Biased, width: u128) -> u128 {
        if self.biased.contains(&which) { width } else { 0 }
    }

    /// Numbers of one norm of the hidden size.
    fn norm(&self) -> u128 {
        let hidden = u128::from(self.shape.hidden);
        match self.row.norm {
            Norm::Rms | Norm::LayerWithoutBias => hidden,
            Norm::Layer => 2 * hidden,
            Norm::None => 0,
        }
    }

    /// Falcon's first generation runs attention and MLP side by side behind one norm, others behind two.
    fn norms_a_layer(&self, keys: &mut Keys) -> Result<u32, InventoryError> {
        if !self.row.defaults.contains_key("parallel_attn") {
            return Ok(self.row.norms);
        }
        if keys.flag("new_decoder_architecture")? {
            return Ok(keys.count(&["num_ln_in_parallel_attn"])?.unwrap_or(2));
        }
        Ok(if keys.flag("parallel_attn")? { 1 } else { 2 })
    }

    /// Everything that stands once: tables, final norm, head.
    fn outside(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let Shape { hidden, tied, .. } = self.shape;
        let vocab = known(self.shape.vocab, "the size of the vocabulary")?;
        let width = keys.count(&["word_embed_proj_dim"])?.unwrap_or(hidden);
        let mut kept = product(&[vocab, width]);
        if width != hidden {
            kept = kept.saturating_add(product(&[2, width, hidden]));
        }
        if !tied {
            kept = kept.saturating_add(product(&[vocab, hidden]));
        }
        if self.row.positions == Some(Positions::Learned) {
            let positions = known(self.shape.positions, "how many positions there are")?;
            let rows = positions.saturating_add(self.row.position_offset);
            kept = kept.saturating_add(product(&[rows, hidden]));
        }
        if self.row.embedding_norm {
            kept = kept.saturating_add(self.norm());
        }
        // OPT's smallest sizes end without a norm.
        let has_final_norm = !self.row.defaults.contains_key("do_layer_norm_before")
            || (keys.flag("do_layer_norm_before")? && !keys.flag("_remove_final_layer_norm")?);
        if has_final_norm {
            kept = kept.saturating_add(self.norm());
        }
        Ok(Count::kept(
            kept.saturating_add(self.bias(Biased::Head, u128::from(vocab))),
        ))
    }

    fn attention(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let hidden = self.shape.hidden;
        let heads = known(self.shape.heads, "how many query heads there are")?;
        if let Some(rank) = keys.count(&["kv_lora_rank"])? {
            return self.latent_attention(keys, heads, rank);
        }
        let kv_heads = known(self.shape.kv_heads, "how many KV heads there are")?;
        let head_dim = known(self.shape.head_dim, "how wide a head is")?;
        let (query, key) = (product(&[heads, head_dim]), product(&[kv_heads, head_dim]));
        let query_outputs = if self.row.attention_gate { 2 * query } else { query };
        let outputs = query_outputs.saturating_add(2 * key).saturating_add(query);
        let linear = u128::from(hidden).saturating_mul(outputs);
        let mut kept = self.bias(Biased::Q, query_outputs)
            + self.bias(Biased::K, key)
            + self.bias(Biased::V, key)
            + self.bias(Biased::O, u128::from(hidden));
        let is_on = match &self.row.qk_norm_key {
            Some(switch) => keys.flag(switch)?,
            None => true,
        };
        kept += match self.row.qk_norm.filter(|_| is_on) {
            Some(HeadNorm::Head) => 2 * u128::from(head_dim),
            Some(HeadNorm::Model) => query + key,
            None => 0,
        };
        if self.row.sinks {
            kept += u128::from(heads);
        }
        Ok(Count::kept(kept).plus(Count::linear(linear)))
    }

    /// Multi-head latent attention: keys and values come out of one narrow vector a token.
    fn latent_attention(&self, keys: &mut Keys, heads: u32, rank: u32) -> Result<Count, Uncounted> {
        if keys.flag("attention_bias")? {
            let reason = "latent attention with biases is not described here";
            return Err(Uncounted::Because(reason.to_owned()));
        }
        let hidden = self.shape.hidden;
        let rope = known(keys.count(&["qk_rope_head_dim"])?, "`qk_rope_head_dim`")?;
        let plain = known(keys.count(&["qk_nope_head_dim"])?, "`qk_nope_head_dim`")?;
        let value = known(keys.count(&["v_head_dim"])?, "`v_head_dim`")?;
        let query = plain.saturating_add(rope);
        // An explicit null says that queries are not compressed, whatever the family assumes.
        let query_rank = match keys.fields().is_null("q_lora_rank") {
            true => None,
            false => keys.count(&["q_lora_rank"])?,
        };
        let (queries, query_norm) = match query_rank {
            Some(rank) => (
                product(&[hidden, rank]).saturating_add(product(&[rank, heads, query])),
                u128::from(rank),
            ),
            None => (product(&[hidden, heads, query]), 0),
        };
        let linear = queries
            .saturating_add(product(&[hidden, rank.saturating_add(rope)]))
            .saturating_add(product(&[rank, heads, plain.saturating_add(value)]))
            .saturating_add(product(&[heads, value, hidden]));
        Ok(Count::kept(query_norm + u128::from(rank)).plus(Count::linear(linear)))
    }

    /// An MLP of that width.
    fn mlp(&self, ffn: u128) -> Count {
        let hidden = u128::from(self.shape.hidden);
        let ffn = match self.row.mlp {
            MlpForm::HalfGated => ffn / 2,
            _ => ffn,
        };
        let into: u128 = match self.row.mlp {
            MlpForm::Plain => 1,
            MlpForm::Gated | MlpForm::HalfGated => 2,
        };
        let bias = self.bias(Biased::Mlp, into.saturating_mul(ffn).saturating_add(hidden));
        Count::kept(bias).plus(Count::linear(
            (into + 1).saturating_mul(hidden).saturating_mul(ffn),
        ))
    }

    fn dense(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let own = match self.row.dense_ffn.as_deref() {
            Some("intermediate_size_mlp") => keys.count(&["intermediate_size_mlp"])?,
            _ => None,
        };
        let ffn = match (own, self.shape.experts) {
            (Some(ffn), _) => u128::from(ffn),
            (None, _) => u128::from(known(self.shape.ffn, "how wide the MLP is")?),
        };
        let shared = self.shared(keys)?;
        // Granite's hybrids without experts run the shared MLP alone.
        if self.shape.experts.is_none() && shared != Count::default() {
            return Ok(shared);
        }
        Ok(self.mlp(ffn))
    }

    fn routed(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let hidden = self.shape.hidden;
        let experts = known(self.shape.experts, "how many experts there are")?;
        let used = known(self.shape.experts_per_token, "how many experts a token uses")?;
        let ffn = known(self.shape.expert_ffn.or(self.shape.ffn), "how wide an expert is")?;
        let one = self.mlp(u128::from(ffn));
        let expert = match self.row.expert_bias {
            true => one
                .linear
                .saturating_add(2 * u128::from(ffn) + u128::from(hidden)),
            false => one.linear.saturating_add(one.kept),
        };
        let mut kept = product(&[hidden, experts]);
        if self.row.router_bias {
            kept = kept.saturating_add(u128::from(experts));
        }
        let routed = Count {
            kept,
            linear: 0,
            experts: expert.saturating_mul(u128::from(experts)),
            idle: expert.saturating_mul(u128::from(experts.saturating_sub(used))),
        };
        Ok(routed.plus(self.shared(keys)?))
    }

    /// Experts that every token uses.
    fn shared(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let own = keys.count_or_none(super::keys::SHARED_FFN)?;
        let number = keys.count_or_none(super::keys::SHARED_EXPERTS)?;
        let width = match (own, number, self.row.shared) {
            (Some(width), _, _) => u128::from(width),
            (None, Some(number), _) => {
                let one = self.shape.expert_ffn.or(self.shape.ffn);
                product(&[number, known(one, "how wide an expert is")?])
            }
            (None, None, Some(SharedExpert::Ffn)) => {
                u128::from(known(self.shape.ffn, "how wide an expert is")?)
            }
            (None, None, None) => return Ok(Count::default()),
        };
        let gate = if self.row.shared_gate {
            u128::from(self.shape.hidden)
        } else {
            0
        };
        Ok(self.mlp(width).plus(Count::kept(gate)))
    }

    fn mixer(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let form = known(self.row.mixer, "what its layers without attention hold")?;
        match form {
            MixerForm::Mamba1 => self.mamba1(keys),
            MixerForm::Mamba2 => self.mamba2(keys),
            MixerForm::GatedDelta => self.gated_delta(keys),
        }
    }

    fn inner_width(&self, keys: &mut Keys) -> Result<u128, InventoryError> {
        let expand = keys.count(&["mamba_expand", "expand"])?.unwrap_or(2);
        Ok(product(&[expand, self.shape.hidden]))
    }

    fn mamba1(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let hidden = u128::from(self.shape.hidden);
        // In pure state-space models the key of the MLP's width is that of the inner state.
        let inner = match self.row.attention.is_some().then_some(self.shape.ffn).flatten() {
            Some(width) => u128::from(width),
            None => self.inner_width(keys)?,
        };
        let states = u128::from(keys.count(&["mamba_d_state", "state_size"])?.unwrap_or(16));
        let kernel = u128::from(keys.count(&["mamba_d_conv", "conv_kernel"])?.unwrap_or(4));
        let automatic = ["mamba_dt_rank", "time_step_rank"]
            .iter()
            .any(|key| keys.fields().get(key).is_some_and(serde_json::Value::is_string));
        let rank = match automatic {
            true => None,
            false => keys.count(&["mamba_dt_rank", "time_step_rank"])?,
        };
        let rank = rank.map_or_else(|| hidden.div_ceil(16), u128::from);
        let columns = rank.saturating_add(2 * states);
        let linear = hidden
            .saturating_mul(2)
            .saturating_mul(inner)
            .saturating_add(inner.saturating_mul(columns))
            .saturating_add(rank.saturating_mul(inner))
            .saturating_add(inner.saturating_mul(hidden));
        // Convolution with bias, bias of the step widths, the matrix A, the vector D.
        let kept = inner.saturating_mul(kernel + 1 + 1 + states + 1);
        let norms = if self.row.mixer_norms { columns } else { 0 };
        Ok(Count::kept(kept.saturating_add(norms)).plus(Count::linear(linear)))
    }

    fn mamba2(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let hidden = u128::from(self.shape.hidden);
        let heads = keys.count(&["mamba_num_heads", "mamba_n_heads", "num_heads"])?;
        let heads = u128::from(known(heads, "how many heads its state has")?);
        let names: super::keys::Names = match self.row.attention {
            Some(_) => &["mamba_head_dim", "head_dim"],
            None => &["mamba_head_dim", "mamba_d_head"],
        };
        let inner = match keys.count(names)? {
            Some(width) => heads.saturating_mul(u128::from(width)),
            None => self.inner_width(keys)?,
        };
        let groups = keys.count(&["mamba_n_groups", "n_groups"])?.unwrap_or(1);
        let states = keys.count(&["ssm_state_size", "mamba_d_state", "state_size"])?;
        let states = known(states, "how large its state is")?;
        let kernel = u128::from(keys.count(&["mamba_d_conv", "conv_kernel"])?.unwrap_or(4));
        let convolved = inner.saturating_add(product(&[2, groups, states]));
        let rows = inner.saturating_add(convolved).saturating_add(heads);
        let linear = hidden
            .saturating_mul(rows)
            .saturating_add(inner.saturating_mul(hidden));
        // Convolution with bias; step bias, A and D a head; the norm of the inner width.
        let kept = convolved
            .saturating_mul(kernel + 1)
            .saturating_add(3 * heads)
            .saturating_add(inner);
        Ok(Count::kept(kept).plus(Count::linear(linear)))
    }

    fn gated_delta(&self, keys: &mut Keys) -> Result<Count, Uncounted> {
        let hidden = u128::from(self.shape.hidden);
        let mut number = |name: super::keys::Names| -> Result<u32, Uncounted> {
            known(keys.count(name)?, &format!("`{}`", name[0]))
        };
        let key = product(&[
            number(&["linear_num_key_heads"])?,
            number(&["linear_key_head_dim"])?,
        ]);
        let (heads, width) = (
            number(&["linear_num_value_heads"])?,
            number(&["linear_value_head_dim"])?,
        );
        let value = product(&[heads, width]);
        let kernel = u128::from(number(&["linear_conv_kernel_dim"])?);
        let columns = (2 * key)
            .saturating_add(2 * value)
            .saturating_add(2 * u128::from(heads));
        let linear = hidden
            .saturating_mul(columns)
            .saturating_add(value.saturating_mul(hidden));
        let kept = kernel
            .saturating_mul((2 * key).saturating_add(value))
            .saturating_add(2 * u128::from(heads) + u128::from(width));
        Ok(Count::kept(kept).plus(Count::linear(linear)))
    }
}
