//! The slices of one rank: which rows and columns of which tensor, per layer.

use half::{bf16, f16};
use infercluster_spec::layout::{LayerGroup, Reduction};
use infercluster_spec::{Dtype, IndexRange, Model};

use super::ModelError;
use crate::backend::{Backend, MatrixShape};
use crate::checkpoint::{Checkpoint, CheckpointError, WeightSlice, names};

/// What every rank of a group holds of a layer, in rank order.
#[derive(Debug, Clone)]
pub(super) struct Shares {
    reduction: Reduction,
    query_heads: Vec<IndexRange>,
    mlp_columns: Vec<IndexRange>,
    /// Empty in `fast`.
    output_rows: Vec<IndexRange>,
    group_size: u32,
}

impl Shares {
    /// `None` where rows are missing in `invariant` or present in `fast`.
    pub(super) fn of(group: &LayerGroup, reduction: Reduction, model: &Model) -> Option<Self> {
        let rows: Vec<IndexRange> = group
            .shards
            .iter()
            .filter_map(|shard| shard.output_rows)
            .collect();
        let wanted = match reduction {
            Reduction::Fast => 0,
            Reduction::Invariant => group.shards.len(),
        };
        (rows.len() == wanted).then(|| Self {
            reduction,
            query_heads: group.shards.iter().map(|shard| shard.query_heads).collect(),
            mlp_columns: group.shards.iter().map(|shard| shard.mlp_columns).collect(),
            output_rows: rows,
            group_size: model.group_size(),
        })
    }
}

/// One layer of one rank. A weight of an empty share is absent.
pub(super) struct Layer<B: Backend> {
    pub(super) attention_norm: B::Buffer,
    pub(super) attention: Option<Attention<B>>,
    pub(super) output: Option<B::Weight>,
    pub(super) mlp_norm: B::Buffer,
    pub(super) mlp: Option<Mlp<B>>,
    pub(super) down: Option<B::Weight>,
    pub(super) widths: Widths,
}

/// Elements of a token's vectors that every rank computes, in rank order.
#[derive(Debug, Clone)]
pub(super) struct Widths {
    pub(super) attention: Vec<usize>,
    pub(super) mlp: Vec<usize>,
    pub(super) rows: Vec<usize>,
}

/// The attention of this rank's heads.
pub(super) struct Attention<B: Backend> {
    pub(super) query_heads: IndexRange,
    pub(super) kv_heads: usize,
    pub(super) query: Linear<B>,
    pub(super) key: Linear<B>,
    pub(super) value: Linear<B>,
}

/// Gate and up projection of this rank's columns.
pub(super) struct Mlp<B: Backend> {
    pub(super) columns: usize,
    pub(super) gate: B::Weight,
    pub(super) up: B::Weight,
}

/// A weight with its bias.
pub(super) struct Linear<B: Backend> {
    pub(super) weight: B::Weight,
    pub(super) bias: Option<B::Buffer>,
}

/// Final norm and LM head.
pub(super) struct Head<B: Backend> {
    pub(super) norm: B::Buffer,
    pub(super) vocab: IndexRange,
    pub(super) weight: Option<B::Weight>,
}

/// The embedding table, left in the mapped checkpoint.
pub(super) struct Embedding {
    checkpoint: Checkpoint,
    table: MatrixShape,
}

impl Embedding {
    /// The row of one token, appended to `out`. The token is below the vocabulary.
    pub(super) fn lookup(&self, token: u32, out: &mut Vec<f32>) -> Result<(), CheckpointError> {
        let row = IndexRange::new(token, token + 1).expect("one token is a range");
        let slice = self.checkpoint.slice_rows(names::EMBEDDING, self.table, row)?;
        widen(&slice, out);
        Ok(())
    }
}

