//! KV on its way between layouts: what this device still has to send and to take in.
//!
//! The step thread does all of it between steps, a chunk of about 1 MiB at a time, since it owns the caches. Sending
//! waits where the network does, and until the coordinator asks for mirroring (`bulk`) it keeps to a rate. Only
//! before the first step of the new layout everything leaves, whatever it takes ([`Copying::send_tail_chunk`]):
//! that step may wait for it elsewhere.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use infercluster_serving::handover::{HandoverId, KvUnit, LaneAck, LaneData, LaneId};
use infercluster_spec::{BytesPerSec, GpuId, IndexRange, KvBlockId};

use super::kv_line::KvLine;
use crate::backend::Cpu;
use crate::clock;
use crate::kv::{KvError, KvPart, KvStore};
use crate::lanes::KvLane;
use crate::wire::message::Shadow;
use crate::wire::{LaneFrame, LaneHeader, WireError};

/// Bytes of a chunk, where a token is not larger.
const CHUNK_BYTES: u64 = 1 << 20;

/// How long a device may save up what its rate allows.
const BURST: Duration = Duration::from_millis(50);

/// Why KV was not sent or taken in.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    #[error("{0}")]
    Kv(#[from] KvError),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("lane {} is not one of this handover", .0.0)]
    UnknownLane(LaneId),
    #[error("{} tokens of a lane of {token_bytes} bytes a token came as {found} bytes", range.len())]
    Payload {
        range: IndexRange,
        token_bytes: u64,
        found: usize,
    },
}

/// KV that has come and is not taken in yet.
pub(super) struct Arrival {
    /// Who sent it over the network; `None` where this device did.
    peer: Option<GpuId>,
    pub(super) data: LaneData,
    blocks: Vec<KvBlockId>,
    payload: Payload,
}

enum Payload {
    Frame(LaneFrame),
    Local(Vec<u8>),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.payload(),
            Self::Local(bytes) => bytes,
        }
    }
}

/// Blocks of every unit.
pub(super) type Tables = BTreeMap<KvUnit, Vec<KvBlockId>>;

/// Whether sending waits for the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Kept,
    Ignored,
}

/// When there is a chunk to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// At once.
    Now,
    /// The rate allows the next one then.
    At(Instant),
    /// Not before something comes.
    None,
}

/// One handover's copying on one device.
pub(super) struct Copying {
    pub(super) handover: HandoverId,
    /// The layout whose caches are read.
    pub(super) source: HandoverId,
    lanes: BTreeMap<LaneId, Lane>,
    copy_rate: Option<BytesPerSec>,
    /// Until the coordinator asks for mirroring.
    pub(super) is_bulk: bool,
    outgoing: VecDeque<LaneData>,
    arrivals: VecDeque<Arrival>,
    lines: BTreeMap<GpuId, KvLine>,
    /// Devices that a lane leads to or from and whose connection does not stand.
    missing: BTreeSet<GpuId>,
    next_bulk: Instant,
}

struct Lane {
    lane: KvLane,
    token_bytes: u64,
}

impl Copying {
    pub(super) fn new(
        gpu: GpuId,
        (handover, source): (HandoverId, HandoverId),
        shadow: &Shadow,
        head_dim: u32,
    ) -> Self {
        let lane = |lane: &KvLane| {
            let heads: u64 = lane
                .slices
                .iter()
                .map(|slice| u64::from(slice.kv_heads.len()))
                .sum();
            // Key and value, four bytes a number.
            let token_bytes = heads.saturating_mul(8 * u64::from(head_dim));
            let lane = lane.clone();
            (lane.lane.id, Lane { lane, token_bytes })
        };
        Self {
            handover,
            source,
            lanes: shadow.lanes.iter().map(lane).collect(),
            copy_rate: shadow.copy_rate,
            is_bulk: true,
            outgoing: VecDeque::new(),
            arrivals: VecDeque::new(),
            lines: BTreeMap::new(),
            missing: peers(&shadow.lanes, gpu),
            next_bulk: clock::now(),
        }
    }

    pub(super) fn line_up(&mut self, peer: GpuId, line: KvLine) {
        self.missing.remove(&peer);
        self.lines.insert(peer, line);
    }

    /// Whether every connection that a lane needs stands.
    pub(super) fn is_connected(&self) -> bool {
        self.missing.is_empty()
    }

