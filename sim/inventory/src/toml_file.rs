//! TOML into values with errors that name line and field, and values that may stand alone or in a list.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::InventoryError;

/// Reads `text` as a `T`.
pub(crate) fn read<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, InventoryError> {
    let document = toml::de::Deserializer::parse(text).map_err(|error| {
        let (line, column) = position(text, &error);
        InventoryError::Syntax {
            file: file.to_owned(),
            line,
            column,
            message: error.message().to_owned(),
        }
    })?;
    serde_path_to_error::deserialize(document).map_err(|error| InventoryError::Field {
        file: file.to_owned(),
        line: position(text, error.inner()).0,
        field: error.path().to_string(),
        message: error.inner().message().to_owned(),
    })
}

/// Line and column from 1.
fn position(text: &str, error: &toml::de::Error) -> (usize, usize) {
    let start = error.span().map_or(0, |span| span.start).min(text.len());
    let before = &text.as_bytes()[..start];
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
    (line, column)
}

/// One value, or a list of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OneOrMany<T> {
    pub(crate) values: Vec<T>,
    /// Whether it was written as a list.
    pub(crate) is_list: bool,
}

impl<T> Default for OneOrMany<T> {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            is_list: true,
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrManyVisitor(PhantomData))
    }
}

struct OneOrManyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> OneOrManyVisitor<T> {
    fn one<E: serde::de::Error>(value: impl IntoDeserializer<'de, E>) -> Result<OneOrMany<T>, E> {
        Ok(OneOrMany {
            values: vec![T::deserialize(value.into_deserializer())?],
            is_list: false,
        })
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrManyVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value or a list of values")
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Self::Value, E> {
        Self::one(value.to_owned())
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
        Ok(OneOrMany {
            values: Vec::deserialize(SeqAccessDeserializer::new(items))?,
            is_list: true,
        })
    }
}
