//! The repository's own files: where they are, what may lie at the top, how long they may be.

use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the repository.
pub(crate) struct Source {
    /// Its path from the root, with `/`.
    pub(crate) path: String,
    /// What it holds.
    pub(crate) text: String,
}

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .parent()
        .expect("this crate has a folder of its own")
        .to_owned()
}

/// Every file of the repository that is text, in path order; what `.gitignore` names is no part of it.
pub(crate) fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(
        found.iter().any(|source| source.path == "tests/tidy/sources.rs"),
        "the walk does not even find this file"
    );
    found
}

/// Rust files only.
pub(crate) fn rust_sources() -> Vec<Source> {
    let mut found = sources();
    found.retain(|source| source.path.ends_with(".rs"));
    found
}

fn walk(folder: &Path, prefix: &str, found: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository can be read") {
        let entry = entry.expect("an entry of the repository can be read");
        let name = entry.file_name().into_string().expect("file names are UTF-8");
        if matches!(name.as_str(), ".git" | "target" | "out") {
            continue;
        }
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().expect("an entry has a type");
        if kind.is_dir() {
            walk(&entry.path(), &format!("{path}/"), found);
        } else if let Ok(text) = fs::read_to_string(entry.path()) {
            found.push(Source { path, text });
        }
    }
}

/// Everything that may lie at the top.
const TOP: [&str; 20] = [
    ".cargo",
    ".ci",
    ".clippy.toml",
    ".git",
    ".gitattributes",
    ".gitignore",
    ".rustfmt.toml",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "executor",
    "experiments",
    "planner",
    "sim",
    "tests",
    "traces",
];

#[test]
fn the_top_holds_what_the_map_says() {
    let strangers: Vec<String> = fs::read_dir(root())
        .expect("the root can be read")
        .map(|entry| {
            entry
                .expect("an entry can be read")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| !TOP.contains(&name.as_str()) && name != "target" && name != "out")
        .collect();
    assert!(
        strangers.is_empty(),
        "not on the list of the top folder: {strangers:?}"
    );
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "LICENSE-MIT",
        "LICENSE-APACHE",
        ".ci/run",
    ] {
        assert!(root().join(name).is_file(), "{name} is missing");
    }
}

/// Lines that a Rust file may have.
const LONGEST: usize = 800;

/// Files that may be longer, each with its reason.
const LONG: [(&str, &str); 0] = [];

#[test]
fn files_are_short() {
    let sources = rust_sources();
    let long: Vec<String> = sources
        .iter()
        .map(|source| (source, source.text.lines().count()))
        .filter(|(source, lines)| *lines > LONGEST && !LONG.iter().any(|(path, _)| *path == source.path))
        .map(|(source, lines)| format!("{} has {lines} lines", source.path))
        .collect();
    assert!(
        long.is_empty(),
        "past {LONGEST} lines, cut them or list them with a reason: {long:#?}"
    );
    for (path, _) in LONG {
        let lines = sources
            .iter()
            .find(|source| source.path == path)
            .map(|source| source.text.lines().count());
        assert!(
            lines.is_some_and(|lines| lines > LONGEST),
            "{path} needs no exception any more"
        );
    }
}
