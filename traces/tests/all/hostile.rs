//! Bad files give one typed error that names file and line, and never a panic.

use infercluster_traces::{TraceError, read};

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
const VIDUR: &str = "arrived_at,num_prefill_tokens,num_decode_tokens\n";
const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 8, "output_length": 6, "hash_ids": [0]}"#;

fn message(text: &[u8]) -> (TraceError, String) {
    let error = read("bad.txt", text).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("bad.txt"), "{message}");
    (error, message)
}

#[test]
fn what_is_no_trace_says_what_it_is() {
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 52428800\n";
    assert!(matches!(message(lfs.as_bytes()).0, TraceError::LfsPointer { .. }));
    assert!(matches!(
        message(b"<!DOCTYPE html><html>").0,
        TraceError::Html { .. }
    ));
    assert!(matches!(message(b"").0, TraceError::Empty { .. }));
    assert!(matches!(message(b" \r\n\n").0, TraceError::Empty { .. }));
    assert!(matches!(message(VIDUR.as_bytes()).0, TraceError::Empty { .. }));
    let unknown = [
        &b"a,b,c\n1,2,3\n"[..],
        b"{\"prompt\": 1}",
        b"hello",
        b"[1, 2]",
        b"\xef\xbb\xbfx",
    ];
    for text in unknown {
        let (error, message) = message(text);
        assert!(matches!(error, TraceError::UnknownFormat { .. }), "{message}");
        assert!(
            message.contains("mooncake (timestamp, input_length, output_length)"),
            "{message}"
        );
    }
    assert!(matches!(message(b"a\xff,b\n").0, TraceError::NotText { .. }));
    assert!(matches!(message(b"\xff\xfea\0,\0").0, TraceError::Utf16 { .. }));
    assert!(matches!(
        message(b"0,0.5,1.2,Gamma,1,2\n").0,
        TraceError::OneClient { .. }
    ));
    let twice = format!("num_decode_tokens,{VIDUR}5,0,1,1\n");
    assert!(matches!(
        message(twice.as_bytes()).0,
        TraceError::DuplicateColumn { .. }
    ));
}

#[test]
fn bad_rows_are_named_by_line_and_field() {
    let check = |text: String, parts: &[&str]| {
        let (_, message) = message(text.as_bytes());
        for part in parts {
            assert!(message.contains(part), "`{message}` should hold `{part}`");
        }
    };
    let vidur = |row: &str| format!("{VIDUR}0,1,1\n{row}\n");
    check(vidur("-1,5,5"), &["bad.txt:3", "arrived_at", "at least zero"]);
    check(vidur("NaN,5,5"), &[":3", "arrived_at", "finite"]);
    check(vidur("inf,5,5"), &[":3", "arrived_at"]);
    check(vidur("1e300,5,5"), &[":3", "213 days"]);
    check(vidur("1700000000,5,5"), &[":3", "calendar date"]);
    check(vidur(",5,5"), &[":3", "arrived_at"]);
    check(vidur("1,-5,5"), &[":3", "num_prefill_tokens", "`-5`"]);
    check(vidur("1,5,5.5"), &[":3", "num_decode_tokens"]);
    check(vidur("1,18446744073709551615,5"), &[":3", "num_prefill_tokens"]);
    check(
        vidur("1,99999999999999999999999,5"),
        &[":3", "num_prefill_tokens"],
    );
    check(vidur("1,5"), &[":3", "2 cells", "header has 3"]);
    check(vidur("1,5,5,5"), &[":3", "4 cells"]);
    check(vidur("2,5,5\n1.5,5,5"), &[":4", "before 2 s", "1.5 s"]);
    let azure = |row: &str| format!("{AZURE}2023-11-16 18:15:46.6805900,1,1\n{row}\n");
    check(azure("2023-11-16 18:15:46.6805899,5,5"), &[":3", "sort the file"]);
    check(azure("2023-13-16 18:15:46,5,5"), &[":3", "TIMESTAMP", "datetime"]);
    check(azure("2123-11-16 18:15:46,5,5"), &[":3", "213 days"]);
    check(azure("5,5,5"), &[":3", "TIMESTAMP"]);
    let json = |row: &str| format!("{MOONCAKE}\n{row}\n");
    check(json("{\"timestamp\": 1"), &["bad.txt:2:", "EOF"]);
    check(json("[1]"), &["bad.txt:2:"]);
    check(
        json("{\"timestamp\": 1, \"input_length\": 3}"),
        &[":2", "output_length", "missing"],
    );
    check(
        json(&MOONCAKE.replace("8,", "-8,")),
        &[":2", "input_length", "`-8`"],
    );
    check(json(&MOONCAKE.replace("8,", "\"8\",")), &[":2", "input_length"]);
    check(
        json(&MOONCAKE.replace("0,", "-1,")),
        &[":2", "timestamp", "at least zero"],
    );
    check(json(&MOONCAKE.replace("[0]", "[-1]")), &[":2", "hash_ids"]);
    check(
        json(&MOONCAKE.replace("[0]", "[0, 1]")),
        &[":2", "2 block hashes", "make it 1"],
    );
    check(json(&MOONCAKE.replace("[0]", "7")), &[":2", "hash_ids"]);
    check(
        "{\"schema\": \"infercluster-trace-lines/9\"}".to_owned(),
        &[":1", "schema"],
    );
    check(
        "{\"schema\": \"infercluster-trace-lines/1\", \"hash_block\": 0}".to_owned(),
        &[":1", "hash_block"],
    );
    check(
        "request_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,1,4,8,8\n".to_owned(),
        &[":2", "batch_size"],
    );
}

#[test]
fn endless_lines_and_deep_nesting_end() {
    let long = format!("{{\"timestamp\": {}", "1".repeat(5 << 20));
    assert!(matches!(
        message(long.as_bytes()).0,
        TraceError::LineTooLong { line: 1, .. }
    ));
    let deep = format!("{{\"timestamp\": {}", "[".repeat(1 << 20));
    assert!(matches!(
        message(deep.as_bytes()).0,
        TraceError::Json { line: 1, .. }
    ));
}

#[test]
fn every_prefix_and_every_changed_byte_is_survived() {
    let texts = [
        format!("{AZURE}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9,396,109\n"),
        format!("{VIDUR}0.0,374,44\n4.314579,396,109\n"),
        format!("{MOONCAKE}\n{MOONCAKE}\n"),
    ];
    for text in texts {
        for end in 0..text.len() {
            let _ = read("cut.txt", &text.as_bytes()[..end]);
            for byte in [b'-', b'9', b'"', b'\n', 0xff] {
                let mut changed = text.clone().into_bytes();
                changed[end] = byte;
                let _ = read("changed.txt", changed.as_slice());
            }
        }
    }
}

#[test]
fn compressed_files_that_are_cut_or_bombs_end() {
    let packed = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut encoder, bytes).unwrap();
        encoder.finish().unwrap()
    };
    let good = packed(format!("{VIDUR}0,1,1\n").as_bytes());
    for end in 2..good.len() {
        let (_, message) = message(&good[..end]);
        assert!(message.contains("compressed"), "{message}");
    }
    // A bomb of empty lines, and one of rows that could be requests.
    let (_, blank) = message(&packed(&vec![b'\n'; 64 << 20]));
    assert!(
        blank.contains("no request") || blank.contains("which no trace does"),
        "{blank}"
    );
    let rows = [VIDUR.as_bytes(), &b"0,1,1\n".repeat(6 << 20)].concat();
    let (_, rows) = message(&packed(&rows));
    assert!(rows.contains("which no trace does"), "{rows}");
}
