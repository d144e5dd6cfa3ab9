//! Planted parameters come back from seeded noisy rows, and unseen layouts and batches are predicted.

use infercluster_spec::calibration::{AffineFit, DecodeFit, RooflineFit};
use infercluster_spec::operator::Provenance;
use infercluster_spec::{Bytes, Fraction, Measurement};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, LogNormal};

use super::*;
use crate::cost::fixtures::cluster;
use crate::cost::{AnalyticCost, CostModel, Origin};

/// A device whose every parameter is known.
pub(super) fn planted() -> Calibration {
    let roofline = |flops_per_s, half_rate_m| RooflineFit {
        floor_s: 4e-6,
        flops_per_s,
        bytes_per_s: 8e9,
        half_rate_m,
        sharpness: 2.5,
    };
    let device = DeviceCalibration {
        gemm: [(Dtype::F32, roofline(1e11, 4.0))].into(),
        attention_prefill: [(Dtype::F32, roofline(4e10, 20.0))].into(),
        attention_decode: [(
            Dtype::F32,
            DecodeFit {
                floor_s: 6e-6,
                bytes_per_s: 6e9,
                per_pair_s: 3e-7,
                flops_per_s: 3e10,
            },
        )]
        .into(),
        memory: Some(AffineFit {
            floor_s: 1e-6,
            per_s: 7e9,
        }),
        host_step: Some(AffineFit {
            floor_s: 8e-5,
            per_s: 2e5,
        }),
        ..DeviceCalibration::default()
    };
    Calibration {
        devices: [("worker".to_owned(), device)].into(),
        ..Calibration::default()
    }
}

fn operators() -> Vec<Operator> {
    let mut operators = Vec::new();
    for m in [1, 2, 4, 8, 16, 64, 256, 1024] {
        for (n, k) in [
            (64, 64),
            (256, 1024),
            (1024, 256),
            (4096, 4096),
            (512, 512),
            (16384, 1024),
        ] {
            operators.push(Operator::Gemm { m, n, k });
        }
    }
    for (query_heads, kv_heads) in [(1, 1), (4, 2), (8, 2), (16, 16)] {
        for (count, length) in [(1, 16), (1, 512), (4, 64), (4, 1024), (16, 128), (64, 512)] {
            operators.push(Operator::AttentionPrefill {
                query_heads,
                kv_heads,
                head_dim: 64,
                new_tokens: count * length,
                score_pairs: count * length * (length + 1) / 2,
                kv_tokens: count * length,
            });
            operators.push(Operator::AttentionDecode {
                query_heads,
                kv_heads,
                head_dim: 64,
                sequences: count,
                kv_tokens: count * length,
            });
        }
    }
    operators.extend((6..24).map(|log| Operator::Elementwise {
        bytes: Bytes(1 << log),
    }));
    operators.extend([1, 2, 4, 8, 16, 32, 64].map(|sequences| Operator::HostStep { sequences }));
    operators
}

/// The planted device's times under multiplicative noise of 3 %, at an emulated speed.
fn profile(speed: f64) -> Profile {
    let cluster = cluster(&[1.0]);
    let cost = AnalyticCost::new(&cluster, &planted()).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(20_261_201);
    let noise = LogNormal::new(0.0, 0.03).unwrap();
    let measurements = operators().into_iter().map(|operator| {
        let host = matches!(operator, Operator::HostStep { .. });
        let pace = if host { 1.0 } else { speed };
        let exact = cost.operator_seconds(GpuId(0), Dtype::F32, &operator).unwrap();
        let median_s = exact / pace * noise.sample(&mut random);
        Measurement {
            operator,
            dtype: Dtype::F32,
            median_s,
            p10_s: median_s,
            p90_s: median_s,
            samples: 1,
        }
    });
    Profile {
        device_type: "worker".to_owned(),
        provenance: Provenance {
            emulated_speed: Fraction::new(speed).filter(|speed| *speed != Fraction::ONE),
            ..Provenance::default()
        },
        measurements: measurements.collect(),
    }
}

