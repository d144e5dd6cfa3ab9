//! What travels on a KV connection: token ranges of a unit, and the word that they have arrived.
//!
//! The body of a [`Kind::Kv`] frame is a postcard header, then raw f32 as [`crate::kv::KvStore::export`] gives
//! them, slice after slice of the lane.

use infercluster_serving::handover::{LaneAck, LaneData};
use infercluster_spec::KvBlockId;
use serde::{Deserialize, Serialize};

use super::WireError;
use super::frame::Kind;

/// The header of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaneHeader {
    /// KV; its numbers follow.
    Data {
        /// Which tokens of which unit on which lane.
        data: LaneData,
        /// The blocks that hold these tokens, in order: block ids mean the same in both layouts.
        blocks: Vec<KvBlockId>,
    },
    /// KV has arrived; nothing follows.
    Ack(LaneAck),
}

/// A frame as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneFrame {
    /// What it is.
    pub header: LaneHeader,
    body: Vec<u8>,
    payload_start: usize,
}

impl LaneFrame {
    /// Encodes a frame: the body to send.
    pub fn encode(header: &LaneHeader, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        let head = postcard::to_stdvec(header).map_err(undecodable)?;
        let mut body = Vec::with_capacity(head.len() + payload.len());
        body.extend_from_slice(&head);
        body.extend_from_slice(payload);
        Ok(body)
    }

    /// Reads a body.
    pub fn decode(body: Vec<u8>) -> Result<Self, WireError> {
        let (header, rest) = postcard::take_from_bytes(&body).map_err(undecodable)?;
        let payload_start = body.len() - rest.len();
        Ok(Self {
            header,
            body,
            payload_start,
        })
    }

    /// Bytes of the whole frame.
    pub fn body_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    /// The numbers.
    pub fn payload(&self) -> &[u8] {
        &self.body[self.payload_start..]
    }
}

fn undecodable(source: postcard::Error) -> WireError {
    WireError::Undecodable {
        kind: Kind::Kv,
        source,
    }
}

#[cfg(test)]
mod tests {
    use infercluster_serving::handover::{HandoverId, KvUnit, LaneId};
    use infercluster_spec::SequenceId;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_survive_the_wire(from: u16, count: u16, blocks: Vec<u32>, payload: Vec<u8>) {
            let unit = KvUnit { sequence: SequenceId(7), incarnation: 2 };
            let (from, count) = (u32::from(from), u32::from(count));
            let header = LaneHeader::Data {
                data: LaneData { handover: HandoverId(3), lane: LaneId(1), unit, from, to: from + count },
                blocks: blocks.into_iter().map(KvBlockId).collect(),
            };
            let frame = LaneFrame::decode(LaneFrame::encode(&header, &payload).unwrap()).unwrap();
            prop_assert_eq!(frame.payload(), payload.as_slice());
            prop_assert_eq!(frame.header, header);
        }

        #[test]
        fn random_bytes_are_no_reason_to_panic(bytes: Vec<u8>) {
            let _ = LaneFrame::decode(bytes);
        }
    }
}
