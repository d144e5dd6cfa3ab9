//! Emulated device speeds: a worker that is asked to run at 0.4 of its speed pays the difference in every
//! compute segment, before the collective that follows, as a slower device would.
//!
//! A segment of a device at speed `s` lasts as long as it had the processor, over `s`: what it lost to others on
//! its core comes out of the wait, as far as that reaches, because the device that is emulated has a core of its
//! own. Sleeping is coarse, so a wait sleeps until [`SPIN_LEAD`] before its end and spins the rest; what it still
//! overshoots is taken off the next wait. A device at full speed has no wait, so whatever else runs on its core
//! counts as slowness, and the achieved speed says so.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use infercluster_spec::{GpuId, SegmentKind};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::model::{self, Segment, SegmentMeter};

/// How long before its end a wait stops sleeping.
const SPIN_LEAD: Duration = Duration::from_micros(150);
/// Largest share by which an emulated speed may miss what was asked for.
pub const SPEED_TOLERANCE: f64 = 0.02;

/// A factor that is no speed.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("speed {found} is not above 0 and at most 1")]
pub struct SpeedError {
    /// What was found.
    pub found: f64,
}

/// The share of its full speed at which a device runs: above 0, at most 1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Speed(f64);

impl Speed {
    /// As fast as it can.
    pub const FULL: Self = Self(1.0);

    /// The factor.
    pub fn factor(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Speed {
    type Error = SpeedError;
    fn try_from(found: f64) -> Result<Self, SpeedError> {
        if found > 0.0 && found <= 1.0 {
            Ok(Self(found))
        } else {
            Err(SpeedError { found })
        }
    }
}

impl From<Speed> for f64 {
    fn from(speed: Speed) -> Self {
        speed.0
    }
}

/// Sums over the segments of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SegmentTimes {
    /// How many.
    pub count: u64,
    /// Seconds in kernels.
    pub compute_s: f64,
    /// Seconds of those in which the thread had its core.
    pub core_s: f64,
    /// Seconds that pacing added.
    pub padding_s: f64,
}

impl SegmentTimes {
    /// Kernels and pacing: the time of the emulated device.
    pub fn paced_s(&self) -> f64 {
        self.compute_s + self.padding_s
    }
}

impl AddAssign<&Self> for SegmentTimes {
    fn add_assign(&mut self, other: &Self) {
        self.count += other.count;
        self.compute_s += other.compute_s;
        self.core_s += other.core_s;
        self.padding_s += other.padding_s;
    }
}

/// Times by kind of segment.
pub type TimesByKind = BTreeMap<SegmentKind, SegmentTimes>;

/// Measures compute segments, and stretches them where the device is emulated.
#[derive(Debug)]
pub struct Pacer {
    speed: Speed,
    started: Instant,
    /// Processor time of the thread at the start of the segment.
    core_started: Duration,
    /// What earlier waits took too long.
    overshoot: Duration,
    times: TimesByKind,
}

impl Pacer {
    /// A pacer for the calling thread, whose timer slack becomes 1 ns.
    pub fn new(speed: Speed) -> Self {
        // SAFETY: this option changes a scheduling parameter of the calling thread only. Where the kernel
        // refuses, sleeps are coarser and the speed check says so.
        unsafe {
            libc::prctl(libc::PR_SET_TIMERSLACK, 1);
        }
        Self {
            speed,
            started: clock::now(),
            core_started: clock::thread_time(),
            overshoot: Duration::ZERO,
            times: TimesByKind::new(),
        }
    }

    /// Another factor from the next segment on.
    pub fn set_speed(&mut self, speed: Speed) {
        self.speed = speed;
    }

    /// The times since the last call.
    pub fn take(&mut self) -> TimesByKind {
        std::mem::take(&mut self.times)
    }

    /// Waits as long as the emulated device would compute on; answers how long that was.
    fn pad(&mut self, compute: Duration, core: Duration) -> Duration {
        let owed = core.mul_f64(1.0 / self.speed.factor()).saturating_sub(compute);
        let wait = owed.saturating_sub(self.overshoot);
        self.overshoot = self.overshoot.saturating_sub(owed);
        if wait.is_zero() {
            return Duration::ZERO;
        }
        let from = clock::now();
        if let Some(sleep) = wait.checked_sub(SPIN_LEAD) {
            std::thread::sleep(sleep);
        }
        while from.elapsed() < wait {
            std::hint::spin_loop();
        }
        let waited = from.elapsed();
        self.overshoot = waited.saturating_sub(wait);
        waited
    }
}

impl SegmentMeter for Pacer {
    fn begin(&mut self) {
        self.core_started = clock::thread_time();
        self.started = clock::now();
    }