#[test]
fn planted_parameters_come_back() {
    for speed in [1.0, 0.4] {
        let found = fit(&[profile(speed)], &cluster(&[1.0])).unwrap();
        let (found, planted) = (&found.devices["worker"], &planted().devices["worker"]);
        // 3 % noise on the rows leaves the rates within 10 % and the floors, which few rows show, within 25 %.
        let close = |what: &str, found: f64, planted: f64, tolerance: f64| {
            let error = (found / planted - 1.0).abs();
            assert!(
                error <= tolerance,
                "speed {speed}: {what} {found:e}, planted {planted:e}"
            );
        };
        for (what, found, planted) in [
            ("gemm", &found.gemm[&Dtype::F32], &planted.gemm[&Dtype::F32]),
            (
                "prefill",
                &found.attention_prefill[&Dtype::F32],
                &planted.attention_prefill[&Dtype::F32],
            ),
        ] {
            close(what, found.flops_per_s, planted.flops_per_s, 0.1);
            close(what, found.floor_s, planted.floor_s, 0.25);
        }
        // Small GEMMs are memory-bound, so only attention shows its half rate, and trades it with sharpness.
        let half = |device: &DeviceCalibration| device.attention_prefill[&Dtype::F32].half_rate_m;
        close("prefill half rate", half(found), half(planted), 0.4);
        close(
            "gemm bytes",
            found.gemm[&Dtype::F32].bytes_per_s,
            planted.gemm[&Dtype::F32].bytes_per_s,
            0.1,
        );
        let (decode, decode_planted) = (
            &found.attention_decode[&Dtype::F32],
            &planted.attention_decode[&Dtype::F32],
        );
        close("decode floor", decode.floor_s, decode_planted.floor_s, 0.25);
        close("decode pairs", decode.per_pair_s, decode_planted.per_pair_s, 0.1);
        close(
            "decode bytes",
            decode.bytes_per_s,
            decode_planted.bytes_per_s,
            0.25,
        );
        let (memory, host) = (found.memory.unwrap(), found.host_step.unwrap());
        close("memory rate", memory.per_s, 7e9, 0.1);
        close("memory floor", memory.floor_s, 1e-6, 0.1);
        close("host floor", host.floor_s, 8e-5, 0.1);
        close("host rate", host.per_s, 2e5, 0.1);
        assert_eq!(found.residuals.len(), 5);
        for residual in &found.residuals {
            assert!(residual.median_error < 0.05, "{residual:?}");
        }
    }
}

#[test]
fn a_prediction_past_the_evidence_says_so() {
    let host = cluster(&[1.0]);
    let cost = AnalyticCost::new(&host, &fit(&[profile(1.0)], &host).unwrap()).unwrap();
    let origin = |m| cost.origin(GpuId(0), Dtype::F32, &Operator::Gemm { m, n: 4096, k: 4096 });
    assert_eq!(origin(512), Ok(Origin::Calibrated));
    assert_eq!(origin(8192), Ok(Origin::Extrapolated));
    // Half precision was not measured, and runs on the single-precision peak.
    let half = cost.origin(GpuId(0), Dtype::F16, &Operator::Gemm { m: 1, n: 1, k: 1 });
    assert_eq!(half, Ok(Origin::Datasheet));
}

#[test]
fn held_out_shapes_are_predicted() {
    let residuals = cross_validate(&[profile(1.0)], &cluster(&[1.0]), 4).unwrap();
    for residual in &residuals["worker"] {
        assert!(residual.median_error < 0.06, "{residual:?}");
        assert!(residual.p90_error < 0.15, "{residual:?}");
    }
    let error = cross_validate(&[profile(1.0)], &cluster(&[1.0]), 1).unwrap_err();
    assert_eq!(error, CalibrateError::Folds { folds: 1, shapes: 6 });
}

#[test]
fn what_cannot_be_fitted_is_refused_by_name() {
    let host = cluster(&[1.0]);
    let check = |change: &dyn Fn(&mut Profile), expected: &str| {
        let mut profile = profile(1.0);
        change(&mut profile);
        assert_eq!(fit(&[profile], &host).unwrap_err().to_string(), expected);
    };
    check(
        &|profile| profile.measurements.truncate(5),
        "gemm of `worker` in f32 was measured at 5 shapes, the fit needs 6",
    );
    check(
        &|profile| profile.device_type = "other".to_owned(),
        "the profile is of device type `other`, cluster `host` has worker",
    );
    check(
        &|profile| profile.measurements[0].median_s = 0.0,
        "Gemm { m: 1, n: 64, k: 64 } on `worker` was measured as 0 s, a positive time is needed",
    );
    check(
        &|profile| profile.provenance.emulated_speed = Some(Fraction::ZERO),
        "the profile of `worker` says emulated speed 0",
    );
}
