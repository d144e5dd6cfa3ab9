//! The one program `infercluster`: every command, and the workers that it starts of itself.
//!
//! Commands parse, call library functions and show the answer; they hold no method of their own.
//! Results go to stdout, talk goes to stderr. Exit codes: 0 done; 1 done, but the goal is not met;
//! 2 bad input or failure, with one message on stderr.

pub mod cli;
mod clusters;
mod commands;
mod failure;
mod foreign;
mod fuzzing;
mod io;
pub mod memory;
mod models;
mod planning;
mod process;
mod profiling;
mod quickstart;
mod reports;
mod rig;
mod running;
mod screen;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::Cli;
use crate::failure::is_closed_pipe;
use crate::screen::Screen;

/// How a command ended, where it ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// What was asked is done.
    Done,
    /// An answer is printed, but the goal is not met, is infeasible or lacks input.
    GoalNotMet,
}

/// Runs the program: `args` as the operating system gives them, the program's own name first.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to stdout and are no failure. A closed pipe is nobody's loss.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    talk_to_stderr();
    let screen = Screen::new(cli.json);
    let prepared = cli.hardware.as_deref().map_or(Ok(()), clusters::extend_catalogue);
    match prepared.and_then(|()| commands::run(cli.command, &screen)) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::GoalNotMet) => ExitCode::from(1),
        // The reader of a pipe went away: it has what it wanted.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            screen.failure(&error);
            ExitCode::from(2)
        }
    }
}

/// Sends `tracing` events to stderr as `RUST_LOG` asks for; warnings where it asks for nothing.
fn talk_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    // A second call in one process keeps the first subscriber, which serves as well.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .try_init();
}
