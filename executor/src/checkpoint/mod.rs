//! Checkpoints in the safetensors format: mapped files, checked headers, slices without reading the rest.
//!
//! A file is hostile until its header has been checked: every offset, size, shape and overlap, with
//! arithmetic that cannot overflow. What [`Checkpoint::open`] accepts can be sliced without a panic.

mod error;
mod header;
mod index;
mod make;
pub mod names;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use infercluster_spec::{Dtype, IndexRange};
use memmap2::Mmap;

pub use error::CheckpointError;
pub use make::{MakeError, make};

use crate::backend::MatrixShape;
use header::Header;

/// The tensors of a model folder. Clones share the mappings.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Arc<Vec<MappedFile>>,
    /// Which file holds a tensor.
    places: Arc<BTreeMap<String, usize>>,
}

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

/// Checks the header of a safetensors file that is at hand in full; gives the number of its tensors.
pub fn check_bytes(file: &Path, bytes: &[u8]) -> Result<usize, CheckpointError> {
    if (bytes.len() as u64) < header::LENGTH_BYTES {
        return Err(CheckpointError::Truncated {
            file: file.to_owned(),
            header: header::LENGTH_BYTES,
            found: bytes.len() as u64,
        });
    }
    header::read(file, bytes).map(|header| header.tensors.len())
}

/// Part of a tensor: row-major little-endian bytes in the stored dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSlice<'a> {
    /// Rows and columns of the part; a vector is one row.
    pub shape: MatrixShape,
    /// Stored dtype.
    pub dtype: Dtype,
    /// The bytes, borrowed from the mapping where they lie together.
    pub bytes: Cow<'a, [u8]>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or the files that `model.safetensors.index.json` names, and checks them.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        let (files, places) = if single.is_file() {
            let file = MappedFile::open(&single)?;
            let places = file.header.tensors.keys().map(|name| (name.clone(), 0)).collect();
            (vec![file], places)
        } else if index.is_file() {
            index::open(folder, &index)?
        } else {
            return Err(CheckpointError::NoWeights {
                folder: folder.to_owned(),
            });
        };
        Ok(Self {
            folder: folder.to_owned(),
            files: Arc::new(files),
            places: Arc::new(places),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Names of all tensors, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Elements `range` of the vector `name`, which must have `len` elements.
    pub fn slice_vector(
        &self,
        name: &str,
        len: usize,
        range: IndexRange,
    ) -> Result<WeightSlice<'_>, CheckpointError> {
        let tensor = self.tensor(name, &[len])?;
        tensor.check("elements", len, range)?;
        let at = range.as_usize();
        Ok(WeightSlice {
            shape: MatrixShape {
                rows: 1,
                columns: at.len(),
            },
            dtype: tensor.dtype,
            bytes: Cow::Borrowed(&tensor.bytes[tensor.scale(at)]),
        })
    }

    /// Rows `rows` of the matrix `name`, which must have the shape `full`.
    pub fn slice_rows(
        &self,
        name: &str,
        full: MatrixShape,
        rows: IndexRange,
    ) -> Result<WeightSlice<'_>, CheckpointError> {
        let tensor = self.tensor(name, &[full.rows, full.columns])?;
        tensor.check("rows", full.rows, rows)?;
        let at = rows.as_usize();
        let elements = at.start * full.columns..at.end * full.columns;
        Ok(WeightSlice {
            shape: MatrixShape {
                rows: at.len(),
                columns: full.columns,
            },
            dtype: tensor.dtype,
            bytes: Cow::Borrowed(&tensor.bytes[tensor.scale(elements)]),
        })
    }

    /// Columns `columns` of every row of the matrix `name`, which must have the shape `full`.
    pub fn slice_columns(
        &self,
        name: &str,
        full: MatrixShape,
        columns: IndexRange,
    ) -> Result<WeightSlice<'_>, CheckpointError> {
        let tensor = self.tensor(name, &[full.rows, full.columns])?;
        tensor.check("columns", full.columns, columns)?;
        let at = tensor.scale(columns.as_usize());
        let shape = MatrixShape {
            rows: full.rows,
            columns: columns.len() as usize,
        };
        let bytes = if shape == full {
            Cow::Borrowed(tensor.bytes)
        } else if columns.is_empty() {
            Cow::Borrowed(&[][..])
        } else {
            let row_bytes = tensor.scale(0..full.columns).end;
            let mut bytes = Vec::with_capacity(full.rows * at.len());
            for row in tensor.bytes.chunks_exact(row_bytes) {
                bytes.extend_from_slice(&row[at.clone()]);
            }
            Cow::Owned(bytes)
        };
        Ok(WeightSlice {
            shape,
            dtype: tensor.dtype,
            bytes,
        })
    }

    /// Finds a tensor and checks its shape and dtype.
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor<'_>, CheckpointError> {
        let missing = || CheckpointError::Missing {
            folder: self.folder.clone(),
            tensor: name.to_owned(),
        };
        let file = &self.files[*self.places.get(name).ok_or_else(missing)?];
        let (name, entry) = file.header.tensors.get_key_value(name).ok_or_else(missing)?;
        if entry.shape != expected {
            return Err(CheckpointError::Shape {
                file: file.path.clone(),
                tensor: name.clone(),
                found: entry.shape.clone(),
                expected: expected.to_vec(),
            });
        }
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F16 => Dtype::F16,
            other => {
                return Err(CheckpointError::Dtype {
                    file: file.path.clone(),
                    tensor: name.clone(),
                    found: other,
                });
            }
        };
        Ok(Tensor {
            name,
            path: &file.path,
            dtype,
            bytes: &file.map[entry.bytes.clone()],
        })
    }
}

/// One tensor of a checked shape and a known dtype.
struct Tensor<'a> {
    name: &'a str,
    path: &'a Path,
    dtype: Dtype,
    bytes: &'a [u8],
}

impl Tensor<'_> {
    fn check(&self, what: &'static str, total: usize, asked: IndexRange) -> Result<(), CheckpointError> {
        if asked.end() as usize <= total {
            return Ok(());
        }
        Err(CheckpointError::Slice {
            file: self.path.to_owned(),
            tensor: self.name.to_owned(),
            what,
            total,
            asked,
        })
    }

    /// Element positions as byte positions. Both lie inside the tensor, so nothing overflows.
    fn scale(&self, elements: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let size = (self.dtype.bits() / 8) as usize;
        elements.start * size..elements.end * size
    }
}

impl MappedFile {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::Io {
            file: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found < header::LENGTH_BYTES {
            return Err(CheckpointError::Truncated {
                file: path.to_owned(),
                header: header::LENGTH_BYTES,
                found,
            });
        }
        // SAFETY: the mapping is read-only and private to this process. A file that another process
        // shortens while it is mapped ends this process with a signal; checkpoints are not written while
        // they are served, and every other way of reading them would cost a second copy in memory.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let header = header::read(path, &map)?;
        Ok(Self {
            path: path.to_owned(),
            map,
            header,
        })
    }
}
