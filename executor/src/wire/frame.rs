//! The frame header: 24 bytes whose first 8 never change between versions, so that versions can be compared.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::WireError;

/// The version of the protocol.
pub const VERSION: u16 = 2;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;
const MAGIC: [u8; 4] = *b"IFCL";

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// The dialer's side of the handshake.
    Hello = 1,
    /// The acceptor's side.
    Welcome = 2,
    /// The acceptor's no: a text, readable by every version.
    Refused = 3,
    /// A control message.
    Control = 4,
    /// Little-endian f32.
    Tensor = 5,
    /// KV on its way to a new layout, or the word that some has arrived.
    Kv = 6,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::Hello,
        Self::Welcome,
        Self::Refused,
        Self::Control,
        Self::Tensor,
        Self::Kv,
    ];

    /// The longest body that is read.
    pub const fn limit(self) -> u32 {
        match self {
            Self::Hello | Self::Welcome | Self::Refused => 1 << 10,
            Self::Control => 64 << 20,
            Self::Tensor => 1 << 30,
            Self::Kv => 16 << 20,
        }
    }

    fn from_number(found: u16) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|kind| *kind as u16 == found)
            .ok_or(WireError::UnknownKind { found })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Hello => "hello",
            Self::Welcome => "welcome",
            Self::Refused => "refusal",
            Self::Control => "control",
            Self::Tensor => "tensor",
            Self::Kv => "kv",
        })
    }
}

/// What stands before every body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the body is.
    pub kind: Kind,
    /// Its bytes, at most the kind's limit.
    pub length: u32,
    /// A number that both sides expect: which exchange of a connection a tensor belongs to.
    pub tag: u32,
    checksum: u64,
}

impl Header {
    /// The header of a body.
    pub fn of(kind: Kind, tag: u32, body: &[u8]) -> Result<Self, WireError> {
        let length = u32::try_from(body.len())
            .ok()
            .filter(|length| *length <= kind.limit());
        let Some(length) = length else {
            return Err(WireError::TooLong {
                kind,
                length: body.len() as u64,
                limit: u64::from(kind.limit()),
            });
        };
        Ok(Self {
            kind,
            length,
            tag,
            checksum: checksum(kind, tag, body),
        })
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Reads a header and compares its length with the kind's limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let part = |from: usize| [bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]];
        let short = |from: usize| u16::from_le_bytes([bytes[from], bytes[from + 1]]);
        if part(0) != MAGIC {
            return Err(WireError::Magic { found: part(0) });
        }
        if short(4) != VERSION {
            return Err(WireError::Version {
                found: short(4),
                expected: VERSION,
            });
        }
        let kind = Kind::from_number(short(6))?;
        let length = u32::from_le_bytes(part(8));
        if length > kind.limit() {
            return Err(WireError::TooLong {
                kind,
                length: u64::from(length),
                limit: u64::from(kind.limit()),
            });
        }
        let checksum =
            u64::from(u32::from_le_bytes(part(16))) | u64::from(u32::from_le_bytes(part(20))) << 32;
        Ok(Self {
            kind,
            length,
            tag: u32::from_le_bytes(part(12)),
            checksum,
        })
    }

    /// Whether this is the header of that body.
    pub fn verify(&self, body: &[u8]) -> Result<(), WireError> {
        if body.len() as u64 == u64::from(self.length) && checksum(self.kind, self.tag, body) == self.checksum
        {
            return Ok(());
        }
        Err(WireError::Checksum {
            kind: self.kind,
            length: self.length,
        })
    }
}

/// xxh3 of the body, seeded with kind and tag so that neither can be exchanged unnoticed.
fn checksum(kind: Kind, tag: u32, body: &[u8]) -> u64 {
    xxh3_64_with_seed(body, u64::from(kind as u16) << 32 | u64::from(tag))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn another_version_is_named() {
        let mut bytes = Header::of(Kind::Control, 0, b"x").unwrap().encode();
        bytes[4..6].copy_from_slice(&9_u16.to_le_bytes());
        let error = Header::decode(&bytes).unwrap_err().to_string();
        let expected = format!("the peer speaks wire version 9, this program speaks {VERSION}");
        assert_eq!(error, expected);
    }

    #[test]
    fn a_length_past_the_limit_is_refused_before_anything_is_read() {
        let mut bytes = Header::of(Kind::Control, 0, b"x").unwrap().encode();
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(
            Header::decode(&bytes),
            Err(WireError::TooLong {
                length: 0xffff_ffff,
                ..
            })
        ));
    }

    proptest! {
        #[test]
        fn headers_survive_the_wire(tag: u32, body: Vec<u8>) {
            let header = Header::of(Kind::Tensor, tag, &body).unwrap();
            prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
            prop_assert!(header.verify(&body).is_ok());
        }

        #[test]
        fn random_headers_never_pass_their_limit(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.length <= header.kind.limit());
            }
        }

        #[test]
        fn one_changed_byte_is_noticed(tag: u32, body in proptest::collection::vec(any::<u8>(), 1..64), at: proptest::sample::Index, flip in 1_u8..) {
            let header = Header::of(Kind::Control, tag, &body).unwrap();
            let mut whole = header.encode().to_vec();
            whole.extend_from_slice(&body);
            let at = at.index(whole.len());
            whole[at] ^= flip;
            let (head, rest) = whole.split_at(HEADER_BYTES);
            let changed = Header::decode(head.try_into().unwrap()).and_then(|header| header.verify(rest));
            prop_assert!(changed.is_err(), "byte {at}");
        }
    }
}
