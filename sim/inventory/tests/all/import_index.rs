//! The real dumps of the reference data: every cell of their index that is filled must be found.

use std::collections::BTreeMap;

use infercluster_inventory::import::{self, Figure, Import};

use crate::reference;

/// `NV12:28 SYS:4`; a figure that a dump does not have is `absent`.
fn counts(cell: &str) -> BTreeMap<String, Option<String>> {
    let pairs = cell.split_whitespace().filter_map(|pair| pair.split_once(':'));
    pairs
        .map(|(key, value)| {
            (
                key.to_owned(),
                Some(value.to_owned()).filter(|value| value != "absent"),
            )
        })
        .collect()
}

fn shown(figure: Figure) -> String {
    match figure {
        Figure::Count(count) => count.to_string(),
        Figure::Measured(value) => value.to_string(),
    }
}

fn check(found: &Import, cell: impl Fn(&str) -> String) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut compare = |column: &str, own: String| {
        let expected = cell(column);
        if !expected.is_empty() && expected != own {
            wrong.push(format!("{}: {column} is {own}, not {expected}", cell("file")));
        }
    };
    let count = |count: Option<u64>| count.map_or("null".to_owned(), |count| count.to_string());
    compare("kind", found.kind.name().to_owned());
    compare("gpus", count(found.gpus));
    compare("nics", count(found.nics));
    compare("complete", found.complete.to_string());
    let own: BTreeMap<String, Option<String>> = found
        .counts
        .iter()
        .map(|(key, value)| (key.clone(), value.map(shown)))
        .collect();
    let expected = counts(&cell("gpu_pairs_or_counts"));
    if own != expected && !expected.is_empty() {
        wrong.push(format!("{}: counts are {own:?}, not {expected:?}", cell("file")));
    }
    if !wrong.is_empty() {
        wrong.push(format!("  {:?}", found.problems));
    }
    wrong
}

#[test]
fn every_filled_cell_of_the_index_is_found() {
    let Some(root) = reference::folder("dumps of real hosts") else {
        return;
    };
    let folder = root.join("data/topology");
    let mut index = csv::Reader::from_path(folder.join("INDEX.csv")).unwrap();
    let header = index.headers().unwrap().clone();
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for row in index.records() {
        let row = row.unwrap();
        let cell = |name: &str| row[header.iter().position(|cell| cell == name).unwrap()].to_owned();
        let bytes = std::fs::read(folder.join(cell("file"))).unwrap();
        // The name must not matter.
        match import::read(&bytes, "dump") {
            Ok(found) => wrong.extend(check(&found, cell)),
            Err(error) => wrong.push(format!("{}: {error}", cell("file"))),
        }
        checked += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(checked, 44);
}

/// What the index says of a dump in words.
#[test]
fn contradictions_of_real_dumps_are_named() {
    let Some(root) = reference::folder("dumps of real hosts") else {
        return;
    };
    let read = |file: &str| {
        let bytes = std::fs::read(root.join("data/topology").join(file)).unwrap();
        import::read(&bytes, file).unwrap()
    };
    let log = read("nvbandwidth_log.txt");
    let matrix = log
        .problems
        .iter()
        .find(|problem| problem.what.contains("3 columns"));
    assert_eq!(matrix.map(|problem| problem.line), Some(12), "{:?}", log.problems);
    let adapters = read("ibstat_roce_200g_mixed.txt");
    assert_eq!(
        adapters.facts.host.nics.iter().filter(|nic| nic.is_down).count(),
        1
    );
    let cut = read("smi_mixed_3060_4090_cut.txt");
    assert_eq!(cut.problems[0].line, 13, "{:?}", cut.problems);
    for whole in [
        "nccl_rccl_mi200_4nic.xml",
        "nccl_oci_h100x8_16nic.xml",
        "nccl_rccl_mi300x_8p.xml",
    ] {
        let found = read(whole);
        assert!(
            found.complete && found.problems.is_empty(),
            "{whole}: {:?}",
            found.problems
        );
    }
}
