//! Good dumps of every kind, mangled as pastes are: what loses nothing changes nothing, and nothing panics.

use std::collections::BTreeSet;

use infercluster_inventory::import::facts::{Device, Facts};
use infercluster_inventory::import::{self, Import};
use proptest::prelude::*;

use crate::import_fixtures::{Good, all};

/// What a dump says, as sets that can be compared.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    /// Number or address of a device, and its name where it has one.
    gpus: BTreeSet<(String, Option<String>)>,
    nics: BTreeSet<String>,
    pairs: BTreeSet<(String, String, String)>,
    nodes: BTreeSet<(String, u64)>,
    types: BTreeSet<String>,
}

fn said(import: &Import) -> Said {
    let mut said = Said::default();
    collect(&import.facts, &mut said);
    said
}

fn collect(facts: &Facts, said: &mut Said) {
    let host = &facts.host;
    let gpu = |gpu: usize| {
        let gpu = &host.gpus[gpu];
        gpu.index
            .map_or_else(|| gpu.bus.clone().unwrap_or_default(), |index| index.to_string())
    };
    for (position, own) in host.gpus.iter().enumerate() {
        said.gpus.insert((gpu(position), own.name.clone()));
    }
    said.nics.extend(host.nics.iter().map(|nic| nic.name.clone()));
    let end = |device: Device| match device {
        Device::Gpu(own) => gpu(own),
        Device::Nic(own) => host.nics[own].name.clone(),
    };
    for pair in &host.pairs {
        said.pairs
            .insert((end(pair.a), end(pair.b), pair.connection.to_string()));
    }
    for node in &facts.nodes {
        let count = node.gpus.iter().map(|(_, count, _)| count).sum();
        let names = if node.names.is_empty() {
            vec![String::new()]
        } else {
            node.names.clone()
        };
        said.nodes.extend(names.into_iter().map(|name| (name, count)));
        said.types
            .extend(node.gpus.iter().filter_map(|(name, _, _)| name.clone()));
    }
    for more in &facts.more {
        collect(more, said);
    }
}

fn read(good: &Good, text: &str) -> Option<Import> {
    import::read(text.as_bytes(), "mangled")
        .ok()
        .filter(|found| found.kind.name() == good.kind)
}

fn whole(good: &Good) -> Import {
    let found =
        import::read(good.text.as_bytes(), "good").unwrap_or_else(|error| panic!("{}: {error}", good.kind));
    assert_eq!(found.kind.name(), good.kind);
    assert!(
        found.complete && found.problems.is_empty(),
        "{}: {:?}",
        good.kind,
        found.problems
    );
    found
}

#[test]
fn good_dumps_are_whole() {
    for good in all() {
        let found = whole(&good);
        let gpus = match good.kind {
            "ibstat" | "ibv-devinfo" => None,
            "nvbandwidth" => Some(2),
            "slurm-sinfo" => Some(24),
            "slurm-node" | "ray-status" => Some(8),
            "k8s-node" if good.announces => Some(8),
            _ => Some(4),
        };
        assert_eq!(found.gpus, gpus, "{}", good.kind);
    }
}

/// What pasting does to a text without losing a word of it.
#[test]
fn what_loses_nothing_changes_nothing() {
    for good in all() {
        let own = whole(&good);
        let first_word = good.text.split_whitespace().next().unwrap().to_owned();
        let coloured = good
            .text
            .replacen(&first_word, &format!("\u{1b}[1;31m{first_word}\u{1b}[0m"), 1);
        let mut same = vec![
            ("colour", coloured),
            ("CRLF", good.text.replace('\n', "\r\n")),
            ("blank lines before", format!("\n\n{}", good.text)),
            (
                "a command before",
                format!("user@host:~$ some command\n{}", good.text),
            ),
            (
                "labels of one task",
                good.text.lines().map(|line| format!("3: {line}\n")).collect(),
            ),
            ("a byte order mark", format!("\u{feff}{}", good.text)),
        ];
        if !good.text.contains("apiVersion: v1\nkind") {
            same.push(("spaces for tabs", good.text.replace('\t', "        ")));
        }
        if good.kind != "gfd-labels" {
            same.push(("no final line end", good.text.trim_end_matches('\n').to_owned()));
        }
        for (what, text) in same {
            let found =
                read(&good, &text).unwrap_or_else(|| panic!("{} with {what} is not recognised", good.kind));
            let counts = (found.gpus, found.nics, &found.counts, found.complete);
            let expected = (own.gpus, own.nics, &own.counts, own.complete);
            assert_eq!(
                counts, expected,
                "{} with {what}: {:?}",
                good.kind, found.problems
            );
            assert!(
                found.problems.is_empty(),
                "{} with {what}: {:?}",
                good.kind,
                found.problems
            );
        }
    }
}

