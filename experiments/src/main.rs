//! The program `infercluster`.

use std::process::ExitCode;

use infercluster_experiments::memory::CountingAllocator;

/// The system's allocator; it counts only while `fuzz` holds readers to their limit.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    infercluster_experiments::run(std::env::args_os())
}
