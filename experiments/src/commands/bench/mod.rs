//! `bench`: what this build does on this machine, one file a measurement.

mod migrate;
mod simulate;
mod unlike;

use clap::{Args, Subcommand};

use self::migrate::MigrateBench;
use self::simulate::SimulateBench;
use self::unlike::UnlikeBench;
use crate::Outcome;
use crate::screen::Screen;

/// Measures this build on this machine.
#[derive(Debug, Args)]
pub(crate) struct BenchCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Migrate(MigrateBench),
    Simulate(SimulateBench),
    Unlike(UnlikeBench),
}

/// Runs the command.
pub(crate) fn run(command: &BenchCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match &command.action {
        Action::Migrate(arguments) => migrate::run(arguments, screen),
        Action::Simulate(arguments) => simulate::run(arguments, screen),
        Action::Unlike(arguments) => unlike::run(arguments, screen),
    }
}
