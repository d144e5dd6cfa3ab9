//! `quickstart`: the whole loop on this machine.

use std::path::PathBuf;

use clap::Args;

use crate::Outcome;
use crate::quickstart::{self, Settings};
use crate::running::Speeds;
use crate::screen::Screen;

/// Runs the whole loop on this machine with nothing installed: profile, calibrate, plan, simulate, execute.
///
/// Two workers, one at an emulated 0.4 of the other's speed, serve a made model: cut evenly, as engines do it, and
/// as planned, in turns. Everything that is predicted is measured and stands in one table. At last the even layout
/// becomes the planned one while requests run. Takes two minutes or three; nothing else should run meanwhile.
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
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Judged runs of each layout, in turns; medians and spread are shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    repeats: u8,
}

/// Runs the command.
pub(crate) fn run(arguments: &Quickstart, screen: &Screen) -> anyhow::Result<Outcome> {
    let settings = Settings {
        folder: arguments.output.clone(),
        speeds: arguments.speed.pair()?,
        requests: arguments.requests,
        repeats: usize::from(arguments.repeats),
    };
    let report = quickstart::run(&settings, screen)?;
    screen.answer(&report, |report| report.people())?;
    Ok(Outcome::Done)
}
