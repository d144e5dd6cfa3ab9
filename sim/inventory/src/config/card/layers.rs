//! Which layers attend, and which hold experts: configs say it in a dozen ways.

use serde_json::Value;

use super::keys::Keys;
use super::table::{NoAttention, Row};
use crate::error::InventoryError;

/// What mixes tokens in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mixer {
    Attention,
    /// State of fixed size: a state-space or linear-attention layer, a convolution.
    Recurrent,
    /// Both side by side.
    Both,
    None,
}

/// What transforms tokens one by one in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mlp {
    Dense,
    Experts,
    None,
}

/// The stack of layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layers {
    pub(super) mixers: Vec<Mixer>,
    pub(super) mlps: Vec<Mlp>,
}

impl Layers {
    pub(super) fn attending(&self) -> u32 {
        let attends = |mixer: &&Mixer| matches!(mixer, Mixer::Attention | Mixer::Both);
        self.mixers.iter().filter(attends).count() as u32
    }

    /// `count` is already limited.
    pub(super) fn of(
        keys: &mut Keys,
        row: Option<&Row>,
        count: u32,
        experts: Option<u32>,
    ) -> Result<Self, InventoryError> {
        if let Some(pattern) = keys.fields().text("hybrid_override_pattern")? {
            return by_pattern(keys, &pattern, count);
        }
        let mixers = match row.and_then(|row| row.attention) {
            Some(NoAttention::None) => vec![Mixer::Recurrent; count as usize],
            None => mixers(keys, count)?,
        };
        let mut mlps = Vec::with_capacity(count as usize);
        let holds_experts = match experts {
            Some(_) => Some(ExpertRule::of(keys)?),
            None => None,
        };
        for layer in 0..count {
            let has = holds_experts.as_ref().is_some_and(|rule| rule.holds(layer));
            mlps.push(if has { Mlp::Experts } else { Mlp::Dense });
        }
        if row.is_some_and(|row| row.attention.is_some()) {
            mlps.fill(Mlp::None);
        }
        if mixers.contains(&Mixer::None) {
            only_where_nothing_mixes(keys, &mixers, &mut mlps)?;
        }
        Ok(Self { mixers, mlps })
    }
}

/// Stacks whose layers do one thing each: those that mix tokens have no MLP.
fn only_where_nothing_mixes(keys: &Keys, mixers: &[Mixer], mlps: &mut [Mlp]) -> Result<(), InventoryError> {
    let words = match keys.list("layer_types")? {
        Some(words) => words,
        None => keys.list("layers_block_type")?.unwrap_or_default(),
    };
    for ((mixer, mlp), word) in mixers.iter().zip(mlps).zip(words) {
        *mlp = match (mixer, word.as_str()) {
            (Mixer::None, Some("moe")) => Mlp::Experts,
            (Mixer::None, _) => Mlp::Dense,
            _ => Mlp::None,
        };
    }
    Ok(())
}

/// One letter a layer: `M` state space, `*` attention, `-` MLP, `E` experts.
fn by_pattern(keys: &Keys, pattern: &str, count: u32) -> Result<Layers, InventoryError> {
    let kinds: Option<Vec<(Mixer, Mlp)>> = pattern
        .chars()
        .map(|letter| match letter {
            'M' => Some((Mixer::Recurrent, Mlp::None)),
            '*' => Some((Mixer::Attention, Mlp::None)),
            '-' => Some((Mixer::None, Mlp::Dense)),
            'E' => Some((Mixer::None, Mlp::Experts)),
            _ => None,
        })
        .collect();
    let kinds = kinds.filter(|kinds| kinds.len() == count as usize);
    let (mixers, mlps) = kinds
        .ok_or_else(|| {
            let shown: String = pattern.chars().take(80).collect();
            let expected = format!("one of M, *, - and E for each of the {count} layers");
            keys.fields()
                .bad("hybrid_override_pattern", format!("\"{shown}\""), &expected)
        })?
        .into_iter()
        .unzip();
    Ok(Layers { mixers, mlps })
}

fn mixers(keys: &mut Keys, count: u32) -> Result<Vec<Mixer>, InventoryError> {
    for key in ["layer_types", "layers_block_type"] {
        if let Some(list) = keys.list(key)? {
            return named(keys, key, list, count);
        }
    }
    if let Some(list) = keys.list("attn_type_list")? {
        let attends = |at: usize| list.get(at).and_then(Value::as_u64) == Some(1);
        return Ok(choose(count, |layer| attends(layer as usize)));
    }
    // A pattern that repeats over the stack.
    for key in ["block_types", "_block_types"] {
        if let Some(list) = keys.list(key)?.filter(|list| !list.is_empty()) {
            let attends = |at: usize| list[at % list.len()].as_str() == Some("attention");
            return Ok(choose(count, |layer| attends(layer as usize)));
        }
    }
    for key in ["attn_layer_indices", "full_attn_idxs"] {
        if let Some(list) = keys.list(key)? {
            return Ok(listed(list, count, 0));
        }
    }
    if let Some(linear) = keys.fields().object("linear_attn_config")? {
        let list = linear.get("full_attn_layers").and_then(Value::as_array);
        // This list counts layers from one.
        return Ok(list.map_or_else(
            || vec![Mixer::Attention; count as usize],
            |list| listed(list, count, 1),
        ));
    }
    if let Some(period) = keys.count(&["attn_layer_period"])? {
        let offset = keys.count_or_none(&["attn_layer_offset"])?.unwrap_or(0);
        return Ok(choose(count, |layer| layer % period == offset));
    }
    if let Some(interval) = keys.count(&["full_attention_interval"])? {
        return Ok(choose(count, |layer| (layer + 1) % interval == 0));
    }
    Ok(vec![Mixer::Attention; count as usize])
}

