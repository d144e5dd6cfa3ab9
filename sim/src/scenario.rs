//! What is simulated, and why it may be refused.

use infercluster_serving::{RouterPolicy, SchedulerError};
use infercluster_spec::layout::ReplicaRole;
use infercluster_spec::report::{RequestRecord, Slo};
use infercluster_spec::validate::LayoutViolations;
use infercluster_spec::{
    BatchShape, Bytes, Cluster, EngineOptions, Layout, Model, ReplicaId, Report, RequestId, SimDuration,
    StageId, Trace,
};

use crate::cost::{CostError, CostModel};

/// A run: which requests meet which layout on which hardware.
#[derive(Clone, Copy)]
pub struct Scenario<'a> {
    /// The hardware.
    pub cluster: &'a Cluster,
    /// The model.
    pub model: &'a Model,
    /// What runs where.
    pub layout: &'a Layout,
    /// What a step costs, and what devices count.
    pub cost: &'a dyn CostModel,
    /// Where step times come from.
    pub steps: StepTimes,
    /// The requests.
    pub trace: &'a Trace,
    /// When they are sent.
    pub load: Load,
    /// How a replica batches; without a longest context the model's own holds.
    pub options: EngineOptions,
    /// How requests are shared among replicas.
    pub router: RouterPolicy,
    /// Device memory that neither weights nor KV may use: activations, workspaces.
    pub memory_reserve: Bytes,
    /// KV blocks that a replica may have at most, where it is less than memory allows.
    pub kv_blocks_limit: Option<u32>,
    /// Latency limits that the report judges by.
    pub slo: Option<Slo>,
}

impl<'a> Scenario<'a> {
    /// Open loop with default options and nothing reserved.
    pub fn new(
        cluster: &'a Cluster,
        model: &'a Model,
        layout: &'a Layout,
        cost: &'a dyn CostModel,
        trace: &'a Trace,
    ) -> Self {
        Self {
            cluster,
            model,
            layout,
            cost,
            steps: StepTimes::default(),
            trace,
            load: Load::Open,
            options: EngineOptions::default(),
            router: RouterPolicy::default(),
            memory_reserve: Bytes::ZERO,
            kv_blocks_limit: None,
            slo: None,
        }
    }
}

/// Where step times come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepTimes {
    /// The cost model.
    #[default]
    CostModel,
    /// A table of two rows, the same for every stage: for measuring the engine itself, and for comparison
    /// with simulators that charge a step like that.
    Fixed(FixedSteps),
}

/// Step times that do not depend on how much a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedSteps {
    /// A step with any prefill.
    pub prefill: SimDuration,
    /// Any other step.
    pub decode: SimDuration,
}

impl FixedSteps {
    /// How long a step takes: at least a picosecond, the clock's grain.
    pub fn of(&self, shape: &BatchShape) -> SimDuration {
        let span = if shape.prefill_new > 0 {
            self.prefill
        } else {
            self.decode
        };
        span.max(SimDuration(1))
    }
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// At the arrivals that the trace states.
    Open,
    /// Each client sends the next request of the trace after its last one ended; stated arrivals are ignored.
    Closed {
        /// How many clients there are, at least 1.
        clients: u32,
        /// From the last token of an answer to the arrival of the client's next request. A service begins its
        /// next step before it hands tokens out, so that a request that follows a token never enters the step
        /// that follows it; zero would let it in.
        turnaround: SimDuration,
        /// Send for so long, in a trace that should not end before; `None` sends all of it.
        duration: Option<SimDuration>,
    },
}

/// What a client of the same machine takes to hear the end of an answer and to send its next request: longer
/// than it takes to begin a step, far shorter than a step.
pub const DEFAULT_TURNAROUND: SimDuration = SimDuration(1_000_000_000);

impl Load {
    /// So many clients with the turnaround of a client nearby, until the trace ends.
    pub fn closed(clients: u32) -> Self {
        Self::Closed {
            clients,
            turnaround: DEFAULT_TURNAROUND,
            duration: None,
        }
    }
}

/// What a run gave.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationOutcome {
    /// Latencies, rates and busy fractions.
    pub report: Report,
    /// What happened to each request that was sent, in the order of the trace.
    pub requests: Vec<RequestRecord>,
    /// What each replica did.
    pub replicas: Vec<ReplicaOutcome>,
}

/// What one replica did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaOutcome {
    /// Steps that it computed.
    pub steps: u64,
    /// Tokens that it computed, those computed again included.
    pub computed_tokens: u64,
    /// KV blocks of its pool.
    pub kv_blocks: u32,
    /// Most KV blocks in use at one time.
    pub kv_blocks_peak: u32,
    /// Most sequences that held KV at one time.
    pub running_peak: u32,
}

/// Why there is no outcome.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The layout is not valid here.
    #[error(transparent)]
    Layout(#[from] LayoutViolations),
    /// A step has no predicted time.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// An option has no meaning.
    #[error(transparent)]
    Options(#[from] SchedulerError),
    /// A load of nobody.
    #[error("a closed loop of 0 clients sends nothing, at least 1 is needed")]
    NoClients,
    /// An open loop over a trace of lengths.
    #[error("{request} has no arrival, which an open loop needs; a closed loop does without")]
    NoArrival {
        /// Which.
        request: RequestId,
    },
    /// Requests that are not in order of arrival.
    #[error("{request} arrives before the one that stands before it in the trace")]
    ArrivalOrder {
        /// Which.
        request: RequestId,
    },
    /// A role that the engine does not play.
    #[error("{replica} has the role {role:?}, which is not simulated")]
    Role {
        /// Which.
        replica: ReplicaId,
        /// Its role.
        role: ReplicaRole,
    },
    /// A pool without a size.
    #[error("{replica} has no KV capacity: no device of it states its memory and there is no block limit")]
    NoCapacity {
        /// Which.
        replica: ReplicaId,
    },
    /// A step time that is no span of the clock.
    #[error("{stage} of {replica} takes {seconds} s for one step, the clock reaches 213 days")]
    StepTime {
        /// Which replica.
        replica: ReplicaId,
        /// Which stage.
        stage: StageId,
        /// What the cost model says.
        seconds: f64,
    },
    /// A run that outlasts the clock.
    #[error("the run outlasts the clock, which reaches 213 days")]
    ClockEnds,
}
