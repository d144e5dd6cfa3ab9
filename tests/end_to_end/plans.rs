//! Plans and migrations by the command line.

use infercluster_tests::scratch::Scratch;

use crate::program;

const HOST: &str = "name = \"host\"\n[[node]]\nname = \"a\"\ngpus = \"2 x cpu-core\"\nspeed = [1.0, 0.4]\n\
    memory = \"2 GiB\"\nfabric = \"none\"\n";

const PLAN: [&str; 9] = [
    "plan",
    "--cluster",
    "host.toml",
    "--model",
    "model",
    "--context",
    "128",
    "--stages",
    "1",
];

#[test]
fn a_slow_device_gets_less_and_the_layout_runs() {
    let scratch = Scratch::with_model(program(), &["--preset", "small"]);
    scratch.write("host.toml", HOST);
    let flags = ["--split-groups", "--json"];
    let plan = scratch.run(&[&PLAN[..], &flags].concat()).done().json();
    assert_eq!(plan["outcome"], "planned");
    let shards = &plan["layout"]["replicas"][0]["stages"][0]["layer_groups"][0]["shards"];
    let columns = |rank: usize| {
        let (start, end) = shards[rank]["mlp_columns"]
            .as_str()
            .unwrap()
            .split_once("..")
            .unwrap();
        end.parse::<u32>().unwrap() - start.parse::<u32>().unwrap()
    };
    assert!(
        columns(0) > columns(1),
        "the device at 0.4 holds {} of 1024 columns",
        columns(1)
    );
    let even = plan["baselines"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["kind"] == "even")
        .unwrap();
    assert!(even["gain"].as_f64().unwrap() > 1.0, "{even}");
    let generate = [
        "generate",
        "--model-dir",
        "model",
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        "4",
        "--json",
    ];
    let invariant = ["--reduction", "invariant", "--split-groups", "-o", "plan.json"];
    scratch.run(&[&PLAN[..], &invariant].concat()).done();
    let alone = scratch.run(&generate).done();
    let planned = scratch
        .run(&[&generate[..], &["--layout", "plan.json"]].concat())
        .done();
    assert_eq!(planned.stdout, alone.stdout);
}

#[test]
fn infeasible_is_an_answer() {
    let scratch = Scratch::with_model(program(), &[]);
    scratch.write("host.toml", HOST);
    let plan = [
        "plan",
        "--cluster",
        "host.toml",
        "--model",
        "model",
        "--context",
        "4000",
        "--sequences",
        "100000",
        "--json",
    ];
    let answer = scratch.run(&plan);
    assert_eq!(answer.code, Some(1), "{answer}");
    let why = answer.json();
    assert_eq!(why["outcome"], "infeasible");
    assert!(why["missing_bytes"].as_u64().unwrap() > 0);
    assert!(why["nearest_sequences"].as_u64().unwrap() < 100_000);
}

#[test]
fn a_migration_moves_what_the_target_lacks() {
    let scratch = Scratch::with_model(program(), &[]);
    for (name, heads) in [("even.json", "1:1"), ("uneven.json", "2:1")] {
        scratch
            .run(&[
                "layout",
                "make",
                "--model-dir",
                "model",
                "--devices",
                "2",
                "--heads",
                heads,
                "--split-groups",
                "-o",
                name,
            ])
            .done();
    }
    let plan = |from: &str, to: &str| {
        let plan = [
            "migrate", "plan", "--from", from, "--to", to, "--model", "model", "--json",
        ];
        scratch.run(&plan).done().json()["phases"].clone()
    };
    let same = plan("even.json", "even.json");
    assert!(
        same.as_array()
            .unwrap()
            .iter()
            .all(|phase| phase["transfers"] == serde_json::json!([])),
        "{same}"
    );
    let phases = plan("even.json", "uneven.json");
    assert!(!phases[0]["transfers"].as_array().unwrap().is_empty());
    scratch.change("uneven.json", "other.json", |layout| {
        layout["kv"]["block_size"] = 8.into()
    });
    scratch
        .run(&[
            "migrate",
            "plan",
            "--from",
            "even.json",
            "--to",
            "other.json",
            "--model",
            "model",
        ])
        .refused(&["KV block size changes from 16 to 8"]);
}

const PROBLEM: &str = r#"{"layers": 4, "nodes": [
    {"name": "fast", "region": 0, "throughput": {"2": 10.0, "4": 3.0}},
    {"name": "far", "region": 1, "throughput": {"2": 10.0, "4": 3.0}}],
    "link_tokens_per_s": {"within": null, "cross": 8.0}}"#;

#[test]
fn layers_are_placed_for_the_most_flow() {
    let scratch = Scratch::new(program());
    scratch.write("problem.json", PROBLEM);
    let answer = scratch
        .run(&["plan", "flow", "problem.json", "--json"])
        .done()
        .json();
    // Half the layers each, over a link of 8: more than 3 + 3 alone.
    assert_eq!(
        (answer["objective"].as_f64(), answer["gap"].as_f64()),
        (Some(8.0), Some(0.0))
    );
    assert_eq!(answer["placement"].as_array().unwrap().len(), 2);
    let flows = answer["flows"].as_array().unwrap();
    assert!(
        flows.iter().any(|flow| flow["from"] == "source") && flows.iter().any(|flow| flow["to"] == "sink")
    );
    let table = scratch.run(&["plan", "flow", "problem.json"]).done();
    assert!(table.stdout.contains("8.00 tokens/s"), "{table}");
    scratch.write("short.json", PROBLEM.replace("\"layers\": 4", "\"layers\": 9"));
    let short = scratch.run(&["plan", "flow", "short.json", "--json"]);
    assert_eq!(
        (short.code, short.json()["objective"].as_f64()),
        (Some(1), Some(0.0)),
        "{short}"
    );
}

#[test]
fn bad_placement_problems_are_refused() {
    let scratch = Scratch::new(program());
    let pair = r#"{"from": "fast#0", "to": "far#0", "tokens_per_s": 1.0}"#;
    let pairs =
        |pairs: &str| PROBLEM.replace("\"cross\": 8.0", &format!("\"cross\": 8.0, \"pairs\": [{pairs}]"));
    for (problem, part) in [
        (
            PROBLEM.replace("\"layers\": 4", "\"layers\": 1099511627776"),
            "between 1 and 4096",
        ),
        (PROBLEM.replace("10.0", "NaN"), "expected"),
        (PROBLEM.replace("10.0", "1e999"), "number out of range"),
        (PROBLEM.replace("10.0", "-10.0"), "-10 tokens/s"),
        (
            pairs(&pair.replace("far#0", "far#1")),
            "`far#1`, which there is not",
        ),
        (pairs(&format!("{pair}, {pair}")), "given twice"),
        (String::new(), "EOF"),
    ] {
        scratch.write("bad.json", &problem);
        scratch
            .run(&["plan", "flow", "bad.json"])
            .refused(&["bad.json", part]);
    }
    scratch.run(&["plan", "--model", "model"]).refused(&["--cluster"]);
}
