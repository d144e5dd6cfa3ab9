//! The whole loop on one machine, by the functions that the single commands call.

mod migration;
mod report;

use std::path::PathBuf;

use anyhow::Context as _;
use indicatif::ProgressBar;
use infercluster_executor::checkpoint;
use infercluster_executor::speed::Speed;
use infercluster_planner::replica::Workload;
use infercluster_spec::{Bytes, json};

use crate::commands::model::{DEFAULT_SEED as MODEL_SEED, Preset};
use crate::io;
use crate::rig::judged::{self, Case, Repeats};
use crate::rig::{ClosedLoop, Rig, even_of, short_requests};
use crate::screen::Screen;

pub(crate) use report::QuickReport;
use report::{Judged, Parts};

/// What a user may change.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Where everything is written.
    pub(crate) folder: PathBuf,
    /// Emulated speeds of the two workers.
    pub(crate) speeds: [Speed; 2],
    /// Requests of each judged run.
    pub(crate) requests: u64,
    /// Judged runs of each layout.
    pub(crate) repeats: usize,
}

/// Sequences under way in the judged runs; calibration runs use others.
const JUDGED_CLIENTS: u32 = 8;
/// Sequences under way in the runs that the calibration is fitted to.
const FITTED_CLIENTS: [u32; 2] = [4, 12];
/// Requests of a run that the calibration is fitted to, where the judged ones have as many.
const FITTED_REQUESTS: u64 = 32;
/// Memory of one worker: far more than the model, so that memory binds nothing.
const WORKER_MEMORY: Bytes = Bytes(1 << 30);

/// Runs the loop.
pub(crate) fn run(settings: &Settings, screen: &Screen) -> anyhow::Result<QuickReport> {
    let judged_runs = 2 * settings.repeats;
    let steps = Steps::new(screen, judged_runs);
    let folder = &settings.folder;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let model = Preset::Quick.model("model");
    let rig = Rig::new(folder.join("model"), model, settings.speeds, WORKER_MEMORY)?;
    steps.next("making a random model with a fixed seed");
    checkpoint::make(&rig.model_dir, &rig.model, MODEL_SEED)?;

    steps.next("measuring operators at both speeds");
    let operators = rig.measure_operators()?;

    let fitted = short_requests("fitted", FITTED_REQUESTS.min(settings.requests))?;
    let workload = Workload::of_trace(&fitted, JUDGED_CLIENTS).context("a trace without requests")?;
    let even = even_of(&rig.plan_both(&operators, workload)?)?;
    steps.next("running one worker alone, then both evenly, for the calibration");
    let closed = |clients| ClosedLoop {
        clients,
        duration: None,
    };
    let calibration = rig.calibrate(&operators, &even, &fitted, &FITTED_CLIENTS.map(closed))?;
    io::write_document(&folder.join("calibration.json"), &calibration)?;

    steps.next("planning and simulating");
    let trace = short_requests("judged", settings.requests)?;
    let load = closed(JUDGED_CLIENTS);
    let planned = rig.plan_both(&calibration, workload)?;
    io::write_document(&folder.join("even.json"), &even)?;
    io::write_document(&folder.join("planned.json"), &planned.layout)?;
    let mut predicted = Vec::new();
    for layout in [&even, &planned.layout] {
        predicted.push(rig.simulate(&calibration, layout, &trace, load)?);
    }

    let case = |name, layout| Case {
        name,
        layout,
        trace: &trace,
        load,
    };
    let cases = [case("even", &even), case("planned", &planned.layout)];
    let repeats = Repeats {
        runs: settings.repeats,
        // Each takes some ten seconds, and all of it is to take less than three minutes.
        spare: settings.repeats,
    };
    let measured = judged::judge(&rig, &cases, repeats, screen, &mut |name| {
        steps.next(&format!("executing the {name} layout"));
    })?;

    steps.next("migrating from the even layout to the planned one under load");
    let migration = migration::run(&rig, &even, &planned.layout, settings.requests)?;
    steps.finish();

    let report = QuickReport::new(Parts {
        rig: &rig,
        planned: &planned,
        calibration: &calibration,
        even: Judged {
            predicted: &predicted[0],
            measured: &measured[0],
        },
        chosen: Judged {
            predicted: &predicted[1],
            measured: &measured[1],
        },
        migration,
    })?;
    io::write_bytes(&folder.join("report.json"), json::write_plain(&report).as_bytes())?;
    io::write_bytes(&folder.join("report.txt"), report.people().as_bytes())?;
    screen.say(format!("everything is in {}", folder.display()));
    Ok(report)
}

/// Progress in whole steps: a bar on a terminal, nothing in pipes.
struct Steps(ProgressBar);

impl Steps {
    fn new(screen: &Screen, judged_runs: usize) -> Self {
        // Those beside the judged runs are the calls of `next` above.
        Self(screen.progress(5 + judged_runs as u64, "starting"))
    }

    fn next(&self, what: &str) {
        self.0.inc(1);
        self.0.set_message(what.to_owned());
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}