    /// Queues what the handover wants sent.
    pub(super) fn ship(&mut self, data: LaneData) {
        self.outgoing.push_back(data);
    }

    /// Queues what has come.
    pub(super) fn arrive(&mut self, peer: GpuId, data: LaneData, blocks: Vec<KvBlockId>, frame: LaneFrame) {
        self.arrivals.push_back(Arrival {
            peer: Some(peer),
            data,
            blocks,
            payload: Payload::Frame(frame),
        });
    }

    /// The oldest arrival.
    pub(super) fn take_arrival(&mut self) -> Option<Arrival> {
        let arrival = self.arrivals.pop_front()?;
        if let (Some(peer), Payload::Frame(frame)) = (arrival.peer, &arrival.payload) {
            self.note_consumed(peer, frame);
        }
        Some(arrival)
    }

    /// A frame of a peer is dealt with.
    pub(super) fn note_consumed(&self, peer: GpuId, frame: &LaneFrame) {
        if let Some(line) = self.lines.get(&peer) {
            line.note_consumed(frame);
        }
    }

    /// A unit's blocks belong to others now: what was to be sent of it is not there any more.
    pub(super) fn forget(&mut self, unit: KvUnit) {
        self.outgoing.retain(|data| data.unit != unit);
    }

    /// All KV is void.
    pub(super) fn clear(&mut self) {
        self.outgoing.clear();
        while self.take_arrival().is_some() {}
    }

    /// What there is to do between steps.
    pub(super) fn work(&self) -> Work {
        if !self.arrivals.is_empty() {
            return Work::Now;
        }
        if self.sendable(Room::Kept).is_none() {
            return Work::None;
        }
        if self.is_bulk && self.next_bulk > clock::now() {
            return Work::At(self.next_bulk);
        }
        Work::Now
    }

    /// The first queued item whose lane can take a chunk: lanes stay in order, and none waits for another.
    fn sendable(&self, room: Room) -> Option<usize> {
        self.outgoing.iter().position(|data| {
            let Some(lane) = self.lanes.get(&data.lane).map(|lane| &lane.lane) else {
                // Sending it gives the error.
                return true;
            };
            let line = self.lines.get(&lane.lane.to);
            lane.is_local() || line.is_some_and(|line| room == Room::Ignored || line.has_room())
        })
    }

    /// Sends one chunk of what is queued and has room; `false` where there is none.
    pub(super) fn send_chunk(&mut self, caches: &KvStore<Cpu>, tables: &Tables) -> Result<bool, CopyError> {
        self.send(Room::Kept, caches, tables)
    }

    /// Sends one chunk of what is queued, however much waits in the network; `false` where nothing is left.
    pub(super) fn send_tail_chunk(
        &mut self,
        caches: &KvStore<Cpu>,
        tables: &Tables,
    ) -> Result<bool, CopyError> {
        self.send(Room::Ignored, caches, tables)
    }

    fn send(&mut self, room: Room, caches: &KvStore<Cpu>, tables: &Tables) -> Result<bool, CopyError> {
        let Some(index) = self.sendable(room) else {
            return Ok(false);
        };
        let whole = self.outgoing[index];
        let lane = self
            .lanes
            .get(&whole.lane)
            .ok_or(CopyError::UnknownLane(whole.lane))?;
        let tokens = (CHUNK_BYTES / lane.token_bytes.max(1)).max(1);
        let end = u64::from(whole.to).min(u64::from(whole.from) + tokens) as u32;
        let data = LaneData { to: end, ..whole };
        if end == whole.to {
            self.outgoing.remove(index);
        } else {
            self.outgoing[index].from = end;
        }
        let table = tables.get(&data.unit).map_or(&[][..], Vec::as_slice);
        let (blocks, range) = covering(table, &data, caches.block_size());
        let mut payload = Vec::new();
        for slice in &lane.lane.slices {
            let part = KvPart {
                layer: slice.layer,
                kv_heads: slice.kv_heads,
                tokens: range,
            };
            caches.export(&blocks, part, &mut payload)?;
        }
        if self.is_bulk {
            self.pace(payload.len());
        }
        self.dispatch(data, blocks, payload)?;
        Ok(true)
    }

