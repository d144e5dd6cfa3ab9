//! `calibrate`: measurements into parameters of the cost model, with residuals.

use std::path::{Path, PathBuf};

use clap::Args;
use infercluster_sim::calibrate::{cross_validate, fit, fit_steps, step_errors};
use infercluster_spec::calibration::Residual;
use infercluster_spec::{Calibration, Profile, StepRun};

use crate::Outcome;
use crate::screen::{Columns, Screen};
use crate::{clusters, io, models};

/// Fits the cost model to measurements and shows how far it is from them.
///
/// Profiles give single operators; step files of real runs, with their model, add what only whole steps show.
/// Runs under --judge are predicted and compared, never fitted.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster calibrate --cluster cluster.json cpu.profile.json -o calibration.json\n  \
    infercluster calibrate --cluster cluster.json cpu.profile.json --steps even.steps.json --model tiny \
    --judge uneven.steps.json -o calibration.json")]
pub(crate) struct Calibrate {
    /// Profiles, as `profile` writes them.
    #[arg(required = true)]
    profiles: Vec<PathBuf>,
    /// The cluster whose device types were measured.
    #[arg(long)]
    cluster: PathBuf,
    /// Measured steps of real runs, as `replay --steps` writes them.
    #[arg(long, requires = "model")]
    steps: Vec<PathBuf>,
    /// The model of those runs.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Measured steps to be predicted, held out of the fit.
    #[arg(long, requires = "model")]
    judge: Vec<PathBuf>,
    /// Cross-validate operators over so many parts of the weight shapes.
    #[arg(long)]
    folds: Option<usize>,
    /// Where to write the calibration.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Calibrate, screen: &Screen) -> anyhow::Result<Outcome> {
    let cluster = clusters::read(&arguments.cluster)?.cluster;
    let profiles = read_all::<Profile>(&arguments.profiles)?;
    let mut calibration = fit(&profiles, &cluster)?;
    let model = arguments.model.as_deref().map(models::read).transpose()?;
    if let (Some(model), false) = (&model, arguments.steps.is_empty()) {
        let runs = read_all::<StepRun>(&arguments.steps)?;
        calibration = fit_steps(&runs, &cluster, &model.model, &calibration)?;
    }
    if let Some(output) = &arguments.output {
        io::write_document(output, &calibration)?;
    }
    screen.document(&calibration, people)?;
    if let Some(folds) = arguments.folds {
        for (device_type, residuals) in cross_validate(&profiles, &cluster, folds)? {
            screen.say(format!("{device_type}, shapes held out in {folds} parts:"));
            screen.say(table(residuals.iter()));
        }
    }
    if let Some(model) = &model {
        for path in &arguments.judge {
            let run: StepRun = io::read_document(path)?;
            let errors = step_errors(&[run], &cluster, &model.model, &calibration)?;
            screen.say(judgement(path, errors));
        }
    }
    Ok(Outcome::Done)
}

fn read_all<T: infercluster_spec::Document>(paths: &[PathBuf]) -> anyhow::Result<Vec<T>> {
    paths.iter().map(|path| io::read_document(path)).collect()
}

/// How well steps that were held out are predicted.
fn judgement(path: &Path, mut errors: Vec<f64>) -> String {
    errors.iter_mut().for_each(|error| *error = error.abs());
    errors.sort_by(f64::total_cmp);
    let at = |p| infercluster_spec::stats::percentile(&errors, p).unwrap_or(0.0);
    format!(
        "{}: {} steps held out, error median {:.1} %, p90 {:.1} %",
        io::name_of(path),
        errors.len(),
        100.0 * at(50.0),
        100.0 * at(90.0)
    )
}

fn people(calibration: &Calibration) -> String {
    let mut text = String::new();
    for (device_type, device) in &calibration.devices {
        let origin = &device.provenance;
        text.push_str(&format!(
            "{device_type}: {}, {}\n",
            origin.device_name, origin.date
        ));
        text.push_str(&table(device.residuals.iter()));
    }
    text
}

fn table<'a>(residuals: impl Iterator<Item = &'a Residual>) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut table = Columns::new([
        "operator",
        "dtype",
        ">rows",
        ">median error",
        ">p90 error",
        ">bias",
    ]);
    for residual in residuals {
        table.row([
            residual.operator.clone(),
            residual.dtype.to_string(),
            residual.rows.to_string(),
            percent(residual.median_error),
            percent(residual.p90_error),
            percent(residual.bias),
        ]);
    }
    table.to_string()
}
