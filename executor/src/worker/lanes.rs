//! KV on its way from the runtime of one epoch to that of the next, between workers or inside one.
//!
//! A *slice* is a run of layers and KV heads that a device lacks and another has; it travels as chunks near
//! [`CHUNK_BYTES`], each a token range of one sequence in one layer. Sending runs on a thread of its own and
//! receiving on another, so that the step thread only reads and writes its own memory. Chunks of one lane arrive in
//! the order in which they were sent.
//!
//! Who is owed which tokens, and when, is not known here: that is the handover's state machine.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use infercluster_spec::layout::Stage;
use infercluster_spec::{GpuId, IndexRange, KvBlockId, Rank, SequenceId};
use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::kv::{KvError, KvPart, KvStore};
use crate::wire::{Connection, Kind, WireError};

/// Bytes of a chunk: 64 KiB would reach a quarter of a link's rate, much more would delay a step behind it.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Longest frame that a lane reads: one token row of a layer may be longer than a chunk.
const FRAME_LIMIT: u32 = 64 << 20;
/// How long a lane waits for its next chunk.
const LANE_SILENCE: Duration = Duration::from_secs(600);

/// Layers and KV heads of every sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KvSlice {
    /// Which layers of the model.
    pub layers: IndexRange,
    /// Which KV heads.
    pub kv_heads: IndexRange,
}

/// What stands before the bytes of a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkHeader {
    /// Whose KV.
    pub sequence: SequenceId,
    /// How often that sequence had lost its KV before: which of its block tables is meant.
    pub incarnation: u32,
    /// The layer.
    pub layer: u32,
    /// The KV heads.
    pub kv_heads: IndexRange,
    /// The token positions.
    pub tokens: IndexRange,
    /// The sequence's blocks, the same on every rank.
    pub block_table: Vec<KvBlockId>,
}

impl ChunkHeader {
    fn part(&self) -> KvPart {
        KvPart {
            layer: self.layer,
            kv_heads: self.kv_heads,
            tokens: self.tokens,
        }
    }
}

/// A piece of KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvChunk {
    /// What it is.
    pub header: ChunkHeader,
    /// Its numbers, in the form of [`KvStore::export`].
    pub bytes: Vec<u8>,
}

/// Tokens of one sequence that are to be moved.
#[derive(Debug, Clone, Copy)]
pub struct KvSpan<'a> {
    /// Whose.
    pub sequence: SequenceId,
    /// Which of its block tables.
    pub incarnation: u32,
    /// From and to which position.
    pub tokens: IndexRange,
    /// Its blocks.
    pub block_table: &'a [KvBlockId],
}

/// Reads a span of a slice out of a store, chunk by chunk, and gives every chunk to `take`.
pub fn export_span<B: Backend>(
    store: &KvStore<B>,
    slice: KvSlice,
    span: KvSpan<'_>,
    mut take: impl FnMut(KvChunk),
) -> Result<(), KvError> {
    for layer in slice.layers.iter() {
        for tokens in chunk_ranges(store, layer, slice.kv_heads, span.tokens)? {
            let header = ChunkHeader {
                sequence: span.sequence,
                incarnation: span.incarnation,
                layer,
                kv_heads: slice.kv_heads,
                tokens,
                block_table: span.block_table.to_vec(),
            };
            let mut bytes = Vec::new();
            store.export(&header.block_table, header.part(), &mut bytes)?;
            take(KvChunk { header, bytes });
        }
    }
    Ok(())
}

/// Token ranges whose bytes are near [`CHUNK_BYTES`], at least one token each.
fn chunk_ranges<B: Backend>(
    store: &KvStore<B>,
    layer: u32,
    kv_heads: IndexRange,
    tokens: IndexRange,
) -> Result<Vec<IndexRange>, KvError> {
    let one = IndexRange::new(tokens.start(), tokens.start().saturating_add(1)).unwrap_or_default();
    let part = KvPart {
        layer,
        kv_heads,
        tokens: one,
    };
    let row = store.part_bytes(part)?.0.max(1);
    let step = u32::try_from((CHUNK_BYTES / row).max(1)).unwrap_or(u32::MAX);
    let mut ranges = Vec::new();
    let mut start = tokens.start();
    while start < tokens.end() {
        let end = start.saturating_add(step).min(tokens.end());
        ranges.extend(IndexRange::new(start, end));
        start = end;
    }
    Ok(ranges)
}

