//! Two workers of unlike speed on this machine: measured, planned for, simulated and run by the functions that the
//! single commands call. `quickstart` and `bench unlike` are two uses of it.
//!
//! The calibration sees profiles, one worker alone and the even layout. It never sees the runs that its
//! predictions are compared with.

pub(crate) mod judged;
pub(crate) mod quiet;
pub(crate) mod rows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use infercluster_executor::coordinator::{Coordinator, CoordinatorOptions};
use infercluster_executor::replay::{Pace, ReplayOptions, ReplayOutcome, Target, replay};
use infercluster_executor::speed::Speed;
use infercluster_inventory::{Catalogue, cluster_file};
use infercluster_planner::replica::{Objective, PlanProblem, Workload};
use infercluster_sim::calibrate::{fit, fit_steps};
use infercluster_sim::cost::AnalyticCost;
use infercluster_sim::engine::simulate;
use infercluster_sim::scenario::{DEFAULT_TURNAROUND, Load, Scenario};
use infercluster_spec::layout::{CPU_F32, DEFAULT_QUANTUM, Reduction};
use infercluster_spec::report::RequestRecord;
use infercluster_spec::{
    Bytes, Calibration, Cluster, GpuId, Layout, Model, Report, SimDuration, StepRun, Trace,
};
use infercluster_traces::synth::{
    Amount, ArrivalProcess, DEFAULT_SEED, LengthDistribution, Lengths, SynthSpec, synthesise,
};

use crate::planning::{self, Answer, Planned};
use crate::profiling::{self, CPU_TYPE};
use crate::running;

/// Most tokens of one step that are profiled.
const PROFILED_TOKENS: usize = 64;

/// The model and the workers.
pub(crate) struct Rig {
    /// Folder of the model.
    pub(crate) model_dir: PathBuf,
    /// The model.
    pub(crate) model: Model,
    /// The workers as a cluster: their speeds, and the memory that each may use.
    pub(crate) cluster: Cluster,
    speeds: [Speed; 2],
    memory: Bytes,
}

/// So many clients, each with one request at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ClosedLoop {
    /// Clients.
    pub(crate) clients: u32,
    /// They send for so long; `None` until the trace ends.
    pub(crate) duration: Option<SimDuration>,
}

/// What a run, simulated or real, gave.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    /// Latencies.
    pub(crate) report: Report,
    /// Tokens a second: of the whole run, or of the time in which clients sent where that was limited, so that the
    /// last requests, which run in ever smaller batches, do not count.
    pub(crate) output_tokens_per_s: f64,
}

impl ClosedLoop {
    fn load(self) -> Load {
        Load::Closed {
            clients: self.clients,
            turnaround: DEFAULT_TURNAROUND,
            duration: self.duration,
        }
    }

    fn pace(self) -> Pace {
        Pace::Closed {
            concurrency: self.clients as usize,
            duration: self
                .duration
                .map(|span| Duration::from_nanos(span.as_nanoseconds())),
        }
    }

    /// Judges the records of a run under this load.
    pub(crate) fn observe(self, report: Report, records: &[RequestRecord]) -> Observed {
        let output_tokens_per_s = match self.duration {
            None => report.output_tokens_per_s,
            Some(duration) => rate_within(records, duration),
        };
        Observed {
            report,
            output_tokens_per_s,
        }
    }
}

/// Tokens a second that came in the first `window` after the first arrival.
fn rate_within(records: &[RequestRecord], window: SimDuration) -> f64 {
    let Some(first) = records.iter().map(|record| record.arrival).min() else {
        return 0.0;
    };
    let times = records.iter().flat_map(|record| &record.token_times);
    let tokens = times.filter(|at| at.since(first) <= window).count();
    tokens as f64 / window.as_seconds()
}

