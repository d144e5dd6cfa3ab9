//! The catalogue: its own entries, names, and what a user's file changes.

use std::collections::BTreeSet;

use infercluster_inventory::{Catalogue, InventoryError};
use infercluster_spec::{Bytes, Dtype};

use crate::reference;

#[test]
fn every_entry_is_valid() {
    let catalogue = Catalogue::builtin();
    assert!(catalogue.devices().len() >= 54 && catalogue.links().len() >= 24);
    let mut names = BTreeSet::new();
    for device in catalogue.devices() {
        let all = std::iter::once(&device.name).chain(&device.aliases);
        for name in all {
            assert!(names.insert(name.clone()), "{name} is there twice");
            assert_eq!(catalogue.device(name).unwrap().name, device.name);
        }
        assert!(!device.sources.is_empty(), "{} has no source", device.name);
        for source in &device.sources {
            assert_ne!(
                &catalogue.cite(std::slice::from_ref(source)),
                source,
                "{source} of {} is no source",
                device.name
            );
        }
        if let Some(pcie) = &device.pcie {
            assert!(catalogue.link(pcie).is_ok(), "{}", device.name);
        }
        assert!(
            device.peak.keys().all(|dtype| !device.not_native.contains(dtype)),
            "{}",
            device.name
        );
        assert!(
            device.peak.values().all(|rate| rate.per_second() > 0.0),
            "{}",
            device.name
        );
        assert!(device.memory != Some(Bytes::ZERO), "{}", device.name);
    }
    for link in catalogue.links() {
        assert!(
            !link.sources.is_empty() && link.bandwidth.per_second() > 0.0,
            "{}",
            link.name
        );
        assert!(
            link.achieved.is_none_or(|achieved| achieved <= link.bandwidth),
            "{}",
            link.name
        );
    }
}

#[test]
fn names_are_found_as_people_and_drivers_spell_them() {
    let catalogue = Catalogue::builtin();
    for (asked, name) in [
        ("h100-sxm", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("L40S", "l40s-48gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("mi300x", "mi300x"),
    ] {
        assert_eq!(catalogue.device(asked).unwrap().name, name, "{asked}");
    }
    assert_eq!(catalogue.link("NDR").unwrap().name, "ib-ndr");
}

#[test]
fn unknown_names_list_near_ones() {
    let catalogue = Catalogue::builtin();
    let near = |asked: &str| catalogue.device(asked).unwrap_err().to_string();
    // A name of several types is no name: it lists them.
    assert!(near("a100").contains("a100-pcie-40gb") && near("a100").contains("a100-sxm4-80gb"));
    assert!(near("h100-smx").contains("h100-sxm"), "{}", near("h100-smx"));
    assert!(near("").contains("h100-sxm") && near("completely else").contains("trainium2"));
    assert!(near(&"x".repeat(1 << 20)).contains("mi300x"));
    assert!(catalogue.link("nrd").unwrap_err().to_string().contains("ndr"));
}

#[test]
fn a_file_extends_and_overrides() {
    let mut catalogue = Catalogue::builtin();
    let text = r#"
        [[device]]
        name = "t4"
        memory_bandwidth = "300 GB/s"
        peak = { int8 = "120 TFLOP/s" }

        [[device]]
        name = "own-chip"
        aliases = ["oc"]
        memory = "64 GiB"

        [[link]]
        name = "ndr"
        latency = "1 us"
    "#;
    catalogue.extend("mine.toml", text).unwrap();
    let t4 = catalogue.device("t4-16gb").unwrap();
    assert_eq!(t4.memory_bandwidth, Some("300 GB/s".parse().unwrap()));
    assert_eq!(t4.peak[&Dtype::Int8], "120 TFLOP/s".parse().unwrap());
    assert_eq!(t4.peak[&Dtype::F16], "65 TFLOP/s".parse().unwrap());
    assert!(catalogue.cite(&t4.sources).ends_with("mine.toml"));
    assert_eq!(catalogue.device("OC").unwrap().memory, Some(Bytes(64 << 30)));
    assert_eq!(
        catalogue.link("ib-ndr").unwrap().latency,
        Some("1 us".parse().unwrap())
    );
}

#[test]
fn bad_files_name_line_field_and_units() {
    let refuse = |text: &str, parts: &[&str]| {
        let error = Catalogue::builtin()
            .extend("mine.toml", text)
            .unwrap_err()
            .to_string();
        for part in parts {
            assert!(error.contains(part), "`{error}` should hold `{part}`");
        }
    };
    refuse(
        "[[device]]\nname = \"x\"\nmemory = 80\n",
        &["mine.toml:3", "device[0].memory", "no unit", "GiB"],
    );
    refuse(
        "[[device]]\nname = \"x\"\nmemory_bandwidth = \"NaN GB/s\"\n",
        &[":3", "device[0].memory_bandwidth"],
    );
    refuse(
        "[[device]]\nname = \"x\"\nmemroy = \"1 GiB\"\n",
        &[":3", "memroy"],
    );
    refuse("[[device]]\nmemory = \"1 GiB\"\n", &["name"]);
    refuse("[[link]]\nname = \"x\"\n", &["link[0].kind", "infiniband"]);
    refuse("[[device]\n", &["mine.toml:1"]);
    let taken = Catalogue::builtin()
        .extend("mine.toml", "[[device]]\nname = \"x\"\naliases = [\"l40s\"]\n")
        .unwrap_err();
    assert!(matches!(taken, InventoryError::NameTaken { .. }), "{taken}");
}

#[test]
fn figures_are_those_of_the_survey() {
    let Some(root) = reference::folder("the hardware survey") else {
        return;
    };
    let text = std::fs::read_to_string(root.join("data/hardware/gpus.json")).unwrap();
    let survey: serde_json::Value = serde_json::from_str(&text).unwrap();
    let catalogue = Catalogue::builtin();
    let gpus = survey["gpus"].as_array().unwrap();
    for gpu in gpus {
        let entry = catalogue.device(gpu["name"].as_str().unwrap()).unwrap();
        let bandwidth = entry.memory_bandwidth.map(|rate| rate.per_second() / 1e9);
        assert_eq!(bandwidth, gpu["memory_bandwidth_gb_s"].as_f64(), "{}", entry.name);
        let scale_up = entry.scale_up.map(|rate| rate.per_second() / 1e9);
        assert_eq!(
            scale_up,
            gpu["scaleup_gb_s_per_direction"].as_f64(),
            "{}",
            entry.name
        );
        for (key, dtype) in [("bf16", Dtype::Bf16), ("fp8", Dtype::Fp8), ("fp32", Dtype::F32)] {
            let rate = entry.peak.get(&dtype).map(|rate| rate.per_second() / 1e12);
            assert_eq!(rate, gpu["tflops_dense"][key].as_f64(), "{} {key}", entry.name);
        }
    }
    assert_eq!(gpus.len() + 1, catalogue.devices().len());
}
