//! Clusters: short files, one line, documents, and quantities that are none.

use infercluster_tests::scratch::Scratch;

use crate::program;

const LINE: &str = "1 x (2 x l40s, 1 x ndr)";

#[test]
fn a_line_becomes_a_document_that_reads_back() {
    let scratch = Scratch::new(program());
    let from_line = scratch
        .run(&["cluster", "show", LINE, "-o", "cluster.json", "--json"])
        .done();
    let from_file = scratch.run(&["cluster", "show", "cluster.json", "--json"]).done();
    assert_eq!(from_line.stdout, from_file.stdout);
    let cluster = from_file.json();
    assert_eq!(cluster["nodes"][0]["gpus"].as_array().unwrap().len(), 2);
    let table = scratch.run(&["cluster", "show", LINE]).done();
    assert!(table.stdout.contains("2 x l40s"), "{table}");
    assert!(
        table.stdout.contains("assumed, since the file does not say"),
        "{table}"
    );
}

#[test]
fn a_quantity_needs_a_number_and_a_unit() {
    let scratch = Scratch::new(program());
    scratch.run(&["cluster", "show", LINE, "-o", "good.json"]).done();
    let device = "l40s-48gb";
    let bad = [
        ("\"NaN GB/s\"", "`NaN GB/s` is not a finite number"),
        ("\"inf GB/s\"", "`inf GB/s` is not a finite number"),
        ("\"-1 GB/s\"", "`-1 GB/s` is not a finite number"),
        ("\"864 parsec\"", "unit `parsec`"),
        ("\"864\"", "`864` has no unit"),
        ("864", "`864` has no unit"),
        ("null", "memory_bandwidth"),
    ];
    for (value, needle) in bad {
        scratch.change("good.json", "bad.json", |cluster| {
            cluster["device_types"][device]["memory_bandwidth"] = serde_json::from_str(value).unwrap();
        });
        let field = format!("device_types.{device}.memory_bandwidth");
        scratch
            .run(&["cluster", "show", "bad.json"])
            .refused(&["bad.json", &field, needle]);
    }
}

#[test]
fn short_files_name_line_and_field() {
    let scratch = Scratch::new(program());
    let cases = [
        (
            "gpus = \"8 x h100-sxm\"\nmemory = 80",
            "cluster.toml:5",
            "`80` has no unit",
        ),
        (
            "gpus = \"8 x h100-sxm\"\nfabric = {kind = \"nvswitch\", bandwidth = \"NaN GB/s\"}",
            "cluster.toml:5",
            "NaN GB/s",
        ),
        ("gpus = \"8 x h1000\"", "cluster.toml", "h1000"),
        ("gpus = \"99999999999 x h100-sxm\"", "cluster.toml", "99999999999"),
        ("wishes = 3", "cluster.toml", "wishes"),
    ];
    for (lines, place, needle) in cases {
        scratch.write(
            "cluster.toml",
            format!("name = \"lab\"\n[[node]]\nname = \"a\"\n{lines}\n"),
        );
        scratch
            .run(&["cluster", "show", "cluster.toml"])
            .refused(&[place, needle]);
    }
}

#[test]
fn what_a_file_leaves_open_is_asked_for() {
    let scratch = Scratch::new(program());
    scratch.write(
        "host.toml",
        "name = \"host\"\n[[node]]\nname = \"a\"\ngpus = \"2 x cpu-core\"\nfabric = \"none\"\n",
    );
    let answer = scratch.run(&["cluster", "show", "host.toml", "--json"]);
    assert_eq!(answer.code, Some(1), "{answer}");
    let open = answer.json()["open"].clone();
    assert!(open[0].as_str().unwrap().contains("memory"), "{answer}");
}
