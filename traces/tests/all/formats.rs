//! Every format: own fixtures with values worked out by hand, and the statistics of the reference data.

use infercluster_spec::{SimTime, Tokens};
use infercluster_traces::read::require_arrivals;
use infercluster_traces::{
    Loaded, TraceError, TraceFormat, TraceStatistics, load, read, statistics, statistics_of_file,
};

use crate::reference;

struct Expected {
    format: TraceFormat,
    arrivals_ps: &'static [u64],
    lengths: &'static [(u64, u64)],
}

fn check(text: &str, expected: &Expected) -> Loaded {
    let loaded = read("fixture.txt", text.as_bytes()).unwrap();
    let requests = &loaded.trace.requests;
    let arrivals: Vec<u64> = requests
        .iter()
        .filter_map(|request| request.arrival)
        .map(|SimTime(at)| at)
        .collect();
    let lengths: Vec<(u64, u64)> = requests
        .iter()
        .map(|request| (request.input.0, request.output.0))
        .collect();
    assert_eq!(loaded.format, expected.format, "{text}");
    assert_eq!(arrivals, expected.arrivals_ps, "{text}");
    assert_eq!(lengths, expected.lengths, "{text}");
    assert!(requests.iter().zip(0..).all(|(request, id)| request.id.0 == id));
    loaded
}

#[test]
fn azure_datetimes_count_from_the_first_request() {
    // CRLF, no final newline, 100 ns digits, and a day that ends between the rows.
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.9999999,374,44\r\n\
                2023-11-17 00:00:00.0000001,396,109";
    let expected = Expected {
        format: TraceFormat::Azure,
        arrivals_ps: &[0, 200_000],
        lengths: &[(374, 44), (396, 109)],
    };
    check(text, &expected);
    check(&format!("\u{feff}{text}\r\n\r\n"), &expected);
    // The 2024 files carry an offset.
    let offset = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n\
                  2024-05-10 02:00:00.009931+02:00,396,109\n";
    check(
        offset,
        &Expected {
            arrivals_ps: &[0, 1_000_000],
            ..expected
        },
    );
}

#[test]
fn rows_of_cells() {
    let vidur = Expected {
        format: TraceFormat::Vidur,
        arrivals_ps: &[0, 5_892_655_000_000],
        lengths: &[(374, 44), (91, 16)],
    };
    check(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n5.8926549999999995,91,16\n",
        &vidur,
    );
    check(
        "num_decode_tokens , arrived_at, num_prefill_tokens\n44,0e3,374\n16,5.892655,91\n",
        &vidur,
    );
    check(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n",
        &Expected {
            format: TraceFormat::VidurLengths,
            arrivals_ps: &[],
            lengths: &[(3772, 54)],
        },
    );
    check(
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n\
         0,2,0,1,1,4096,32\n1,2,0,3,1,2048,8\n",
        &Expected {
            format: TraceFormat::Splitwise,
            arrivals_ps: &[1_000_000_000_000, 3_000_000_000_000],
            lengths: &[(4096, 32), (2048, 8)],
        },
    );
    // Version 2 of BurstGPT inserts columns; a failed request has no answer and is left out.
    let loaded = check(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
         5,a,1,ChatGPT,472,18,490,Conversation log\n6,a,1,ChatGPT,472,0,472,Conversation log\n\
         45.5,b,1,GPT-4,1087,230,1317,API log\n",
        &Expected {
            format: TraceFormat::BurstGpt,
            arrivals_ps: &[5_000_000_000_000, 45_500_000_000_000],
            lengths: &[(472, 18), (1087, 230)],
        },
    );
    assert_eq!(loaded.dropped_rows, 1);
    // Statistics of the file count its row all the same: gaps of 1 and 39.5 s.
    let whole = statistics_of_file(&loaded);
    assert_eq!(
        (whole.rows, whole.span_s, whole.output.p50),
        (3, Some(40.5), 18.0)
    );
    assert_eq!(statistics(&loaded.trace).rows, 2);
    assert!((whole.gap_cv.unwrap() - 19.25 / 20.25).abs() < 1e-12);
}

