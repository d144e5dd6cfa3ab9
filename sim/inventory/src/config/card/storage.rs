//! Bytes of stored weights, and of the KV cache of one token.

use infercluster_spec::model::Dtype;
use serde_json::Value;

use super::super::fields::Fields;
use super::count::Count;
use crate::error::InventoryError;

/// How a quantisation stores the projections that it covers.
struct Scheme {
    bits: u128,
    /// Numbers that share a scale.
    group: u128,
    /// Bits beside the numbers, a group: scale and zero point.
    group_bits: u128,
    only_experts: bool,
}

/// Bytes of the weights, or why they are not known.
pub(super) fn weight_bytes(
    outer: &Fields,
    count: Count,
    dtype: Option<Dtype>,
) -> Result<Result<u128, String>, InventoryError> {
    let Some(dtype) = dtype else {
        return Ok(Err(
            "the file does not say in which precision weights are stored".to_owned()
        ));
    };
    let bits = u128::from(dtype.bits());
    let Some(quantisation) = outer.object("quantization_config")? else {
        return Ok(Ok(count.total().saturating_mul(bits).div_ceil(8)));
    };
    let scheme = match scheme(&quantisation)? {
        Ok(scheme) => scheme,
        Err(reason) => return Ok(Err(reason)),
    };
    let (covered, plain) = match scheme.only_experts {
        true => (count.experts, count.kept.saturating_add(count.linear)),
        false => (count.experts.saturating_add(count.linear), count.kept),
    };
    let groups = covered.div_ceil(scheme.group).saturating_mul(scheme.group_bits);
    let stored = covered.saturating_mul(scheme.bits).saturating_add(groups);
    Ok(Ok(stored.saturating_add(plain.saturating_mul(bits)).div_ceil(8)))
}

fn scheme(quantisation: &Fields) -> Result<Result<Scheme, String>, InventoryError> {
    let method = quantisation.text("quant_method")?;
    let number = |key: &str| -> Result<Option<u128>, InventoryError> {
        match quantisation.has(key) && quantisation.get(key).is_some_and(Value::is_u64) {
            true => quantisation.count(key).map(|count| Some(u128::from(count))),
            false => Ok(None),
        }
    };
    let scheme = match method.as_deref() {
        Some("fp8") => Scheme {
            bits: 8,
            group: block(quantisation),
            group_bits: 32,
            only_experts: false,
        },
        Some("mxfp4") => Scheme {
            bits: 4,
            group: 32,
            group_bits: 8,
            only_experts: true,
        },
        Some("gptq" | "awq") => {
            let bits = number("bits")?.unwrap_or(4).min(32);
            Scheme {
                bits,
                group: number("group_size")?.unwrap_or(128),
                group_bits: 16 + bits,
                only_experts: false,
            }
        }
        other => {
            let name: String = other.unwrap_or("absent").chars().take(40).collect();
            return Ok(Err(format!(
                "how quantisation method `{name}` stores weights is not described here"
            )));
        }
    };
    Ok(Ok(scheme))
}

/// Numbers of a block that shares a scale; a whole matrix, which costs next to nothing, where there is none.
fn block(quantisation: &Fields) -> u128 {
    let sides = quantisation.get("weight_block_size").and_then(Value::as_array);
    let sides = sides.filter(|sides| !sides.is_empty());
    sides.map_or(1 << 40, |sides| {
        let side = |value: &Value| value.as_u64().map_or(1, |side| u128::from(side.max(1)));
        sides.iter().map(side).fold(1, u128::saturating_mul)
    })
}

/// `2 x attention layers x KV heads x head width x bytes`.
pub(super) fn kv_bytes_per_token(attending: u32, kv_heads: u32, head_dim: u32, dtype: Dtype) -> Option<u64> {
    let numbers = 2_u128 * u128::from(attending) * u128::from(kv_heads) * u128::from(head_dim);
    let bits = numbers.checked_mul(u128::from(dtype.bits()))?;
    u64::try_from(bits.div_ceil(8)).ok()
}
