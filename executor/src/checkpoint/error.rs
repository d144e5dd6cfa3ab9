//! What can be wrong with a checkpoint.

use std::ops::Range;
use std::path::PathBuf;

use infercluster_spec::IndexRange;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file that cannot be read or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Neither `model.safetensors` nor its index.
    #[error("{}: there is neither model.safetensors nor model.safetensors.index.json", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// A file shorter than its header says.
    #[error("{}: the header takes {header} bytes, but the file has {found}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Bytes that the header takes, its length field included.
        header: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A header longer than any real one.
    #[error("{}: the header length {found} is above the limit {limit}", file.display())]
    HeaderLength {
        /// The file.
        file: PathBuf,
        /// What the length field says.
        found: u64,
        /// What is accepted.
        limit: u64,
    },
    /// JSON that is no header or index.
    #[error("{}: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A tensor with a shape whose size overflows.
    #[error("{}: tensor {tensor}: shape {shape:?} overflows", file.display())]
    Overflow {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor whose shape and byte range disagree.
    #[error(
        "{}: tensor {tensor}: shape {shape:?} of {dtype:?} takes {expected} bytes, but its range is {range:?}",
        file.display()
    )]
    Size {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Its stored dtype.
        dtype: safetensors::Dtype,
        /// Bytes that the shape takes, rounded up.
        expected: usize,
        /// Its bytes in the data.
        range: Range<usize>,
    },
    /// A tensor that reaches past the end of its file.
    #[error("{}: tensor {tensor} ends at byte {end} of the data, but there are {available}", file.display())]
    PastEnd {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// One past its last byte.
        end: usize,
        /// Bytes of data in the file.
        available: usize,
    },
    /// Two tensors that share bytes, or a hole between them.
    #[error(
        "{}: tensor {tensor} starts at byte {start} of the data where {expected} was expected: the data \
         overlaps or has a hole",
        file.display()
    )]
    NotContiguous {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it starts.
        start: usize,
        /// Where the tensor before it ends.
        expected: usize,
    },
    /// Data after the last tensor.
    #[error("{}: {unused} bytes after the last tensor belong to none", file.display())]
    TrailingData {
        /// The file.
        file: PathBuf,
        /// How many bytes.
        unused: usize,
    },
    /// An index that names a file elsewhere.
    #[error("{}: tensor {tensor}: `{named}` is not a plain file name inside the folder", index.display())]
    OutsideFolder {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name.
        named: String,
    },
    /// A tensor that the index places in a file that does not have it.
    #[error("{}: tensor {tensor} is not in {}", index.display(), file.display())]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file that the index names.
        file: PathBuf,
    },
    /// A tensor that the model needs.
    #[error("{}: there is no tensor {tensor}", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the model says.
    #[error("{}: tensor {tensor} has shape {found:?}, the model asks for {expected:?}", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape that the model asks for.
        expected: Vec<usize>,
    },
    /// A tensor in a dtype that the executor does not compute with.
    #[error("{}: tensor {tensor} is stored as {found:?}, known are F32, BF16 and F16", file.display())]
    Dtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The stored dtype.
        found: safetensors::Dtype,
    },
    /// Rows or columns that a tensor does not have.
    #[error("{}: tensor {tensor} has {total} {what}, {asked} were asked for", file.display())]
    Slice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Rows or columns.
        what: &'static str,
        /// How many there are.
        total: usize,
        /// Which were asked for.
        asked: IndexRange,
    },
}
