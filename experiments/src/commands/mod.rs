//! One module a command: its arguments and what it does with them.

pub(crate) mod doctor;
pub(crate) mod layout;
pub(crate) mod model;
pub(crate) mod trace;

use crate::Outcome;
use crate::cli::Command;
use crate::screen::Screen;

/// Runs a command.
pub(crate) fn run(command: Command, screen: &Screen) -> anyhow::Result<Outcome> {
    match command {
        Command::Layout(arguments) => layout::run(arguments, screen),
        Command::Trace(arguments) => trace::run(arguments, screen),
        Command::Doctor(arguments) => doctor::run(&arguments, screen),
        Command::Model(arguments) => model::run(arguments, screen),
    }
}
