//! Who may depend on whom.

use std::collections::BTreeSet;

use crate::sources::sources;

/// Crate, and what it may depend on; every manifest must be listed.
const ARROWS: [(&str, &[&str]); 9] = [
    ("spec", &[]),
    ("serving", &["spec"]),
    ("inventory", &["spec"]),
    ("traces", &["spec"]),
    ("sim", &["spec", "serving"]),
    ("planner", &["spec", "sim"]),
    ("executor", &["spec", "serving"]),
    (
        "experiments",
        &[
            "spec",
            "serving",
            "inventory",
            "traces",
            "sim",
            "planner",
            "executor",
        ],
    ),
    (
        "tests",
        &[
            "spec",
            "serving",
            "inventory",
            "traces",
            "sim",
            "planner",
            "executor",
            "experiments",
        ],
    ),
];

const PREFIX: &str = "infercluster-";

#[test]
fn crates_depend_only_downwards() {
    let mut seen = BTreeSet::new();
    for source in sources() {
        let Some(folder) = source.path.strip_suffix("/Cargo.toml") else {
            continue;
        };
        let manifest: toml::Table = source.text.parse().expect("a manifest is TOML");
        let name = manifest["package"]["name"].as_str().expect("a crate has a name");
        let name = name
            .strip_prefix(PREFIX)
            .unwrap_or_else(|| panic!("{folder} is called {name}"));
        let (_, allowed) = ARROWS
            .iter()
            .find(|(listed, _)| *listed == name)
            .unwrap_or_else(|| panic!("{name} ({folder}) is on no list of arrows"));
        seen.insert(name.to_owned());
        for found in dependencies(&manifest) {
            let found = found.strip_prefix(PREFIX).unwrap_or(&found);
            assert!(allowed.contains(&found), "{name} must not depend on {found}");
        }
    }
    assert_eq!(seen.len(), ARROWS.len(), "crates found: {seen:?}");
}

/// Crates of this workspace that a manifest names: for the library, its tests, its build script, any target.
fn dependencies(manifest: &toml::Table) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in manifest {
        let Some(table) = value.as_table() else {
            continue;
        };
        if key.ends_with("dependencies") {
            found.extend(table.keys().filter(|name| name.starts_with(PREFIX)).cloned());
        } else if key == "target" {
            let targets = table.values().filter_map(toml::Value::as_table);
            found.extend(targets.flat_map(dependencies));
        }
    }
    found
}

#[test]
fn a_dependency_is_found_wherever_it_hides() {
    let manifest = "
        [dependencies]
        infercluster-a.workspace = true
        serde = '1'
        [dev-dependencies]
        infercluster-b = { path = '../b' }
        [target.'cfg(unix)'.build-dependencies]
        infercluster-c = '1'
    ";
    let found = dependencies(&manifest.parse().expect("this is TOML"));
    assert_eq!(found, ["infercluster-a", "infercluster-b", "infercluster-c"]);
}
