//! What one device type reaches: calibrated parameters where there are any, datasheet peaks times stated
//! efficiencies elsewhere.

use std::collections::BTreeMap;

use infercluster_spec::Dtype;
use infercluster_spec::calibration::{AffineFit, DecodeFit, DeviceCalibration, RooflineFit, StepFit};
use infercluster_spec::cluster::DeviceType;

use super::Origin;

/// What is assumed of a device type that nobody measured, as shares of its datasheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DefaultEfficiency {
    /// Launch floor of a kernel, seconds.
    pub kernel_floor_s: f64,
    /// Share of the dense peak that a large GEMM reaches.
    pub gemm_compute: f64,
    /// Share of the memory rate that weights stream at.
    pub gemm_memory: f64,
    /// Tokens at which a GEMM reaches half of its compute rate.
    pub gemm_half_rate_m: f64,
    /// Share of the dense peak that prefill attention reaches.
    pub prefill_compute: f64,
    /// Tokens at which prefill attention reaches half of its compute rate.
    pub prefill_half_rate_m: f64,
    /// Share of the memory rate that decode attention reads the cache at.
    pub decode_memory: f64,
    /// Share of the dense peak that decode attention reaches.
    pub decode_compute: f64,
    /// Seconds per (sequence, KV head) of decode attention.
    pub decode_per_pair_s: f64,
    /// Share of the memory rate that norms, activations and copies reach.
    pub traffic_memory: f64,
    /// Sharpness of the smooth maximum.
    pub sharpness: f64,
    /// Host seconds of a step.
    pub host_floor_s: f64,
    /// Host seconds of a sequence in a step.
    pub host_per_sequence_s: f64,
    /// Share of a link's rate that large messages reach.
    pub link: f64,
}

/// The default table. Compute and memory shares are what published H100 and A100 kernels reach at large
/// shapes (60 to 75 % of dense peak, 75 to 90 % of memory rate); links reach 80 to 91 % of nominal. Host
/// time is of the order that Python serving engines show. All of it is a starting point that a
/// calibration replaces, and [`Origin::Datasheet`] marks what rests on it.
pub const DEFAULT_EFFICIENCY: DefaultEfficiency = DefaultEfficiency {
    kernel_floor_s: 3e-6,
    gemm_compute: 0.70,
    gemm_memory: 0.80,
    gemm_half_rate_m: 8.0,
    prefill_compute: 0.50,
    prefill_half_rate_m: 128.0,
    decode_memory: 0.70,
    decode_compute: 0.30,
    decode_per_pair_s: 1e-9,
    traffic_memory: 0.75,
    sharpness: 3.0,
    host_floor_s: 5e-4,
    host_per_sequence_s: 1e-5,
    link: 0.85,
};

/// A value with its origin.
#[derive(Debug, Clone, PartialEq)]
struct Known<T> {
    value: T,
    origin: Origin,
}

impl<T> Known<T> {
    fn datasheet(value: T) -> Self {
        let origin = Origin::Datasheet;
        Self { value, origin }
    }

    fn calibrated(value: T) -> Self {
        let origin = Origin::Calibrated;
        Self { value, origin }
    }
}

/// The resolved parameters of one device type, at speed 1.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRates {
    gemm: BTreeMap<Dtype, Known<RooflineFit>>,
    attention_prefill: BTreeMap<Dtype, Known<RooflineFit>>,
    attention_decode: BTreeMap<Dtype, Known<DecodeFit>>,
    memory: Known<AffineFit>,
    host_step: Known<AffineFit>,
    step: Option<StepFit>,
    /// Longest measured seconds by form and precision.
    longest_s: BTreeMap<(String, Dtype), f64>,
}

impl DeviceRates {
    /// Calibrated parameters where `calibration` has them, the datasheet with `defaults` elsewhere.
    pub fn new(
        device: &DeviceType,
        calibration: Option<&DeviceCalibration>,
        defaults: &DefaultEfficiency,
    ) -> Self {
        let mut rates = Self::from_datasheet(device, defaults);
        if let Some(calibration) = calibration {
            overlay(&mut rates.gemm, &calibration.gemm);
            overlay(&mut rates.attention_prefill, &calibration.attention_prefill);
            overlay(&mut rates.attention_decode, &calibration.attention_decode);
            for (known, fit) in [
                (&mut rates.memory, &calibration.memory),
                (&mut rates.host_step, &calibration.host_step),
            ] {
                if let Some(fit) = fit {
                    *known = Known::calibrated(*fit);
                }
            }
            rates.step.clone_from(&calibration.step);
            let residuals = calibration.residuals.iter();
            rates.longest_s = residuals
                .map(|residual| ((residual.operator.clone(), residual.dtype), residual.longest_s))
                .collect();
        }
        rates
    }

    /// GEMM parameters for weights of a dtype.
    pub fn gemm(&self, dtype: Dtype) -> Option<(&RooflineFit, Origin)> {
        self.gemm.get(&dtype).map(|known| (&known.value, known.origin))
    }

