//! What a model folder holds besides its config: weights, and whether they are those of the model.

use std::path::Path;

use infercluster_executor::backend::MatrixShape;
use infercluster_executor::checkpoint::{Checkpoint, CheckpointError, names};
use infercluster_spec::model::Family;
use infercluster_spec::{IndexRange, Model};
use serde::Serialize;

/// Weights in a folder.
#[derive(Debug, Serialize)]
pub(super) struct Weights {
    /// Tensors in the files.
    tensors: usize,
    /// Whether every tensor of the model is there in its shape; absent where the executor does not know the
    /// layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    complete: Option<bool>,
}

impl Weights {
    /// Looks at the weights beside a config; `None` where there are none.
    pub(super) fn of(folder: &Path, model: &Model) -> Result<Option<Self>, CheckpointError> {
        let checkpoint = match Checkpoint::open(folder) {
            Err(CheckpointError::NoWeights { .. }) => return Ok(None),
            other => other?,
        };
        let is_known = matches!(model.family, Family::Llama | Family::Qwen2) && model.experts.is_none();
        if is_known {
            check_shapes(&checkpoint, model)?;
        }
        Ok(Some(Self {
            tensors: checkpoint.names().count(),
            complete: is_known.then_some(true),
        }))
    }

    /// One line for people.
    pub(super) fn text(&self) -> String {
        match self.complete {
            Some(_) => format!("{} tensors, every one of the model among them", self.tensors),
            None => format!(
                "{} tensors of layers that the executor does not run",
                self.tensors
            ),
        }
    }
}

/// Asks for an empty part of every tensor: that checks its presence, shape and dtype, and reads nothing.
fn check_shapes(checkpoint: &Checkpoint, model: &Model) -> Result<(), CheckpointError> {
    let nothing = IndexRange::default();
    for (name, shape) in names::tensors(model) {
        match shape.as_slice() {
            [rows, columns] => {
                let full = MatrixShape {
                    rows: *rows,
                    columns: *columns,
                };
                checkpoint.slice_rows(&name, full, nothing)?;
            }
            other => {
                checkpoint.slice_vector(&name, other.iter().product(), nothing)?;
            }
        }
    }
    Ok(())
}
