//! XML dumps, read as a stream into one flat list of elements. Entities of the document's own are refused;
//! where the text breaks off, what was read so far is kept.

use quick_xml::Reader;
use quick_xml::events::attributes::Attribute;
use quick_xml::events::{BytesStart, Event};

use super::error::ImportError;
use super::text::{Text, line_at};
use super::{Import, nccl_xml, smi_xml, table};

/// Elements of one file; so many take less than 50 MB.
const ELEMENTS_LIMIT: usize = 100_000;
/// Levels; a PCI tree has less than ten.
const DEPTH_LIMIT: usize = 64;
/// Attributes of one element.
const ATTRIBUTES_LIMIT: usize = 32;

/// One element; those below it follow in the list.
#[derive(Debug)]
pub(super) struct Element {
    pub(super) name: String,
    attributes: Vec<(String, String)>,
    pub(super) text: String,
    pub(super) parent: Option<usize>,
    /// Position after the last element below.
    end: usize,
    pub(super) line: usize,
    /// Whether an attribute cannot be read or goes over a line end, as where a terminal has wrapped it.
    pub(super) is_damaged: bool,
}

impl Element {
    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }

    /// An attribute as a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.attribute(name)?.trim().parse().ok()
    }
}

/// A document as far as it is there.
#[derive(Debug)]
pub(super) struct Xml {
    pub(super) elements: Vec<Element>,
    /// Where and why reading stopped early.
    pub(super) cut: Option<(usize, String)>,
    /// Whether tags do not match, so that what lies below what is not sure either.
    pub(super) is_torn: bool,
}

impl Xml {
    /// The element itself and every one below.
    pub(super) fn below(&self, position: usize) -> impl Iterator<Item = (usize, &Element)> {
        let end = self.elements[position].end.min(self.elements.len());
        (position..end).map(|position| (position, &self.elements[position]))
    }

    /// The text of the first element at that path below.
    pub(super) fn text_at(&self, position: usize, path: &[&str]) -> Option<&str> {
        let found = path.iter().try_fold(position, |parent, name| {
            let mut below = self.below(parent);
            below
                .find(|(_, element)| element.parent == Some(parent) && element.name == *name)
                .map(|(position, _)| position)
        })?;
        Some(self.elements[found].text.trim())
    }

    /// Those above an element, nearest first.
    pub(super) fn above(&self, position: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(self.elements[position].parent, |above| {
            self.elements[*above].parent
        })
    }
}

/// An XML dump of any tool; `None` where the text is no XML.
pub(super) fn import(text: &Text) -> Result<Option<Import>, ImportError> {
    let plain = table::plain(text.body());
    let Some(start) = start(&plain) else {
        return Ok(None);
    };
    let xml = read(text, &plain, start)?;
    let root = xml.elements.first().map(|root| root.name.as_str());
    match root {
        Some("nvidia_smi_log") => smi_xml::read(&xml).map(Some),
        Some("system") => nccl_xml::read(&xml, text).map(Some),
        _ => Err(ImportError::UnknownDocument {
            file: text.name().to_owned(),
            line: line_at(&plain, start),
            format: "XML",
            found: root.map_or("no element".to_owned(), |root| {
                format!("root <{}>", root.chars().take(40).collect::<String>())
            }),
        }),
    }
}

/// Where the document starts: at the first byte, or after a prompt at what only a dump has.
fn start(text: &str) -> Option<usize> {
    let first = text.len() - text.trim_start().len();
    if text[first..].starts_with('<') {
        return Some(first);
    }
    let root = ["<nvidia_smi_log", "<system version="]
        .iter()
        .find_map(|root| text.find(root))?;
    let before = ["<?xml", "<!DOCTYPE"]
        .iter()
        .filter_map(|mark| text[..root].rfind(mark));
    Some(before.min().unwrap_or(root))
}

fn read(text: &Text, body: &str, start: usize) -> Result<Xml, ImportError> {
    let mut parsing = Parsing {
        file: text,
        xml: Xml {
            elements: Vec::new(),
            cut: None,
            is_torn: false,
        },
        open: Vec::new(),
        line: line_at(body, start),
        counted: start,
    };
    let mut reader = Reader::from_str(&body[start..]);
    reader.config_mut().allow_dangling_amp = true;
    loop {
        let event = reader.read_event();
        let offset = start + reader.buffer_position() as usize;
        match event {
            Ok(Event::Eof) => break,
            Ok(event) => {
                if parsing.event(event)? {
                    break;
                }
            }
            Err(error) => {
                let offset = start + reader.error_position() as usize;
                parsing.xml.is_torn = matches!(error, quick_xml::Error::IllFormed(_));
                parsing.xml.cut = Some((line_at(body, offset), format!("no XML from here: {error}")));
                break;
            }
        }
        parsing.advance(body, offset);
    }
    Ok(parsing.finish())
}