    fn end(&mut self, segment: Segment) {
        let compute = self.started.elapsed();
        // Read inside the time of the other clock, so that it is not more; less where others had the core.
        let core = clock::thread_time()
            .saturating_sub(self.core_started)
            .min(compute);
        let padding = if self.speed == Speed::FULL {
            Duration::ZERO
        } else {
            self.pad(compute, core)
        };
        let times = self.times.entry(kind(segment.kind)).or_default();
        times.count += 1;
        times.compute_s += compute.as_secs_f64();
        times.core_s += core.as_secs_f64();
        times.padding_s += padding.as_secs_f64();
    }
}

/// The report's word for a kind of segment.
fn kind(kind: model::SegmentKind) -> SegmentKind {
    match kind {
        model::SegmentKind::Attention => SegmentKind::Attention,
        model::SegmentKind::OutputRows => SegmentKind::OutputRows,
        model::SegmentKind::Mlp => SegmentKind::Mlp,
        model::SegmentKind::DownRows => SegmentKind::DownRows,
        model::SegmentKind::StageEnd => SegmentKind::Head,
    }
}

/// What a device was asked to be and what it was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpeedCheck {
    /// The device.
    pub gpu: GpuId,
    /// Emulated: the factor that was asked for.
    pub asked: f64,
    /// Core time over compute time and padding; `None` where it computed nothing.
    pub achieved: Option<f64>,
}

impl SpeedCheck {
    /// Compares.
    pub fn of(gpu: GpuId, asked: Speed, times: &TimesByKind) -> Self {
        let core_s: f64 = times.values().map(|times| times.core_s).sum();
        let paced_s: f64 = times.values().map(SegmentTimes::paced_s).sum();
        Self {
            gpu,
            asked: asked.factor(),
            achieved: (paced_s > 0.0).then(|| core_s / paced_s),
        }
    }

    /// Whether the device was what it is said to be: an emulated speed is within [`SPEED_TOLERANCE`] of what was
    /// asked. A device at full speed is what the machine made of it.
    pub fn is_valid(&self) -> bool {
        self.asked == Speed::FULL.factor() || self.is_undisturbed()
    }

    /// Whether it ran at the speed that was asked, full or emulated: nobody else took much of its core.
    pub fn is_undisturbed(&self) -> bool {
        self.achieved
            .is_none_or(|achieved| (achieved / self.asked - 1.0).abs() <= SPEED_TOLERANCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(compute_s: f64, padding_s: f64) -> TimesByKind {
        let times = SegmentTimes {
            count: 1,
            compute_s,
            core_s: compute_s,
            padding_s,
        };
        [(SegmentKind::Mlp, times)].into()
    }

    #[test]
    fn two_percent_off_is_invalid() {
        let check = |padding_s| SpeedCheck::of(GpuId(1), Speed(0.4), &times(0.4, padding_s)).is_valid();
        assert!(check(0.6));
        // 0.4 / 1.0079 is 0.8 % low, 0.4 / 1.03 is 2.9 % low, 0.4 / 0.97 is 3.1 % high.
        assert!(check(0.6079) && !check(0.63) && !check(0.57));
        assert!(SpeedCheck::of(GpuId(1), Speed(0.4), &TimesByKind::new()).is_valid());
    }

    #[test]
    fn overshoot_is_paid_back() {
        let mut pacer = Pacer::new(Speed(0.5));
        pacer.overshoot = Duration::from_millis(3);
        // Owes 1 ms three times, all of it paid already, then nothing is left over.
        let segment = Duration::from_millis(1);
        for left in [2, 1, 0] {
            assert_eq!(pacer.pad(segment, segment), Duration::ZERO);
            assert_eq!(pacer.overshoot, Duration::from_millis(left));
        }
        let waited = pacer.pad(segment, segment);
        assert!(waited >= segment, "{waited:?}");
    }

    #[test]
    fn what_others_took_comes_out_of_the_wait() {
        let mut pacer = Pacer::new(Speed(0.5));
        let (core, late) = (Duration::from_millis(1), Duration::from_millis(2));
        // 1 ms of core time makes a segment of 2 ms, which has passed already, and of no more than that.
        assert_eq!(pacer.pad(late, core), Duration::ZERO);
        assert_eq!(pacer.overshoot, Duration::ZERO);
        let times = SegmentTimes {
            count: 1,
            compute_s: 0.002,
            core_s: 0.001,
            padding_s: 0.0,
        };
        let check = |speed| SpeedCheck::of(GpuId(0), Speed(speed), &[(SegmentKind::Mlp, times)].into());
        assert!(check(0.5).is_valid() && !check(0.6).is_valid());
        // Nothing was emulated at full speed, but half of the core was lost.
        assert!(check(1.0).is_valid() && !check(1.0).is_undisturbed());
    }

    #[test]
    fn factors_are_checked() {
        for bad in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
            assert!(Speed::try_from(bad).is_err(), "{bad}");
        }
        assert_eq!(Speed::try_from(1.0), Ok(Speed::FULL));
    }
}