/// Writes a chunk into a store; its size was checked against its header there.
pub fn import_chunk<B: Backend>(store: &mut KvStore<B>, chunk: &KvChunk) -> Result<(), KvError> {
    store.import(&chunk.header.block_table, chunk.header.part(), &chunk.bytes)
}

/// What a rank of the next layout already holds under the layout in force: copied inside the device, over no
/// connection. One slice for every run of layers with the same heads.
pub fn kept_slices(before: (&Stage, Rank), after: (&Stage, Rank), group_size: u32) -> Vec<KvSlice> {
    let heads = |(stage, rank): (&Stage, Rank), layer: u32| {
        let shard = stage.group_of(layer)?.shards.get(rank.index())?;
        Some(shard.kv_heads(group_size))
    };
    let mut slices: Vec<KvSlice> = Vec::new();
    for layer in after.0.layers().unwrap_or_default().iter() {
        let (Some(held), Some(wanted)) = (heads(before, layer), heads(after, layer)) else {
            continue;
        };
        let kv_heads = held.intersect(wanted);
        if kv_heads.is_empty() {
            continue;
        }
        match slices.last_mut() {
            Some(last) if last.kv_heads == kv_heads && last.layers.end() == layer => {
                last.layers = IndexRange::new(last.layers.start(), layer + 1).unwrap_or(last.layers);
            }
            _ => slices.extend(IndexRange::new(layer, layer + 1).map(|layers| KvSlice { layers, kv_heads })),
        }
    }
    slices
}

/// The sending ends of a worker's lanes, by receiver.
#[derive(Debug, Default)]
pub struct Outgoing {
    lanes: BTreeMap<GpuId, Sender<KvChunk>>,
}

impl Outgoing {
    /// Adds a lane with a thread of its own. `lost` hears why it ended before its time.
    pub fn open(
        &mut self,
        to: GpuId,
        connection: Connection,
        lost: impl FnOnce(GpuId, WireError) + Send + 'static,
    ) -> std::io::Result<()> {
        let (sender, queue) = mpsc::channel();
        thread::Builder::new().name("kv send".to_owned()).spawn(move || {
            if let Err(error) = send_all(&connection, &queue) {
                lost(to, error);
            }
        })?;
        self.lanes.insert(to, sender);
        Ok(())
    }

    /// Hands a chunk to a lane; `false` where there is none or it ended.
    pub fn send(&self, to: GpuId, chunk: KvChunk) -> bool {
        self.lanes.get(&to).is_some_and(|lane| lane.send(chunk).is_ok())
    }
}

fn send_all(connection: &Connection, queue: &Receiver<KvChunk>) -> Result<(), WireError> {
    while let Ok(chunk) = queue.recv() {
        connection.send(Kind::Control, &chunk.header)?;
        connection.send_bytes(Kind::Tensor, &chunk.bytes)?;
    }
    Ok(())
}

/// Reads a lane on a thread of its own until it ends; `take` gets every chunk in order, `ended` the reason.
pub fn receive_lane(
    connection: Connection,
    take: impl Fn(KvChunk) + Send + 'static,
    ended: impl FnOnce(WireError) + Send + 'static,
) -> std::io::Result<()> {
    let body = move || {
        let error = loop {
            match receive_chunk(&connection) {
                Ok(chunk) => take(chunk),
                Err(error) => break error,
            }
        };
        ended(error);
    };
    thread::Builder::new()
        .name("kv receive".to_owned())
        .spawn(body)
        .map(drop)
}

