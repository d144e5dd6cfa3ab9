//! JSON dumps, read as a stream so that lines are known and a cut text keeps its beginning.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io::{self, Read};

use infercluster_spec::json::message_of;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::error::ImportError;
use super::text::Text;
use super::tree::{Builder, Document, Value};
use super::{Import, kubernetes, nvbandwidth, table, worker};

/// Lines before the document: a prompt, a command.
const LINES_BEFORE: usize = 8;

/// A JSON dump of any tool; `None` where the text is no JSON.
pub(super) fn import(text: &Text) -> Result<Option<Import>, ImportError> {
    let plain = table::plain(text.body());
    let Some((offset, line)) = start(&plain) else {
        return Ok(None);
    };
    let document = read(text, &plain[offset..], line)?;
    let is_whole = document.cut.is_none();
    for read in [nvbandwidth::from_json, worker::read, kubernetes::read] {
        if let Some(mut import) = read(&document, text)? {
            if let Some((line, what)) = document.cut {
                import.lost(line, what);
            }
            return Ok(Some(import));
        }
    }
    // `[root@host ~]$ nvidia-smi` starts like a list, and is left to the other readers.
    if let Some(root) = document
        .roots
        .first()
        .filter(|root| is_whole && root.text().is_none())
    {
        return Err(ImportError::UnknownDocument {
            file: text.name().to_owned(),
            line,
            format: "JSON",
            found: root.keys(),
        });
    }
    Ok(None)
}

/// Offset and line of the first brace or bracket that starts a line.
fn start(text: &str) -> Option<(usize, usize)> {
    let mut offset = 0;
    for (index, line) in text.split_inclusive('\n').take(LINES_BEFORE).enumerate() {
        if line.trim_start().starts_with(['{', '[']) && !line.trim_end().ends_with(['$', '#']) {
            return Some((offset, index + 1));
        }
        offset += line.len();
    }
    None
}

fn read<'a>(text: &'a Text<'a>, body: &str, first_line: usize) -> Result<Document, ImportError> {
    let line = Cell::new(first_line);
    let sink = Sink {
        builder: RefCell::new(Builder::new(text)),
        refusal: RefCell::new(None),
        line: &line,
    };
    let source = Counting {
        rest: body.as_bytes(),
        line: &line,
    };
    let mut deserializer = serde_json::Deserializer::from_reader(source);
    let cut = loop {
        let before = sink.builder.borrow().values();
        let Err(error) = Seed(&sink).deserialize(&mut deserializer) else {
            continue;
        };
        if let Some(refusal) = sink.refusal.take() {
            return Err(refusal);
        }
        let is_new = sink.builder.borrow().values() > before;
        if error.is_eof() && !is_new {
            break None;
        }
        let what = if error.is_eof() {
            "the text ends within the document".to_owned()
        } else {
            format!("no JSON from here: {}", message_of(&error))
        };
        break Some((first_line + error.line().saturating_sub(1), what));
    };
    Ok(sink.builder.into_inner().finish(cut))
}

/// Hands out bytes and counts line ends; the parser asks for one byte at a time.
struct Counting<'a> {
    rest: &'a [u8],
    line: &'a Cell<usize>,
}

impl Read for Counting<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (Some(slot), Some((byte, rest))) = (buffer.first_mut(), self.rest.split_first()) else {
            return Ok(0);
        };
        *slot = *byte;
        self.rest = rest;
        if *byte == b'\n' {
            self.line.set(self.line.get() + 1);
        }
        Ok(1)
    }
}

struct Sink<'a> {
    builder: RefCell<Builder<'a>>,
    /// Why reading must stop, which the parser's own error cannot carry.
    refusal: RefCell<Option<ImportError>>,
    line: &'a Cell<usize>,
}

impl Sink<'_> {
    fn keep<E: serde::de::Error>(&self, result: Result<(), ImportError>) -> Result<(), E> {
        result.map_err(|refusal| {
            let message = E::custom(&refusal);
            self.refusal.replace(Some(refusal));
            message
        })
    }

    fn scalar<E: serde::de::Error>(&self, value: Value) -> Result<(), E> {
        let result = self.builder.borrow_mut().scalar(self.line.get(), value);
        self.keep(result)
    }

    fn start<E: serde::de::Error>(&self, value: Value) -> Result<(), E> {
        let result = self.builder.borrow_mut().start(self.line.get(), value);
        self.keep(result)
    }
}

/// Any value, put into the sink.
#[derive(Clone, Copy)]
struct Seed<'b, 'a>(&'b Sink<'a>);

impl<'de> DeserializeSeed<'de> for Seed<'_, '_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.0.scalar(Value::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.0.scalar(Value::Scalar(value.to_string()))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.0.scalar(Value::Scalar(value.to_string()))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.0.scalar(Value::Scalar(value.to_string()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.0.scalar(Value::Scalar(value.to_string()))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        self.0.scalar(Value::Scalar(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.start(Value::List(Vec::new()))?;
        while items.next_element_seed(self)?.is_some() {}
        self.0.builder.borrow_mut().end();
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        self.0.start(Value::Map(Vec::new()))?;
        while let Some(key) = entries.next_key::<String>()? {
            self.0.builder.borrow_mut().key(self.0.line.get(), key);
            entries.next_value_seed(self)?;
        }
        self.0.builder.borrow_mut().end();
        Ok(())
    }
}
