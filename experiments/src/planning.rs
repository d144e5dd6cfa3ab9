//! One plan and everything that is said about it: the layout, what binds it, what it is compared with, and what
//! the simulator makes of it.

use infercluster_planner::draw::draw_layout;
use infercluster_planner::replica::{
    BaselineKind, Infeasible, Objective, PlanOutcome, PlanProblem, ReplicaPlan, StagePlan, plan_replica,
};
use infercluster_sim::cost::CostModel;
use infercluster_sim::engine::{self, EngineChoice};
use infercluster_sim::scenario::{Load, Scenario};
use infercluster_spec::{Bytes, Cluster, GpuId, Layout, Model, Report, Trace};
use serde::Serialize;

use crate::screen::{Columns, facts};

/// The answer of `plan`.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// A layout was found.
    Planned(Box<Planned>),
    /// None holds the workload.
    Infeasible(NotPlanned),
}

/// A plan.
#[derive(Debug, Serialize)]
pub(crate) struct Planned {
    /// The layout.
    pub(crate) layout: Layout,
    /// Seconds in which every sequence advances by one token.
    pub(crate) step_s: f64,
    /// Output tokens a second that follow.
    pub(crate) output_tokens_per_s: f64,
    /// Whether no layout of one replica over these devices in this rank order is faster, on this cost model.
    pub(crate) exact: bool,
    /// Ways to deal devices to stages that were priced.
    pub(crate) structures: usize,
    /// Lower bounds on the step of this structure.
    pub(crate) bounds: Bounds,
    /// By stage.
    pub(crate) stages: Vec<StageAnswer>,
    /// Layouts as engines make them today, fastest first.
    pub(crate) baselines: Vec<BaselineAnswer>,
    /// What the simulator says of the plan on the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simulated: Option<Report>,
}

/// What ideal shares would reach.
#[derive(Debug, Serialize)]
pub(crate) struct Bounds {
    /// Whole heads, quanta and rows.
    pub(crate) integer_shares_s: f64,
    /// Any fraction.
    pub(crate) continuous_shares_s: f64,
}

/// One stage.
#[derive(Debug, Serialize)]
pub(crate) struct StageAnswer {
    gpus: Vec<GpuId>,
    layers: String,
    time_s: f64,
    host_s: f64,
    collective_s: f64,
    rank_compute_s: Vec<f64>,
    memory_used_bytes: Vec<u64>,
    binding: String,
}

/// A layout to compare with.
#[derive(Debug, Serialize)]
pub(crate) struct BaselineAnswer {
    pub(crate) kind: &'static str,
    pub(crate) layout: Layout,
    pub(crate) step_s: f64,
    /// How much longer its step is, as a factor.
    pub(crate) gain: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simulated: Option<Report>,
}

/// Why there is no plan.
#[derive(Debug, Serialize)]
pub(crate) struct NotPlanned {
    /// What the devices together lack.
    pub(crate) missing_bytes: u64,
    nearest_sequences: Option<u32>,
    nearest_context: Option<u64>,
}

/// What candidates are simulated on.
#[derive(Clone, Copy)]
pub(crate) struct Trial<'a> {
    /// The requests.
    pub(crate) trace: &'a Trace,
    /// When they are sent.
    pub(crate) load: Load,
}

/// Plans, and simulates the plan and its baselines where there is a trial.
pub(crate) fn plan(problem: &PlanProblem, trial: Option<Trial>) -> anyhow::Result<Answer> {
    let plan = match plan_replica(problem)? {
        PlanOutcome::Plan(plan) => plan,
        PlanOutcome::Infeasible(why) => return Ok(Answer::Infeasible(NotPlanned::of(&why))),
    };
    let judge = |layout: &Layout| -> anyhow::Result<Option<Report>> {
        let Some(trial) = trial else {
            return Ok(None);
        };
        Ok(Some(simulated(
            problem.cluster,
            problem.model,
            layout,
            problem.cost,
            problem.reserve,
            trial,
        )?))
    };
    let baselines = plan
        .baselines
        .iter()
        .map(|baseline| {
            Ok(BaselineAnswer {
                kind: kind(baseline.kind),
                step_s: baseline.step_time.as_seconds(),
                gain: baseline.step_time.as_seconds() / plan.step_time.as_seconds(),
                simulated: judge(&baseline.layout)?,
                layout: baseline.layout.clone(),
            })
        })
        .collect::<anyhow::Result<_>>()?;
    let simulated = judge(&plan.layout)?;
    Ok(Answer::Planned(Box::new(planned(*plan, baselines, simulated))))
}

fn simulated(
    cluster: &Cluster,
    model: &Model,
    layout: &Layout,
    cost: &dyn CostModel,
    reserve: Bytes,
    trial: Trial,
) -> anyhow::Result<Report> {
    let mut scenario = Scenario::new(cluster, model, layout, cost, trial.trace);
    scenario.load = trial.load;
    scenario.memory_reserve = reserve;
    Ok(engine::run(&scenario, EngineChoice::Fastest)?.report)
}