    /// Keeps to the rate on average: what was not used while steps ran may follow at once, up to [`BURST`].
    fn pace(&mut self, bytes: usize) {
        if let Some(rate) = self.copy_rate {
            let seconds = (bytes as f64 / rate.per_second().max(1.0)).min(60.0);
            let earliest = clock::now().checked_sub(BURST).unwrap_or(self.next_bulk);
            self.next_bulk = self.next_bulk.max(earliest) + Duration::from_secs_f64(seconds);
        }
    }

    fn dispatch(
        &mut self,
        data: LaneData,
        blocks: Vec<KvBlockId>,
        payload: Vec<u8>,
    ) -> Result<(), CopyError> {
        let to = self.lanes[&data.lane].lane.lane.to;
        match self.lines.get(&to) {
            Some(line) => line.send(&LaneHeader::Data { data, blocks }, &payload)?,
            None => self.arrivals.push_back(Arrival {
                peer: None,
                data,
                blocks,
                payload: Payload::Local(payload),
            }),
        }
        Ok(())
    }

    /// Writes what is new of an arrival into the shadow's caches.
    pub(super) fn apply(
        &self,
        arrival: &Arrival,
        fresh: &LaneData,
        caches: &mut KvStore<Cpu>,
    ) -> Result<(), CopyError> {
        let data = &arrival.data;
        let lane = self
            .lanes
            .get(&data.lane)
            .ok_or(CopyError::UnknownLane(data.lane))?;
        let payload = arrival.payload.bytes();
        let tokens = data.to.saturating_sub(data.from) as usize;
        let expected = u64::from(data.to.saturating_sub(data.from)).checked_mul(lane.token_bytes);
        if expected != Some(payload.len() as u64) {
            return Err(CopyError::Payload {
                range: IndexRange::new(data.from, data.to).unwrap_or_default(),
                token_bytes: lane.token_bytes,
                found: payload.len(),
            });
        }
        let first = data.from - data.from % caches.block_size();
        let range = IndexRange::new(fresh.from - first, fresh.to - first).unwrap_or_default();
        let mut rest = payload;
        for slice in &lane.lane.slices {
            let part = KvPart {
                layer: slice.layer,
                kv_heads: slice.kv_heads,
                tokens: range,
            };
            let (numbers, tail) = rest.split_at(tokens * row_bytes(lane, slice.kv_heads));
            rest = tail;
            let known = (fresh.from - data.from) as usize * row_bytes(lane, slice.kv_heads);
            caches.import(&arrival.blocks, part, &numbers[known..])?;
        }
        Ok(())
    }

    /// Says to the sender what has arrived; answers the word where the sender is this device.
    pub(super) fn confirm(&self, ack: LaneAck) -> Result<Option<LaneAck>, CopyError> {
        let lane = self
            .lanes
            .get(&ack.lane)
            .ok_or(CopyError::UnknownLane(ack.lane))?;
        if lane.lane.is_local() {
            return Ok(Some(ack));
        }
        if let Some(line) = self.lines.get(&lane.lane.lane.from) {
            line.send(&LaneHeader::Ack(ack), &[])?;
        }
        Ok(None)
    }
}

/// The other ends of a device's lanes.
pub(super) fn peers(lanes: &[KvLane], gpu: GpuId) -> BTreeSet<GpuId> {
    let crossing = lanes
        .iter()
        .map(|lane| lane.lane)
        .filter(|lane| lane.from != lane.to);
    crossing
        .filter_map(|lane| match lane {
            lane if lane.from == gpu => Some(lane.to),
            lane if lane.to == gpu => Some(lane.from),
            _ => None,
        })
        .collect()
}

/// Bytes of one token of a slice.
fn row_bytes(lane: &Lane, kv_heads: IndexRange) -> usize {
    let heads: u64 = lane
        .lane
        .slices
        .iter()
        .map(|slice| u64::from(slice.kv_heads.len()))
        .sum();
    (lane.token_bytes / heads.max(1)) as usize * kv_heads.len() as usize
}

/// The blocks that hold a range of tokens, and the range within them.
fn covering(table: &[KvBlockId], data: &LaneData, block_size: u32) -> (Vec<KvBlockId>, IndexRange) {
    let first = data.from / block_size;
    let last = data.to.div_ceil(block_size) as usize;
    let blocks = table
        .get(first as usize..last.min(table.len()))
        .unwrap_or_default();
    let start = first * block_size;
    let range = IndexRange::new(data.from - start, data.to - start).unwrap_or_default();
    (blocks.to_vec(), range)
}
