//! The program `infercluster`.

use std::process::ExitCode;

fn main() -> ExitCode {
    infercluster_experiments::run(std::env::args_os())
}