impl Rig {
    /// Two workers for a model; each may use `memory`.
    pub(crate) fn new(
        model_dir: PathBuf,
        model: Model,
        speeds: [Speed; 2],
        memory: Bytes,
    ) -> anyhow::Result<Self> {
        let [first, second] = speeds.map(Speed::factor);
        let memory_text = memory.to_file_text();
        let text = format!(
            "name = \"this host\"\n[[node]]\nname = \"host\"\ngpus = \"2 x {CPU_TYPE}\"\nfabric = \"none\"\n\
             memory = \"{memory_text}\"\nspeed = [{first:?}, {second:?}]\n"
        );
        Ok(Self {
            model_dir,
            model,
            cluster: cluster_file::read("this host", &text, &Catalogue::builtin())?.cluster,
            speeds,
            memory,
        })
    }

    /// Operators of a step at both speeds.
    pub(crate) fn measure_operators(&self) -> anyhow::Result<Calibration> {
        let mut profiles = Vec::new();
        for speed in self.speeds {
            profiles.push(profiling::profile(&self.model, PROFILED_TOKENS, speed, CPU_TYPE)?.profile);
        }
        Ok(fit(&profiles, &self.cluster)?)
    }

    /// Adds what whole steps show: of the first worker alone, which is let use the memory of the whole model, and
    /// of the even layout, under each load.
    pub(crate) fn calibrate(
        &self,
        operators: &Calibration,
        even: &Layout,
        trace: &Trace,
        loads: &[ClosedLoop],
    ) -> anyhow::Result<Calibration> {
        let alone = Layout::single(&self.model, Reduction::Fast);
        let mut runs = Vec::new();
        for (layout, memory) in [(&alone, None), (even, Some(self.memory))] {
            for load in loads {
                let outcome = self.run_within(layout, memory, trace, *load)?;
                runs.push(StepRun {
                    layout: layout.clone(),
                    steps: outcome.steps,
                });
            }
        }
        Ok(fit_steps(&runs, &self.cluster, &self.model, operators)?)
    }

    /// One tensor-parallel group over `gpus`.
    pub(crate) fn plan(
        &self,
        calibration: &Calibration,
        gpus: Vec<GpuId>,
        workload: Workload,
    ) -> anyhow::Result<Answer> {
        let cost = AnalyticCost::new(&self.cluster, calibration)?;
        let problem = PlanProblem {
            cost: &cost,
            model: &self.model,
            cluster: &self.cluster,
            gpus,
            reduction: Reduction::Fast,
            numerics: CPU_F32.to_owned(),
            quantum: DEFAULT_QUANTUM,
            kv: Layout::single(&self.model, Reduction::Fast).kv,
            split_groups: true,
            stages: Some(1),
            workload,
            objective: Objective::Throughput,
            reserve: Bytes::ZERO,
        };
        planning::plan(&problem, None)
    }

    /// One tensor-parallel group over both workers, which must exist.
    pub(crate) fn plan_both(&self, calibration: &Calibration, workload: Workload) -> anyhow::Result<Planned> {
        let gpus = vec![GpuId(0), GpuId(1)];
        match self.plan(calibration, gpus, workload)? {
            Answer::Planned(planned) => Ok(*planned),
            Answer::Infeasible(_) => bail!("the model does not fit two workers of {}", self.memory),
        }
    }

    /// What the simulator says of a layout.
    pub(crate) fn simulate(
        &self,
        calibration: &Calibration,
        layout: &Layout,
        trace: &Trace,
        load: ClosedLoop,
    ) -> anyhow::Result<Observed> {
        let cost = AnalyticCost::new(&self.cluster, calibration)?;
        let mut scenario = Scenario::new(&self.cluster, &self.model, layout, &cost, trace);
        scenario.load = load.load();
        let outcome = simulate(&scenario)?;
        if load.duration.is_some() && outcome.requests.len() == trace.requests.len() {
            bail!(
                "all {} requests of the trace were sent before the time was over",
                trace.requests.len()
            );
        }
        Ok(load.observe(outcome.report, &outcome.requests))
    }

