//! The CPU, profile `cpu-f32/1`: one thread a worker, results there when a call returns.

use half::{bf16, f16};
use infercluster_spec::Dtype;
use infercluster_spec::layout::CPU_F32;

use super::{AttentionShape, AttentionSpan, Backend, BackendError, HeadShape, KvShape, KvSlot, MatrixShape};
use crate::numerics::attention::Attention;
use crate::numerics::elementwise::RmsNorm;
use crate::numerics::gemm::Gemm;
use crate::numerics::{Isa, Kernels};

/// The CPU with the kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    kernels: Kernels,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// With the fastest kernels that this machine has.
    pub fn new() -> Self {
        Self {
            kernels: Kernels::best(),
        }
    }

    /// With the kernels of one instruction set; `None` where this machine lacks it.
    pub fn with_isa(isa: Isa) -> Option<Self> {
        Kernels::of(isa).map(|kernels| Self { kernels })
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }
}

/// A weight matrix in its stored dtype.
#[derive(Debug, Clone)]
pub struct Matrix {
    shape: MatrixShape,
    elements: Elements,
}

#[derive(Debug, Clone)]
enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Backend for Cpu {
    type Buffer = Vec<f32>;
    type Weight = Matrix;

    fn numerics(&self) -> &'static str {
        CPU_F32
    }

    fn allocate(&self, len: usize) -> Result<Vec<f32>, BackendError> {
        zeroed(len)
    }

    fn len(&self, buffer: &Vec<f32>) -> usize {
        buffer.len()
    }

    fn upload(&self, from: &[f32], to: &mut Vec<f32>, offset: usize) -> Result<(), BackendError> {
        to[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn download(&self, from: &Vec<f32>, offset: usize, to: &mut [f32]) -> Result<(), BackendError> {
        to.copy_from_slice(&from[offset..offset + to.len()]);
        Ok(())
    }

    fn load_weight(&self, bytes: &[u8], shape: MatrixShape, dtype: Dtype) -> Result<Matrix, BackendError> {
        check_weight_bytes(bytes, shape, dtype)?;
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let elements = match dtype {
            Dtype::Bf16 => Elements::Bf16(collect(bytes.chunks_exact(2), |b| bf16::from_bits(pair(b)))?),
            Dtype::F16 => Elements::F16(collect(bytes.chunks_exact(2), |b| f16::from_bits(pair(b)))?),
            _ => Elements::F32(collect(bytes.chunks_exact(4), |b| {
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            })?),
        };
        Ok(Matrix { shape, elements })
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn gemm(
        &self,
        x: &Vec<f32>,
        m: usize,
        weight: &Matrix,
        bias: Option<&Vec<f32>>,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let MatrixShape { rows: n, columns: k } = weight.shape;
        let bias = bias.map(Vec::as_slice);
        match &weight.elements {
            Elements::F32(weight) => self.kernels.gemm(Gemm {
                x,
                weight,
                bias,
                m,
                n,
                k,
                out,
            }),
            Elements::Bf16(weight) => self.kernels.gemm(Gemm {
                x,
                weight,
                bias,
                m,
                n,
                k,
                out,
            }),
            Elements::F16(weight) => self.kernels.gemm(Gemm {
                x,
                weight,
                bias,
                m,
                n,
                k,
                out,
            }),
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &Vec<f32>,
        m: usize,
        gain: &Vec<f32>,
        epsilon: f32,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        self.kernels.rms_norm(RmsNorm {
            x,
            m,
            gain,
            epsilon,
            out,
        });
        Ok(())
    }

    fn rope(
        &self,
        x: &mut Vec<f32>,
        shape: HeadShape,
        positions: &[u32],
        table: &Vec<f32>,
    ) -> Result<(), BackendError> {
        self.kernels.rope(x, shape, positions, table);
        Ok(())
    }

    fn kv_write(
        &self,
        cache: &mut Vec<f32>,
        shape: KvShape,
        slots: &[KvSlot],
        keys: &Vec<f32>,
        values: &Vec<f32>,
    ) -> Result<(), BackendError> {
        let dim = shape.head_dim;
        for (token, slot) in slots.iter().enumerate() {
            for head in 0..shape.kv_heads {
                let source = (token * shape.kv_heads + head) * dim;
                let key = shape.key_offset(*slot, head);
                let value = key + shape.value_offset();
                cache[key..][..dim].copy_from_slice(&keys[source..][..dim]);
                cache[value..][..dim].copy_from_slice(&values[source..][..dim]);
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        query: &Vec<f32>,
        cache: &Vec<f32>,
        shape: AttentionShape,
        spans: &[AttentionSpan<'_>],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        self.kernels.attention(Attention {
            query,
            cache,
            shape,
            spans,
            out,
        });
        Ok(())
    }

    fn silu_mul(&self, gate: &mut Vec<f32>, up: &Vec<f32>, len: usize) -> Result<(), BackendError> {
        self.kernels.silu_mul(&mut gate[..len], &up[..len]);
        Ok(())
    }

    fn add(&self, x: &mut Vec<f32>, y: &Vec<f32>, len: usize) -> Result<(), BackendError> {
        self.kernels.add(&mut x[..len], &y[..len]);
        Ok(())
    }

    fn clear(&self, x: &mut Vec<f32>, len: usize) -> Result<(), BackendError> {
        x[..len].fill(0.0);
        Ok(())
    }

    fn interleave(
        &self,
        parts: &Vec<f32>,
        rows: usize,
        widths: &[usize],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let total: usize = widths.iter().sum();
        let mut before = 0;
        for &width in widths {
            for row in 0..rows {
                let source = &parts[rows * before + row * width..][..width];
                out[row * total + before..][..width].copy_from_slice(source);
            }
            before += width;
        }
        Ok(())
    }

    fn select_rows(
        &self,
        x: &Vec<f32>,
        width: usize,
        rows: &[usize],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        for (target, &row) in rows.iter().enumerate() {
            out[target * width..][..width].copy_from_slice(&x[row * width..][..width]);
        }
        Ok(())
    }
}

pub(super) fn check_weight_bytes(bytes: &[u8], shape: MatrixShape, dtype: Dtype) -> Result<(), BackendError> {
    if !matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
        return Err(BackendError::UnsupportedDtype { found: dtype });
    }
    let elements = shape.rows.checked_mul(shape.columns);
    let expected = elements.and_then(|count| count.checked_mul((dtype.bits() / 8) as usize));
    if expected != Some(bytes.len()) {
        return Err(BackendError::WeightBytes {
            rows: shape.rows,
            columns: shape.columns,
            dtype,
            expected: expected.map_or(u64::MAX, |bytes| bytes as u64),
            found: bytes.len() as u64,
        });
    }
    Ok(())
}

/// Zeroed memory, or an error instead of an abort where there is none.
pub(super) fn zeroed(len: usize) -> Result<Vec<f32>, BackendError> {
    let mut buffer = reserve(len)?;
    buffer.resize(len, 0.0);
    Ok(buffer)
}

fn reserve<T>(len: usize) -> Result<Vec<T>, BackendError> {
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(len)
        .map_err(|_| BackendError::OutOfMemory { elements: len })?;
    Ok(buffer)
}

fn collect<'a, T>(
    chunks: std::slice::ChunksExact<'a, u8>,
    decode: impl Fn(&'a [u8]) -> T,
) -> Result<Vec<T>, BackendError> {
    let mut elements = reserve(chunks.len())?;
    elements.extend(chunks.map(decode));
    Ok(elements)
}
