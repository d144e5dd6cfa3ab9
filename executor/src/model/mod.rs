//! One seat of a layout: its weight slices, and what it computes of a step.
//!
//! In `fast`, output and down projections are cut along K and partial sums meet in two all-reduces a
//! layer. In `invariant` they are cut by rows: activations and rows meet in four uneven gathers a layer and
//! every dot product is whole, so bits do not depend on the cut. Norms and the residual stream are computed
//! by every rank.

mod forward;
mod meter;
mod rope;
mod weights;

use infercluster_spec::layout::{Reduction, Seat};
use infercluster_spec::{Dtype, IndexRange, Layout, Model, model::Family};

pub use meter::{NoMeter, Segment, SegmentKind, SegmentMeter};
pub use rope::rope_hash;

use crate::backend::{Backend, BackendError};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::comm::CommError;
use crate::kv::KvError;
pub use forward::LayerObserver;
use forward::Scratch;
use rope::RopeTable;
use weights::{Embedding, Head, Layer};

/// Why a seat was not loaded or a step not computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Weights that cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The KV cache refused.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A collective did not end.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The layout has no such seat.
    #[error("the layout has no {} {} {}", .0.replica, .0.stage, .0.rank)]
    NoSeat(Seat),
    /// A seat whose layout breaks a rule that `validate_layout` checks.
    #[error("{} {} {}: the shards of layers {layers} do not fit the reduction", seat.replica, seat.stage, seat.rank)]
    Shards {
        /// The seat.
        seat: Seat,
        /// Its layers.
        layers: IndexRange,
    },
    /// A model that this executor does not compute.
    #[error("models of family {family:?} with {what} are not supported")]
    Unsupported {
        /// How its layers compute.
        family: Family,
        /// What is not known.
        what: &'static str,
    },
    /// A layout made for another numerics profile.
    #[error("the layout asks for the numerics profile {asked:?}, this device computes in {found:?}")]
    Numerics {
        /// What the layout says.
        asked: String,
        /// What the device has.
        found: &'static str,
    },
    /// A step without a token, or an item without one.
    #[error("an item of the step has no token")]
    EmptyItem,
    /// A token that the vocabulary does not have.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// A position past the model's context.
    #[error("a sequence of {needed} tokens is longer than the model's {limit} positions")]
    TooLong {
        /// Tokens after the step.
        needed: u64,
        /// Positions of the model.
        limit: u32,
    },
    /// A communicator of another group.
    #[error("the communicator has {found} ranks, the stage has {expected}")]
    GroupSize {
        /// Ranks of the communicator.
        found: usize,
        /// Ranks of the stage.
        expected: usize,
    },
    /// A hidden state that does not belong to the step.
    #[error("the hidden state has {found} numbers, the step needs {expected}")]
    HiddenSize {
        /// Numbers that were given; none counts as zero.
        found: usize,
        /// Numbers that this stage needs; a first stage takes none.
        expected: usize,
    },
}

/// What a stage gives for a step.
pub enum StageOutput<B: Backend> {
    /// `[tokens, hidden]`, the same on every rank: for the next stage.
    Hidden {
        /// The numbers.
        state: B::Buffer,
        /// Rows.
        tokens: usize,
    },
    /// `[items that want logits, this rank's vocabulary rows]`, in item order: from the last stage.
    Logits {
        /// The numbers.
        logits: B::Buffer,
        /// Rows.
        items: usize,
        /// Vocabulary rows of this rank.
        vocab: IndexRange,
    },
}

/// The weights of one seat, ready to compute.
pub struct SeatModel<B: Backend> {
    backend: B,
    dims: Dims,
    reduction: Reduction,
    tp_size: usize,
    first_layer: u32,
    layers: Vec<Layer<B>>,
    embedding: Option<Embedding>,
    head: Option<Head<B>>,
    rope: RopeTable<B>,
    scratch: Scratch<B>,
}

/// The dimensions that a step needs.
#[derive(Debug, Clone, Copy)]
struct Dims {
    hidden: usize,
    head_dim: usize,
    ffn: usize,
    group_size: u32,
    all_queries: usize,
    vocab: u32,
    max_positions: u32,
    epsilon: f32,
    score_scale: f32,
}

