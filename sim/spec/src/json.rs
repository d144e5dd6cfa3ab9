//! The JSON form of documents: a `schema` key with kind and version, sorted keys, errors that name the
//! file and the field.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A value that stands in a file of its own.
pub trait Document: Serialize + DeserializeOwned {
    /// What the `schema` key says, `"<kind>/<version>"`.
    const SCHEMA: &'static str;
}

/// Why a file is not the document that was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// Not JSON at all.
    #[error("{file}:{line}:{column}: {message}")]
    Syntax {
        /// Name of the file, or `-`.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// JSON, but another kind of document or another version.
    #[error("{file}: schema is {found}, expected \"{expected}\"")]
    Schema {
        /// Name of the file.
        file: String,
        /// What was found, as JSON.
        found: String,
        /// What this program reads.
        expected: &'static str,
    },
    /// A field that cannot be read.
    #[error("{file}: field `{path}`: {message}")]
    Field {
        /// Name of the file.
        file: String,
        /// Path of the field, such as `links[3].bandwidth`.
        path: String,
        /// What is wrong with it.
        message: String,
    },
}

/// Reads a document; `file` is only the name that errors carry.
pub fn read<T: Document>(file: &str, text: &str) -> Result<T, DocumentError> {
    let mut value: Value = serde_json::from_str(text).map_err(|error| syntax(file, &error))?;
    let found = value.as_object_mut().and_then(|object| object.remove("schema"));
    if found.as_ref().and_then(Value::as_str) != Some(T::SCHEMA) {
        let found = found.map_or_else(|| "absent".to_owned(), |value| value.to_string());
        return Err(DocumentError::Schema {
            file: file.to_owned(),
            found,
            expected: T::SCHEMA,
        });
    }
    from_value(file, value)
}

/// Reads a plain JSON value without a schema key, with the same errors.
pub fn read_plain<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, DocumentError> {
    from_value(
        file,
        serde_json::from_str(text).map_err(|error| syntax(file, &error))?,
    )
}

fn from_value<T: DeserializeOwned>(file: &str, value: Value) -> Result<T, DocumentError> {
    serde_path_to_error::deserialize(value).map_err(|error| DocumentError::Field {
        file: file.to_owned(),
        path: error.path().to_string(),
        message: error.inner().to_string(),
    })
}

fn syntax(file: &str, error: &serde_json::Error) -> DocumentError {
    DocumentError::Syntax {
        file: file.to_owned(),
        line: error.line(),
        column: error.column(),
        message: message_of(error),
    }
}

/// What is wrong with a JSON text, without the place: whoever names the file says that in its own words.
pub fn message_of(error: &serde_json::Error) -> String {
    let message = error.to_string();
    message.split(" at line ").next().unwrap_or_default().to_owned()
}

/// The document as indented JSON with sorted keys and a final newline.
///
/// # Panics
/// Where a document holds a map with keys that are no text, or a number that is not finite: both are bugs.
pub fn write<T: Document>(document: &T) -> String {
    let mut value = to_value(document);
    if let Value::Object(object) = &mut value {
        object.insert("schema".to_owned(), Value::from(T::SCHEMA));
    }
    write_value(value)
}

/// Any value as indented JSON with sorted keys and a final newline.
pub fn write_plain<T: Serialize>(value: &T) -> String {
    write_value(to_value(value))
}

fn to_value<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("documents are plain maps, lists, texts and finite numbers")
}

fn write_value(value: Value) -> String {
    let mut text = serde_json::to_string_pretty(&sorted(value)).expect("a JSON value prints");
    text.push('\n');
    text
}

/// Keys in order, whatever map `serde_json` was built with.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let ordered: std::collections::BTreeMap<String, Value> = object
                .into_iter()
                .map(|(key, value)| (key, sorted(value)))
                .collect();
            Value::Object(ordered.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}
