//! The header of one safetensors file: eight bytes of length, JSON, data.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::CheckpointError;

/// Bytes of the length field.
pub(super) const LENGTH_BYTES: u64 = 8;
/// Longest header that is read; the format's own limit.
const LENGTH_LIMIT: u64 = 100_000_000;

/// Where every tensor of one file is.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Entry>,
}

/// One tensor, checked.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Position of its data in the file.
    pub(super) bytes: Range<usize>,
}

/// Reads and checks the header of a whole file of at least [`LENGTH_BYTES`] bytes.
pub(super) fn read(path: &Path, file: &[u8]) -> Result<Header, CheckpointError> {
    let (length, rest) = file.split_first_chunk().expect("the caller checked the length");
    let length = u64::from_le_bytes(*length);
    if length > LENGTH_LIMIT {
        return Err(CheckpointError::HeaderLength {
            file: path.to_owned(),
            found: length,
            limit: LENGTH_LIMIT,
        });
    }
    let Some((json, data)) = rest.split_at_checked(length as usize) else {
        return Err(CheckpointError::Truncated {
            file: path.to_owned(),
            header: LENGTH_BYTES + length,
            found: file.len() as u64,
        });
    };
    let infos = parse(json).map_err(|source| CheckpointError::Json {
        file: path.to_owned(),
        source,
    })?;
    let mut tensors = BTreeMap::new();
    for (name, info) in infos {
        let entry = check_size(path, &name, info, data.len())?;
        tensors.insert(name, entry);
    }
    check_cover(path, &tensors, data.len())?;
    let data_start = file.len() - data.len();
    for entry in tensors.values_mut() {
        entry.bytes = entry.bytes.start + data_start..entry.bytes.end + data_start;
    }
    Ok(Header { tensors })
}

/// Every entry but `__metadata__`, whose content says nothing about the tensors.
fn parse(json: &[u8]) -> Result<Vec<(String, TensorInfo)>, serde_json::Error> {
    let entries: BTreeMap<String, &RawValue> = serde_json::from_slice(json)?;
    entries
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, raw)| Ok((name, TensorInfo::deserialize(raw)?)))
        .collect()
}

/// The entry with its range inside the data; fails where shape, dtype and range disagree.
fn check_size(path: &Path, name: &str, info: TensorInfo, available: usize) -> Result<Entry, CheckpointError> {
    let TensorInfo {
        dtype,
        shape,
        data_offsets: (start, end),
    } = info;
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &side| bits.checked_mul(side));
    let Some(bits) = bits else {
        return Err(CheckpointError::Overflow {
            file: path.to_owned(),
            tensor: name.to_owned(),
            shape,
        });
    };
    if !bits.is_multiple_of(8) || end.checked_sub(start) != Some(bits / 8) {
        return Err(CheckpointError::Size {
            file: path.to_owned(),
            tensor: name.to_owned(),
            shape,
            dtype,
            expected: bits.div_ceil(8),
            range: start..end,
        });
    }
    if end > available {
        return Err(CheckpointError::PastEnd {
            file: path.to_owned(),
            tensor: name.to_owned(),
            end,
            available,
        });
    }
    Ok(Entry {
        dtype,
        shape,
        bytes: start..end,
    })
}

/// The tensors cover the data exactly: no byte twice, none without an owner, as the format demands.
fn check_cover(
    path: &Path,
    tensors: &BTreeMap<String, Entry>,
    available: usize,
) -> Result<(), CheckpointError> {
    let mut order: Vec<(&String, &Entry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let mut covered = 0;
    for (name, entry) in order {
        if entry.bytes.start != covered {
            return Err(CheckpointError::NotContiguous {
                file: path.to_owned(),
                tensor: name.clone(),
                start: entry.bytes.start,
                expected: covered,
            });
        }
        covered = entry.bytes.end;
    }
    if covered != available {
        return Err(CheckpointError::TrailingData {
            file: path.to_owned(),
            unused: available - covered,
        });
    }
    Ok(())
}
