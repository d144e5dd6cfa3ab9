//! What the system says about this process.

use std::fs;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use infercluster_spec::Bytes;

/// CPU time of the main thread where the system counts it in nanoseconds (Linux), wall time elsewhere; since
/// an instant that stays the same.
pub(crate) fn cpu_time() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let counted = || {
        let text = fs::read_to_string("/proc/self/schedstat").ok()?;
        text.split_ascii_whitespace().next()?.parse().ok()
    };
    counted().map_or_else(|| START.elapsed(), Duration::from_nanos)
}

/// Most memory that this process had; `None` where the system does not tell.
pub(crate) fn peak_memory() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes * 1024))
}
