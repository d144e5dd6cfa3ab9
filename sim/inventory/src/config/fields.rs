//! Typed access to the keys of a JSON object: every failure names file and field, every default is noted.

use infercluster_spec::model::Dtype;
use serde_json::{Map, Value};

use crate::error::InventoryError;

/// One JSON object of a config with the path that leads to it.
pub(super) struct Fields<'a> {
    file: &'a str,
    prefix: String,
    object: &'a Map<String, Value>,
    assumed: Vec<&'static str>,
}

/// A value as messages show it: cut where it is long.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a str, object: &'a Map<String, Value>) -> Self {
        Self {
            file,
            prefix: String::new(),
            object,
            assumed: Vec::new(),
        }
    }

    pub(super) fn file(&self) -> &str {
        self.file
    }

    pub(super) fn into_assumed(self) -> Vec<&'static str> {
        self.assumed
    }

    /// Notes that a default stands for this key.
    pub(super) fn assume(&mut self, key: &'static str) {
        self.assumed.push(key);
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key)
    }

    /// Present and not null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| !value.is_null())
    }

    pub(super) fn is_null(&self, key: &str) -> bool {
        self.get(key).is_some_and(Value::is_null)
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, InventoryError> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields {
                file: self.file,
                prefix: format!("{}{key}.", self.prefix),
                object,
                assumed: Vec::new(),
            })),
            Some(other) => Err(self.bad(key, brief(other), "an object or null")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>, InventoryError> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.bad(key, brief(other), "a text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, InventoryError> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.bad(key, brief(other), "true or false")),
        }
    }

    pub(super) fn flag_or(&mut self, key: &'static str, default: bool) -> Result<bool, InventoryError> {
        let found = self.flag(key)?;
        if found.is_none() {
            self.assume(key);
        }
        Ok(found.unwrap_or(default))
    }

    /// A whole number from 1 to 2^31 - 1, so that neighbours of it fit 32 bits.
    pub(super) fn count(&self, key: &str) -> Result<u32, InventoryError> {
        let expected = "a whole number from 1 to 2147483647";
        let value = self
            .get(key)
            .filter(|value| !value.is_null())
            .ok_or_else(|| self.missing(key, expected))?;
        value
            .as_u64()
            .and_then(|count| u32::try_from(count).ok())
            .filter(|count| (1..=i32::MAX as u32).contains(count))
            .ok_or_else(|| self.bad(key, brief(value), expected))
    }

    pub(super) fn count_or(&mut self, key: &'static str, default: u32) -> Result<u32, InventoryError> {
        if self.has(key) {
            return self.count(key);
        }
        self.assume(key);
        Ok(default)
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, InventoryError> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value
                .as_f64()
                .filter(|number| number.is_finite())
                .map(Some)
                .ok_or_else(|| self.bad(key, brief(value), "a finite number")),
        }
    }

    pub(super) fn positive(&self, key: &str) -> Result<f64, InventoryError> {
        let expected = "a finite number above zero";
        let number = self.number(key)?.ok_or_else(|| self.missing(key, expected))?;
        if number > 0.0 {
            Ok(number)
        } else {
            Err(self.bad(key, number.to_string(), expected))
        }
    }

    pub(super) fn positive_or(&mut self, key: &'static str, default: f64) -> Result<f64, InventoryError> {
        if self.has(key) {
            return self.positive(key);
        }
        self.assume(key);
        Ok(default)
    }

    /// One id, a list of ids or null.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, InventoryError> {
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| self.bad(key, brief(value), "a token id, a list of them or null"))
        };
        match self.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        }
    }

    /// `torch_dtype`, or `dtype` as newer files call it.
    pub(super) fn dtype(&self) -> Result<Option<Dtype>, InventoryError> {
        let key = if self.has("torch_dtype") {
            "torch_dtype"
        } else {
            "dtype"
        };
        let Some(text) = self.text(key)? else {
            return Ok(None);
        };
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        let known = Dtype::ALL.map(Dtype::name).join(", ");
        name.parse().map(Some).map_err(|_| {
            self.bad(
                key,
                format!("\"{text}\""),
                &format!("a dtype such as float32, float16, bfloat16 or one of {known}"),
            )
        })
    }

    pub(super) fn divides(
        &self,
        field: &str,
        found: u32,
        divisor_field: &str,
        divisor: u32,
    ) -> Result<(), InventoryError> {
        if found.is_multiple_of(divisor) {
            return Ok(());
        }
        Err(InventoryError::NotDivisible {
            file: self.file.to_owned(),
            field: self.path(field),
            found,
            divisor_field: self.path(divisor_field),
            divisor,
        })
    }

    pub(super) fn bad(&self, key: &str, found: String, expected: &str) -> InventoryError {
        InventoryError::BadField {
            file: self.file.to_owned(),
            field: self.path(key),
            found,
            expected: expected.to_owned(),
        }
    }

    pub(super) fn unsupported(&self, key: &str, found: String, supported: &'static str) -> InventoryError {
        InventoryError::Unsupported {
            file: self.file.to_owned(),
            field: self.path(key),
            found,
            supported,
        }
    }

    fn missing(&self, key: &str, expected: &str) -> InventoryError {
        InventoryError::Missing {
            file: self.file.to_owned(),
            field: self.path(key),
            expected: expected.to_owned(),
        }
    }

    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}
