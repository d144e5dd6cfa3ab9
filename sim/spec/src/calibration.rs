//! Fitted parameters of the cost model, per device type and precision, with their origin and residuals.
//!
//! A closed form gives every operator a time; a calibration holds the numbers in those forms. What stands
//! here is data: the forms themselves are in `infercluster-sim`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cluster::LinkKind;
use crate::json::Document;
use crate::model::Dtype;
use crate::operator::{Provenance, SegmentKind};

/// Everything fitted so far.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    /// Per device type of the cluster.
    pub devices: BTreeMap<String, DeviceCalibration>,
    /// Per kind of link.
    pub links: BTreeMap<LinkKind, LinkFit>,
}

impl Document for Calibration {
    const SCHEMA: &'static str = "infercluster-calibration/1";
}

/// Parameters of one device type.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceCalibration {
    /// Where they come from.
    pub provenance: Provenance,
    /// GEMM by weight dtype.
    pub gemm: BTreeMap<Dtype, RooflineFit>,
    /// Prefill attention by cache dtype.
    pub attention_prefill: BTreeMap<Dtype, RooflineFit>,
    /// Decode attention by cache dtype.
    pub attention_decode: BTreeMap<Dtype, DecodeFit>,
    /// Memory traffic of norms, rotations, activations and copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<AffineFit>,
    /// Host time of a step, by sequences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_step: Option<AffineFit>,
    /// What whole steps showed beyond single operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<StepFit>,
    /// How far the fits are from what was measured.
    pub residuals: Vec<Residual>,
}

/// Corrections that only whole steps show: operators timed alone run with warm caches and without
/// neighbours. A segment lasts `segment_floor_s + scale[kind] x (sum of its operators)`, times
/// `neighbour_slowdown` where the layout seats another device on the same node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepFit {
    /// Seconds of every segment beyond its operators.
    pub segment_floor_s: f64,
    /// Factor on the operators of a kind of segment; 1 where a kind is absent.
    pub scale: BTreeMap<SegmentKind, f64>,
    /// Factor on a device that shares its node, at least 1.
    pub neighbour_slowdown: f64,
}

/// `floor_s + smooth max(flops / (flops_per_s x eff), bytes / bytes_per_s)` in seconds; the smooth maximum of
/// a and b is `(a^p + b^p)^(1/p)`, and `eff = m / (m + half_rate_m)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RooflineFit {
    /// Launch floor, seconds.
    pub floor_s: f64,
    /// Reached compute rate, FLOP/s.
    pub flops_per_s: f64,
    /// Reached memory rate, byte/s.
    pub bytes_per_s: f64,
    /// Tokens m at which half of the compute rate is reached; 0 where small m costs nothing extra.
    pub half_rate_m: f64,
    /// Sharpness p of the smooth maximum, at least 1.
    pub sharpness: f64,
}

/// `floor_s + kv_bytes / bytes_per_s + per_pair_s x sequences x kv_heads + flops / flops_per_s` in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeFit {
    /// Launch floor, seconds.
    pub floor_s: f64,
    /// Reached KV read rate, byte/s.
    pub bytes_per_s: f64,
    /// Seconds per (sequence, KV head).
    pub per_pair_s: f64,
    /// Reached compute rate, FLOP/s.
    pub flops_per_s: f64,
}

/// `floor_s + x / per_s` in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AffineFit {
    /// Seconds at nothing.
    pub floor_s: f64,
    /// Units a second.
    pub per_s: f64,
}

/// Alpha-beta cost of one message over a kind of link: `alpha_s + bytes / bytes_per_s` in seconds. Where a link
/// states its own rate, the smaller of the two holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkFit {
    /// Where it comes from.
    pub provenance: Provenance,
    /// Latency, seconds.
    pub alpha_s: f64,
    /// Rate, byte/s.
    pub bytes_per_s: f64,
}

/// Quality of one fit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// Which operator.
    pub operator: String,
    /// Which dtype.
    pub dtype: Dtype,
    /// Rows that went into the fit.
    pub rows: u32,
    /// Longest time among them at speed 1, seconds: a prediction past it extrapolates.
    pub longest_s: f64,
    /// Median of |predicted - measured| / measured.
    pub median_error: f64,
    /// 90th percentile of the same.
    pub p90_error: f64,
    /// Median of (predicted - measured) / measured.
    pub bias: f64,
}

/// What [`Residual::operator`] says, one name per form.
pub mod residual_name {
    /// GEMM.
    pub const GEMM: &str = "gemm";
    /// Prefill attention.
    pub const ATTENTION_PREFILL: &str = "attention_prefill";
    /// Decode attention.
    pub const ATTENTION_DECODE: &str = "attention_decode";
    /// Memory traffic.
    pub const MEMORY: &str = "memory";
    /// Host time.
    pub const HOST_STEP: &str = "host_step";
    /// Transfers and collectives.
    pub const EXCHANGE: &str = "exchange";
    /// Whole steps.
    pub const STEP: &str = "step";
}
