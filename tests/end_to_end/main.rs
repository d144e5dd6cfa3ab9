//! The program as a user meets it: commands in, exit codes, stdout and stderr out.

mod basics;
mod checkpoints;
mod clusters;
mod distributed;
mod generation;
mod imports;
mod layouts;
mod models;
mod plans;
mod quickstart;
mod readers;
mod services;
mod simulations;
mod traces;

use infercluster_tests::program::Program;

/// The program under test.
fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_infercluster-under-test"))
}
