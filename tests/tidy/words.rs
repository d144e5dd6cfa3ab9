//! What must not stand in a file: unordered maps, loose ends, traces of the place where it was written.

use crate::sources::{Source, rust_sources, sources};

/// This file names what it forbids.
const SELF: &str = "tests/tidy/words.rs";

fn lines(sources: &[Source]) -> impl Iterator<Item = (&str, usize, &str)> {
    sources
        .iter()
        .filter(|source| source.path != SELF)
        .flat_map(|source| {
            let lines = source.text.lines().enumerate();
            lines.map(|(line, text)| (source.path.as_str(), line + 1, text))
        })
}

#[track_caller]
fn refuse(sources: &[Source], rule: &str, breaks: impl Fn(&str, &str) -> bool) {
    let found: Vec<String> = lines(sources)
        .filter(|(path, _, text)| breaks(path, text))
        .map(|(path, line, text)| format!("{path}:{line}: {}", text.trim()))
        .collect();
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

#[test]
fn nothing_iterates_in_random_order() {
    refuse(
        &rust_sources(),
        "use BTreeMap, BTreeSet or a Vec indexed by id",
        |_, text| text.contains("HashMap") || text.contains("HashSet"),
    );
}

#[test]
fn loose_ends_have_an_issue() {
    refuse(&rust_sources(), "name the issue (#12) or do it", |_, text| {
        let is_open = ["TODO", "FIXME", "XXX"].iter().any(|word| text.contains(word));
        is_open && !text.contains('#')
    });
}

#[test]
fn lints_are_silenced_with_a_reason() {
    refuse(
        &rust_sources(),
        "use #[expect(.., reason = \"..\")]",
        |_, text| text.contains("#[allow(") || text.contains("#![allow("),
    );
}

#[test]
fn tests_are_neither_ignored_nor_expected_to_panic() {
    refuse(&rust_sources(), "no ignored test, no should_panic", |_, text| {
        let text = text.trim();
        text.starts_with("#[ignore") || text.starts_with("#[should_panic")
    });
}

#[test]
fn nothing_tells_where_it_was_written() {
    let places = [
        "/work/",
        "/root/",
        "/home/",
        "/Users/",
        "artifactory",
        "localhost:",
    ];
    refuse(&sources(), "no path or host of one machine", |path, text| {
        path != "Cargo.lock" && places.iter().any(|place| text.contains(place))
    });
}

#[test]
fn the_lock_file_names_the_public_registry_only() {
    let lock: Vec<Source> = sources()
        .into_iter()
        .filter(|source| source.path == "Cargo.lock")
        .collect();
    assert_eq!(lock.len(), 1, "the lock file is part of the repository");
    refuse(&lock, "crates come from crates.io", |_, text| {
        text.starts_with("source = ")
            && text != "source = \"registry+https://github.com/rust-lang/crates.io-index\""
    });
}
