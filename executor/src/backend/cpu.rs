//! The CPU, profile `cpu-f32/1`.

use infercluster_spec::Dtype;

use super::{BackendError, MatrixShape};

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
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(len)
        .map_err(|_| BackendError::OutOfMemory { elements: len })?;
    buffer.resize(len, 0.0);
    Ok(buffer)
}
