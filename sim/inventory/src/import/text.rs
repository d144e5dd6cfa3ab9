//! From bytes to text: what is no text, or not the dump itself, is refused with a reason.

use std::borrow::Cow;

use super::FILE_LIMIT;
use super::error::ImportError;

/// A dump as text.
#[derive(Debug)]
pub(super) struct Text<'a> {
    name: &'a str,
    body: Cow<'a, str>,
    first_damaged: Option<usize>,
}

impl Text<'_> {
    /// What messages call the file.
    pub(super) fn name(&self) -> &str {
        self.name
    }

    pub(super) fn body(&self) -> &str {
        &self.body
    }

    /// First line with bytes that are no UTF-8.
    pub(super) fn first_damaged(&self) -> Option<usize> {
        self.first_damaged
    }

    /// The beginning, for a message.
    pub(super) fn first_words(&self) -> String {
        let line = self.body.lines().find(|line| !line.trim().is_empty());
        let printable = line
            .unwrap_or_default()
            .trim()
            .chars()
            .map(|letter| if letter.is_control() { ' ' } else { letter });
        printable.take(60).collect()
    }

    pub(super) fn too_many(&self, line: usize, what: &'static str, limit: u64) -> ImportError {
        ImportError::TooMany {
            file: self.name.to_owned(),
            line,
            what,
            limit,
        }
    }
}

/// Line of a byte, from 1.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

pub(super) fn decode<'a>(bytes: &'a [u8], name: &'a str) -> Result<Text<'a>, ImportError> {
    let file = || name.to_owned();
    if bytes.len() as u64 > FILE_LIMIT {
        return Err(ImportError::TooLong {
            file: file(),
            found: bytes.len() as u64,
            limit: FILE_LIMIT,
        });
    }
    refuse_wide(bytes, name)?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let body = String::from_utf8_lossy(bytes);
    let first_damaged = match &body {
        Cow::Borrowed(_) => None,
        Cow::Owned(text) => text
            .find(char::REPLACEMENT_CHARACTER)
            .map(|offset| line_at(text, offset)),
    };
    let start = body.trim_start();
    if start.is_empty() {
        return Err(ImportError::Empty { file: file() });
    }
    if start.starts_with("version https://git-lfs.github.com/spec/") {
        return Err(ImportError::LfsPointer { file: file() });
    }
    let opening: String = start.chars().take(15).collect::<String>().to_lowercase();
    if opening.starts_with("<!doctype html") || opening.starts_with("<html") || opening.starts_with("<head") {
        return Err(ImportError::Html { file: file() });
    }
    Ok(Text {
        name,
        body,
        first_damaged,
    })
}

/// Refuses wide encodings and what is no text; one in bytes of wide ASCII every second is zero.
fn refuse_wide(bytes: &[u8], name: &str) -> Result<(), ImportError> {
    let marks: [(&[u8], &str); 4] = [
        (b"\xff\xfe\0\0", "UTF-32"),
        (b"\0\0\xfe\xff", "UTF-32"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ];
    if let Some((_, encoding)) = marks.iter().find(|(mark, _)| bytes.starts_with(mark)) {
        return Err(ImportError::WideText {
            file: name.to_owned(),
            encoding,
        });
    }
    let Some(offset) = bytes.iter().position(|byte| *byte == 0) else {
        return Ok(());
    };
    let start = &bytes[..bytes.len().min(64)];
    let zeros = |first: usize| start.iter().skip(first).step_by(2).all(|byte| *byte == 0);
    if start.len() >= 4 && (zeros(0) || zeros(1)) && start.iter().any(|byte| *byte != 0) {
        return Err(ImportError::WideText {
            file: name.to_owned(),
            encoding: "UTF-16 without a byte order mark",
        });
    }
    let packed: [(&[u8], &str); 4] = [
        (b"\x1f\x8b", "a gzip archive"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x28\xb5\x2f\xfd", "a zstd archive"),
        (b"\x7fELF", "a program"),
    ];
    let what = packed.iter().find(|(mark, _)| bytes.starts_with(mark));
    Err(ImportError::Binary {
        file: name.to_owned(),
        offset,
        what: what.map_or("a binary file", |(_, what)| what),
    })
}
