//! One layout's runtime on one device: weights, KV pool, communicator and links to the neighbouring stages.
//!
//! Runtimes of several layouts stand beside each other; which of them a step runs on is the handover's decision.

use std::net::TcpStream;
use std::time::Duration;

use infercluster_spec::json::DocumentError;
use infercluster_spec::layout::{Seat, Stage};
use infercluster_spec::validate::{LayoutViolations, validate_layout};
use infercluster_spec::{Bytes, Epoch, GpuId, Layout, Model, Rank, StageId};

use super::probe;
use super::sample::{self, Choice, LogitsSlice};
use super::switchboard::{Line, LineError, Switchboard};
use crate::backend::Cpu;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::clock;
use crate::comm::{CommError, Communicator, Solo, TcpCommunicator, TensorLink};
use crate::kv::{KvError, KvStore};
use crate::model::{LayerObserver, ModelError, SeatModel, SegmentMeter, StageOutput};
use crate::probe::ProbeTrace;
use crate::wire::Purpose;
use crate::wire::message::{Prepare, StepOrder};

/// How long the connections of a layout may take to stand.
pub(super) const MESH_DEADLINE: Duration = Duration::from_secs(30);

/// Why a runtime was not built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// A document that cannot be read.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// A layout that breaks its rules.
    #[error(transparent)]
    Layout(#[from] LayoutViolations),
    /// This device has nothing to do in the layout.
    #[error("{gpu} has no seat in the layout of {epoch}")]
    NoSeat {
        /// This device.
        gpu: GpuId,
        /// Which layout.
        epoch: Epoch,
    },
    /// A peer is not connected.
    #[error(transparent)]
    Line(#[from] LineError),
    /// A socket cannot be set up.
    #[error("setting up the socket to {peer}: {source}")]
    Socket {
        /// The other end.
        peer: GpuId,
        /// What the system says.
        source: std::io::Error,
    },
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The weights cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The KV pool cannot be allocated.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// No room beside what this device holds already.
    #[error("{gpu} holds {held} and may hold {limit}: {needed} more do not fit, {missing} are missing")]
    Memory {
        /// This device.
        gpu: GpuId,
        /// What its other layouts take.
        held: Bytes,
        /// What it may take in all.
        limit: Bytes,
        /// What this layout needs.
        needed: Bytes,
        /// The shortage.
        missing: Bytes,
    },
    /// The probe did not run to its end.
    #[error("the probe: {0}")]
    ProbeFailed(StepError),
    /// The probe gave other numbers.
    #[error("the probe differs from the layout in force, first in {}", place_of(*.layer, *.layers))]
    ProbeDiffers {
        /// The first layer that differs; `layers` for the LM head.
        layer: u32,
        /// Layers of the model.
        layers: u32,
    },
}

fn place_of(layer: u32, layers: u32) -> String {
    if layer >= layers {
        "the LM head".to_owned()
    } else {
        format!("layer {layer}")
    }
}

/// Why a step was not computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// A peer was lost or out of step.
    #[error("{gpu}: {source}")]
    Peer {
        /// Who.
        gpu: GpuId,
        /// How.
        source: CommError,
    },
    /// The model refused.
    #[error(transparent)]
    Model(ModelError),
    /// An order whose two lists differ.
    #[error("the order has {wants} wishes for {items} items")]
    Wants {
        /// Entries of the one.
        wants: usize,
        /// Entries of the other.
        items: usize,
    },
}

impl StepError {
    /// The device whose fault it is, where it is another.
    pub(super) fn peer(&self) -> Option<GpuId> {
        match self {
            Self::Peer { gpu, .. } => Some(*gpu),
            _ => None,
        }
    }
}

/// What a step gave on this rank.
pub(super) struct StepResult {
    /// On rank 0 of the last stage: a choice for every item that wanted logits.
    pub(super) choices: Option<Vec<Choice>>,
    /// How long this rank waited for the stage before.
    pub(super) upstream: Duration,
}

/// Everything that one layout needs on this device.
pub(super) struct Runtime {
    pub(super) seat: Seat,
    model: SeatModel<Cpu>,
    kv: KvStore<Cpu>,
    comm: Box<dyn Communicator<Cpu>>,
    /// Devices of the stage, in rank order.
    ranks: Vec<GpuId>,
    upstream: Option<(GpuId, TensorLink)>,
    downstream: Vec<(GpuId, TensorLink)>,
    /// Vocabulary rows of each rank, on the last stage.
    vocab_widths: Vec<usize>,
    hidden_in: Vec<f32>,
}

