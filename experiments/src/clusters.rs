//! Clusters as commands take them: a cluster document, a short file, or the one-line form.

use std::path::Path;

use infercluster_inventory::{Catalogue, ClusterFile, cluster_file};
use infercluster_spec::json;

use crate::io;

/// Reads a cluster: JSON, a short TOML file, or, where no such file exists, the one-line form itself.
pub(crate) fn read(argument: &Path) -> anyhow::Result<ClusterFile> {
    let catalogue = Catalogue::builtin();
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