#[test]
fn headers_may_stand_twice() {
    for good in all()
        .iter()
        .filter(|good| ["topo-m", "query-csv", "slurm-sinfo", "nccl-tests"].contains(&good.kind))
    {
        let own = whole(good);
        let is_header = |line: &&str| {
            ["\tGPU0", "index,", "NODELIST", "#       size"]
                .iter()
                .any(|start| line.starts_with(start))
        };
        let mut lines: Vec<&str> = good.text.split_inclusive('\n').collect();
        let header = lines.iter().position(is_header).unwrap();
        lines.insert(header + 2, lines[header]);
        let found = read(good, &lines.concat()).unwrap();
        assert_eq!(
            (said(&found), found.complete),
            (said(&own), true),
            "{}: {:?}",
            good.kind,
            found.problems
        );
    }
}

#[test]
fn columns_may_be_missing() {
    let without = |text: &str, column: usize, separator: &str| -> String {
        let cut = |line: &str| {
            let mut cells: Vec<&str> = line.split(separator).collect();
            cells.remove(column);
            cells.join(separator) + "\n"
        };
        text.lines().map(cut).collect()
    };
    let csv = crate::import_fixtures::csv();
    for column in 0..8 {
        let found = import::read(without(&csv, column, ", ").as_bytes(), "csv").unwrap();
        assert_eq!(
            (found.gpus, found.complete),
            (Some(4), true),
            "without column {column}: {:?}",
            found.problems
        );
    }
    let narrow: String = crate::import_fixtures::SINFO
        .lines()
        .map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ") + "\n")
        .collect();
    assert_eq!(import::read(narrow.as_bytes(), "sinfo").unwrap().gpus, Some(24));
}

fn kinds() -> impl Strategy<Value = (usize, usize, usize)> {
    (0..all().len(), 0..10_000_usize, 0..10_000_usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1200))]

    #[test]
    fn rows_stand_in_any_order((kind, one, other) in kinds()) {
        let goods: Vec<Good> = all().into_iter().filter(|good| good.has_rows).collect();
        let good = &goods[kind % goods.len()];
        let own = whole(good);
        let mut lines: Vec<&str> = good.text.split_inclusive('\n').collect();
        let is_row = |line: &&str| {
            let start = line.trim_start();
            start.starts_with("GPU") && !line.starts_with('\t') || start.starts_with("NIC") && line.contains("X")
                || start.starts_with(|letter: char| letter.is_ascii_digit()) || start.starts_with("gpu") || start.starts_with("nvidia.com")
        };
        let rows: Vec<usize> = (0..lines.len()).filter(|line| is_row(&lines[*line])).collect();
        let (one, other) = (rows[one % rows.len()], rows[other % rows.len()]);
        lines.swap(one, other);
        let found = read(good, &lines.concat()).unwrap();
        prop_assert_eq!(said(&found), said(&own), "{}: {:?}", good.kind, found.problems);
        prop_assert!(found.complete, "{}: {:?}", good.kind, found.problems);
    }

    #[test]
    fn any_change_is_survived((kind, at, byte) in kinds(), more in proptest::collection::vec((0..10_000_usize, any::<u8>()), 0..6)) {
        let good = &all()[kind];
        let mut bytes = good.text.clone().into_bytes();
        for (at, byte) in more.into_iter().chain([(at, byte as u8)]) {
            let place = (bytes.len() - 1) * at / 10_000;
            bytes[place] = byte;
        }
        if let Ok(found) = import::read(&bytes, "changed") {
            prop_assert!(found.problems.iter().all(|problem| problem.line > 0));
        }
    }
}