    /// Starts worker processes for a layout and replays a trace.
    pub(crate) fn run(
        &self,
        layout: &Layout,
        trace: &Trace,
        load: ClosedLoop,
    ) -> anyhow::Result<ReplayOutcome> {
        self.run_within(layout, Some(self.memory), trace, load)
    }

    fn run_within(
        &self,
        layout: &Layout,
        memory: Option<Bytes>,
        trace: &Trace,
        load: ClosedLoop,
    ) -> anyhow::Result<ReplayOutcome> {
        let coordinator = Coordinator::start(self.options(layout, memory)?)?;
        let options = ReplayOptions {
            pace: load.pace(),
            seed: DEFAULT_SEED,
            max_context: self.model.max_positions,
            vocab: self.model.vocab,
            logits_hash: false,
            slo: None,
        };
        let outcome = replay(Target::Coordinator(&coordinator), trace, &options, &|_| ())?;
        match outcome.answers.iter().find_map(|answer| answer.error.as_ref()) {
            Some(error) => bail!(
                "{} requests failed, the first with: {error}",
                outcome.report.failed
            ),
            None => Ok(outcome),
        }
    }

    /// What a coordinator of a layout is started with, both workers at their speeds; `memory` is what each may
    /// use.
    pub(crate) fn options(
        &self,
        layout: &Layout,
        memory: Option<Bytes>,
    ) -> anyhow::Result<CoordinatorOptions> {
        let mut options = running::options(&self.model_dir, &self.model, layout)?;
        let speeds = [GpuId(0), GpuId(1)].into_iter().zip(self.speeds);
        options.speeds = speeds
            .filter(|(gpu, _)| layout.gpus.contains(gpu))
            .collect::<BTreeMap<_, _>>();
        options.memory = memory;
        options.launch = running::pinned()?;
        Ok(options)
    }

    /// What each worker may use.
    pub(crate) fn memory(&self) -> Bytes {
        self.memory
    }
}

/// The layout that engines would choose.
pub(crate) fn even_of(planned: &Planned) -> anyhow::Result<Layout> {
    let even = planned.baselines.iter().find(|baseline| baseline.kind == "even");
    Ok(even.context("no even layout fits")?.layout.clone())
}

/// How many times the rate of the even layout ideal whole shares would reach, on the plan's cost model.
pub(crate) fn gain_bound(planned: &Planned) -> anyhow::Result<f64> {
    let even = planned.baselines.iter().find(|baseline| baseline.kind == "even");
    Ok(even.context("no even layout fits")?.step_s / planned.bounds.integer_shares_s)
}

/// Short requests, as many as asked for: the same lengths whatever the name.
pub(crate) fn short_requests(name: &str, count: u64) -> anyhow::Result<Trace> {
    let uniform = |min, max| LengthDistribution::Uniform { min, max };
    Ok(synthesise(&SynthSpec {
        name,
        arrivals: ArrivalProcess::Closed,
        lengths: Lengths::Independent {
            input: uniform(16, 48),
            output: uniform(24, 48),
        },
        amount: Amount::Count(count),
        seed: DEFAULT_SEED,
    })?)
}

#[cfg(test)]
mod tests {
    use infercluster_spec::{RequestId, SimTime, Tokens};

    use super::*;

    #[test]
    fn a_limited_run_counts_the_tokens_of_its_time() {
        let second = 1_000_000_000_000;
        let record = |arrival: u64, times: &[u64]| RequestRecord {
            id: RequestId(0),
            arrival: SimTime(arrival * second),
            input: Tokens(1),
            token_times: times.iter().map(|at| SimTime(at * second)).collect(),
            preemptions: 0,
            completed: true,
        };
        // From 1 s to 5 s: tokens at 2, 3 and 5 of the first, 4 of the second; those at 6 and 7 are late.
        let records = [record(1, &[2, 3, 5, 6]), record(3, &[4, 7])];
        assert_eq!(rate_within(&records, SimDuration(4 * second)), 1.0);
        assert_eq!(rate_within(&[], SimDuration(second)), 0.0);
    }
}
