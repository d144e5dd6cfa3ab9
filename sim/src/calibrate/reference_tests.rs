//! Fits to measured GPU kernels of the reference data; skipped where it is absent.

use std::path::PathBuf;

use infercluster_spec::calibration::Residual;
use infercluster_spec::operator::Provenance;
use infercluster_spec::{BatchShape, Measurement};

use super::*;
use crate::cost::fixtures::cluster;

fn rows(file: &str) -> Option<Vec<BTreeMap<String, String>>> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared");
    let root = std::env::var_os("INFERCLUSTER_REFERENCE_DATA").map_or_else(|| default.into(), PathBuf::from);
    let path = root.join("data/kernel-measurements").join(file);
    let mut reader = csv::Reader::from_path(&path).ok()?;
    let rows: Result<_, _> = reader.deserialize().collect();
    Some(rows.expect("the reference file is a table with one header"))
}

/// Reads a count from a named column of a row.
type Number<'a> = dyn Fn(&str) -> u64 + 'a;

/// The rows of one system as a profile of the fixture's device type, which only lends its name.
fn profile(
    file: &str,
    keep: &dyn Fn(&BTreeMap<String, String>) -> bool,
    operator: &dyn Fn(&Number) -> Operator,
) -> Option<Profile> {
    let Some(rows) = rows(file) else {
        println!("skipped: no {file} in the reference data (1 fit)");
        return None;
    };
    let measurements = rows.iter().filter(|row| keep(row)).map(|row| {
        let median_s = row["latency_us"].parse::<f64>().unwrap() * 1e-6;
        let number = |column: &str| row[column].parse::<u64>().unwrap();
        Measurement {
            operator: operator(&number),
            dtype: Dtype::Bf16,
            median_s,
            p10_s: median_s,
            p90_s: median_s,
            samples: 1,
        }
    });
    Some(Profile {
        device_type: "worker".to_owned(),
        provenance: Provenance::default(),
        measurements: measurements.collect(),
    })
}

/// Prints the residual of the fit and of held-out shapes, returns both.
fn judge(what: &str, profile: Profile) -> [Residual; 2] {
    let (profiles, host) = ([profile], cluster(&[1.0]));
    let fitted = fit(&profiles, &host).unwrap();
    let held = cross_validate(&profiles, &host, 5).unwrap();
    let residuals = [
        fitted.devices["worker"].residuals[0].clone(),
        held["worker"][0].clone(),
    ];
    for (how, residual) in ["fit", "held-out shapes"].into_iter().zip(&residuals) {
        println!(
            "{what}, {how}: {} rows, median error {:.3}, p90 {:.3}, bias {:.3}",
            residual.rows, residual.median_error, residual.p90_error, residual.bias
        );
        let all = [residual.median_error, residual.p90_error, residual.bias];
        assert!(all.iter().all(|error| error.is_finite()), "{residual:?}");
    }
    residuals
}

#[test]
fn gemm_on_h100() {
    let keep = |row: &BTreeMap<String, String>| row["system"] == "h100_sxm" && row["dtype"] == "bf16";
    let gemm = |number: &Number| Operator::Gemm {
        m: number("m"),
        n: number("n"),
        k: number("k"),
    };
    if let Some(profile) = profile("gemm_h100_a100.csv", &keep, &gemm) {
        let [fitted, held] = judge("GEMM h100 bf16", profile);
        assert!(fitted.median_error < 0.30 && held.median_error < 0.30);
    }
}

#[test]
fn attention_on_h100() {
    let keep = |row: &BTreeMap<String, String>| row["system"] == "h100_sxm" && row["kv_dtype"] == "bf16";
    let heads = |number: &Number, column: &str| number(column) as u32;
    let decode = |number: &Number| Operator::AttentionDecode {
        query_heads: heads(number, "q_heads"),
        kv_heads: heads(number, "kv_heads"),
        head_dim: heads(number, "head_dim"),
        sequences: number("batch"),
        kv_tokens: number("batch") * number("kv_len"),
    };
    if let Some(profile) = profile("attention_generation_h100_a100.csv", &keep, &decode) {
        let [fitted, held] = judge("decode attention h100 bf16", profile);
        assert!(fitted.median_error < 0.30 && held.median_error < 0.30);
    }
    let prefill = |number: &Number| {
        let mut shape = BatchShape::default();
        (0..number("batch")).for_each(|_| shape.add_prefill(number("isl"), 0, true));
        Operator::AttentionPrefill {
            query_heads: heads(number, "q_heads"),
            kv_heads: heads(number, "kv_heads"),
            head_dim: heads(number, "head_dim"),
            new_tokens: shape.prefill_new,
            score_pairs: shape.prefill_score_pairs,
            kv_tokens: shape.prefill_kv_tokens,
        }
    };
    if let Some(profile) = profile("attention_context_h100_a100.csv", &keep, &prefill) {
        let [fitted, held] = judge("prefill attention h100 bf16", profile);
        assert!(fitted.median_error < 0.30 && held.median_error < 0.30);
    }
}
