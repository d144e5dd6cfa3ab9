//! The program `infercluster` under another name, so that these tests get its path and it is built with them.

use std::process::ExitCode;

use infercluster_experiments::memory::CountingAllocator;

/// As in the program itself.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    infercluster_experiments::run(std::env::args_os())
}