fn planned(plan: ReplicaPlan, baselines: Vec<BaselineAnswer>, simulated: Option<Report>) -> Planned {
    Planned {
        step_s: plan.step_time.as_seconds(),
        output_tokens_per_s: plan.output_tokens_per_s,
        exact: plan.exact,
        structures: plan.structures,
        bounds: Bounds {
            integer_shares_s: plan.bounds.integer.as_seconds(),
            continuous_shares_s: plan.bounds.continuous.as_seconds(),
        },
        stages: plan.stages.iter().map(StageAnswer::of).collect(),
        layout: plan.layout,
        baselines,
        simulated,
    }
}

fn kind(kind: BaselineKind) -> &'static str {
    match kind {
        BaselineKind::Even => "even",
        BaselineKind::MemoryProportional => "memory_proportional",
    }
}

impl StageAnswer {
    fn of(stage: &StagePlan) -> Self {
        Self {
            gpus: stage.gpus.clone(),
            layers: stage.layers.to_string(),
            time_s: stage.time.as_seconds(),
            host_s: stage.host.as_seconds(),
            collective_s: stage.collectives.as_seconds(),
            rank_compute_s: stage.rank_compute.iter().map(|time| time.as_seconds()).collect(),
            memory_used_bytes: stage.memory_used.iter().map(|bytes| bytes.0).collect(),
            binding: stage.binding.to_string(),
        }
    }
}

impl NotPlanned {
    fn of(why: &Infeasible) -> Self {
        Self {
            missing_bytes: why.missing.0,
            nearest_sequences: why.nearest_sequences,
            nearest_context: why.nearest_context,
        }
    }

    fn people(&self) -> String {
        let nearest = |what: &str, found: Option<String>| match found {
            Some(found) => format!("{found} would fit {what}"),
            None => format!("nothing fits {what}"),
        };
        facts([
            (
                "no layout fits",
                format!("{} are missing at least", Bytes(self.missing_bytes)),
            ),
            (
                "fewer sequences",
                nearest(
                    "at this context",
                    self.nearest_sequences.map(|count| format!("{count} sequences")),
                ),
            ),
            (
                "shorter contexts",
                nearest(
                    "for this many sequences",
                    self.nearest_context.map(|tokens| format!("{tokens} tokens")),
                ),
            ),
        ])
    }
}

/// The answer as a person reads it.
pub(crate) fn people(answer: &Answer, model: &Model, cluster: &Cluster, objective: Objective) -> String {
    let planned = match answer {
        Answer::Planned(planned) => planned,
        Answer::Infeasible(why) => return why.people(),
    };
    let mut text = draw_layout(&planned.layout, model, Some(cluster));
    text.push('\n');
    text.push_str(&stages(planned));
    text.push('\n');
    text.push_str(&comparison(planned));
    let proof = if planned.exact {
        "no layout of one replica over these devices in this rank order is faster, on this cost model"
    } else {
        "not proven: a faster layout may exist"
    };
    let goal = match objective {
        Objective::Throughput => "throughput",
        Objective::Latency => "time between tokens",
    };
    text.push_str(&format!(
        "\nplanned for {goal} over {} structures; {proof}\n",
        planned.structures
    ));
    text
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1000.0 * seconds)
}

fn stages(planned: &Planned) -> String {
    let mut table = Columns::new([
        "stage",
        "devices",
        "layers",
        ">step",
        ">collectives",
        ">host",
        ">compute by rank",
        "held back by",
    ]);
    for (index, stage) in planned.stages.iter().enumerate() {
        let gpus: Vec<String> = stage.gpus.iter().map(|gpu| gpu.0.to_string()).collect();
        let compute: Vec<String> = stage
            .rank_compute_s
            .iter()
            .map(|time| milliseconds(*time))
            .collect();
        table.row([
            index.to_string(),
            gpus.join(" "),
            stage.layers.clone(),
            milliseconds(stage.time_s),
            milliseconds(stage.collective_s),
            milliseconds(stage.host_s),
            compute.join(", "),
            stage.binding.clone(),
        ]);
    }
    table.to_string()
}

fn comparison(planned: &Planned) -> String {
    let mut table = Columns::new([
        "layout",
        ">every sequence one token",
        ">gain",
        ">simulated output/s",
        ">simulated itl p50",
    ]);
    let simulated = |report: &Option<Report>| match report {
        Some(report) => (
            format!("{:.1}", report.output_tokens_per_s),
            milliseconds(report.itl_s.p50),
        ),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let (rate, itl) = simulated(&planned.simulated);
    table.row([
        "this plan".to_owned(),
        milliseconds(planned.step_s),
        String::new(),
        rate,
        itl,
    ]);
    for baseline in &planned.baselines {
        let (rate, itl) = simulated(&baseline.simulated);
        let name = baseline.kind.replace('_', " ");
        table.row([
            name,
            milliseconds(baseline.step_s),
            format!("{:.3} x", baseline.gain),
            rate,
            itl,
        ]);
    }
    for (name, bound) in [
        ("bound, whole shares", planned.bounds.integer_shares_s),
        ("bound, any fraction", planned.bounds.continuous_shares_s),
    ] {
        let dash = || "-".to_owned();
        table.row([
            name.to_owned(),
            milliseconds(bound),
            String::new(),
            dash(),
            dash(),
        ]);
    }
    table.to_string()
}
