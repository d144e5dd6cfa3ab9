//! Folders of clients: read, expected, drawn from, refused.

use std::path::PathBuf;

use infercluster_traces::{TraceError, servegen, statistics};

use crate::reference;

/// A folder of its own for each test.
fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("clients-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (name, text) in files {
        std::fs::write(folder.join(name), text).unwrap();
    }
    folder
}

const LENGTHS: &str = r#"{"0": {"input_tokens": "{}", "output_tokens": "{}"},
    "600": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{4: 1.0}"}}"#;
const OTHER: &str = r#"{"0": {"input_tokens": "{100: 1}", "output_tokens": "{8: 1}"}}"#;

#[test]
fn what_to_expect_is_weighted_by_what_clients_send() {
    let path = folder(
        "expect",
        &[
            (
                "chunk-7-trace.csv",
                "0,0,0,,0,0\n600,0.5,1.2,Gamma,0.7,3\n1200,0,0,,0,0\n",
            ),
            ("chunk-7-dataset.json", LENGTHS),
            ("chunk-9-trace.csv", "0,0.25,1,,0,0\n600,0.25,1.5,Weibull,0.8,3\n"),
            ("chunk-9-dataset.json", OTHER),
            ("README.md", "not a client"),
        ],
    );
    let pool = servegen::load(&path).unwrap();
    let found = pool.statistics();
    assert_eq!((found.clients, found.windows), (2, 3));
    // 300 requests of the one, two windows of 150 of the other.
    assert!((found.expected_requests - 600.0).abs() < 1e-9);
    let input = found.input.unwrap();
    assert!((input.mean - (0.5 * 20.0 + 0.5 * 100.0)).abs() < 1e-9);
    assert_eq!((input.p50, input.p99, input.max), (30.0, 100.0, 100));
    let drawn = pool.generate(600, 1200, 5).unwrap();
    assert_eq!(drawn, pool.generate(600, 1200, 5).unwrap());
    assert_ne!(drawn, pool.generate(600, 1200, 6).unwrap());
    let shown = statistics(&drawn);
    // 450 are expected; gaps of that variation make about 24 of spread.
    assert!((350..550).contains(&shown.rows), "{}", shown.rows);
    assert!(shown.span_s.unwrap() < 600.0 && shown.input.max == 100);
    assert!(matches!(
        pool.generate(5000, 6000, 5),
        Err(TraceError::Empty { .. })
    ));
    assert!(matches!(pool.generate(9, 9, 5), Err(TraceError::Empty { .. })));
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn bad_folders_name_file_line_and_window() {
    let check = |files: &[(&str, &str)], parts: &[&str]| {
        let path = folder("bad", files);
        let message = servegen::load(&path).unwrap_err().to_string();
        for part in parts {
            assert!(message.contains(part), "`{message}` should hold `{part}`");
        }
        std::fs::remove_dir_all(path).unwrap();
    };
    check(&[], &["no chunk-N-trace.csv"]);
    check(&[("a.csv", "x")], &["no chunk-N-trace.csv"]);
    let rates = |text: &'static str| ("chunk-1-trace.csv", text);
    check(&[rates("0,1,1\n")], &["chunk-1-trace.csv:1", "3 cells"]);
    check(&[rates("0,1,1,,0,0\n0,1,1,,0,0\n")], &[":2", "start_s", "later"]);
    check(&[rates("0,NaN,1,,0,0\n")], &[":1", "rate", "finite"]);
    check(&[rates("0,-1,1,,0,0\n")], &[":1", "rate"]);
    check(&[rates("0,1,1,Pareto,0,0\n")], &[":1", "Pareto", "Weibull"]);
    check(
        &[rates("version https://git-lfs.github.com/spec/v1\n")],
        &["git lfs pull"],
    );
    let lengths = |text: &'static str| [rates("0,1,1,,0,0\n"), ("chunk-1-dataset.json", text)];
    check(&lengths("{"), &["chunk-1-dataset.json:1"]);
    check(&lengths(r#"{"x": {}}"#), &["window x", "whole seconds"]);
    check(
        &lengths(r#"{"0": {"input_tokens": [1]}}"#),
        &["window 0", "input_tokens"],
    );
    for bad in [
        "{1: -1}",
        "{1: NaN}",
        "{-1: 1}",
        "{1}",
        "1: 1",
        "{1: 0}",
        "{99999999999: 1}",
    ] {
        let text: &'static str =
            Box::leak(format!(r#"{{"0": {{"output_tokens": "{bad}"}}}}"#).into_boxed_str());
        check(&lengths(text), &["window 0", "output_tokens"]);
    }
    let rate: &'static str = "0,1e9,1,,0,0\n";
    let path = folder(
        "many",
        &[("chunk-1-trace.csv", rate), ("chunk-1-dataset.json", OTHER)],
    );
    let many = servegen::load(&path)
        .unwrap()
        .generate(0, 600, 1)
        .unwrap_err()
        .to_string();
    assert!(many.contains("shorter time"), "{many}");
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn the_published_folder_has_its_windows() {
    let Some(root) = reference::folder("a published folder of clients") else {
        return;
    };
    let pool = servegen::load(&root.join("data/traces/servegen_m-large")).unwrap();
    let found = pool.statistics();
    assert_eq!((found.clients, found.windows), (3, 2016));
    // By hand from the rows with a rate: every window lasts 600 s.
    assert!(found.expected_requests > 1000.0 && found.input.unwrap().max > 1000);
    let drawn = pool.generate(742_200, 743_400, 1).unwrap();
    assert!(!drawn.requests.is_empty());
}