impl Runtime {
    /// Builds the runtime that `prepare` describes: connections first, so that a missing peer is known before
    /// gigabytes are read. Answers it with what its probe gave, which is as expected.
    pub(super) fn build(
        prepare: &Prepare,
        gpu: GpuId,
        switchboard: &Switchboard,
    ) -> Result<(Self, ProbeTrace), PrepareError> {
        let model: Model = prepare.model.read()?;
        let layout: Layout = prepare.layout.read()?;
        validate_layout(&layout, &model, None)?;
        let missing = PrepareError::NoSeat {
            gpu,
            epoch: prepare.epoch,
        };
        let seat = layout.seat_of(gpu).ok_or(missing)?;
        let mesh = Mesh {
            prepare,
            layout: &layout,
            seat,
            switchboard,
        };
        let comm = mesh.communicator()?;
        let upstream = mesh.upstream()?;
        let downstream = mesh.downstream()?;
        let checkpoint = Checkpoint::open(&prepare.model_dir)?;
        let kv = KvStore::new(Cpu::new(), &model, &layout, seat, prepare.kv_blocks)?;
        let weights = SeatModel::load(Cpu::new(), &checkpoint, &model, &layout, seat)?;
        let stage = mesh.stage(seat.stage);
        let mut runtime = Self {
            seat,
            model: weights,
            kv,
            comm,
            ranks: stage.gpus().collect(),
            upstream,
            downstream,
            vocab_widths: vocab_widths(stage),
            hidden_in: Vec::new(),
        };
        let expected = prepare.shadow.as_ref().map(|shadow| &shadow.expected);
        let trace = probe::run(&mut runtime, &model, &layout, expected)?;
        Ok((runtime, trace))
    }

    /// The KV pool.
    pub(super) fn kv(&self) -> &KvStore<Cpu> {
        &self.kv
    }

    /// The KV pool, to write to or to exchange.
    pub(super) fn kv_mut(&mut self) -> &mut KvStore<Cpu> {
        &mut self.kv
    }

    /// Whether this rank answers the coordinator.
    pub(super) fn answers(&self) -> bool {
        self.model.is_last_stage() && self.seat.rank == Rank(0)
    }

    /// Computes a step together with the other ranks.
    pub(super) fn run(
        &mut self,
        order: &StepOrder,
        meter: &mut dyn SegmentMeter,
    ) -> Result<StepResult, StepError> {
        self.run_observed(order, meter, &mut |_, _, _| Ok(()))
    }

    /// [`Self::run`] that shows the state after every layer.
    pub(super) fn run_observed(
        &mut self,
        order: &StepOrder,
        meter: &mut dyn SegmentMeter,
        observe: LayerObserver<'_, Cpu>,
    ) -> Result<StepResult, StepError> {
        let items = &order.descriptor.items;
        if order.wants.len() != items.len() {
            return Err(StepError::Wants {
                wants: order.wants.len(),
                items: items.len(),
            });
        }
        if items.is_empty() {
            // An empty step only carries a change of layout.
            let choices = self.answers().then(Vec::new);
            return Ok(StepResult {
                choices,
                upstream: Duration::ZERO,
            });
        }
        let tokens: usize = items.iter().map(|item| item.tokens.len()).sum();
        let waiting = clock::now();
        let staged = self.receive(tokens)?;
        let upstream = waiting.elapsed();
        let hidden_in = staged.then_some(&self.hidden_in);
        let output = self
            .model
            .forward_observed(&mut self.kv, items, hidden_in, self.comm.as_mut(), meter, observe)
            .map_err(|error| name_peer(&self.ranks, error))?;
        let choices = match output {
            StageOutput::Hidden { state, tokens } => {
                self.hand_on(&state[..tokens * self.model.hidden()])?;
                None
            }
            StageOutput::Logits { logits, items, vocab } => self.answer(logits, items, vocab, order)?,
        };
        Ok(StepResult { choices, upstream })
    }

    /// The first layer where the probe differs on this stage or on one before it: the worst news goes down the
    /// pipeline, so that every later stage names the same layer.
    pub(super) fn share_difference(&mut self, own: Option<u32>) -> Result<Option<u32>, StepError> {
        const NONE: u32 = u32::MAX;
        let mut layer = own.unwrap_or(NONE);
        if let Some((gpu, link)) = &mut self.upstream {
            let mut before = [0.0];
            link.receive(&mut before)
                .map_err(|source| StepError::Peer { gpu: *gpu, source })?;
            layer = layer.min(before[0].to_bits());
        }
        // The number travels as the bits of an f32; nothing computes with it.
        self.hand_on(&[f32::from_bits(layer)])?;
        Ok((layer != NONE).then_some(layer))
    }

    /// Width of the hidden state.
    pub(super) fn hidden(&self) -> usize {
        self.model.hidden()
    }

    /// Takes the hidden state of the stage before; `false` on the first stage.
    fn receive(&mut self, tokens: usize) -> Result<bool, StepError> {
        let Some((gpu, link)) = &mut self.upstream else {
            return Ok(false);
        };
        // The descriptor said how much is to come, and the token budget bounded the descriptor.
        self.hidden_in.resize(tokens * self.model.hidden(), 0.0);
        link.receive(&mut self.hidden_in)
            .map_err(|source| StepError::Peer { gpu: *gpu, source })?;
        Ok(true)
    }

    fn hand_on(&mut self, state: &[f32]) -> Result<(), StepError> {
        for (gpu, link) in &mut self.downstream {
            link.send(state)
                .map_err(|source| StepError::Peer { gpu: *gpu, source })?;
        }
        Ok(())
    }

