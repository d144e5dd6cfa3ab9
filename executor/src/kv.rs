//! The KV cache of one seat: blocks of a fixed number of tokens, in every layer only for the KV heads that
//! this rank holds there.
//!
//! Which block belongs to whom is the scheduler's ledger; this store only keeps numbers. Block ids mean the
//! same on every rank of a replica. What leaves through [`KvStore::export`] is independent of block size,
//! block order and device: `[token][key, value][head][head_dim]` as little-endian f32.

use infercluster_spec::{Bytes, Dtype, IndexRange, KvBlockId, Layout, Model, layout::Seat};

use crate::backend::{Backend, BackendError, KvShape, KvSlot};
use crate::step::StepItem;

/// Why the KV cache refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// The device refused.
    #[error("kv cache: {0}")]
    Backend(#[from] BackendError),
    /// The layout has no such seat.
    #[error("the layout has no {} {} {}", .0.replica, .0.stage, .0.rank)]
    NoSeat(Seat),
    /// Query heads that do not share KV heads evenly.
    #[error("{query_heads} query heads are no multiple of {kv_heads} kv heads")]
    Heads {
        /// Query heads of the model.
        query_heads: u32,
        /// KV heads of the model.
        kv_heads: u32,
    },
    /// A cache dtype that this executor does not store.
    #[error("kv cache in {found} is not supported, only f32")]
    Dtype {
        /// What the layout asks for.
        found: Dtype,
    },
    /// A pool whose size overflows or is zero.
    #[error("a pool of {blocks} blocks of {block_size} tokens cannot be allocated")]
    PoolSize {
        /// Blocks asked for.
        blocks: u32,
        /// Tokens of a block.
        block_size: u32,
    },
    /// A block outside the pool.
    #[error("{block} is outside the pool of {blocks} blocks")]
    UnknownBlock {
        /// The block.
        block: KvBlockId,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// A block table too short for its tokens.
    #[error("{needed} tokens need more than the {blocks} blocks of their table")]
    ShortTable {
        /// One past the last position.
        needed: u32,
        /// Blocks in the table.
        blocks: usize,
    },
    /// A layer that this seat does not hold.
    #[error("layer {layer} is not among the layers {held} of this seat")]
    UnknownLayer {
        /// The layer.
        layer: u32,
        /// Layers that are held.
        held: IndexRange,
    },
    /// KV heads that this seat does not hold in that layer.
    #[error("kv heads {asked} of layer {layer} are not among the held {held}")]
    UnknownHeads {
        /// The layer.
        layer: u32,
        /// Heads that were asked for.
        asked: IndexRange,
        /// Heads that are held.
        held: IndexRange,
    },
    /// Imported bytes that are not what their range says.
    #[error("kv of {tokens} tokens takes {expected} bytes, {found} were given")]
    Payload {
        /// Tokens of the range.
        tokens: u32,
        /// Bytes that the range asks for.
        expected: u64,
        /// Bytes that were given.
        found: u64,
    },
}

/// A part of a sequence's KV in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPart {
    /// The layer, numbered in the whole model.
    pub layer: u32,
    /// KV heads, numbered in the whole model.
    pub kv_heads: IndexRange,
    /// Token positions of the sequence.
    pub tokens: IndexRange,
}

struct LayerCache<B: Backend> {
    kv_heads: IndexRange,
    shape: KvShape,
    cache: B::Buffer,
}

/// Keys and values of one seat.
pub struct KvStore<B: Backend> {
    backend: B,
    layers: IndexRange,
    blocks: u32,
    block_size: u32,
    caches: Vec<LayerCache<B>>,
}

