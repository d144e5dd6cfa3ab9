//! Clusters as commands take them: a cluster document, a short file, or the one-line form.

use std::path::Path;
use std::sync::OnceLock;

use infercluster_inventory::{Catalogue, ClusterFile, cluster_file};
use infercluster_spec::json;

use crate::io;

/// The catalogue of this call: the built-in one, with a user's file on top of it. It is set once, before a
/// command runs, since every command that names types of hardware takes it.
static EXTENDED: OnceLock<Catalogue> = OnceLock::new();

/// Lays a user's catalogue file over the built-in entries.
pub(crate) fn extend_catalogue(path: &Path) -> anyhow::Result<()> {
    let text = io::read_text(path, io::DOCUMENT_LIMIT)?;
    let mut catalogue = Catalogue::builtin();
    catalogue.extend(&io::name_of(path), &text)?;
    // A second call in one process keeps the first catalogue, as it does the first log.
    let _ = EXTENDED.set(catalogue);
    Ok(())
}

/// The hardware that names stand for.
pub(crate) fn catalogue() -> Catalogue {
    EXTENDED.get().cloned().unwrap_or_else(Catalogue::builtin)
}

/// Reads a cluster: JSON, a short TOML file, or, where no such file exists, the one-line form itself.
pub(crate) fn read(argument: &Path) -> anyhow::Result<ClusterFile> {
    let catalogue = catalogue();
    if let Some(line) = one_line(argument) {
        return Ok(cluster_file::read_line(line, &catalogue)?);
    }
    let text = io::read_text(argument, io::DOCUMENT_LIMIT)?;
    let name = io::name_of(argument);
    if text.trim_start().starts_with('{') {
        let cluster = json::read(&name, &text)?;
        return Ok(ClusterFile {
            cluster,
            assumed: Vec::new(),
        });
    }
    Ok(cluster_file::read(&name, &text, &catalogue)?)
}

/// An argument such as `"8 x h100-sxm, nvswitch"` is no file name: it has ` x ` in it and names no file.
fn one_line(argument: &Path) -> Option<&str> {
    let text = argument.to_str()?;
    (text.contains(" x ") && !argument.exists()).then_some(text)
}
