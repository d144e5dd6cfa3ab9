//! Why a trace could not be read, made or written.

use infercluster_spec::SimTime;

use crate::format::TraceFormat;

/// Why a trace could not be read, made or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened, read or written.
    #[error("{file}: {source}")]
    Io {
        /// Which file.
        file: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// Nothing but white space, or a header without a request.
    #[error("{file}: the file holds no request")]
    Empty {
        /// Which file.
        file: String,
    },
    /// The pointer that Git LFS leaves where a large file was not downloaded.
    #[error("{file}: this is a Git LFS pointer, not the trace; fetch the file itself (git lfs pull)")]
    LfsPointer {
        /// Which file.
        file: String,
    },
    /// Text in an encoding of two bytes a letter.
    #[error("{file}: this is text in UTF-16; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)")]
    Utf16 {
        /// Which file.
        file: String,
    },
    /// A file longer than any of its kind.
    #[error("{file}: the file is longer than {limit} bytes")]
    FileTooLong {
        /// Which file.
        file: String,
        /// The limit.
        limit: u64,
    },
    /// A folder without files of clients.
    #[error(
        "{folder}: the folder holds no chunk-N-trace.csv; name a trace file, or a folder of ServeGen clients"
    )]
    NoClients {
        /// Which folder.
        folder: String,
    },
    /// More files than any published folder has.
    #[error("{folder}: the folder holds more than {limit} clients")]
    TooManyClients {
        /// Which folder.
        folder: String,
        /// The limit.
        limit: u64,
    },
    /// One client's file on its own.
    #[error("{file}: this is the file of one ServeGen client; name the folder that holds it")]
    OneClient {
        /// Which file.
        file: String,
    },
    /// A window of a client's lengths that cannot be read.
    #[error("{file}: window {window}: field `{field}` is {found}, it should be {expected}")]
    BadWindow {
        /// Which file.
        file: String,
        /// Start of the window, as the file names it.
        window: String,
        /// The field.
        field: String,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A column that a format needs, twice in one header.
    #[error("{file}:1: column `{column}` is there twice, and a row can mean either")]
    DuplicateColumn {
        /// Which file.
        file: String,
        /// The column.
        column: &'static str,
    },
    /// A web page, as a failed download leaves it.
    #[error("{file}: this is a web page, not a trace; download the raw file")]
    Html {
        /// Which file.
        file: String,
    },
    /// Bytes that are no text.
    #[error("{file}:{line}: the line is no UTF-8 text; a compressed trace must be unpacked first")]
    NotText {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// A line that no trace has.
    #[error("{file}:{line}: the line is longer than {limit} bytes")]
    LineTooLong {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The limit.
        limit: u64,
    },
    /// Columns or keys of no known format.
    #[error("{file}: fields {found} are of no known trace format, known are {known}")]
    UnknownFormat {
        /// Which file.
        file: String,
        /// Columns or keys of its first line.
        found: String,
        /// Every known format with its fields.
        known: String,
    },
    /// A line that is no JSON object.
    #[error("{file}:{line}:{column}: {message}")]
    Json {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// A row with more or fewer cells than the header.
    #[error("{file}:{line}: the row has {found} cells, the header has {expected}")]
    RowLength {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Cells of the row.
        found: u64,
        /// Cells of the header.
        expected: u64,
    },
    /// A JSON row without a field that its format has.
    #[error("{file}:{line}: field `{field}` is missing")]
    MissingField {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The field.
        field: &'static str,
    },
    /// A value that is not what its field holds.
    #[error("{file}:{line}: field `{field}` is {found}, it should be {expected}")]
    BadValue {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The field.
        field: String,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A request that arrives before the one above it.
    #[error("{file}:{line}: arrival {found} s is before {previous} s of the request above; sort the file")]
    OutOfOrder {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Its arrival in seconds.
        found: f64,
        /// The arrival above it in seconds.
        previous: f64,
    },
    /// A number of block hashes that does not fit the prompt.
    #[error(
        "{file}:{line}: {found} block hashes for {input} prompt tokens, \
         blocks of {block} tokens make it {expected}"
    )]
    HashCount {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Hashes in the row.
        found: u64,
        /// Prompt tokens in the row.
        input: u64,
        /// Tokens of a block.
        block: u32,
        /// Hashes that the prompt needs.
        expected: u64,
    },
    /// Lengths only, where arrival times are needed.
    #[error(
        "trace {trace} has no arrival times; choose an arrival process (poisson, gamma, constant) with a rate"
    )]
    NoArrivals {
        /// Name of the trace.
        trace: String,
    },
    /// A format that cannot say what the trace holds.
    #[error("trace {trace} cannot be written as {format}: {reason}")]
    Unwritable {
        /// Name of the trace.
        trace: String,
        /// The format.
        format: TraceFormat,
        /// What it cannot say.
        reason: &'static str,
    },
    /// A parameter of a generator or a transformation.
    #[error("parameter `{parameter}` is {found}, it should be {expected}")]
    Parameter {
        /// Its name.
        parameter: &'static str,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A request past the end of the clock.
    #[error("request {index} would arrive after {limit} s, where the clock ends")]
    ClockRange {
        /// Position of the request.
        index: u64,
        /// Largest instant in seconds.
        limit: f64,
    },
}

/// Largest instant of the clock in seconds.
pub(crate) fn clock_limit() -> f64 {
    SimTime(u64::MAX).as_seconds()
}
