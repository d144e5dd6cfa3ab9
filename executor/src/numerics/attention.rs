//! Attention over the paged cache: one recurrence per query, fixed by absolute positions.
//!
//! Keys are taken in tiles of [`TILE`] tokens and splits of [`SPLIT`] tokens, both aligned to the token's
//! absolute position, so neither block size nor chunk, batch or rank enters the bits. Inside a split a query
//! keeps a running maximum, sum and mixed value (online softmax); splits are merged in ascending order. A
//! query skips tiles that lie wholly behind it. Prefill computes several queries beside each other, which
//! only shares loads: each runs the same operations in the same order as alone.

#![expect(
    clippy::needless_range_loop,
    reason = "register tiles are arrays indexed by constants, several at once"
)]

use super::elementwise::{exp, exp_minus, sum};
use super::gemm::dots;
use super::lanes::{LANES, Lanes, Stored, store_first};
use crate::backend::{AttentionShape, AttentionSpan, KvSlot};

/// Tokens of one tile.
pub(crate) const TILE: usize = 64;
/// Tokens of one split.
pub(crate) const SPLIT: usize = 512;

/// Operands of `Backend::attention`.
pub(crate) struct Attention<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) cache: &'a [f32],
    pub(crate) shape: AttentionShape,
    pub(crate) spans: &'a [AttentionSpan<'a>],
    pub(crate) out: &'a mut [f32],
}