    fn answer(
        &mut self,
        logits: Vec<f32>,
        rows: usize,
        vocab: infercluster_spec::IndexRange,
        order: &StepOrder,
    ) -> Result<Option<Vec<Choice>>, StepError> {
        let wants: Vec<_> = order
            .descriptor
            .items
            .iter()
            .zip(&order.wants)
            .filter(|(item, _)| item.wants_logits)
            .map(|(_, wants)| *wants)
            .collect();
        assert_eq!(
            rows,
            wants.len(),
            "the model gives one row of logits an item that wants them"
        );
        let slice = LogitsSlice {
            numbers: logits,
            vocab,
        };
        let choices = if wants.is_empty() {
            Vec::new()
        } else {
            sample::choose::<Cpu>(self.comm.as_mut(), &slice, &self.vocab_widths, &wants)
                .map_err(|error| name_peer(&self.ranks, ModelError::Comm(error)))?
        };
        Ok(self.answers().then_some(choices))
    }
}

/// A collective's error knows ranks; the coordinator knows devices.
fn name_peer(ranks: &[GpuId], error: ModelError) -> StepError {
    match error {
        ModelError::Comm(source) => match ranks.get(source.peer().index()) {
            Some(gpu) => StepError::Peer { gpu: *gpu, source },
            None => StepError::Model(ModelError::Comm(source)),
        },
        other => StepError::Model(other),
    }
}

/// Vocabulary rows of each rank; empty where the stage is not the last.
fn vocab_widths(stage: &Stage) -> Vec<usize> {
    let shards = stage
        .layer_groups
        .last()
        .into_iter()
        .flat_map(|group| &group.shards);
    shards
        .filter_map(|shard| shard.vocab.map(|vocab| vocab.len() as usize))
        .collect()
}

/// The connections of one seat.
struct Mesh<'a> {
    prepare: &'a Prepare,
    layout: &'a Layout,
    seat: Seat,
    switchboard: &'a Switchboard,
}

impl Mesh<'_> {
    fn stage(&self, stage: StageId) -> &Stage {
        let seat = Seat { stage, ..self.seat };
        self.layout
            .stage(seat)
            .expect("stages of a valid layout are asked for by position")
    }

    fn line(&self, purpose: Purpose, peer: GpuId) -> Result<TcpStream, PrepareError> {
        let line = Line {
            layout: self.prepare.layout_id,
            purpose,
            peer,
        };
        let connection = self
            .switchboard
            .connect(line, &self.prepare.peers, MESH_DEADLINE)?;
        Ok(connection.into_stream())
    }

    fn communicator(&self) -> Result<Box<dyn Communicator<Cpu>>, PrepareError> {
        let ranks: Vec<GpuId> = self.stage(self.seat.stage).gpus().collect();
        if ranks.len() == 1 {
            return Ok(Box::new(Solo));
        }
        let mut peers = Vec::with_capacity(ranks.len());
        for (rank, &gpu) in ranks.iter().enumerate() {
            let own = rank == self.seat.rank.index();
            peers.push((!own).then(|| self.line(Purpose::Collective, gpu)).transpose()?);
        }
        let communicator = TcpCommunicator::new(self.seat.rank, peers, self.prepare.peer_deadline);
        let peer = ranks[usize::from(self.seat.rank == Rank(0))];
        Ok(Box::new(
            communicator.map_err(|source| PrepareError::Socket { peer, source })?,
        ))
    }

    /// Rank `r` takes from rank `r mod tp` of the stage before.
    fn upstream(&self) -> Result<Option<(GpuId, TensorLink)>, PrepareError> {
        let Some(before) = self.seat.stage.0.checked_sub(1) else {
            return Ok(None);
        };
        let givers: Vec<GpuId> = self.stage(StageId(before)).gpus().collect();
        let rank = self.seat.rank.index() % givers.len();
        Ok(Some(self.link(Rank(rank as u32), givers[rank])?))
    }

    /// The ranks of the next stage that take from this one.
    fn downstream(&self) -> Result<Vec<(GpuId, TensorLink)>, PrepareError> {
        let stages = &self.layout.replicas[self.seat.replica.index()].stages;
        let Some(next) = stages.get(self.seat.stage.index() + 1) else {
            return Ok(Vec::new());
        };
        let size = self.stage(self.seat.stage).tp_size();
        next.gpus()
            .enumerate()
            .filter(|(rank, _)| rank % size == self.seat.rank.index())
            .map(|(rank, gpu)| self.link(Rank(rank as u32), gpu))
            .collect()
    }

    fn link(&self, rank: Rank, gpu: GpuId) -> Result<(GpuId, TensorLink), PrepareError> {
        let stream = self.line(Purpose::Activations, gpu)?;
        let link = TensorLink::new(rank, stream, self.prepare.peer_deadline)
            .map_err(|source| PrepareError::Socket { peer: gpu, source })?;
        Ok((gpu, link))
    }
}
