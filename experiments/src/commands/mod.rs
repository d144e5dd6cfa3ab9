//! One module a command: its arguments and what it does with them.

pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod cluster;
pub(crate) mod doctor;
pub(crate) mod fuzz;
pub(crate) mod generate;
pub(crate) mod layout;
pub(crate) mod migrate;
pub(crate) mod model;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod quickstart;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod trace;
pub(crate) mod worker;

use crate::Outcome;
use crate::cli::Command;
use crate::screen::Screen;

/// Runs a command.
pub(crate) fn run(command: Command, screen: &Screen) -> anyhow::Result<Outcome> {
    match command {
        Command::Layout(arguments) => layout::run(arguments, screen),
        Command::Trace(arguments) => trace::run(arguments, screen),
        Command::Plan(arguments) => plan::run(&arguments, screen),
        Command::Migrate(arguments) => migrate::run(arguments, screen),
        Command::Simulate(arguments) => simulate::run(&arguments, screen),
        Command::Calibrate(arguments) => calibrate::run(&arguments, screen),
        Command::Profile(arguments) => profile::run(&arguments, screen),
        Command::Serve(arguments) => serve::run(&arguments, screen),
        Command::Report(arguments) => report::run(&arguments, screen),
        Command::Replay(arguments) => replay::run(&arguments, screen),
        Command::Quickstart(arguments) => quickstart::run(&arguments, screen),
        Command::Generate(arguments) => generate::run(&arguments, screen),
        Command::Bench(arguments) => bench::run(&arguments, screen),
        Command::Worker(arguments) => worker::run(&arguments),
        Command::Fuzz(arguments) => fuzz::run(&arguments, screen),
        Command::Doctor(arguments) => doctor::run(&arguments, screen),
        Command::Cluster(arguments) => cluster::run(arguments, screen),
        Command::Model(arguments) => model::run(arguments, screen),
    }
}
