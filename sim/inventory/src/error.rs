//! Why something that an operator has could not be read. Every variant names the file and the field.

/// Why a file could not be read into spec values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InventoryError {
    /// The file cannot be opened or read.
    #[error("{file}: {source}")]
    Io {
        /// Which file.
        file: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is longer than any file of its kind.
    #[error("{file}: the file has {found} bytes, a {kind} has at most {limit}")]
    FileTooLong {
        /// Which file.
        file: String,
        /// What it should be.
        kind: &'static str,
        /// Its length.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Not JSON or TOML at all.
    #[error("{file}:{line}:{column}: {message}")]
    Syntax {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// A model that no family here describes.
    #[error("{file}: {field} {found} is not known, known are {known}")]
    UnknownArchitecture {
        /// Which file.
        file: String,
        /// Where it says so: `model_type` or `architectures`.
        field: &'static str,
        /// What it says, as JSON.
        found: String,
        /// What is known, for people.
        known: String,
    },
    /// A field that must be there is not.
    #[error("{file}: field `{field}` is missing, it should be {expected}")]
    Missing {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// What belongs there.
        expected: String,
    },
    /// A field holds something else than what belongs there.
    #[error("{file}: field `{field}` is {found}, it should be {expected}")]
    BadField {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// Well formed, but nothing here computes it, so reading on would give a wrong model.
    #[error("{file}: field `{field}` is {found}, only {supported} is supported")]
    Unsupported {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// What was found.
        found: String,
        /// What could be read.
        supported: &'static str,
    },
    /// Two counts that must divide do not.
    #[error("{file}: field `{field}` is {found}, which is no multiple of `{divisor_field}` = {divisor}")]
    NotDivisible {
        /// Which file.
        file: String,
        /// The field that should be a multiple.
        field: String,
        /// Its value.
        found: u32,
        /// The field that should divide it.
        divisor_field: String,
        /// Its value.
        divisor: u32,
    },
    /// Counts that are fine one by one, but whose product is no model.
    #[error("{file}: {fields} together give more than {limit} parameters")]
    TooLarge {
        /// Which file.
        file: String,
        /// The fields that multiply.
        fields: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A field of a TOML file that cannot be read.
    #[error("{file}:{line}: field `{field}`: {message}")]
    Field {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Path of the field, such as `node[0].memory`.
        field: String,
        /// What is wrong with it, with the accepted units where it lacks one.
        message: String,
    },
    /// A name that the catalogue does not have.
    #[error("{file}: field `{field}`: the catalogue has no {kind} `{found}`, near are {near}")]
    UnknownType {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// What was looked for: a device or a link.
        kind: &'static str,
        /// The name that was asked for.
        found: String,
        /// Names like it, or all of them.
        near: String,
    },
    /// A name that would mean two entries of the catalogue.
    #[error("{file}: field `{field}`: name `{name}` already belongs to {kind} `{owner}`")]
    NameTaken {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// The name.
        name: String,
        /// A device or a link.
        kind: &'static str,
        /// The entry that has it.
        owner: String,
    },
    /// More than any cluster has, before anything is allocated for it.
    #[error("{file}: field `{field}` asks for {found} {what}, at most {limit} are accepted")]
    TooMany {
        /// Which file.
        file: String,
        /// Path of the field.
        field: String,
        /// What is counted.
        what: &'static str,
        /// How many are asked for.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A document of the product's own that cannot be read.
    #[error(transparent)]
    Document(#[from] infercluster_spec::json::DocumentError),
    /// Nothing that a benchmark or an engine writes.
    #[error(
        "{file}: these are no results of a known kind; known are own reports, vLLM and SGLang benchmark \
         results (JSON or the printed table), GuideLLM, GenAI-Perf, MLPerf summaries, and logs of vLLM and \
         SGLang"
    )]
    UnknownResults {
        /// Which file.
        file: String,
    },
    /// A GGUF header that cannot be read.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    /// Figures or connections that the file leaves open, all of them.
    #[error("{file} leaves open:{}", open.iter().map(|item| format!("\n  {item}")).collect::<String>())]
    Open {
        /// Which file.
        file: String,
        /// What is asked for, each with the key that answers it.
        open: Vec<String>,
    },
}