impl<B: Backend> SeatModel<B> {
    /// Loads this seat's slices from a checkpoint. The layout has passed `validate_layout`.
    pub fn load(
        backend: B,
        checkpoint: &Checkpoint,
        model: &Model,
        layout: &Layout,
        seat: Seat,
    ) -> Result<Self, ModelError> {
        check_supported(&backend, model, layout)?;
        let stage = layout.stage(seat).ok_or(ModelError::NoSeat(seat))?;
        let replica = &layout.replicas[seat.replica.index()];
        let loader = weights::Loader {
            backend: &backend,
            checkpoint,
            model,
            rank: seat.rank.index(),
        };
        let mut layers = Vec::new();
        for group in &stage.layer_groups {
            let shares = weights::Shares::of(group, layout.reduction, model).ok_or(ModelError::Shards {
                seat,
                layers: group.layers,
            })?;
            if seat.rank.index() >= group.shards.len() {
                return Err(ModelError::NoSeat(seat));
            }
            for layer in group.layers.iter() {
                layers.push(loader.layer(layer, &shares)?);
            }
        }
        let first = seat.stage.index() == 0;
        let last = seat.stage.index() + 1 == replica.stages.len();
        let embedding = first.then(|| loader.embedding()).transpose()?;
        let head = match stage.layer_groups.last() {
            Some(group) if last => {
                let vocab = group.shards[seat.rank.index()].vocab.ok_or(ModelError::Shards {
                    seat,
                    layers: group.layers,
                })?;
                Some(loader.head(vocab)?)
            }
            _ => None,
        };
        Ok(Self {
            dims: Dims::of(model),
            reduction: layout.reduction,
            tp_size: stage.tp_size(),
            first_layer: stage.layers().unwrap_or_default().start(),
            layers,
            embedding,
            head,
            rope: RopeTable::new(model.rope, model.head_dim as usize, model.max_positions),
            scratch: Scratch::default(),
            backend,
        })
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Whether this seat looks up the embedding.
    pub fn is_first_stage(&self) -> bool {
        self.embedding.is_some()
    }

    /// Whether this seat gives logits.
    pub fn is_last_stage(&self) -> bool {
        self.head.is_some()
    }

    /// Width of the hidden state between stages.
    pub fn hidden(&self) -> usize {
        self.dims.hidden
    }
}

impl Dims {
    fn of(model: &Model) -> Self {
        Self {
            hidden: model.hidden as usize,
            head_dim: model.head_dim as usize,
            ffn: model.ffn as usize,
            group_size: model.group_size(),
            all_queries: model.query_heads as usize * model.head_dim as usize,
            vocab: model.vocab,
            max_positions: model.max_positions,
            epsilon: model.rms_epsilon as f32,
            score_scale: (1.0 / f64::from(model.head_dim).sqrt()) as f32,
        }
    }
}

fn check_supported<B: Backend>(backend: &B, model: &Model, layout: &Layout) -> Result<(), ModelError> {
    let unsupported = |what| {
        Err(ModelError::Unsupported {
            family: model.family,
            what,
        })
    };
    if layout.numerics != backend.numerics() {
        return Err(ModelError::Numerics {
            asked: layout.numerics.clone(),
            found: backend.numerics(),
        });
    }
    if !matches!(model.family, Family::Llama | Family::Qwen2) {
        return unsupported("layers other than Llama's and Qwen2's");
    }
    if model.kv_heads == 0 || !model.query_heads.is_multiple_of(model.kv_heads) {
        return unsupported("query heads that are no multiple of the kv heads");
    }
    if model.query_heads.checked_mul(model.head_dim).is_none() {
        return unsupported("heads of more than 2^32 elements");
    }
    if model.experts.is_some() {
        return unsupported("experts");
    }
    if model.sliding_window.is_some() {
        return unsupported("a sliding window");
    }
    if !model.head_dim.is_multiple_of(2) {
        return unsupported("heads of odd width");
    }
    if layout.kv.dtype != Dtype::F32 {
        return unsupported("a kv cache other than f32");
    }
    Ok(())
}

/// Continues the chain of logit hashes of a request: equal chains mean equal bits in every step.
pub fn chain_logits(chain: u64, logits: &[f32]) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::with_seed(chain);
    for logit in logits {
        hasher.update(&logit.to_le_bytes());
    }
    hasher.digest()
}
