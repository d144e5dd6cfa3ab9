//! What can be wrong with a GGUF header.

/// Why a file is no readable GGUF header.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be read.
    #[error("{file}: {source}")]
    Io {
        /// Which file.
        file: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another kind of file.
    #[error("{file}: the file starts with {found}, a GGUF file with \"GGUF\"")]
    Magic {
        /// Which file.
        file: String,
        /// Its first bytes.
        found: String,
    },
    /// A version that nothing here reads.
    #[error("{file}: GGUF version {found} is not read, known are 1 to 3 in little-endian order")]
    Version {
        /// Which file.
        file: String,
        /// What the file says.
        found: u32,
    },
    /// The file ends inside its header.
    #[error("{file}: the file ends at byte {at}, in the middle of {what}: download it again")]
    Cut {
        /// Which file.
        file: String,
        /// Where it ends.
        at: u64,
        /// What was being read.
        what: String,
    },
    /// A count or length that no real file has.
    #[error("{file}: byte {at}: {what} is {found}, at most {limit} is accepted")]
    TooMany {
        /// Which file.
        file: String,
        /// Where the number stands.
        at: u64,
        /// What is counted.
        what: String,
        /// What the file says.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A value that means nothing.
    #[error("{file}: byte {at}: {what} is {found}, it should be {expected}")]
    Bad {
        /// Which file.
        file: String,
        /// Where it stands.
        at: u64,
        /// What it is.
        what: String,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A tensor that cannot be as it is described.
    #[error("{file}: tensor `{tensor}`: {what}")]
    Tensor {
        /// Which file.
        file: String,
        /// Its name.
        tensor: String,
        /// What is wrong with it.
        what: String,
    },
}