    /// Prefill attention parameters for a cache of a dtype.
    pub fn attention_prefill(&self, dtype: Dtype) -> Option<(&RooflineFit, Origin)> {
        self.attention_prefill
            .get(&dtype)
            .map(|known| (&known.value, known.origin))
    }

    /// Decode attention parameters for a cache of a dtype.
    pub fn attention_decode(&self, dtype: Dtype) -> Option<(&DecodeFit, Origin)> {
        self.attention_decode
            .get(&dtype)
            .map(|known| (&known.value, known.origin))
    }

    /// Memory traffic: seconds by bytes.
    pub fn memory(&self) -> (&AffineFit, Origin) {
        (&self.memory.value, self.memory.origin)
    }

    /// Host time: seconds by sequences.
    pub fn host_step(&self) -> (&AffineFit, Origin) {
        (&self.host_step.value, self.host_step.origin)
    }

    /// Longest seconds, at speed 1, that the fit of a form (`residual_name`) has seen.
    pub fn longest_s(&self, form: &str, dtype: Dtype) -> Option<f64> {
        self.longest_s.get(&(form.to_owned(), dtype)).copied()
    }

    /// Corrections from whole steps.
    pub fn step(&self) -> Option<&StepFit> {
        self.step.as_ref()
    }

    fn from_datasheet(device: &DeviceType, defaults: &DefaultEfficiency) -> Self {
        let bandwidth = device.memory_bandwidth.per_second();
        let mut rates = Self {
            gemm: BTreeMap::new(),
            attention_prefill: BTreeMap::new(),
            attention_decode: BTreeMap::new(),
            memory: Known::datasheet(AffineFit {
                floor_s: defaults.kernel_floor_s,
                per_s: defaults.traffic_memory * bandwidth,
            }),
            host_step: Known::datasheet(AffineFit {
                floor_s: defaults.host_floor_s,
                per_s: 1.0 / defaults.host_per_sequence_s,
            }),
            step: None,
            longest_s: BTreeMap::new(),
        };
        // A device without a memory rate has no roofline: no entry, so that asking for it is an error.
        for dtype in Dtype::ALL.into_iter().filter(|_| bandwidth > 0.0) {
            let Some(peak) = compute_peak(device, dtype) else {
                continue;
            };
            let roofline = |compute: f64, memory: f64, half_rate_m: f64| RooflineFit {
                floor_s: defaults.kernel_floor_s,
                flops_per_s: compute * peak,
                bytes_per_s: memory * bandwidth,
                half_rate_m,
                sharpness: defaults.sharpness,
            };
            let gemm = roofline(
                defaults.gemm_compute,
                defaults.gemm_memory,
                defaults.gemm_half_rate_m,
            );
            let prefill = roofline(
                defaults.prefill_compute,
                defaults.decode_memory,
                defaults.prefill_half_rate_m,
            );
            let decode = DecodeFit {
                floor_s: defaults.kernel_floor_s,
                bytes_per_s: defaults.decode_memory * bandwidth,
                per_pair_s: defaults.decode_per_pair_s,
                flops_per_s: defaults.decode_compute * peak,
            };
            rates.gemm.insert(dtype, Known::datasheet(gemm));
            rates.attention_prefill.insert(dtype, Known::datasheet(prefill));
            rates.attention_decode.insert(dtype, Known::datasheet(decode));
        }
        rates
    }
}

/// Peak of the arithmetic that runs weights or caches stored as `dtype`, FLOP/s: its own precision where
/// the device has it, else the narrowest wider one to which values are converted on the way (weight-only
/// FP8 on a device without FP8 runs at its 16-bit rate). Never a narrower one.
fn compute_peak(device: &DeviceType, dtype: Dtype) -> Option<f64> {
    let candidates: &[Dtype] = match dtype {
        Dtype::F32 => &[Dtype::F32],
        Dtype::Tf32 => &[Dtype::Tf32, Dtype::F32],
        Dtype::Bf16 => &[Dtype::Bf16, Dtype::F16, Dtype::Tf32, Dtype::F32],
        Dtype::F16 => &[Dtype::F16, Dtype::Bf16, Dtype::Tf32, Dtype::F32],
        Dtype::Fp8 => &[Dtype::Fp8, Dtype::Bf16, Dtype::F16, Dtype::Tf32, Dtype::F32],
        Dtype::Int8 => &[Dtype::Int8, Dtype::Bf16, Dtype::F16, Dtype::Tf32, Dtype::F32],
        Dtype::Fp4 => &[Dtype::Fp4, Dtype::Bf16, Dtype::F16, Dtype::Tf32, Dtype::F32],
        Dtype::Int4 => &[Dtype::Int4, Dtype::Bf16, Dtype::F16, Dtype::Tf32, Dtype::F32],
        _ => return None,
    };
    candidates
        .iter()
        .find_map(|candidate| device.peak.get(candidate))
        .map(|peak| peak.per_second())
        .filter(|peak| *peak > 0.0)
}

fn overlay<T: Copy>(rates: &mut BTreeMap<Dtype, Known<T>>, fits: &BTreeMap<Dtype, T>) {
    for (dtype, fit) in fits {
        rates.insert(*dtype, Known::calibrated(*fit));
    }
}
