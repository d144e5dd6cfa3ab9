//! `nvidia-smi topo -m`: own pastes, mangled ones, and the real ones of the reference data.

use infercluster_inventory::import::topo_matrix::{Connection, TopoMatrix, read};
use proptest::prelude::*;

const TABLE: &str = "$ nvidia-smi topo -m\n\
    \tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
    GPU0\t X \tNV12\tSYS\tPXB\t0-23\t0\t\tN/A\n\
    GPU1\tNV12\t X \tNV4\tSYS\t0-23\t0\t\tN/A\n\
    GPU2\tSYS\tNV4\t X \tNODE\t24-47\t1\t\tN/A\n\
    NIC0\tPXB\tSYS\tNODE\t X \n\n\
    Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n\
    NIC Legend:\n\n  NIC0: mlx5_0\n";

fn table() -> TopoMatrix {
    read(TABLE).unwrap()
}

#[test]
fn a_whole_table_is_read() {
    let found = table();
    assert_eq!((found.gpus, found.devices.len(), found.is_complete), (3, 4, true));
    assert_eq!(found.connections[&(0, 1)], Connection::Nvlink(12));
    assert_eq!(found.connections[&(2, 3)], Connection::Node);
    assert_eq!(found.connections.len(), 6);
    assert_eq!(found.nic_names["NIC0"], "mlx5_0");
    let pairs: Vec<(String, u32)> = found.gpu_pairs().into_iter().collect();
    let expected = [("NV12", 1), ("NV4", 1), ("SYS", 1)].map(|(name, count)| (name.to_owned(), count));
    assert_eq!(pairs, expected);
}

#[test]
fn what_does_not_change_the_table_changes_nothing() {
    let spaced = TABLE.replace('\t', "    ");
    let coloured = TABLE.replace("GPU0", "\u{1b}[4mGPU0\u{1b}[0m");
    let peers = format!("{TABLE}\n GPU0 GPU1 GPU2\n GPU0 X GNS OK\n GPU1 GNS X OK\n GPU2 OK OK X\n");
    let repeated = TABLE.replace("NIC0\tPXB", "\tGPU0\tGPU1\tGPU2\tNIC0\nNIC0\tPXB");
    let named = TABLE.replace("NIC0", "mlx5_0");
    for text in [
        spaced,
        coloured,
        peers,
        repeated,
        named,
        TABLE.replace('\n', "\r\n"),
    ] {
        let found = read(&text).unwrap();
        assert_eq!(found.connections, table().connections, "{text}");
        assert!(found.is_complete, "{:?}", found.problems);
    }
}

#[test]
fn contradictions_and_losses_are_named_by_line() {
    let check = |text: &str, line: usize, part: &str| {
        let found = read(text).unwrap();
        let named = found
            .problems
            .iter()
            .any(|problem| problem.line == line && problem.what.contains(part));
        assert!(
            named,
            "{:?} should name line {line} with `{part}`",
            found.problems
        );
        found
    };
    let one_sided = TABLE.replacen("NV12", "NV6", 1);
    let found = check(&one_sided, 4, "GPU0 to GPU1 is NV12 here and NV6 in line 3");
    assert!(!found.connections.contains_key(&(0, 1)));
    // Every row is there, so nothing is lost but the truth.
    assert!(found.is_complete);
    check(
        &TABLE.replacen("SYS", "SY", 1),
        3,
        "row GPU0 has 2 of 4 cells, then `SY`",
    );
    check(&TABLE.replacen("\tGPU2\tNIC0", "\tGPU2", 1), 3, "more cells");
    check(
        &TABLE.replacen(" X \tNV4", "NV4\t X ", 1),
        4,
        "row GPU1 has 1 of 4 cells",
    );
    check(&TABLE.replacen("GPU1\tGPU2", "GPU1\tGPU1", 1), 2, "twice");
    let cut = &TABLE[..TABLE.find("GPU2\tSYS").unwrap()];
    check(cut, 2, "no whole row");
    // `NV12` cut to `NV1` is no link.
    let open = &TABLE[..=TABLE.find("NV12").unwrap() + 2];
    let found = check(open, 3, "may go on");
    assert!(found.connections.is_empty());
    for text in ["", "GPU", "no table here\n", "<html>", "GPU0 X\n"] {
        assert_eq!(read(text), None, "{text}");
    }
}

proptest! {
    #[test]
    fn mangled_tables_lose_but_never_invent(start in 0..TABLE.len(), end in 0..TABLE.len(), row in 0..20_usize) {
        let whole = table();
        let (start, end) = (start.min(end), start.max(end));
        let mut dropped: Vec<&str> = TABLE.split_inclusive('\n').collect();
        dropped.remove(row % dropped.len());
        for text in [&TABLE[..end], &TABLE[start..end], &dropped.concat()] {
            let Some(found) = read(text) else { continue };
            let names = |matrix: &TopoMatrix, pair: &(usize, usize)| {
                (matrix.devices[pair.0].clone(), matrix.devices[pair.1].clone())
            };
            let known: Vec<_> = whole.connections.iter().map(|(pair, link)| (names(&whole, pair), *link)).collect();
            for (pair, link) in &found.connections {
                let link = (names(&found, pair), *link);
                prop_assert!(known.contains(&link), "{link:?} is invented");
            }
            if found.connections.len() < whole.connections.len() {
                prop_assert!(!found.is_complete && !found.problems.is_empty(), "{text}");
            }
        }
    }

    #[test]
    fn any_text_is_survived(text in "(GPU[0-9]|NIC[0-9]|X|NV[0-9]{1,12}|SYS|PIX|OK|\t| |\n|\r|\u{1b}\\[|.){0,200}") {
        if let Some(found) = read(&text) {
            prop_assert!(found.gpus <= found.devices.len());
        }
    }
}