fn choose(count: u32, attends: impl Fn(u32) -> bool) -> Vec<Mixer> {
    let mixer = |layer| match attends(layer) {
        true => Mixer::Attention,
        false => Mixer::Recurrent,
    };
    (0..count).map(mixer).collect()
}

fn listed(list: &[Value], count: u32, first: u64) -> Vec<Mixer> {
    let mut mixers = vec![Mixer::Recurrent; count as usize];
    for value in list {
        let at = value
            .as_u64()
            .and_then(|at| usize::try_from(at.checked_sub(first)?).ok());
        if let Some(mixer) = at.and_then(|at| mixers.get_mut(at)) {
            *mixer = Mixer::Attention;
        }
    }
    mixers
}

/// A word a layer. Words of attention contain "attention"; those of linear attention keep a state instead.
fn named(keys: &Keys, key: &str, list: &[Value], count: u32) -> Result<Vec<Mixer>, InventoryError> {
    let kind = |value: &Value| {
        let word = value.as_str()?;
        Some(match word {
            "hybrid" => Mixer::Both,
            "mlp" | "moe" => Mixer::None,
            _ if word.starts_with("linear") => Mixer::Recurrent,
            _ if word.contains("attention") => Mixer::Attention,
            _ => Mixer::Recurrent,
        })
    };
    let kinds: Option<Vec<Mixer>> = list.iter().map(kind).collect();
    kinds
        .filter(|kinds| kinds.len() == count as usize)
        .ok_or_else(|| {
            let found = format!("a list of {} entries", list.len());
            keys.fields()
                .bad(key, found, &format!("a word for each of the {count} layers"))
        })
}

/// Which layers hold experts, in every way that configs say it; what is not said does not restrict.
struct ExpertRule {
    first: u32,
    last: u32,
    /// Layers whose number from one is a multiple.
    every: u32,
    /// Layers whose number from the first with experts is a multiple.
    step: u32,
    period: Option<(u32, u32)>,
    only: Option<Vec<u32>>,
    except: Vec<u32>,
}

impl ExpertRule {
    fn of(keys: &mut Keys) -> Result<Self, InventoryError> {
        let numbers = |list: Option<&[Value]>| -> Option<Vec<u32>> {
            let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
            let mut numbers: Vec<u32> = list?.iter().filter_map(number).collect();
            numbers.sort_unstable();
            Some(numbers)
        };
        let mut only = numbers(keys.list("moe_layers")?);
        if let Some(words) = keys.list("mlp_layer_types")? {
            let sparse = |(at, word): (usize, &Value)| (word.as_str() == Some("sparse")).then_some(at as u32);
            only = Some(words.iter().enumerate().filter_map(sparse).collect());
        }
        let step = match keys.fields().get("moe_layer_freq") {
            // One number a layer: 1 where there are experts.
            Some(Value::Array(flags)) => {
                let marked = |(at, flag): (usize, &Value)| (flag.as_u64() == Some(1)).then_some(at as u32);
                only = Some(flags.iter().enumerate().filter_map(marked).collect());
                1
            }
            _ => keys.count_or_none(&["moe_layer_freq"])?.unwrap_or(1),
        };
        let period = match keys.count_or_none(&["expert_layer_period"])? {
            Some(period) => Some((period, keys.count_or_none(&["expert_layer_offset"])?.unwrap_or(0))),
            None => None,
        };
        let every = keys.count_or_none(&[
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_interval",
        ])?;
        let first = keys.count_or_none(&[
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_start_index",
        ])?;
        Ok(Self {
            first: first.unwrap_or(0),
            last: keys.count_or_none(&["moe_layer_end_index"])?.unwrap_or(u32::MAX),
            every: every.unwrap_or(1),
            step,
            period,
            only,
            except: numbers(keys.list("mlp_only_layers")?).unwrap_or_default(),
        })
    }

    fn holds(&self, layer: u32) -> bool {
        let within = layer >= self.first && layer <= self.last;
        let listed = self
            .only
            .as_ref()
            .is_none_or(|only| only.binary_search(&layer).is_ok());
        let in_period = self
            .period
            .is_none_or(|(period, offset)| layer % period == offset);
        within
            && listed
            && in_period
            && (layer + 1).is_multiple_of(self.every)
            && layer.is_multiple_of(self.step)
            && self.except.binary_search(&layer).is_err()
    }
}