impl<B: Backend> KvStore<B> {
    /// An empty pool of `blocks` blocks for the layers and heads of a seat.
    pub fn new(backend: B, model: &Model, layout: &Layout, seat: Seat, blocks: u32) -> Result<Self, KvError> {
        let (query_heads, kv_heads) = (model.query_heads, model.kv_heads);
        if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return Err(KvError::Heads {
                query_heads,
                kv_heads,
            });
        }
        let stage = layout.stage(seat).ok_or(KvError::NoSeat(seat))?;
        if layout.kv.dtype != Dtype::F32 {
            return Err(KvError::Dtype {
                found: layout.kv.dtype,
            });
        }
        let block_size = layout.kv.block_size;
        let mut caches = Vec::new();
        for group in &stage.layer_groups {
            let shard = group.shards.get(seat.rank.index()).ok_or(KvError::NoSeat(seat))?;
            let kv_heads = shard.kv_heads(model.group_size());
            let shape = KvShape {
                kv_heads: kv_heads.len() as usize,
                head_dim: model.head_dim as usize,
                block_size: block_size as usize,
            };
            let len = pool_len(shape, blocks).ok_or(KvError::PoolSize { blocks, block_size })?;
            for _ in group.layers.iter() {
                let cache = backend.allocate(len)?;
                caches.push(LayerCache {
                    kv_heads,
                    shape,
                    cache,
                });
            }
        }
        let layers = stage.layers().unwrap_or_default();
        Ok(Self {
            backend,
            layers,
            blocks,
            block_size,
            caches,
        })
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Layers that are held, numbered in the whole model.
    pub fn layers(&self) -> IndexRange {
        self.layers
    }

    /// KV heads that are held in a layer.
    pub fn kv_heads(&self, layer: u32) -> Result<IndexRange, KvError> {
        Ok(self.caches[self.layer_index(layer)?].kv_heads)
    }

    /// Bytes of the whole pool.
    pub fn bytes(&self) -> Bytes {
        let elements: usize = self
            .caches
            .iter()
            .map(|layer| self.backend.len(&layer.cache))
            .sum();
        Dtype::F32.bytes(elements as u64)
    }

    /// Bytes that [`Self::export`] gives for a part.
    pub fn part_bytes(&self, part: KvPart) -> Result<Bytes, KvError> {
        let layer = self.part_layer(part)?;
        let elements = self.part_row(layer, part) as u64 * u64::from(part.tokens.len());
        Ok(Dtype::F32.bytes(elements))
    }

    /// A part of the sequence whose blocks are `block_table`, appended to `out`.
    pub fn export(&self, block_table: &[KvBlockId], part: KvPart, out: &mut Vec<u8>) -> Result<(), KvError> {
        let layer = self.part_layer(part)?;
        let slots = self.slots(block_table, part.tokens)?;
        let mut row = vec![0.0; self.part_row(layer, part)];
        out.reserve(size_of_val(row.as_slice()) * slots.len());
        for slot in slots {
            for (chunk, at) in row
                .chunks_exact_mut(layer.shape.head_dim)
                .zip(layer.offsets(slot, part.kv_heads))
            {
                self.backend.download(&layer.cache, at, chunk)?;
            }
            // Nothing on a little-endian machine: whole rows are copied.
            row.iter_mut().for_each(swap_on_big_endian);
            out.extend_from_slice(bytemuck::cast_slice(&row));
        }
        Ok(())
    }

    /// Stores what [`Self::export`] gave, here or elsewhere, at the same part of a sequence.
    pub fn import(&mut self, block_table: &[KvBlockId], part: KvPart, bytes: &[u8]) -> Result<(), KvError> {
        let expected = self.part_bytes(part)?.0;
        if bytes.len() as u64 != expected {
            return Err(KvError::Payload {
                tokens: part.tokens.len(),
                expected,
                found: bytes.len() as u64,
            });
        }
        let slots = self.slots(block_table, part.tokens)?;
        let index = self.layer_index(part.layer)?;
        let row_len = self.part_row(&self.caches[index], part);
        let layer = &mut self.caches[index];
        let mut row = vec![0.0; row_len];
        for (slot, bytes) in slots.into_iter().zip(bytes.chunks_exact((row_len * 4).max(1))) {
            bytemuck::cast_slice_mut(&mut row).copy_from_slice(bytes);
            row.iter_mut().for_each(swap_on_big_endian);
            let LayerCache {
                kv_heads,
                shape,
                cache,
            } = &mut *layer;
            for (chunk, at) in
                row.chunks_exact(shape.head_dim)
                    .zip(offsets(*shape, kv_heads.start(), slot, part.kv_heads))
            {
                self.backend.upload(chunk, cache, at)?;
            }
        }
        Ok(())
    }

