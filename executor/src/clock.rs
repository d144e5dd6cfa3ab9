//! The one place where the executor reads time: instants, deadlines and the report clock.

use std::time::{Duration, Instant};

use infercluster_spec::SimTime;

/// The monotonic clock.
pub fn now() -> Instant {
    Instant::now()
}

/// Processor time that the calling thread has had; zero where the system does not count it.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes one timespec, to which the pointer is valid and exclusive.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).ok();
    let nanoseconds = u32::try_from(time.tv_nsec).ok();
    match (answer, seconds.zip(nanoseconds)) {
        (0, Some((seconds, nanoseconds))) => Duration::new(seconds, nanoseconds),
        _ => Duration::ZERO,
    }
}

/// An instant after which waiting ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    started: Instant,
    limit: Duration,
}

impl Deadline {
    /// Waiting may last this long from now.
    pub fn after(limit: Duration) -> Self {
        Self {
            started: now(),
            limit,
        }
    }

    /// What is left; `None` where the deadline has passed.
    pub fn remaining(self) -> Option<Duration> {
        self.limit
            .checked_sub(self.started.elapsed())
            .filter(|left| !left.is_zero())
    }

    /// How long was waited so far.
    pub fn waited(self) -> Duration {
        self.started.elapsed()
    }
}

/// Counts picoseconds from its start, as reports do.
#[derive(Debug, Clone, Copy)]
pub struct RunClock {
    start: Instant,
}

impl RunClock {
    /// Starts at zero now.
    pub fn start() -> Self {
        Self { start: now() }
    }

    /// The time of the run at an instant; zero for instants before its start.
    pub fn at(self, instant: Instant) -> SimTime {
        let nanoseconds = instant.saturating_duration_since(self.start).as_nanos();
        SimTime(u64::try_from(nanoseconds * 1_000).unwrap_or(u64::MAX))
    }

    /// The instant of a time of the run.
    pub fn instant(self, time: SimTime) -> Instant {
        self.start + Duration::from_nanos(time.0 / 1_000)
    }
}

/// Seconds of the calendar since 1970, as the API stamps its answers; zero on a clock set before that.
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