fn receive_chunk(connection: &Connection) -> Result<KvChunk, WireError> {
    let header: ChunkHeader = connection.receive(Kind::Control, LANE_SILENCE)?;
    let (found, bytes) = connection.receive_bytes(LANE_SILENCE, FRAME_LIMIT)?;
    if found != Kind::Tensor {
        return Err(WireError::UnexpectedKind {
            found,
            expected: Kind::Tensor,
        });
    }
    Ok(KvChunk { header, bytes })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use infercluster_spec::layout::{LayerGroup, Reduction, Seat, Shard};
    use infercluster_spec::model::{Family, Rope};
    use infercluster_spec::{Dtype, Layout, Model, ReplicaId, StageId};

    use super::*;
    use crate::backend::Cpu;

    /// Two layers, 8 query heads on 4 KV heads as wide as a lane's chunk splitting needs.
    fn model() -> Model {
        Model {
            name: "lanes".to_owned(),
            family: Family::Llama,
            layers: 2,
            hidden: 64,
            query_heads: 8,
            kv_heads: 4,
            head_dim: 512,
            ffn: 64,
            vocab: 64,
            tied_embeddings: false,
            qkv_bias: false,
            rms_epsilon: 1e-5,
            rope: Rope {
                theta: 10_000.0,
                llama3: None,
            },
            max_positions: 1024,
            dtype: Dtype::F32,
            experts: None,
            sliding_window: None,
        }
    }

    fn range(start: u32, end: u32) -> IndexRange {
        IndexRange::new(start, end).unwrap()
    }

    /// One stage whose query heads are cut at `cut`.
    fn layout(cut: u32) -> Layout {
        let mut layout = Layout::single(&model(), Reduction::Invariant);
        let whole = layout.replicas[0].stages[0].layer_groups[0].shards[0].clone();
        let shard = |gpu, heads| Shard {
            gpu: GpuId(gpu),
            query_heads: heads,
            ..whole.clone()
        };
        layout.gpus = vec![GpuId(0), GpuId(1)];
        layout.replicas[0].stages[0].layer_groups = vec![LayerGroup {
            layers: range(0, 2),
            shards: vec![shard(0, range(0, cut)), shard(1, range(cut, 8))],
        }];
        layout
    }

    fn store(layout: &Layout, rank: u32) -> KvStore<Cpu> {
        let seat = Seat {
            replica: ReplicaId(0),
            stage: StageId(0),
            rank: Rank(rank),
        };
        KvStore::new(Cpu::new(), &model(), layout, seat, 40).unwrap()
    }

    /// Blocks in no order.
    static TABLE: [KvBlockId; 10] = [
        KvBlockId(9),
        KvBlockId(2),
        KvBlockId(33),
        KvBlockId(4),
        KvBlockId(8),
        KvBlockId(17),
        KvBlockId(39),
        KvBlockId(0),
        KvBlockId(1),
        KvBlockId(21),
    ];
    const TOKENS: u32 = 150;

    /// The bytes that layer, head, token and place determine.
    fn pattern(layer: u32, heads: IndexRange, tokens: IndexRange) -> Vec<u8> {
        let mut bytes = Vec::new();
        for token in tokens.iter() {
            for half in 0..2 {
                for head in heads.iter() {
                    for place in 0..512 {
                        let number = ((((token * 2 + half) * 8 + head) * 2 + layer) * 512 + place) as f32;
                        bytes.extend_from_slice(&number.to_le_bytes());
                    }
                }
            }
        }
        bytes
    }

    fn fill(store: &mut KvStore<Cpu>, heads: IndexRange) {
        for layer in 0..2 {
            let tokens = range(0, TOKENS);
            let part = KvPart {
                layer,
                kv_heads: heads,
                tokens,
            };
            store
                .import(&TABLE, part, &pattern(layer, heads, tokens))
                .unwrap();
        }
    }

    fn span(tokens: IndexRange) -> KvSpan<'static> {
        KvSpan {
            sequence: SequenceId(5),
            incarnation: 1,
            tokens,
            block_table: &TABLE,
        }
    }

    #[test]
    fn slices_arrive_whole_and_in_chunks() {
        // 4:4 becomes 6:2 query heads: KV head 2 moves from rank 1 to rank 0, heads 0 and 1 stay there.
        let (before, after) = (layout(4), layout(6));
        let mut held = store(&before, 0);
        fill(&mut held, range(0, 2));
        let mut giver = store(&before, 1);
        fill(&mut giver, range(2, 4));
        let mut taker = store(&after, 0);

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialed = Connection::dial(listener.local_addr().unwrap(), Duration::from_secs(10)).unwrap();
        let accepted = Connection::new(listener.accept().unwrap().0).unwrap();
        let mut outgoing = Outgoing::default();
        outgoing
            .open(GpuId(0), dialed, |gpu, error| panic!("{gpu}: {error}"))
            .unwrap();
        let (arrived, chunks) = mpsc::channel();
        receive_lane(accepted, move |chunk| arrived.send(chunk).unwrap(), |_| {}).unwrap();

        let moved = KvSlice {
            layers: range(0, 2),
            kv_heads: range(2, 3),
        };
        // Bulk first, then what came since.
        for tokens in [range(0, 140), range(140, TOKENS)] {
            let send = |chunk: KvChunk| assert!(outgoing.send(GpuId(0), chunk));
            export_span(&giver, moved, span(tokens), send).unwrap();
        }
        drop(outgoing);
        let chunks: Vec<KvChunk> = chunks.iter().collect();
        // One token of one head is 2 x 512 x 4 bytes, so 256 tokens fill a chunk: two spans of two layers.
        assert_eq!(chunks.len(), 4);
        for chunk in &chunks {
            assert!(chunk.bytes.len() as u64 <= CHUNK_BYTES);
            import_chunk(&mut taker, chunk).unwrap();
        }
        let stage = |layout: &Layout| layout.replicas[0].stages[0].clone();
        let kept = kept_slices((&stage(&before), Rank(0)), (&stage(&after), Rank(0)), 2);
        let expected = KvSlice {
            layers: range(0, 2),
            kv_heads: range(0, 2),
        };
        assert_eq!(kept, [expected]);
        export_span(&held, kept[0], span(range(0, TOKENS)), |chunk| {
            import_chunk(&mut taker, &chunk).unwrap()
        })
        .unwrap();
        for layer in 0..2 {
            let part = KvPart {
                layer,
                kv_heads: range(0, 3),
                tokens: range(0, TOKENS),
            };
            let mut bytes = Vec::new();
            taker.export(&TABLE, part, &mut bytes).unwrap();
            assert!(
                bytes == pattern(layer, part.kv_heads, part.tokens),
                "layer {layer}"
            );
        }
    }

    #[test]
    fn long_spans_are_cut_near_a_mebibyte() {
        let store = store(&layout(8), 0);
        // Four heads: 16 KiB a token, 64 tokens a chunk.
        let ranges = chunk_ranges(&store, 0, range(0, 4), range(3, 150)).unwrap();
        assert_eq!(ranges, [range(3, 67), range(67, 131), range(131, 150)]);
        assert!(
            chunk_ranges(&store, 0, range(0, 4), range(7, 7))
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn a_chunk_that_lies_about_its_size_or_place_is_an_error() {
        let mut store = store(&layout(4), 0);
        let header = ChunkHeader {
            sequence: SequenceId(1),
            incarnation: 0,
            layer: 0,
            kv_heads: range(0, 1),
            tokens: range(0, 2),
            block_table: TABLE.to_vec(),
        };
        let chunk = |header: ChunkHeader, bytes: usize| KvChunk {
            header,
            bytes: vec![0; bytes],
        };
        assert!(import_chunk(&mut store, &chunk(header.clone(), 2 * 4096)).is_ok());
        let outside = |change: fn(&mut ChunkHeader)| {
            let mut header = header.clone();
            change(&mut header);
            chunk(header, 2 * 4096)
        };
        let lies = [
            chunk(header.clone(), 2 * 4096 - 4),
            outside(|header| header.layer = 9),
            outside(|header| header.kv_heads = range(1, 3)),
            outside(|header| header.tokens = range(400, 402)),
            outside(|header| header.block_table = vec![KvBlockId(40)]),
        ];
        for lie in lies {
            assert!(import_chunk(&mut store, &lie).is_err(), "{:?}", lie.header);
        }
    }
}