    /// Slots of an item's new tokens. Fails where its table is too short or names blocks outside the pool.
    pub(crate) fn item_slots(&self, item: &StepItem) -> Result<Vec<KvSlot>, KvError> {
        let end = u32::try_from(item.tokens.len())
            .ok()
            .and_then(|tokens| item.start.checked_add(tokens));
        let tokens = end.and_then(|end| IndexRange::new(item.start, end));
        let tokens = tokens.ok_or(KvError::ShortTable {
            needed: u32::MAX,
            blocks: item.block_table.len(),
        })?;
        self.check_table(&item.block_table)?;
        self.slots(&item.block_table, tokens)
    }

    /// A layer's cache and its shape.
    pub(crate) fn layer(&mut self, layer: u32) -> Result<(KvShape, &mut B::Buffer), KvError> {
        let index = self.layer_index(layer)?;
        let LayerCache { shape, cache, .. } = &mut self.caches[index];
        Ok((*shape, cache))
    }

    fn check_table(&self, block_table: &[KvBlockId]) -> Result<(), KvError> {
        match block_table.iter().find(|block| block.0 >= self.blocks) {
            Some(block) => Err(KvError::UnknownBlock {
                block: *block,
                blocks: self.blocks,
            }),
            None => Ok(()),
        }
    }

    fn slots(&self, block_table: &[KvBlockId], tokens: IndexRange) -> Result<Vec<KvSlot>, KvError> {
        self.check_table(block_table)?;
        let capacity = block_table.len() as u64 * u64::from(self.block_size);
        if u64::from(tokens.end()) > capacity {
            return Err(KvError::ShortTable {
                needed: tokens.end(),
                blocks: block_table.len(),
            });
        }
        let slot = |position: u32| KvSlot {
            block: block_table[(position / self.block_size) as usize],
            offset: (position % self.block_size) as usize,
        };
        Ok(tokens.iter().map(slot).collect())
    }

    fn layer_index(&self, layer: u32) -> Result<usize, KvError> {
        if self.layers.contains(layer) {
            Ok((layer - self.layers.start()) as usize)
        } else {
            Err(KvError::UnknownLayer {
                layer,
                held: self.layers,
            })
        }
    }

    fn part_layer(&self, part: KvPart) -> Result<&LayerCache<B>, KvError> {
        let layer = &self.caches[self.layer_index(part.layer)?];
        if part.kv_heads.intersect(layer.kv_heads) != part.kv_heads {
            return Err(KvError::UnknownHeads {
                layer: part.layer,
                asked: part.kv_heads,
                held: layer.kv_heads,
            });
        }
        Ok(layer)
    }

    fn part_row(&self, layer: &LayerCache<B>, part: KvPart) -> usize {
        2 * part.kv_heads.len() as usize * layer.shape.head_dim
    }
}

impl<B: Backend> LayerCache<B> {
    fn offsets(&self, slot: KvSlot, kv_heads: IndexRange) -> impl Iterator<Item = usize> + use<B> {
        offsets(self.shape, self.kv_heads.start(), slot, kv_heads)
    }
}

/// Positions of keys, then of values, of these heads in one slot of a cache whose first head is `first`.
fn offsets(
    shape: KvShape,
    first: u32,
    slot: KvSlot,
    kv_heads: IndexRange,
) -> impl Iterator<Item = usize> + use<> {
    [0, shape.value_offset()].into_iter().flat_map(move |value| {
        kv_heads
            .iter()
            .map(move |head| shape.key_offset(slot, (head - first) as usize) + value)
    })
}

/// Turns a number of this machine into little-endian, or back: nothing on nearly all machines.
fn swap_on_big_endian(number: &mut f32) {
    *number = f32::from_bits(number.to_bits().to_le());
}

/// Elements of a pool; `None` where there are none to speak of or too many.
fn pool_len(shape: KvShape, blocks: u32) -> Option<usize> {
    if blocks == 0 || shape.block_size == 0 {
        return None;
    }
    2usize
        .checked_mul(shape.kv_heads)?
        .checked_mul(shape.block_size)?
        .checked_mul(shape.head_dim)?
        .checked_mul(blocks as usize)
        .filter(|len| *len <= isize::MAX as usize / 4)
}
