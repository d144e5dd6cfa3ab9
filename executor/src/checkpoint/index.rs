//! A checkpoint in several files, tied together by `model.safetensors.index.json`.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;

use super::{CheckpointError, MappedFile};

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Maps every named file once; each tensor gets the position of its file.
pub(super) fn open(
    folder: &Path,
    index: &Path,
) -> Result<(Vec<MappedFile>, BTreeMap<String, usize>), CheckpointError> {
    let text = std::fs::read(index).map_err(|source| CheckpointError::Io {
        file: index.to_owned(),
        source,
    })?;
    let Index { weight_map } = serde_json::from_slice(&text).map_err(|source| CheckpointError::Json {
        file: index.to_owned(),
        source,
    })?;
    let mut files: Vec<MappedFile> = Vec::new();
    let mut positions: BTreeMap<String, usize> = BTreeMap::new();
    let mut places = BTreeMap::new();
    for (tensor, named) in weight_map {
        if !is_plain_name(&named) {
            return Err(CheckpointError::OutsideFolder {
                index: index.to_owned(),
                tensor,
                named,
            });
        }
        let position = match positions.get(&named) {
            Some(position) => *position,
            None => {
                files.push(MappedFile::open(&folder.join(&named))?);
                positions.insert(named, files.len() - 1);
                files.len() - 1
            }
        };
        if !files[position].header.tensors.contains_key(&tensor) {
            return Err(CheckpointError::NotInShard {
                index: index.to_owned(),
                tensor,
                file: files[position].path.clone(),
            });
        }
        places.insert(tensor, position);
    }
    Ok((files, places))
}

/// One component that is an ordinary name: no folder, no way up, no absolute path.
fn is_plain_name(named: &str) -> bool {
    let mut components = Path::new(named).components();
    matches!(components.next(), Some(Component::Normal(name)) if name.as_encoded_bytes() == named.as_bytes())
        && components.next().is_none()
}
