//! Safetensors files taken apart and put together by hand, so that a test can break exactly one thing.

use std::path::Path;

use serde_json::Value;

/// A file in its parts.
#[derive(Debug, Clone)]
pub struct Parts {
    /// What the length field says; normally the header's length.
    pub length: u64,
    /// The header.
    pub header: Value,
    /// Everything after the header.
    pub data: Vec<u8>,
}

impl Parts {
    /// Takes a well-formed file apart.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("the file can be read");
        let (length, rest) = bytes
            .split_first_chunk()
            .expect("a file starts with its length field");
        let length = u64::from_le_bytes(*length);
        let (header, data) = rest.split_at(usize::try_from(length).expect("the header fits memory"));
        Self {
            length,
            header: serde_json::from_slice(header).expect("the header is JSON"),
            data: data.to_vec(),
        }
    }

    /// Makes the length field true again after a change of the header.
    pub fn relength(&mut self) {
        self.length = self.header.to_string().len() as u64;
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.length.to_le_bytes().to_vec();
        bytes.extend(self.header.to_string().bytes());
        bytes.extend(&self.data);
        bytes
    }
}
