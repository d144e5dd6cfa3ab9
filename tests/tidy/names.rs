//! One word per thing: public names hold none of the words that the vocabulary replaces.

use crate::sources::rust_sources;

/// A word that no public name holds, and what to say.
const REPLACED: [(&str, &str); 18] = [
    ("instance", "replica"),
    ("partition", "stage or shard"),
    ("placement", "layout"),
    ("mapping", "layout"),
    ("rebalance", "migration"),
    ("machine", "node"),
    ("pipe", "link"),
    ("wire", "link"),
    ("pass", "prefill, decode or step"),
    ("page", "kv block"),
    ("slot", "sequence or seat"),
    ("latency", "ttft, itl, tpot or e2e"),
    ("performance", "goodput or throughput"),
    ("utilization", "busy fraction, compute utilization, ..."),
    ("sync", "the collective's name"),
    ("comm", "the collective's name"),
    ("efficiency", "compute bound, memory bound, ..."),
    ("perf", "goodput or throughput"),
];

/// Where such a word is used in another sense: start of the path, word, the sense.
const OTHER_SENSE: [(&str, &str, &str); 8] = [
    (
        "executor/src/",
        "comm",
        "short for communicator, as the field writes it",
    ),
    (
        "executor/src/",
        "wire",
        "the form of bytes on a connection, as in wire protocol",
    ),
    (
        "executor/src/backend/",
        "slot",
        "a token's place inside a KV block",
    ),
    (
        "sim/src/cost/",
        "efficiency",
        "the share of a datasheet rate that kernels reach",
    ),
    ("sim/", "latency", "of a link, where the word is exact"),
    (
        "sim/spec/src/range.rs",
        "partition",
        "of a set into ranges, as in mathematics",
    ),
    (
        "planner/src/flow/",
        "placement",
        "of layers on nodes in the field's flow yardstick, whose word and key it is",
    ),
    (
        "sim/inventory/src/import/",
        "slot",
        "where a PCI card is plugged in",
    ),
];

#[test]
fn public_names_use_the_vocabulary() {
    let mut wrong = Vec::new();
    for source in rust_sources() {
        for (line, text) in source.text.lines().enumerate() {
            let Some(name) = public_name(text) else {
                continue;
            };
            for (word, say) in replaced_words(name) {
                let is_sense = |start: &str, other: &str| source.path.starts_with(start) && word == other;
                if OTHER_SENSE.iter().any(|(start, other, _)| is_sense(start, other)) {
                    continue;
                }
                let at = line + 1;
                wrong.push(format!("{}:{at}: `{name}` says {word}, say {say}", source.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Qualified forms that name exactly one thing.
fn is_exact(words: &[String], position: usize) -> bool {
    let before = position.checked_sub(1).map(|before| words[before].as_str());
    matches!(
        (before, words[position].as_str()),
        (Some("compute" | "bandwidth" | "roofline"), "utilization") | (Some("e2e"), "latency")
    )
}

fn replaced_words(name: &str) -> Vec<(&'static str, &'static str)> {
    let words = words_of(name);
    (0..words.len())
        .filter(|&position| !is_exact(&words, position))
        .filter_map(|position| {
            REPLACED.into_iter().find(|(word, _)| {
                let singular = words[position].strip_suffix('s').unwrap_or(&words[position]);
                *word == words[position] || *word == singular
            })
        })
        .collect()
}

/// The name that a line makes public, where it does.
fn public_name(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let modifiers = ["const ", "async ", "unsafe ", "extern \"C\" "];
    let kinds = [
        "fn ", "struct ", "enum ", "trait ", "type ", "mod ", "static ", "union ", "macro ",
    ];
    let mut rest = rest;
    while let Some(after) = modifiers.iter().find_map(|modifier| rest.strip_prefix(modifier)) {
        rest = after;
    }
    let rest = kinds
        .iter()
        .find_map(|kind| rest.strip_prefix(kind))
        .unwrap_or(rest);
    let end = rest
        .find(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .unwrap_or(rest.len());
    let name = &rest[..end];
    (!name.is_empty() && name != "use").then_some(name)
}

/// `KvBlockId`, `kv_block_id` and `KV_BLOCK_ID` are `kv`, `block`, `id`.
fn words_of(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for part in name.split('_').filter(|part| !part.is_empty()) {
        let is_upper = part.chars().all(|letter| !letter.is_lowercase());
        for (position, letter) in part.chars().enumerate() {
            if position == 0 || (letter.is_uppercase() && !is_upper) {
                words.push(String::new());
            }
            let word = words.last_mut().expect("a part starts a word");
            word.extend(letter.to_lowercase());
        }
    }
    words
}

#[test]
fn names_are_cut_into_words() {
    let words = ["kv", "block", "id"];
    for name in ["KvBlockId", "kv_block_id", "KV_BLOCK_ID"] {
        assert_eq!(words_of(name), words, "{name}");
    }
    assert_eq!(
        public_name("    pub const fn page_size(&self)"),
        Some("page_size")
    );
    assert_eq!(public_name("pub bytes: u64,"), Some("bytes"));
    assert_eq!(public_name("pub(crate) fn page()"), None);
    assert_eq!(replaced_words("PageTables").len(), 1);
    assert_eq!(replaced_words("compute_utilization").len(), 0);
    assert_eq!(
        replaced_words("passes").len(),
        0,
        "only whole words and their plain plural"
    );
}