#[test]
fn compressed_files_and_floating_columns_are_read() {
    let text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374.0,44.0\n1.5,91.0,16.0\n";
    let expected = Expected {
        format: TraceFormat::Vidur,
        arrivals_ps: &[0, 1_500_000_000_000],
        lengths: &[(374, 44), (91, 16)],
    };
    check(text, &expected);
    let loaded = read("trace.csv.gz", packed(text.as_bytes()).as_slice()).unwrap();
    assert_eq!(loaded.trace.requests.len(), 2);
}

#[test]
fn lines_of_json() {
    let loaded = check(
        "{\"timestamp\": 27, \"input_length\": 513, \"output_length\": 6, \"hash_ids\": [0, 1]}\n\n\
         {\"timestamp\": 27, \"input_length\": 512, \"output_length\": 4, \"hash_ids\": [9]}",
        &Expected {
            format: TraceFormat::Mooncake,
            arrivals_ps: &[27_000_000_000, 27_000_000_000],
            lengths: &[(513, 6), (512, 4)],
        },
    );
    assert_eq!(loaded.trace.hash_block, Some(512));
    assert_eq!(loaded.trace.requests[0].block_hashes, [0, 1]);
    let loaded = check(
        "{\"chat_id\": 0, \"parent_chat_id\": -1, \"timestamp\": 0.25, \"input_length\": 17, \
         \"output_length\": 3, \"type\": \"thinking\", \"turn\": 1, \"hash_ids\": [5, 6]}\n",
        &Expected {
            format: TraceFormat::QwenBailian,
            arrivals_ps: &[250_000_000_000],
            lengths: &[(17, 3)],
        },
    );
    assert_eq!(loaded.trace.hash_block, Some(16));
    check(
        "{\"input_toks\": 2358, \"output_toks\": 531, \"arrival_time_ns\": 46926808, \"input_tok_ids\": [1]}",
        &Expected {
            format: TraceFormat::LlmServingSim,
            arrivals_ps: &[46_926_808_000],
            lengths: &[(2358, 531)],
        },
    );
    let loaded = check(
        "{\"schema\": \"infercluster-trace-lines/1\", \"name\": \"mine\"}\n{\"input\": 3, \"output\": 4}\n",
        &Expected {
            format: TraceFormat::Lines,
            arrivals_ps: &[],
            lengths: &[(3, 4)],
        },
    );
    assert_eq!(loaded.trace.name, "mine");
}

#[test]
fn lengths_only_asks_for_an_arrival_process() {
    let loaded = read("v.csv", "num_prefill_tokens,num_decode_tokens\n3,4\n".as_bytes()).unwrap();
    let error = require_arrivals(&loaded.trace).unwrap_err();
    assert!(matches!(error, TraceError::NoArrivals { .. }));
    assert!(error.to_string().contains("arrival process"), "{error}");
    let found = statistics(&loaded.trace);
    assert!(!found.has_arrivals);
    assert_eq!((found.span_s, found.rate_per_s, found.gap_cv), (None, None, None));
}

#[test]
fn statistics_by_hand() {
    // Gaps 1, 1 and 4 s: mean 2, variance 2. Bins of a second hold 1, 1, 1, 0, 0, 0 and 1 arrivals:
    // mean 4/7, variance 4/7 - 16/49 = 12/49.
    let text = "arrived_at,num_prefill_tokens,num_decode_tokens\n1,10,1\n2,20,2\n3,30,3\n7,100,4\n";
    let found = statistics(&read("t.csv", text.as_bytes()).unwrap().trace);
    assert_eq!((found.rows, found.span_s), (4, Some(6.0)));
    assert!((found.rate_per_s.unwrap() - 4.0 / 6.0).abs() < 1e-12);
    assert!((found.gap_cv.unwrap() - 2_f64.sqrt() / 2.0).abs() < 1e-12);
    assert!((found.dispersion_1s.unwrap() - (12.0 / 49.0) / (4.0 / 7.0)).abs() < 1e-12);
    // Position 0.5 x 3 lies between 20 and 30, 0.99 x 3 = 2.97 between 30 and 100.
    assert_eq!(
        (found.input.mean, found.input.p50, found.input.max),
        (40.0, 25.0, 100)
    );
    assert!((found.input.p99 - 97.9).abs() < 1e-9);
    // One request, or all at one instant: no span to divide by.
    let one = statistics(&read("t.csv", &text.as_bytes()[..55]).unwrap().trace);
    assert_eq!((one.rows, one.span_s, one.gap_cv), (1, None, None));
}