/// Reads slices and hands them to the device.
pub(super) struct Loader<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) model: &'a Model,
    pub(super) rank: usize,
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn layer(&self, layer: u32, shares: &Shares) -> Result<Layer<B>, ModelError> {
        let head_dim = self.model.head_dim as usize;
        let heads = shares.query_heads[self.rank];
        let columns = shares.mlp_columns[self.rank];
        let lengths = |ranges: &[IndexRange], unit: usize| -> Vec<usize> {
            ranges.iter().map(|range| range.len() as usize * unit).collect()
        };
        let widths = Widths {
            attention: lengths(&shares.query_heads, head_dim),
            mlp: lengths(&shares.mlp_columns, 1),
            rows: lengths(&shares.output_rows, 1),
        };
        let attention = (!heads.is_empty())
            .then(|| self.attention(layer, heads, shares.group_size))
            .transpose()?;
        let mlp = (!columns.is_empty())
            .then(|| self.mlp(layer, columns))
            .transpose()?;
        let rows = shares.output_rows.get(self.rank).copied();
        let queries = self.scaled(heads);
        let all_queries = self.model.query_heads as usize * head_dim;
        let output = names::layer(layer, "self_attn.o_proj.weight");
        let down = names::layer(layer, "mlp.down_proj.weight");
        let ffn = self.model.ffn as usize;
        Ok(Layer {
            attention_norm: self.norm(&names::layer(layer, "input_layernorm.weight"))?,
            attention,
            output: self.projection(&output, all_queries, shares.reduction, queries, rows)?,
            mlp_norm: self.norm(&names::layer(layer, "post_attention_layernorm.weight"))?,
            mlp,
            down: self.projection(&down, ffn, shares.reduction, columns, rows)?,
            widths,
        })
    }

    pub(super) fn embedding(&self) -> Result<Embedding, ModelError> {
        let table = self.table();
        // An empty slice checks that the table is there, in its shape.
        self.checkpoint
            .slice_rows(names::EMBEDDING, table, IndexRange::default())?;
        Ok(Embedding {
            checkpoint: self.checkpoint.clone(),
            table,
        })
    }

    pub(super) fn head(&self, vocab: IndexRange) -> Result<Head<B>, ModelError> {
        let slice = self
            .checkpoint
            .slice_rows(names::lm_head(self.model), self.table(), vocab)?;
        Ok(Head {
            norm: self.norm(names::FINAL_NORM)?,
            vocab,
            weight: self.weight(&slice)?,
        })
    }

    fn attention(
        &self,
        layer: u32,
        query_heads: IndexRange,
        group_size: u32,
    ) -> Result<Attention<B>, ModelError> {
        let kv_heads = infercluster_spec::layout::kv_heads_of(query_heads, group_size);
        let linear = |part: &str, heads: IndexRange, total: u32| {
            let name = names::layer(layer, &format!("self_attn.{part}_proj"));
            self.linear(
                &name,
                self.scaled(heads),
                total as usize * self.model.head_dim as usize,
            )
        };
        Ok(Attention {
            query_heads,
            kv_heads: kv_heads.len() as usize,
            query: linear("q", query_heads, self.model.query_heads)?,
            key: linear("k", kv_heads, self.model.kv_heads)?,
            value: linear("v", kv_heads, self.model.kv_heads)?,
        })
    }

    fn mlp(&self, layer: u32, columns: IndexRange) -> Result<Mlp<B>, ModelError> {
        let ffn = self.model.ffn as usize;
        let gate = names::layer(layer, "mlp.gate_proj.weight");
        let up = names::layer(layer, "mlp.up_proj.weight");
        Ok(Mlp {
            columns: columns.len() as usize,
            gate: self.rows(&gate, ffn, columns)?,
            up: self.rows(&up, ffn, columns)?,
        })
    }

    /// Rows of output heads as element positions.
    fn scaled(&self, heads: IndexRange) -> IndexRange {
        let head_dim = self.model.head_dim;
        IndexRange::new(heads.start() * head_dim, heads.end() * head_dim).expect("scaling keeps the order")
    }

    fn linear(&self, name: &str, rows: IndexRange, total: usize) -> Result<Linear<B>, ModelError> {
        let bias = format!("{name}.bias");
        let bias = self
            .model
            .qkv_bias
            .then(|| self.vector(&bias, total, rows))
            .transpose()?;
        Ok(Linear {
            weight: self.rows(&format!("{name}.weight"), total, rows)?,
            bias,
        })
    }

    /// Output or down projection: a K-slice in `fast`, whole rows in `invariant`.
    fn projection(
        &self,
        name: &str,
        inputs: usize,
        reduction: Reduction,
        columns: IndexRange,
        rows: Option<IndexRange>,
    ) -> Result<Option<B::Weight>, ModelError> {
        let full = MatrixShape {
            rows: self.model.hidden as usize,
            columns: inputs,
        };
        let slice = match (reduction, rows) {
            (Reduction::Invariant, Some(rows)) => self.checkpoint.slice_rows(name, full, rows)?,
            _ => self.checkpoint.slice_columns(name, full, columns)?,
        };
        self.weight(&slice)
    }

    fn rows(&self, name: &str, total: usize, rows: IndexRange) -> Result<B::Weight, ModelError> {
        let full = MatrixShape {
            rows: total,
            columns: self.model.hidden as usize,
        };
        let slice = self.checkpoint.slice_rows(name, full, rows)?;
        Ok(self.backend.load_weight(&slice.bytes, slice.shape, slice.dtype)?)
    }

    fn weight(&self, slice: &WeightSlice<'_>) -> Result<Option<B::Weight>, ModelError> {
        if slice.shape.rows == 0 || slice.shape.columns == 0 {
            return Ok(None);
        }
        let weight = self.backend.load_weight(&slice.bytes, slice.shape, slice.dtype)?;
        Ok(Some(weight))
    }

    fn norm(&self, name: &str) -> Result<B::Buffer, ModelError> {
        let all = IndexRange::new(0, self.model.hidden).expect("zero is not above a count");
        self.vector(name, self.model.hidden as usize, all)
    }

    fn vector(&self, name: &str, total: usize, range: IndexRange) -> Result<B::Buffer, ModelError> {
        let mut numbers = Vec::new();
        widen(&self.checkpoint.slice_vector(name, total, range)?, &mut numbers);
        let mut buffer = self.backend.allocate(numbers.len())?;
        self.backend.upload(&numbers, &mut buffer, 0)?;
        Ok(buffer)
    }

    fn table(&self) -> MatrixShape {
        MatrixShape {
            rows: self.model.vocab as usize,
            columns: self.model.hidden as usize,
        }
    }
}

/// The numbers of a slice as f32, exactly.
fn widen(slice: &WeightSlice<'_>, out: &mut Vec<f32>) {
    let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    let bytes = &slice.bytes;
    match slice.dtype {
        Dtype::Bf16 => out.extend(bytes.chunks_exact(2).map(|b| bf16::from_bits(half(b)).to_f32())),
        Dtype::F16 => out.extend(bytes.chunks_exact(2).map(|b| f16::from_bits(half(b)).to_f32())),
        _ => out.extend(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        ),
    }
}