super::kernel! {
    /// Attention of every span.
    attention(args: Attention<'_>) = lanes attention
}

#[inline(always)]
unsafe fn attention<V: Lanes, const MR: usize, const NR: usize>(args: Attention<'_>) {
    let Attention {
        query,
        cache,
        shape,
        spans,
        out,
    } = args;
    let heads = shape.query_heads.len() as usize;
    let mut work = Work::<MR>::new(shape.kv.head_dim);
    for span in spans {
        let mut head = 0;
        while head < heads {
            let kv_head = shape.kv_head(head);
            let same = (head..heads)
                .take_while(|&next| shape.kv_head(next) == kv_head)
                .count();
            work.locate(cache.len(), &shape, span, kv_head);
            // Queries of one KV head, a token's heads beside each other, tokens ascending.
            let queries = span.rows * same;
            let mut first = 0;
            while first < queries {
                let count = (queries - first).min(MR);
                for slot in 0..MR {
                    let query = first + slot.min(count - 1);
                    let (row, local) = (query / same, head + query % same);
                    work.at[slot] = ((span.first_row + row) * heads + local) * shape.kv.head_dim;
                    work.visible[slot] = span.start as usize + row + 1;
                }
                // SAFETY: the caller's features; `locate` has checked every key and value, and `tile`
                // checks the queries.
                unsafe { work.run::<V, NR>(query, cache, shape.scale, shape.kv.value_offset()) };
                for slot in 0..count {
                    let target = &mut out[work.at[slot]..][..shape.kv.head_dim];
                    let total = work.total[slot].sum;
                    for (out, mixed) in target.iter_mut().zip(work.total_mixed(slot)) {
                        *out = mixed / total;
                    }
                }
                first += count;
            }
            head += same;
        }
    }
}

/// State of a softmax on its way: the largest score and the sum of weights against it.
#[derive(Clone, Copy)]
struct Softmax {
    largest: f32,
    sum: f32,
}

/// Elements of the values that are mixed at once, and how far each query sees into the tile.
struct Column<const MR: usize> {
    at: usize,
    fade: [f32; MR],
    valid: [usize; MR],
    /// Tokens that every query sees.
    common: usize,
}

const EMPTY: Softmax = Softmax {
    largest: f32::NEG_INFINITY,
    sum: 0.0,
};

/// Buffers of `MR` queries beside each other. Unused places repeat the last query.
struct Work<const MR: usize> {
    head_dim: usize,
    /// Position of every visible token's key in the cache.
    keys: Vec<usize>,
    /// Position of each query.
    at: [usize; MR],
    /// Tokens that each query sees; ascending.
    visible: [usize; MR],
    scores: [[f32; TILE]; MR],
    split: [Softmax; MR],
    total: [Softmax; MR],
    /// Mixed values of the split, then of all splits before: `[2][MR][head_dim]`.
    mixed: Vec<f32>,
}

impl<const MR: usize> Work<MR> {
    fn new(head_dim: usize) -> Self {
        Self {
            head_dim,
            keys: Vec::new(),
            at: [0; MR],
            visible: [0; MR],
            scores: [[0.0; TILE]; MR],
            split: [EMPTY; MR],
            total: [EMPTY; MR],
            mixed: vec![0.0; 2 * MR * head_dim],
        }
    }

    fn total_mixed(&self, slot: usize) -> &[f32] {
        &self.mixed[(MR + slot) * self.head_dim..][..self.head_dim]
    }

    /// Finds the keys of a span's tokens and checks that they and their values lie in the cache.
    fn locate(&mut self, cache_len: usize, shape: &AttentionShape, span: &AttentionSpan<'_>, kv_head: usize) {
        self.keys.clear();
        let tokens = span.start as usize + span.rows;
        for (index, &block) in span.block_table.iter().enumerate() {
            let first = index * shape.kv.block_size;
            for offset in 0..tokens.saturating_sub(first).min(shape.kv.block_size) {
                let key = shape.kv.key_offset(KvSlot { block, offset }, kv_head);
                let end = key + shape.kv.value_offset() + shape.kv.head_dim;
                assert!(
                    end <= cache_len,
                    "{block} ends at {end} of a cache of {cache_len}"
                );
                self.keys.push(key);
            }
        }
        assert!(
            self.keys.len() == tokens,
            "a block table too short for {tokens} tokens"
        );
    }

    /// The whole recurrence of the queries at `at`.
    ///
    /// # Safety
    /// Features as [`Lanes`]; `keys` were located in this cache, whose values lie `value_offset` behind.
    #[inline(always)]
    unsafe fn run<V: Lanes, const NR: usize>(
        &mut self,
        query: &[f32],
        cache: &[f32],
        scale: f32,
        value_offset: usize,
    ) {
        self.total = [EMPTY; MR];
        let end = self.visible[MR - 1];
        let mut split = 0;
        while split < end {
            self.split = [EMPTY; MR];
            self.mixed[..MR * self.head_dim].fill(0.0);
            let mut tile = split;
            while tile < end.min(split + SPLIT) {
                let tokens = (end - tile).min(TILE);
                // SAFETY: the caller's promise.
                unsafe {
                    self.score::<V, NR>(query, cache, tile, tokens, scale);
                    self.mix::<V>(cache, tile, value_offset);
                }
                tile += TILE;
            }
            self.merge();
            split += SPLIT;
        }
    }

    /// Scores of every query against the tokens of a tile.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline(always)]
    unsafe fn score<V: Lanes, const NR: usize>(
        &mut self,
        query: &[f32],
        cache: &[f32],
        tile: usize,
        tokens: usize,
        scale: f32,
    ) {
        let dim = self.head_dim;
        let queries: [*const f32; MR] = std::array::from_fn(|slot| query[self.at[slot]..][..dim].as_ptr());
        let keys = &self.keys[tile..tile + tokens];
        let mut token = 0;
        while token < tokens {
            let count = if token + NR <= tokens { NR } else { 1 };
            // SAFETY: queries are slices of `dim`; keys were located, each `dim` long.
            unsafe {
                let key = |j: usize| cache.as_ptr().add(keys[token + j]);
                if count == NR {
                    let dots = dots::<V, f32, MR, NR>(queries, std::array::from_fn(key), dim);
                    for slot in 0..MR {
                        for j in 0..NR {
                            self.scores[slot][token + j] = dots[slot][j] * scale;
                        }
                    }
                } else {
                    let dots = dots::<V, f32, MR, 1>(queries, [key(0)], dim);
                    for slot in 0..MR {
                        self.scores[slot][token] = dots[slot][0] * scale;
                    }
                }
            }
            token += count;
        }
    }

    /// Turns the scores of a tile into weights and mixes its values in.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline(always)]
    unsafe fn mix<V: Lanes>(&mut self, cache: &[f32], tile: usize, value_offset: usize) {
        let mut valid = [0; MR];
        let mut fade = [1.0; MR];
        for slot in 0..MR {
            valid[slot] = self.visible[slot].saturating_sub(tile).min(TILE);
            if valid[slot] > 0 {
                // SAFETY: the caller's features.
                fade[slot] = unsafe { self.weigh::<V>(slot, valid[slot]) };
            }
        }
        // Visible counts ascend, so the queries that see this tile are the last ones, and all of those
        // see the tokens that the first of them sees.
        let active = valid.iter().position(|&count| count > 0).unwrap_or(MR);
        if active == MR {
            return;
        }
        let dim = self.head_dim;
        let common = if active == 0 { valid[0] } else { 0 };
        let mut at = 0;
        while at < dim {
            // SAFETY: the caller's promise: keys were located and their values lie `value_offset` behind,
            // `dim` long; each call stays below `dim`.
            unsafe {
                let first = cache.as_ptr().add(value_offset + at);
                let column = Column {
                    at,
                    fade,
                    valid,
                    common,
                };
                let width = if MR == 4 && at + 4 * LANES <= dim {
                    4 * LANES
                } else {
                    (dim - at).min(LANES)
                };
                if width > LANES {
                    self.mix_column::<V, 4>(tile, first, &column, width);
                } else {
                    self.mix_column::<V, 1>(tile, first, &column, width);
                }
                at += width;
            }
        }
    }

    /// Mixes `width` elements of every value in, from element `column.at` on; `D` registers hold them.
    /// `width` is `D` times the lanes, or less where `D` is one.
    ///
    /// # Safety
    /// As [`Self::run`]; `first` plus every key of the tile is valid for `width` elements.
    #[inline(always)]
    unsafe fn mix_column<V: Lanes, const D: usize>(
        &mut self,
        tile: usize,
        first: *const f32,
        column: &Column<MR>,
        width: usize,
    ) {
        let whole = width == D * LANES;
        let values = &self.keys[tile..];
        // SAFETY: the caller's promise; `mixed` holds `head_dim` elements a slot.
        unsafe {
            let mut mixed = [[V::zero(); D]; MR];
            for slot in 0..MR {
                let from = self.mixed.as_ptr().add(slot * self.head_dim + column.at);
                load_all(&mut mixed[slot], from, width, whole);
                for part in &mut mixed[slot] {
                    *part = part.mul(V::splat(column.fade[slot]));
                }
            }
            let mut value = [V::zero(); D];
            for token in 0..column.common {
                load_all(&mut value, first.add(values[token]), width, whole);
                for slot in 0..MR {
                    let weight = V::splat(self.scores[slot][token]);
                    for d in 0..D {
                        mixed[slot][d] = weight.mul_add(value[d], mixed[slot][d]);
                    }
                }
            }
            for slot in 0..MR {
                for token in column.common..column.valid[slot] {
                    load_all(&mut value, first.add(values[token]), width, whole);
                    let weight = V::splat(self.scores[slot][token]);
                    for d in 0..D {
                        mixed[slot][d] = weight.mul_add(value[d], mixed[slot][d]);
                    }
                }
                let to = self.mixed.as_mut_ptr().add(slot * self.head_dim + column.at);
                store_all(&mixed[slot], to, width, whole);
            }
        }
    }

    /// Scores to weights for the first `valid` tokens of a tile; gives the factor that what was mixed
    /// before fades by.
    ///
    /// # Safety
    /// Features as [`Lanes`].
    #[inline(always)]
    unsafe fn weigh<V: Lanes>(&mut self, slot: usize, valid: usize) -> f32 {
        let scores = &mut self.scores[slot];
        scores[valid..].fill(f32::NEG_INFINITY);
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in scores.chunks_exact(LANES) {
            for (lane, score) in lanes.iter_mut().zip(chunk) {
                *lane = if *score > *lane { *score } else { *lane };
            }
        }
        let before = self.split[slot];
        let largest = lanes.into_iter().fold(before.largest, f32::max);
        exp_minus(scores, largest);
        let fade = exp(before.largest - largest);
        // SAFETY: the caller's features.
        let sum = unsafe { sum::<V>(scores) };
        self.split[slot] = Softmax {
            largest,
            sum: before.sum.mul_add(fade, sum),
        };
        fade
    }

    /// Merges the split into what came before it.
    #[inline(always)]
    fn merge(&mut self) {
        let dim = self.head_dim;
        let (splits, totals) = self.mixed.split_at_mut(MR * dim);
        for slot in 0..MR {
            let (split, total) = (self.split[slot], self.total[slot]);
            let mixed = splits[slot * dim..][..dim].iter();
            let into = totals[slot * dim..][..dim].iter_mut();
            if split.sum == 0.0 {
                continue;
            }
            if total.sum == 0.0 {
                into.zip(mixed).for_each(|(into, mixed)| *into = *mixed);
                self.total[slot] = split;
                continue;
            }
            let largest = total.largest.max(split.largest);
            let (old, new) = (exp(total.largest - largest), exp(split.largest - largest));
            into.zip(mixed)
                .for_each(|(into, mixed)| *into = into.mul_add(old, mixed * new));
            self.total[slot] = Softmax {
                largest,
                sum: total.sum.mul_add(old, split.sum * new),
            };
        }
    }
}

/// Loads `width` elements: whole registers, or the first lanes of one.
///
/// # Safety
/// Features as [`Lanes`]; `from` is valid for `width` elements, which is `D` times the lanes where `whole`.
#[inline(always)]
unsafe fn load_all<V: Lanes, const D: usize>(to: &mut [V; D], from: *const f32, width: usize, whole: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if whole {
            for d in 0..D {
                to[d] = V::load(from.add(d * LANES));
            }
        } else {
            to[0] = f32::load_first(from, width);
        }
    }
}

/// Stores what [`load_all`] loads.
///
/// # Safety
/// As [`load_all`], for writing.
#[inline(always)]
unsafe fn store_all<V: Lanes, const D: usize>(from: &[V; D], to: *mut f32, width: usize, whole: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if whole {
            for d in 0..D {
                from[d].store(to.add(d * LANES));
            }
        } else {
            store_first(from[0], to, width);
        }
    }
}
