//! The slow, obvious device: plain loops with f64 accumulation. Tests hold the fast ones against it.

use half::{bf16, f16};
use infercluster_spec::Dtype;

use super::{
    AttentionShape, AttentionSpan, Backend, BackendError, HeadShape, KvShape, KvSlot, MatrixShape,
    cpu::{check_weight_bytes, zeroed},
};

/// Plain loops on the CPU. Its bits are no promise, its values are the most exact at hand.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

/// A matrix widened to f32.
#[derive(Debug)]
pub struct ReferenceMatrix {
    shape: MatrixShape,
    elements: Vec<f32>,
}

impl Backend for Reference {
    type Buffer = Vec<f32>;
    type Weight = ReferenceMatrix;

    fn numerics(&self) -> &'static str {
        "reference/1"
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

    fn load_weight(
        &self,
        bytes: &[u8],
        shape: MatrixShape,
        dtype: Dtype,
    ) -> Result<ReferenceMatrix, BackendError> {
        check_weight_bytes(bytes, shape, dtype)?;
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let elements = match dtype {
            Dtype::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Dtype::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_bits(pair(b)).to_f32())
                .collect(),
            Dtype::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_bits(pair(b)).to_f32())
                .collect(),
            found => return Err(BackendError::UnsupportedDtype { found }),
        };
        Ok(ReferenceMatrix { shape, elements })
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn gemm(
        &self,
        x: &Vec<f32>,
        m: usize,
        weight: &ReferenceMatrix,
        bias: Option<&Vec<f32>>,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let MatrixShape { rows, columns } = weight.shape;
        for token in 0..m {
            for row in 0..rows {
                let inputs = &x[token * columns..][..columns];
                let weights = &weight.elements[row * columns..][..columns];
                let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
                out[token * rows + row] = (dot(inputs, weights) + bias) as f32;
            }
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
        let width = gain.len();
        for token in 0..m {
            let row = &x[token * width..][..width];
            let factor = 1.0 / (dot(row, row) / width as f64 + f64::from(epsilon)).sqrt();
            for column in 0..width {
                out[token * width + column] =
                    (f64::from(row[column]) * factor * f64::from(gain[column])) as f32;
            }
        }
        Ok(())
    }

    fn rope(
        &self,
        x: &mut Vec<f32>,
        shape: HeadShape,
        positions: &[u32],
        table: &Vec<f32>,
    ) -> Result<(), BackendError> {
        let (dim, half) = (shape.head_dim, shape.head_dim / 2);
        for (token, position) in positions.iter().enumerate() {
            for head in 0..shape.heads {
                for i in 0..half {
                    let cos = f64::from(table[*position as usize * dim + i]);
                    let sin = f64::from(table[*position as usize * dim + half + i]);
                    let first = (token * shape.heads + head) * dim + i;
                    let (a, b) = (f64::from(x[first]), f64::from(x[first + half]));
                    x[first] = (a * cos - b * sin) as f32;
                    x[first + half] = (b * cos + a * sin) as f32;
                }
            }
        }
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
        for (token, slot) in slots.iter().enumerate() {
            for head in 0..shape.kv_heads {
                for i in 0..shape.head_dim {
                    let source = (token * shape.kv_heads + head) * shape.head_dim + i;
                    let target = shape.key_offset(*slot, head) + i;
                    cache[target] = keys[source];
                    cache[target + shape.value_offset()] = values[source];
                }
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
        let dim = shape.kv.head_dim;
        let heads = shape.query_heads.len() as usize;
        for span in spans {
            for row in 0..span.rows {
                for head in 0..heads {
                    let at = ((span.first_row + row) * heads + head) * dim;
                    let visible = span.start as usize + row + 1;
                    let keys: Vec<usize> = (0..visible)
                        .map(|position| {
                            let slot = KvSlot {
                                block: span.block_table[position / shape.kv.block_size],
                                offset: position % shape.kv.block_size,
                            };
                            shape.kv.key_offset(slot, shape.kv_head(head))
                        })
                        .collect();
                    let scores: Vec<f64> = keys
                        .iter()
                        .map(|&key| dot(&query[at..][..dim], &cache[key..][..dim]) * f64::from(shape.scale))
                        .collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for i in 0..dim {
                        let mixed: f64 = keys
                            .iter()
                            .zip(&weights)
                            .map(|(&key, weight)| {
                                weight * f64::from(cache[key + shape.kv.value_offset() + i])
                            })
                            .sum();
                        out[at + i] = (mixed / total) as f32;
                    }
                }
            }
        }
        Ok(())
    }

    fn silu_mul(&self, gate: &mut Vec<f32>, up: &Vec<f32>, len: usize) -> Result<(), BackendError> {
        for i in 0..len {
            let x = f64::from(gate[i]);
            gate[i] = (x / (1.0 + (-x).exp()) * f64::from(up[i])) as f32;
        }
        Ok(())
    }

    fn add(&self, x: &mut Vec<f32>, y: &Vec<f32>, len: usize) -> Result<(), BackendError> {
        for i in 0..len {
            x[i] += y[i];
        }
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
        for width in widths {
            for row in 0..rows {
                for column in 0..*width {
                    out[row * total + before + column] = parts[rows * before + row * width + column];
                }
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
        for (target, row) in rows.iter().enumerate() {
            for column in 0..width {
                out[target * width + column] = x[row * width + column];
            }
        }
        Ok(())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
