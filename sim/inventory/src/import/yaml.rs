//! YAML dumps, read as a stream of events. Aliases are refused: no tool writes them into a node, and a
//! few lines of them stand for more than memory holds.

use std::borrow::Cow;

use saphyr_parser::{Event, Parser, ScalarStyle};

use super::error::ImportError;
use super::text::Text;
use super::tree::{Builder, Document, Value};
use super::{Import, kubernetes, table};

/// Words of which a node or its labels have at least one.
const SIGNS: [&str; 6] = [
    "apiVersion",
    "capacity",
    "allocatable",
    "nvidia.com/",
    "amd.com/",
    "gpu.intel.com/",
];

/// A YAML dump of any tool; `None` where the text is none.
pub(super) fn import(text: &Text) -> Result<Option<Import>, ImportError> {
    if !SIGNS.iter().any(|sign| text.body().contains(sign)) {
        return Ok(None);
    }
    let plain = table::plain(text.body());
    // JSON is YAML too, but was looked at before: broken JSON is not read by looser rules.
    if plain.trim_start().starts_with(['{', '[']) {
        return Ok(None);
    }
    let body = without_commands(&plain);
    let open = open_value(&body);
    let document = read(text, open.map_or(&*body, |value| &body[..value]))?;
    let Some(mut import) = kubernetes::read(&document, text)? else {
        return Ok(None);
    };
    if let Some((line, what)) = document.cut {
        import.lost(line, what);
    }
    if open.is_some() {
        import.lost(
            plain.lines().count(),
            "the text ends within a value, it may go on",
        );
    }
    Ok(Some(import))
}

/// Where a bare value about devices starts that the text ends in: it may be cut.
fn open_value(text: &str) -> Option<usize> {
    let start = text.rfind('\n').map_or(0, |end| end + 1);
    let last = &text[start..];
    let is_open = last.contains("gpu") && last.ends_with(|letter: char| letter.is_ascii_alphanumeric());
    is_open
        .then(|| last.rfind(": ").map(|colon| start + colon + 1))
        .flatten()
}

/// The text with commands before the document emptied, so that lines keep their numbers.
fn without_commands(text: &str) -> Cow<'_, str> {
    let is_command =
        |line: &&str| line.contains("$ ") || line.contains("# kubectl") || line.starts_with("```");
    let commands = text.split_inclusive('\n').take_while(is_command);
    let (length, count) = commands.fold((0, 0), |(length, count), line| (length + line.len(), count + 1));
    if count == 0 {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}{}", "\n".repeat(count), &text[length..]))
}

fn read(text: &Text, body: &str) -> Result<Document, ImportError> {
    let mut builder = Builder::new(text);
    let mut parser = Parser::new_from_str(body);
    while let Some(event) = parser.next_event() {
        let (event, span) = match event {
            Ok(event) => event,
            Err(error) => {
                let line = error.marker().line();
                builder.forget_last();
                return Ok(builder.finish(Some((line, format!("no YAML from here: {}", error.info())))));
            }
        };
        let line = span.start.line();
        match event {
            Event::Alias(_) => {
                return Err(ImportError::Growing {
                    file: text.name().to_owned(),
                    line,
                    what: "YAML aliases",
                });
            }
            Event::Scalar(scalar, ..) if builder.wants_key() => builder.key(line, scalar.into_owned()),
            Event::Scalar(scalar, style, ..) => {
                let is_null = style == ScalarStyle::Plain && matches!(&*scalar, "" | "~" | "null");
                let value = if is_null {
                    Value::Null
                } else {
                    Value::Scalar(scalar.into_owned())
                };
                builder.scalar(line, value)?;
            }
            Event::SequenceStart(..) => builder.start(line, Value::List(Vec::new()))?,
            Event::MappingStart(..) => builder.start(line, Value::Map(Vec::new()))?,
            Event::SequenceEnd | Event::MappingEnd => builder.end(),
            Event::StreamEnd => break,
            Event::Nothing | Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd => {}
        }
    }
    Ok(builder.finish(None))
}
