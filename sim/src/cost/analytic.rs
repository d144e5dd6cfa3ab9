//! The cost model of a cluster: closed forms with calibrated or datasheet parameters, routes from its links.

use std::collections::BTreeMap;

use infercluster_spec::{Calibration, Cluster, Dtype, GpuId, NodeId, Operator, SegmentKind};

use infercluster_spec::calibration::residual_name;

use super::forms;
use super::rates::{DEFAULT_EFFICIENCY, DefaultEfficiency, DeviceRates};
use super::{CostError, CostModel, Origin, SegmentCorrection};
use crate::topology::{CollectiveGroup, Topology};

/// Closed forms over a cluster. Built once; every question after that is arithmetic.
///
/// ```
/// use infercluster_sim::cost::{AnalyticCost, CostModel, Origin};
/// use infercluster_spec::{Calibration, Cluster, Dtype, GpuId, Operator, json};
/// let cluster: Cluster = json::read("cluster.json", r#"{
///     "schema": "infercluster-cluster/1", "name": "one card",
///     "device_types": {"card": {"memory": "80 GiB", "memory_bandwidth": "1 TB/s",
///                               "peak": {"bf16": "100 TFLOP/s"}}},
///     "nodes": [{"name": "host", "gpus": [{"id": 0, "device_type": "card"}]}]}"#)?;
/// let cost = AnalyticCost::new(&cluster, &Calibration::default())?;
/// let gemm = Operator::Gemm { m: 1, n: 10_000, k: 10_000 };
/// // 200 MB at 0.80 of 1 TB/s is 250 us, plus the kernel floor of 3 us.
/// let seconds = cost.operator_seconds(GpuId(0), Dtype::Bf16, &gemm)?;
/// assert!((seconds - 253e-6).abs() < 1e-6);
/// assert_eq!(cost.origin(GpuId(0), Dtype::Bf16, &gemm)?, Origin::Datasheet);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct AnalyticCost {
    cluster: String,
    rates: BTreeMap<String, DeviceRates>,
    devices: BTreeMap<GpuId, Device>,
    topology: Topology,
}

#[derive(Debug, Clone)]
struct Device {
    device_type: String,
    node: NodeId,
    speed: f64,
}

impl Device {
    fn costs_as(&self, other: &Self) -> bool {
        self.device_type == other.device_type && self.speed == other.speed
    }
}

impl AnalyticCost {
    /// The cluster with the parameters of `calibration`, and [`DEFAULT_EFFICIENCY`] where it has none.
    pub fn new(cluster: &Cluster, calibration: &Calibration) -> Result<Self, CostError> {
        Self::with_defaults(cluster, calibration, &DEFAULT_EFFICIENCY)
    }

    /// The same with another default table.
    pub fn with_defaults(
        cluster: &Cluster,
        calibration: &Calibration,
        defaults: &DefaultEfficiency,
    ) -> Result<Self, CostError> {
        let rates = cluster
            .device_types
            .iter()
            .map(|(name, device)| {
                let rates = DeviceRates::new(device, calibration.devices.get(name), defaults);
                (name.clone(), rates)
            })
            .collect();
        let mut devices = BTreeMap::new();
        for (node, gpu) in cluster.gpus() {
            if !cluster.device_types.contains_key(&gpu.device_type) {
                return Err(CostError::UnknownDeviceType {
                    gpu: gpu.id,
                    device_type: gpu.device_type.clone(),
                    cluster: cluster.name.clone(),
                });
            }
            let speed = gpu.speed.value();
            if speed == 0.0 {
                return Err(CostError::NoSpeed { gpu: gpu.id });
            }
            let device_type = gpu.device_type.clone();
            let device = Device {
                device_type,
                node,
                speed,
            };
            devices.insert(gpu.id, device);
        }
        Ok(Self {
            cluster: cluster.name.clone(),
            rates,
            devices,
            topology: Topology::new(cluster, &calibration.links, defaults.link)?,
        })
    }

    /// The routes of the cluster.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The parameters of a device's type, at speed 1.
    pub fn rates(&self, gpu: GpuId) -> Result<&DeviceRates, CostError> {
        let device = self.device(gpu)?;
        Ok(&self.rates[&device.device_type])
    }

    /// The type of a device.
    pub fn device_type(&self, gpu: GpuId) -> Result<&str, CostError> {
        Ok(&self.device(gpu)?.device_type)
    }

    /// The speed of a device as a share of its type's.
    pub fn speed(&self, gpu: GpuId) -> Result<f64, CostError> {
        Ok(self.device(gpu)?.speed)
    }

    fn device(&self, gpu: GpuId) -> Result<&Device, CostError> {
        self.devices.get(&gpu).ok_or_else(|| CostError::UnknownGpu {
            gpu,
            cluster: self.cluster.clone(),
        })
    }

