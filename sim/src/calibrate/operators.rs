//! The fit of one operator class: which parameters, from where they start, what they predict.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::calibration::{
    AffineFit, DecodeFit, DeviceCalibration, LinkFit, RooflineFit, residual_name,
};
use infercluster_spec::cluster::LinkKind;
use infercluster_spec::{Dtype, Operator};

use super::CalibrateError;
use super::residual::Comparison;
use super::solver::{self, Parameter};
use crate::cost::{AMOUNT_DTYPE, affine_seconds, decode_attention_seconds, roofline_seconds};

/// One measured operator at speed 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Row {
    pub(super) operator: Operator,
    pub(super) seconds: f64,
}

/// Operators that share one form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Gemm,
    AttentionPrefill,
    AttentionDecode,
    Memory,
    HostStep,
    Exchange,
}

impl Class {
    /// `None` for an operator that no form describes yet.
    pub(super) fn of(operator: &Operator) -> Option<Self> {
        Some(match operator {
            Operator::Gemm { .. } => Self::Gemm,
            Operator::AttentionPrefill { .. } => Self::AttentionPrefill,
            Operator::AttentionDecode { .. } => Self::AttentionDecode,
            Operator::Elementwise { .. } | Operator::Copy { .. } => Self::Memory,
            Operator::HostStep { .. } => Self::HostStep,
            Operator::Transfer { .. } | Operator::AllReduce { .. } | Operator::AllGather { .. } => {
                Self::Exchange
            }
            _ => return None,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gemm => residual_name::GEMM,
            Self::AttentionPrefill => residual_name::ATTENTION_PREFILL,
            Self::AttentionDecode => residual_name::ATTENTION_DECODE,
            Self::Memory => residual_name::MEMORY,
            Self::HostStep => residual_name::HOST_STEP,
            Self::Exchange => residual_name::EXCHANGE,
        }
    }

    /// Whether an emulated device's pacing stretches it.
    pub(super) fn is_compute(self) -> bool {
        !matches!(self, Self::HostStep | Self::Exchange)
    }

    /// The precision by which its rows are told apart: bytes moved are bytes, whatever they hold.
    pub(super) fn dtype(self, dtype: Dtype) -> Dtype {
        match self {
            Self::Gemm | Self::AttentionPrefill | Self::AttentionDecode => dtype,
            Self::Memory | Self::HostStep | Self::Exchange => AMOUNT_DTYPE,
        }
    }

    fn parameters(self) -> usize {
        match self {
            Self::Gemm | Self::AttentionPrefill => 5,
            Self::AttentionDecode => 4,
            Self::Memory | Self::HostStep | Self::Exchange => 2,
        }
    }
}

/// What a rank's share decides of an operator's shape, the batch left out: rows with the same one are held
/// out together in cross-validation.
pub(super) fn weight_shape(operator: &Operator) -> [u64; 3] {
    match *operator {
        Operator::Gemm { n, k, .. } => [n, k, 0],
        Operator::AttentionPrefill {
            query_heads,
            kv_heads,
            head_dim,
            ..
        }
        | Operator::AttentionDecode {
            query_heads,
            kv_heads,
            head_dim,
            ..
        } => [query_heads.into(), kv_heads.into(), head_dim.into()],
        ref other => [amount(other).to_bits(), 0, 0],
    }
}

/// The parameters of one class.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Fitted {
    class: Class,
    dtype: Dtype,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Roofline(RooflineFit),
    Decode(DecodeFit),
    Affine(AffineFit),
}

impl Fitted {
    /// Predictions beside measured rows.
    pub(super) fn compare(&self, rows: &[Row]) -> Vec<Comparison> {
        rows.iter()
            .map(|row| Comparison {
                predicted_s: self.form.seconds(self.dtype, &row.operator),
                measured_s: row.seconds,
            })
            .collect()
    }

    /// Writes the parameters where the cost model looks for them.
    pub(super) fn store(
        self,
        dtype: Dtype,
        device: &mut DeviceCalibration,
        links: &mut BTreeMap<LinkKind, LinkFit>,
    ) {
        match (self.class, self.form) {
            (Class::Gemm, Form::Roofline(fit)) => {
                device.gemm.insert(dtype, fit);
            }
            (_, Form::Roofline(fit)) => {
                device.attention_prefill.insert(dtype, fit);
            }
            (_, Form::Decode(fit)) => {
                device.attention_decode.insert(dtype, fit);
            }
            (Class::HostStep, Form::Affine(fit)) => device.host_step = Some(fit),
            (Class::Exchange, Form::Affine(fit)) => {
                let link = LinkFit {
                    provenance: device.provenance.clone(),
                    alpha_s: fit.floor_s,
                    bytes_per_s: fit.per_s,
                };
                links.insert(LinkKind::Loopback, link);
            }
            (_, Form::Affine(fit)) => device.memory = Some(fit),
        }
    }
}

