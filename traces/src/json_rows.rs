//! Traces in lines of JSON: the published ones and the product's own.

use std::io::BufRead;

use infercluster_spec::json;
use serde_json::{Map, Value};

use crate::error::TraceError;
use crate::format::{self, Clock, JSON_SHAPES, LINES_SCHEMA, PICOSECONDS, TraceFormat};
use crate::read::{Builder, Loaded, Row, next_line};

/// Keys of a line and what they mean.
struct Keys {
    format: TraceFormat,
    arrival: Option<(&'static str, Clock)>,
    arrival_optional: bool,
    input: &'static str,
    output: &'static str,
    hashes: Option<(&'static str, u32)>,
}

pub(crate) fn read(mut builder: Builder, mut source: impl BufRead) -> Result<Loaded, TraceError> {
    let mut buffer = Vec::new();
    let mut line = 0_u64;
    let mut keys: Option<Keys> = None;
    let mut epoch = None;
    loop {
        line += 1;
        if !next_line(builder.file(), line, &mut source, &mut buffer)? {
            let format = keys.map_or(TraceFormat::Lines, |keys| keys.format);
            return builder.finish(format);
        }
        let text = std::str::from_utf8(&buffer).map_err(|_| TraceError::NotText {
            file: builder.file().to_owned(),
            line,
        })?;
        if text.trim().is_empty() {
            continue;
        }
        let object = object(&builder, line, text)?;
        let known = match &keys {
            Some(known) => known,
            None => {
                let found = match own_header(&mut builder, line, &object)? {
                    Some(own) => own,
                    None => published(&builder, &object)?,
                };
                let is_header = found.format == TraceFormat::Lines;
                let found = keys.insert(found);
                if is_header {
                    continue;
                }
                found
            }
        };
        let row = row(&builder, known, &object, line, &mut epoch)?;
        let hash_block = known.hashes.map(|(_, block)| block);
        builder.push(row, hash_block)?;
    }
}

fn object(builder: &Builder, line: u64, text: &str) -> Result<Map<String, Value>, TraceError> {
    serde_json::from_str(text).map_err(|error| TraceError::Json {
        file: builder.file().to_owned(),
        line,
        column: error.column(),
        message: json::message_of(&error),
    })
}

fn published(builder: &Builder, first: &Map<String, Value>) -> Result<Keys, TraceError> {
    let shape = format::detect(&JSON_SHAPES, |key| first.contains_key(key)).ok_or_else(|| {
        let keys: Vec<String> = first
            .keys()
            .take(20)
            .map(|key| key.chars().take(40).collect())
            .collect();
        TraceError::UnknownFormat {
            file: builder.file().to_owned(),
            found: keys.join(", "),
            known: format::known(),
        }
    })?;
    Ok(Keys {
        format: shape.format,
        arrival: shape.arrival,
        arrival_optional: false,
        input: shape.input,
        output: shape.output,
        hashes: shape.hashes,
    })
}

/// The first line of the product's own format, `None` where it is another.
fn own_header(
    builder: &mut Builder,
    line: u64,
    first: &Map<String, Value>,
) -> Result<Option<Keys>, TraceError> {
    let Some(schema) = first.get("schema") else {
        return Ok(None);
    };
    if schema.as_str() != Some(LINES_SCHEMA) {
        return Err(builder.bad(line, "schema", &schema.to_string(), LINES_SCHEMA));
    }
    if let Some(name) = first.get("name") {
        let name = name
            .as_str()
            .ok_or_else(|| builder.bad(line, "name", &name.to_string(), "a text"))?;
        builder.rename(name);
    }
    let block = match first.get("hash_block") {
        None | Some(Value::Null) => None,
        Some(value) => Some(
            value
                .as_u64()
                .and_then(|block| u32::try_from(block).ok())
                .filter(|block| *block > 0)
                .ok_or_else(|| {
                    builder.bad(
                        line,
                        "hash_block",
                        &value.to_string(),
                        "a whole number of tokens, at least 1",
                    )
                })?,
        ),
    };
    Ok(Some(Keys {
        format: TraceFormat::Lines,
        arrival: Some(("arrival_ps", PICOSECONDS)),
        arrival_optional: true,
        input: "input",
        output: "output",
        hashes: block.map(|block| ("block_hashes", block)),
    }))
}

fn row(
    builder: &Builder,
    keys: &Keys,
    object: &Map<String, Value>,
    line: u64,
    epoch: &mut Option<i128>,
) -> Result<Row, TraceError> {
    let field = |name: &'static str| {
        object.get(name).ok_or_else(|| TraceError::MissingField {
            file: builder.file().to_owned(),
            line,
            field: name,
        })
    };
    let tokens = |name: &'static str| builder.tokens(line, name, &field(name)?.to_string());
    let arrival = match keys.arrival {
        Some((name, _)) if keys.arrival_optional && !object.contains_key(name) => None,
        Some((name, clock)) => {
            let text = field(name)?.to_string();
            Some(builder.instant(line, name, &text, clock, epoch)?)
        }
        None => None,
    };
    Ok(Row {
        line,
        arrival,
        input: tokens(keys.input)?,
        output: tokens(keys.output)?,
        block_hashes: match keys.hashes {
            Some((name, _)) => hashes(builder, line, name, object.get(name))?,
            None => Vec::new(),
        },
    })
}

fn hashes(builder: &Builder, line: u64, name: &str, value: Option<&Value>) -> Result<Vec<u64>, TraceError> {
    let expected = "a list of whole numbers of at least zero";
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids
            .iter()
            .map(|id| {
                id.as_u64()
                    .ok_or_else(|| builder.bad(line, name, &id.to_string(), expected))
            })
            .collect(),
        Some(other) => Err(builder.bad(line, name, &other.to_string(), expected)),
    }
}
