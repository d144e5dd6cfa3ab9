//! Cut-down runs of what measures this machine. They judge what is written and refused, never how fast it was: a
//! test shares its cores.

use infercluster_tests::scratch::Scratch;
use serde_json::Value;

use crate::program;

/// Metrics of a comparison, each with a finite prediction and measurement between the least and the most.
fn metrics(comparison: &Value) -> Vec<String> {
    let rows = comparison.as_array().expect("a comparison is a list");
    rows.iter()
        .map(|row| {
            let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
            assert!(number("predicted") > 0.0, "{row}");
            assert!(number("least") <= number("measured"), "{row}");
            assert!(number("measured") <= number("most"), "{row}");
            let error = number("predicted") / number("measured") - 1.0;
            assert!((error - number("relative_error")).abs() < 1e-9, "{row}");
            row["metric"].as_str().expect("a metric has a name").to_owned()
        })
        .collect()
}

fn names(cases: &[&str]) -> Vec<String> {
    let of_case = |case: &&str| {
        ["output tokens/s", "ttft p50 ms", "itl p50 ms", "e2e p50 ms"]
            .map(|metric| format!("{case}, {metric}"))
    };
    cases.iter().flat_map(of_case).collect()
}

#[test]
fn the_quickstart_compares_both_layouts_and_migrates() {
    let scratch = Scratch::new(program());
    let flags = [
        "quickstart",
        "-o",
        "quick",
        "--requests",
        "4",
        "--repeats",
        "1",
        "--json",
    ];
    let report = scratch.run(&flags).done().json();
    assert_eq!(metrics(&report["comparison"]), names(&["even", "planned"]));
    assert!(report["gain"]["measured"].as_f64().unwrap() > 0.0);
    assert!(report["gain_bound"].as_f64().unwrap() > 1.0);
    let migration = &report["migration"];
    assert_eq!(
        (&migration["failed"], &migration["hashes_equal"]),
        (&0.into(), &true.into())
    );
    assert_eq!(migration["reduction"], "invariant");
    assert!(migration["steps_meanwhile"].as_u64().unwrap() > 0, "{migration}");
    assert!(migration["kv_bytes_moved"].as_u64().unwrap() > 0, "{migration}");
    let pause = |key: &str| migration[key].as_f64().unwrap();
    assert!(0.0 < pause("pause_p50_ms") && pause("pause_p50_ms") <= pause("pause_worst_ms"));

    let read = |name: &str| std::fs::read_to_string(scratch.path().join("quick").join(name)).unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&read("report.json")).unwrap(),
        report
    );
    let text = read("report.txt");
    assert!(text.contains("live migration: even to planned"), "{text}");
    for name in ["calibration.json", "even.json", "planned.json"] {
        serde_json::from_str::<Value>(&read(name)).unwrap();
    }
}

#[test]
fn unlike_workers_share_a_model_that_neither_holds() {
    let scratch = Scratch::with_model(program(), &["--preset", "small"]);
    let flags = [
        "bench",
        "unlike",
        "--model-dir",
        "model",
        "--concurrency",
        "4",
        "--duration",
        "2 s",
        "--repeats",
        "1",
        "--json",
    ];
    let answer = scratch.run(&flags);
    // Whether the floors hold depends on what else runs on these cores.
    assert!(matches!(answer.code, Some(0 | 1)), "{answer}");
    let report = answer.json();
    let weights = report["weight_bytes"].as_u64().unwrap();
    let memory = report["memory_bytes"].as_u64().unwrap();
    assert!(0 < memory && memory < weights, "{memory} of {weights}");
    assert!(report["refusal"]["missing_bytes"].as_u64().unwrap() >= weights - memory);
    let refusal = report["refusal"]["worker"].as_str().unwrap();
    assert!(refusal.contains("room for 0 KV blocks"), "{refusal}");
    let cases = [
        "even, 4 clients",
        "planned, 4 clients",
        "planned, 2 clients",
        "planned, 6 clients",
    ];
    assert_eq!(metrics(&report["comparison"]), names(&cases));
    let number = |key: &str| report[key].as_f64().unwrap();
    let share = report["gain"]["measured"].as_f64().unwrap() / number("gain_bound");
    assert!((share - number("gain_over_bound")).abs() < 1e-9);
    let missed = report["missed"].as_array().unwrap();
    assert_eq!(missed.is_empty(), answer.code == Some(0), "{answer}");
}

#[test]
fn what_a_bench_cannot_do_is_refused() {
    let scratch = Scratch::new(program());
    for (flags, needle) in [
        (["--speed", "1.0"], "two are needed"),
        (["--speed", "2.0:0.4"], "not above 0 and at most 1"),
        (["--duration", "30"], "30"),
        (["--concurrency", "0"], "0"),
        (["--repeats", "0"], "0"),
    ] {
        let flags = [&["bench", "unlike", "--model-dir", "none"], &flags[..]].concat();
        scratch.run(&flags).refused(&[needle]);
    }
}