struct Parsing<'a> {
    file: &'a Text<'a>,
    xml: Xml,
    open: Vec<usize>,
    /// Line of the byte that was counted up to.
    line: usize,
    counted: usize,
}

impl Parsing<'_> {
    /// Takes an event in; true where the root ends with it.
    fn event(&mut self, event: Event) -> Result<bool, ImportError> {
        match event {
            Event::Start(tag) => self.start(&tag)?,
            Event::Empty(tag) => {
                self.start(&tag)?;
                self.end();
            }
            Event::End(_) => self.end(),
            Event::Text(text) => self.text(&text.decode().unwrap_or_default()),
            Event::CData(data) => self.text(&data.decode().unwrap_or_default()),
            Event::GeneralRef(name) => match name.resolve_char_ref() {
                Ok(Some(letter)) => self.text(letter.encode_utf8(&mut [0; 4])),
                _ => {
                    let known = name.decode().ok();
                    let known = known.and_then(|name| quick_xml::escape::resolve_predefined_entity(&name));
                    self.text(known.ok_or_else(|| self.growing())?);
                }
            },
            Event::DocType(declared) => {
                if declared
                    .windows(8)
                    .any(|bytes| bytes.eq_ignore_ascii_case(b"<!ENTITY"))
                {
                    return Err(self.growing());
                }
            }
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::Eof => {}
        }
        Ok(self.open.is_empty() && !self.xml.elements.is_empty())
    }

    fn growing(&self) -> ImportError {
        ImportError::Growing {
            file: self.file.name().to_owned(),
            line: self.line,
            what: "XML entities of the document's own",
        }
    }

    fn start(&mut self, tag: &BytesStart) -> Result<(), ImportError> {
        if self.xml.elements.len() >= ELEMENTS_LIMIT {
            return Err(self
                .file
                .too_many(self.line, "XML elements", ELEMENTS_LIMIT as u64));
        }
        if self.open.len() >= DEPTH_LIMIT {
            return Err(ImportError::TooDeep {
                file: self.file.name().to_owned(),
                line: self.line,
                limit: DEPTH_LIMIT,
            });
        }
        let is_whole = |attribute: Result<Attribute, _>| {
            attribute.is_ok_and(|attribute| !attribute.value.contains(&b'\n'))
        };
        let is_damaged = !tag.attributes().take(ATTRIBUTES_LIMIT).all(is_whole);
        let attributes = tag
            .attributes()
            .take(ATTRIBUTES_LIMIT)
            .flatten()
            .map(|attribute| {
                let name = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
                let raw = || String::from_utf8_lossy(&attribute.value).into_owned();
                let value = attribute
                    .unescape_value()
                    .map_or_else(|_| raw(), |value| value.into_owned());
                (name, value)
            });
        let position = self.xml.elements.len();
        self.xml.elements.push(Element {
            name: String::from_utf8_lossy(tag.name().as_ref()).into_owned(),
            attributes: attributes.collect(),
            text: String::new(),
            parent: self.open.last().copied(),
            end: usize::MAX,
            line: self.line,
            is_damaged,
        });
        self.open.push(position);
        Ok(())
    }

    fn end(&mut self) {
        if let Some(position) = self.open.pop() {
            self.xml.elements[position].end = self.xml.elements.len();
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(position) = self.open.last()
            && !text.trim().is_empty()
        {
            self.xml.elements[*position].text.push_str(text);
        }
    }

    /// Counts line ends up to where the reader stands.
    fn advance(&mut self, body: &str, offset: usize) {
        let offset = offset.min(body.len());
        let passed = &body.as_bytes()[self.counted.min(offset)..offset];
        self.line += passed.iter().filter(|byte| **byte == b'\n').count();
        self.counted = offset;
    }

    fn finish(mut self) -> Xml {
        if let Some(position) = self.open.last()
            && self.xml.cut.is_none()
        {
            let name = &self.xml.elements[*position].name;
            self.xml.cut = Some((self.line, format!("the text ends within <{name}>")));
        }
        // The text of an element that is not closed may go on.
        for position in self.open {
            self.xml.elements[position].text.clear();
        }
        self.xml
    }
}
