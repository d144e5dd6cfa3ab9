//! The device interface: about a dozen operators on opaque buffers, cut for a GPU.
//!
//! Activations, accumulation and the KV cache are f32; weights stay in the dtype they are stored in and are
//! widened exactly inside the operators. A call may only queue its work: results are there after
//! [`Backend::synchronize`] or [`Backend::download`]. Operators take shapes, never strides, and panic where
//! a buffer is shorter than its shape says, since that is a bug of the caller and not of the input.

mod cpu;
mod reference;

use infercluster_spec::{Dtype, IndexRange, KvBlockId};

pub use cpu::{Cpu, Matrix};
pub use reference::Reference;

pub use crate::numerics::Isa;

/// Why a device did not do what was asked.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// No memory left for a buffer.
    #[error("the device has no memory for {elements} numbers more")]
    OutOfMemory {
        /// How many f32 or weight elements were asked for.
        elements: usize,
    },
    /// Weights that the operators cannot read.
    #[error("weights stored as {found} cannot be computed with, known are f32, bf16 and f16")]
    UnsupportedDtype {
        /// The stored dtype.
        found: Dtype,
    },
    /// Weight bytes that are not what their shape says.
    #[error("a weight of {rows} x {columns} {dtype} takes {expected} bytes, {found} were given")]
    WeightBytes {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
        /// Stored dtype.
        dtype: Dtype,
        /// Bytes that the shape asks for.
        expected: u64,
        /// Bytes that were given.
        found: u64,
    },
}

/// Rows and columns of a weight: `rows` outputs of `columns` inputs each, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
}

/// Heads of a matrix `[tokens, heads x head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// How many heads.
    pub heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

/// One layer's KV cache: `[block][key, value][head][slot][head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads held in this layer.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_size: usize,
}

impl KvShape {
    /// Elements of one block.
    pub fn block_len(&self) -> usize {
        2 * self.kv_heads * self.block_size * self.head_dim
    }

    /// Elements from the key of a slot to its value.
    pub fn value_offset(&self) -> usize {
        self.kv_heads * self.block_size * self.head_dim
    }

    /// Position of a head's key in a slot.
    pub fn key_offset(&self, slot: KvSlot, head: usize) -> usize {
        slot.block.index() * self.block_len() + (head * self.block_size + slot.offset) * self.head_dim
    }
}

/// Where one token's keys and values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// Which block of the pool.
    pub block: KvBlockId,
    /// Which token of the block.
    pub offset: usize,
}

/// New tokens of one sequence in a batch, for attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpan<'a> {
    /// Row of the batch that its first new token has.
    pub first_row: usize,
    /// How many new tokens.
    pub rows: usize,
    /// Position of the first new token in its sequence.
    pub start: u32,
    /// Blocks of the sequence, enough for `start + rows` tokens.
    pub block_table: &'a [KvBlockId],
}

/// Heads that an attention computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// The cache of the layer. Its first head is the KV head of the first query head.
    pub kv: KvShape,
    /// Query heads of this rank, numbered in the whole model.
    pub query_heads: IndexRange,
    /// Query heads that share one KV head.
    pub group_size: u32,
    /// Factor on every score.
    pub scale: f32,
}

impl AttentionShape {
    /// The held KV head that serves the `local`-th query head of this rank.
    pub fn kv_head(&self, local: usize) -> usize {
        let first = self.query_heads.start() / self.group_size;
        ((self.query_heads.start() + local as u32) / self.group_size - first) as usize
    }
}

/// A device that can run Llama-like layers. A clone is another handle of the same device.
pub trait Backend: Clone + Send + 'static {
    /// Memory of the device, in f32 elements.
    type Buffer: Send;
    /// A weight matrix in device memory, in its stored dtype.
    type Weight: Send;

    /// The numerics profile that this device computes in.
    fn numerics(&self) -> &'static str;

    /// Zeroed memory.
    fn allocate(&self, len: usize) -> Result<Self::Buffer, BackendError>;

    /// Elements of a buffer.
    fn len(&self, buffer: &Self::Buffer) -> usize;

    /// Copies to the device.
    fn upload(&self, from: &[f32], to: &mut Self::Buffer, offset: usize) -> Result<(), BackendError>;

    /// Copies from the device, after everything queued before.
    fn download(&self, from: &Self::Buffer, offset: usize, to: &mut [f32]) -> Result<(), BackendError>;

    /// A weight from its stored little-endian bytes.
    fn load_weight(
        &self,
        bytes: &[u8],
        shape: MatrixShape,
        dtype: Dtype,
    ) -> Result<Self::Weight, BackendError>;

    /// Returns when everything queued is done.
    fn synchronize(&self) -> Result<(), BackendError>;

    /// `out[m, rows] = x[m, columns] * weight^T`, plus `bias[rows]` where there is one.
    fn gemm(
        &self,
        x: &Self::Buffer,
        m: usize,
        weight: &Self::Weight,
        bias: Option<&Self::Buffer>,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `out = x / sqrt(mean(x^2) + epsilon) * gain` for each of `m` rows as wide as `gain`.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        m: usize,
        gain: &Self::Buffer,
        epsilon: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Rotates each head of `x[positions, heads x head_dim]`, rotate-half form. Row `p` of the table holds
    /// `head_dim / 2` cosines and as many sines.
    fn rope(
        &self,
        x: &mut Self::Buffer,
        shape: HeadShape,
        positions: &[u32],
        table: &Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Stores row `i` of `keys` and `values` (`[slots, kv_heads x head_dim]`) at `slots[i]`.
    fn kv_write(
        &self,
        cache: &mut Self::Buffer,
        shape: KvShape,
        slots: &[KvSlot],
        keys: &Self::Buffer,
        values: &Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Attention of every span's new tokens over their sequence up to themselves:
    /// `out[tokens, query_heads x head_dim]`. Keys and values of the new tokens are in the cache.
    fn attention(
        &self,
        query: &Self::Buffer,
        cache: &Self::Buffer,
        shape: AttentionShape,
        spans: &[AttentionSpan<'_>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `gate = silu(gate) * up` for `len` elements.
    fn silu_mul(&self, gate: &mut Self::Buffer, up: &Self::Buffer, len: usize) -> Result<(), BackendError>;

    /// `x += y` for `len` elements.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer, len: usize) -> Result<(), BackendError>;

    /// Sets the first `len` elements to zero.
    fn clear(&self, x: &mut Self::Buffer, len: usize) -> Result<(), BackendError>;

    /// Turns matrices `[rows, widths[0]], [rows, widths[1]], ...` that lie one after another into one
    /// `[rows, sum of widths]`: what an uneven gather needs afterwards.
    fn interleave(
        &self,
        parts: &Self::Buffer,
        rows: usize,
        widths: &[usize],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `out[i] = x[rows[i]]` for rows of `width` elements.
    fn select_rows(
        &self,
        x: &Self::Buffer,
        width: usize,
        rows: &[usize],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;
}
