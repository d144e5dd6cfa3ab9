//! `cluster import` and `cluster show`.

mod import;
mod picture;
mod show;

use clap::{Args, Subcommand};

use crate::Outcome;
use crate::screen::Screen;

/// Reads dumps of hosts and clusters, and looks at clusters.
#[derive(Debug, Args)]
pub(crate) struct ClusterCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Import(Box<import::Import>),
    Show(show::Show),
}

/// Runs the command.
pub(crate) fn run(command: ClusterCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Import(arguments) => import::run(&arguments, screen),
        Action::Show(arguments) => show::run(&arguments, screen),
    }
}
