//! Bytes of a header, read in order with the position at hand. No number of the file is ever allocated for:
//! texts grow with the bytes that are there, and what is not needed is skipped through a small buffer.

use std::io::{self, Read};

use super::GgufError;

/// Longest header that is read; a vocabulary of 300,000 tokens with its merges takes some 20 MB.
const HEADER_LIMIT: u64 = 512 << 20;
/// Longest text that is kept: chat templates are the longest.
const TEXT_LIMIT: u64 = 1 << 20;

pub(super) struct Source<R> {
    inner: R,
    file: String,
    at: u64,
    /// Lengths of version 1 have 32 bits.
    pub(super) short_lengths: bool,
}

impl<R: Read> Source<R> {
    pub(super) fn new(file: &str, inner: R) -> Self {
        Self {
            inner,
            file: file.to_owned(),
            at: 0,
            short_lengths: false,
        }
    }

    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        let mut filled = 0;
        while filled < N {
            match self.inner.read(&mut bytes[filled..]) {
                Ok(0) => return Err(self.cut(filled as u64, what)),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.io(source)),
            }
        }
        self.advance(N as u64, what)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count or length in the width of the version.
    pub(super) fn length(&mut self, what: &str) -> Result<u64, GgufError> {
        if self.short_lengths {
            return self.u32(what).map(u64::from);
        }
        self.u64(what)
    }

    /// A text of at most `limit` bytes; bytes that are no UTF-8 are replaced.
    pub(super) fn text(&mut self, what: &str, limit: u64) -> Result<String, GgufError> {
        let start = self.at;
        let length = self.length(what)?;
        if length > limit {
            return Err(GgufError::TooMany {
                file: self.file.clone(),
                at: start,
                what: format!("the length of {what}"),
                found: length,
                limit,
            });
        }
        self.bytes(length, what)
    }

    /// A text of any real length; one that is longer is skipped, and `None`.
    pub(super) fn value_text(&mut self, what: &str) -> Result<Option<String>, GgufError> {
        let length = self.length(what)?;
        if length > TEXT_LIMIT {
            self.skip(length, what)?;
            return Ok(None);
        }
        self.bytes(length, what).map(Some)
    }

    pub(super) fn skip(&mut self, bytes: u64, what: &str) -> Result<(), GgufError> {
        let allowed = bytes.min(HEADER_LIMIT.saturating_sub(self.at).saturating_add(1));
        let skipped = io::copy(&mut (&mut self.inner).take(allowed), &mut io::sink());
        let skipped = skipped.map_err(|source| self.io(source))?;
        if skipped < allowed {
            return Err(self.cut(skipped, what));
        }
        self.advance(skipped, what)
    }

    pub(super) fn bad(&self, what: &str, found: impl ToString, expected: &'static str) -> GgufError {
        GgufError::Bad {
            file: self.file.clone(),
            at: self.at,
            what: what.to_owned(),
            found: found.to_string(),
            expected,
        }
    }

    pub(super) fn too_many(&self, what: &str, found: u64, limit: u64) -> GgufError {
        GgufError::TooMany {
            file: self.file.clone(),
            at: self.at,
            what: what.to_owned(),
            found,
            limit,
        }
    }

    /// That many bytes as text; the buffer grows with what is there.
    fn bytes(&mut self, length: u64, what: &str) -> Result<String, GgufError> {
        let mut bytes = Vec::new();
        let read = (&mut self.inner).take(length).read_to_end(&mut bytes);
        let read = read.map_err(|source| self.io(source))? as u64;
        if read < length {
            return Err(self.cut(read, what));
        }
        self.advance(length, what)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn advance(&mut self, bytes: u64, what: &str) -> Result<(), GgufError> {
        self.at = self.at.saturating_add(bytes);
        if self.at > HEADER_LIMIT {
            return Err(self.too_many(&format!("the header up to {what}"), self.at, HEADER_LIMIT));
        }
        Ok(())
    }

    fn cut(&self, more: u64, what: &str) -> GgufError {
        GgufError::Cut {
            file: self.file.clone(),
            at: self.at.saturating_add(more),
            what: what.to_owned(),
        }
    }

    fn io(&self, source: io::Error) -> GgufError {
        GgufError::Io {
            file: self.file.clone(),
            source,
        }
    }
}