/// As gzip packs it.
fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

/// Six significant digits, or as many as the index prints.
fn close(what: &str, found: Option<f64>, expected: &str) {
    if expected.is_empty() {
        assert_eq!(found, None, "{what}");
        return;
    }
    let expected: f64 = expected.parse().unwrap();
    let found = found.unwrap_or_else(|| panic!("{what} should be {expected}"));
    let tolerance = (expected.abs() * 5e-7).max(5e-7);
    assert!(
        (found - expected).abs() <= tolerance,
        "{what}: {found}, expected {expected}"
    );
}

#[test]
fn reference_traces_have_their_published_statistics() {
    let Some(root) = reference::folder("published traces") else {
        return;
    };
    let folder = root.join("data/traces");
    let mut index = csv::Reader::from_path(folder.join("INDEX.csv")).unwrap();
    let header = index.headers().unwrap().clone();
    let mut checked = 0;
    for row in index.records() {
        let row = row.unwrap();
        let cell = |name: &str| &row[header.iter().position(|cell| cell == name).unwrap()];
        let file = cell("file");
        if file.ends_with('/') {
            continue;
        }
        let loaded = load(&folder.join(file)).unwrap();
        assert_eq!(loaded.dropped_rows, 0, "{file}");
        let found = statistics(&loaded.trace);
        assert_eq!(found.rows.to_string(), cell("rows"), "{file}");
        assert_eq!(
            found.has_prefix_hashes,
            cell("columns").contains("hash_ids"),
            "{file}"
        );
        assert_eq!(
            found.has_arrivals,
            cell("time_unit") != "no arrival times",
            "{file}"
        );
        // The index leaves the statistics of the tiny ones out.
        if found.rows > 100 {
            compare(file, &found, cell);
            checked += 1;
        }
    }
    assert_eq!(checked, 5);
}

fn compare<'a>(file: &str, found: &TraceStatistics, cell: impl Fn(&str) -> &'a str) {
    let what = |name: &str| format!("{name} of {file}");
    let arrivals = [
        ("span_s", found.span_s),
        ("rate_per_s", found.rate_per_s),
        ("gap_CV", found.gap_cv),
        ("disp_1s", found.dispersion_1s),
    ];
    for (name, value) in arrivals {
        close(&what(name), value, cell(name));
    }
    for (prefix, lengths) in [("in", found.input), ("out", found.output)] {
        let columns = [
            ("mean", lengths.mean),
            ("p50", lengths.p50),
            ("p99", lengths.p99),
            ("max", lengths.max as f64),
        ];
        for (name, value) in columns {
            let name = format!("{prefix}_{name}");
            close(&what(&name), Some(value), cell(&name));
        }
    }
}

#[test]
fn azure_and_vidur_copies_hold_the_same_requests() {
    let Some(root) = reference::folder("two copies of one trace") else {
        return;
    };
    let load = |name: &str| load(&root.join("data/traces").join(name)).unwrap().trace;
    let (azure, vidur) = (load("azure2023_conv.csv"), load("vidur_splitwise_conv.csv"));
    assert_eq!(azure.requests, vidur.requests);
    assert_eq!(azure.requests[0].input, Tokens(374));
}
