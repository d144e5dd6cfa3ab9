//! `quickstart`: the whole loop on this machine.

use std::path::PathBuf;

use clap::Args;

use crate::Outcome;
use crate::quickstart::{self, Settings};
use crate::running::Speeds;
use crate::screen::Screen;

/// Runs the whole loop on this machine with nothing installed: profile, calibrate, plan, simulate, execute.
///
/// Two workers, one at an emulated 0.4 of the other's speed, serve a made model: first cut evenly, as engines do
/// it, then as planned. Everything that is predicted is measured and stands in one table. Takes a minute or two;
/// nothing else should run meanwhile.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster quickstart -o out/quickstart")]
pub(crate) struct Quickstart {
    /// Folder for the model, layouts, calibration and report.
    #[arg(short, long, default_value = "out/quickstart")]
    output: PathBuf,
    /// Emulated speeds of the two workers.
    #[arg(long, default_value = "1.0:0.4")]
    speed: Speeds,
    /// Requests of each judged run.
    #[arg(long, default_value_t = 64)]
    requests: u64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Quickstart, screen: &Screen) -> anyhow::Result<Outcome> {
    let settings = Settings {
        folder: arguments.output.clone(),
        speeds: arguments.speed.pair()?,
        requests: arguments.requests,
    };
    let report = quickstart::run(&settings, screen)?;
    screen.answer(&report, |report| report.people())?;
    Ok(Outcome::Done)
}