    /// Seconds at speed 1 and their origin; `None` where the type has no rate for the precision.
    fn evaluate(
        rates: &DeviceRates,
        dtype: Dtype,
        operator: &Operator,
    ) -> Result<Option<(f64, Origin)>, CostError> {
        const OWN_FORM: &str = "an operator is priced by the form of its kind";
        let answer = match *operator {
            Operator::Gemm { .. } => rates.gemm(dtype).map(|(fit, origin)| {
                let seconds = forms::roofline_seconds(fit, dtype, operator);
                (seconds.expect(OWN_FORM), origin)
            }),
            Operator::AttentionPrefill { .. } => rates.attention_prefill(dtype).map(|(fit, origin)| {
                let seconds = forms::roofline_seconds(fit, dtype, operator);
                (seconds.expect(OWN_FORM), origin)
            }),
            Operator::AttentionDecode { .. } => rates.attention_decode(dtype).map(|(fit, origin)| {
                let seconds = forms::decode_attention_seconds(fit, dtype, operator);
                (seconds.expect(OWN_FORM), origin)
            }),
            Operator::Elementwise { bytes } | Operator::Copy { bytes } => {
                let (fit, origin) = rates.memory();
                let seconds = if bytes.0 == 0 {
                    0.0
                } else {
                    forms::affine_seconds(fit, bytes.as_f64())
                };
                Some((seconds, origin))
            }
            Operator::HostStep { sequences } => {
                let (fit, origin) = rates.host_step();
                Some((forms::affine_seconds(fit, sequences as f64), origin))
            }
            _ => {
                return Err(CostError::WrongOperator {
                    operator: *operator,
                    wanted: "compute",
                });
            }
        };
        Ok(answer)
    }

    fn answer(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<(f64, Origin, f64), CostError> {
        let device = self.device(gpu)?;
        let rates = &self.rates[&device.device_type];
        let (seconds, origin) = Self::evaluate(rates, dtype, operator)?.ok_or_else(|| CostError::NoRate {
            gpu,
            device_type: device.device_type.clone(),
            what: name(operator),
            dtype,
        })?;
        Ok((seconds, origin, device.speed))
    }
}

impl CostModel for AnalyticCost {
    fn operator_seconds(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<f64, CostError> {
        let (at_full_speed, _, speed) = self.answer(gpu, dtype, operator)?;
        let host = matches!(operator, Operator::HostStep { .. });
        let seconds = if host {
            at_full_speed
        } else {
            at_full_speed / speed
        };
        if seconds.is_finite() && seconds >= 0.0 {
            Ok(seconds)
        } else {
            Err(CostError::NotFinite {
                gpu,
                operator: *operator,
                seconds,
            })
        }
    }

    fn origin(&self, gpu: GpuId, dtype: Dtype, operator: &Operator) -> Result<Origin, CostError> {
        let (seconds, origin, _) = self.answer(gpu, dtype, operator)?;
        let (form, dtype) = match operator {
            Operator::Gemm { .. } => (residual_name::GEMM, dtype),
            Operator::AttentionPrefill { .. } => (residual_name::ATTENTION_PREFILL, dtype),
            Operator::AttentionDecode { .. } => (residual_name::ATTENTION_DECODE, dtype),
            Operator::HostStep { .. } => (residual_name::HOST_STEP, forms::AMOUNT_DTYPE),
            _ => (residual_name::MEMORY, forms::AMOUNT_DTYPE),
        };
        let longest_s = self.rates(gpu)?.longest_s(form, dtype);
        let is_past = longest_s.is_some_and(|longest_s| seconds > longest_s);
        Ok(match origin {
            Origin::Calibrated if is_past => Origin::Extrapolated,
            origin => origin,
        })
    }

    fn segment_correction(
        &self,
        gpu: GpuId,
        kind: SegmentKind,
        shared: bool,
    ) -> Result<SegmentCorrection, CostError> {
        let device = self.device(gpu)?;
        let Some(fit) = self.rates[&device.device_type].step() else {
            return Ok(SegmentCorrection::NONE);
        };
        let slowdown = if shared { fit.neighbour_slowdown } else { 1.0 };
        // A kind that no run showed keeps its operators as they are.
        let scale = fit.scale.get(&kind).copied().unwrap_or(1.0);
        Ok(SegmentCorrection {
            floor_s: slowdown * fit.segment_floor_s / device.speed,
            scale: slowdown * scale,
        })
    }

    fn is_alike(&self, one: GpuId, other: GpuId) -> bool {
        let (one, other) = (self.devices.get(&one), self.devices.get(&other));
        let alike = one.zip(other).map(|(one, other)| one.costs_as(other));
        alike.unwrap_or(false)
    }

    fn group(&self, gpus: &[GpuId]) -> Result<CollectiveGroup, CostError> {
        Ok(self.topology.group(gpus)?)
    }

    fn node_of(&self, gpu: GpuId) -> Result<NodeId, CostError> {
        self.device(gpu).map(|device| device.node)
    }
}

fn name(operator: &Operator) -> &'static str {
    match operator {
        Operator::Gemm { .. } => "GEMM",
        Operator::AttentionPrefill { .. } => "prefill attention",
        Operator::AttentionDecode { .. } => "decode attention",
        _ => "memory",
    }
}
