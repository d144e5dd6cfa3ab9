//! Where the reference data lies, where there is any.

use std::path::PathBuf;

/// The folder with reference data; prints what is skipped where there is none.
#[expect(clippy::print_stdout, reason = "a skipped test says so")]
pub(crate) fn folder(what: &str) -> Option<PathBuf> {
    let root = std::env::var_os("INFERCLUSTER_REFERENCE_DATA").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")),
        PathBuf::from,
    );
    if root.join("data").is_dir() {
        return Some(root);
    }
    println!(
        "skipped 1 check: {what} needs reference data, and {} has none",
        root.display()
    );
    None
}
