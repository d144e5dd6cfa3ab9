//! `model show` and `model make`.

mod make;
mod show;
mod weights;

use clap::{Args, Subcommand};

use crate::Outcome;
use crate::screen::Screen;

pub(crate) use make::{DEFAULT_SEED, Preset};

/// Shows a model, or makes a small random one.
#[derive(Debug, Args)]
pub(crate) struct ModelCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(show::Show),
    Make(make::Make),
}

/// Runs the command.
pub(crate) fn run(command: ModelCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Show(arguments) => show::run(&arguments, screen),
        Action::Make(arguments) => make::run(&arguments, screen),
    }
}