/// Fits one class; refuses fewer shapes than parameters plus one.
pub(super) fn fit_class(
    device_type: &str,
    class: Class,
    dtype: Dtype,
    rows: &[Row],
) -> Result<Fitted, CalibrateError> {
    let shapes: BTreeSet<&Operator> = rows.iter().map(|row| &row.operator).collect();
    let needed = class.parameters() + 1;
    if shapes.len() < needed {
        return Err(CalibrateError::TooFewShapes {
            device_type: device_type.to_owned(),
            class: class.name(),
            dtype,
            shapes: shapes.len(),
            needed,
        });
    }
    let measured: Vec<f64> = rows.iter().map(|row| row.seconds).collect();
    let predict = |values: &[f64], row: usize| Form::of(class, values).seconds(dtype, &rows[row].operator);
    let solution =
        solver::solve(&starts(class, rows), &measured, &predict).ok_or_else(|| CalibrateError::NoFit {
            device_type: device_type.to_owned(),
            class: class.name(),
            dtype,
        })?;
    Ok(Fitted {
        class,
        dtype,
        form: Form::of(class, &solution.values),
    })
}

impl Form {
    /// `values` in the order of [`starts`].
    fn of(class: Class, values: &[f64]) -> Self {
        match class {
            Class::Gemm | Class::AttentionPrefill => Self::Roofline(RooflineFit {
                floor_s: values[0],
                flops_per_s: values[1],
                bytes_per_s: values[2],
                half_rate_m: values[3],
                sharpness: values[4],
            }),
            Class::AttentionDecode => Self::Decode(DecodeFit {
                floor_s: values[0],
                flops_per_s: values[1],
                bytes_per_s: values[2],
                per_pair_s: values[3],
            }),
            Class::Memory | Class::HostStep | Class::Exchange => Self::Affine(AffineFit {
                floor_s: values[0],
                per_s: values[1],
            }),
        }
    }

    fn seconds(&self, dtype: Dtype, operator: &Operator) -> f64 {
        let seconds = match self {
            Self::Roofline(fit) => roofline_seconds(fit, dtype, operator),
            Self::Decode(fit) => decode_attention_seconds(fit, dtype, operator),
            Self::Affine(fit) => Some(affine_seconds(fit, amount(operator))),
        };
        seconds.unwrap_or_else(|| unreachable!("{operator:?} was sorted to {self:?}"))
    }
}

/// What an affine form is linear in. An exchange over loopback is a mesh whose port carries a flow to each
/// other rank, as in [`crate::topology`].
fn amount(operator: &Operator) -> f64 {
    let flows = |ranks: u32| f64::from(ranks.saturating_sub(1));
    match *operator {
        Operator::Elementwise { bytes } | Operator::Copy { bytes } | Operator::Transfer { bytes } => {
            bytes.as_f64()
        }
        Operator::HostStep { sequences } => sequences as f64,
        Operator::AllReduce { ranks, bytes } => flows(ranks) * bytes.as_f64(),
        Operator::AllGather { ranks, largest, .. } => flows(ranks) * largest.as_f64(),
        _ => 0.0,
    }
}

/// Where the search begins: the floor at the shortest time seen, rates at the best seen.
fn starts(class: Class, rows: &[Row]) -> Vec<Vec<Parameter>> {
    let best = |amount: &dyn Fn(&Operator) -> f64| {
        rows.iter()
            .map(|row| amount(&row.operator) / row.seconds)
            .fold(1.0, f64::max)
    };
    let shortest = rows.iter().map(|row| row.seconds).fold(f64::INFINITY, f64::min);
    let floor = Parameter::new(0.5 * shortest, 1e-10, 1.0);
    let rate = |start: f64| Parameter::new(start, 1e3, 1e18);
    let flops = rate(best(&|operator| operator.flops().as_f64()));
    let bytes = rate(best(&touched));
    match class {
        Class::Gemm | Class::AttentionPrefill => [1.0, 64.0]
            .into_iter()
            .map(|half| {
                let (half, sharpness) = (Parameter::new(half, 1e-3, 1e5), Parameter::new(2.0, 1.0, 8.0));
                vec![floor, flops, bytes, half, sharpness]
            })
            .collect(),
        Class::AttentionDecode => [1e-9, 1e-7]
            .into_iter()
            .map(|pair| vec![floor, flops, bytes, Parameter::new(pair, 1e-13, 1e-2)])
            .collect(),
        Class::Memory | Class::HostStep | Class::Exchange => vec![vec![floor, rate(best(&amount))]],
    }
}

/// Values that an operator touches, at one byte each: the scale of its traffic, for a start only.
fn touched(operator: &Operator) -> f64 {
    match *operator {
        Operator::Gemm { m, n, k } => {
            let (m, n, k) = (m as f64, n as f64, k as f64);
            n * k + m * (n + k)
        }
        Operator::AttentionPrefill {
            kv_heads,
            head_dim,
            kv_tokens,
            ..
        }
        | Operator::AttentionDecode {
            kv_heads,
            head_dim,
            kv_tokens,
            ..
        } => 2.0 * f64::from(kv_heads) * f64::from(head_dim) * kv_tokens as f64,
        ref other => amount(other),
    }
}
