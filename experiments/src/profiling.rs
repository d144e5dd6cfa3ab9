//! Profiles of this host's CPU, at full or emulated speed.

use infercluster_executor::backend::Cpu;
use infercluster_executor::profile::{ProfileGrid, measure};
use infercluster_executor::speed::{Pacer, Speed, SpeedCheck};
use infercluster_spec::layout::CPU_F32;
use infercluster_spec::operator::Provenance;
use infercluster_spec::{Fraction, GpuId, Model, Profile};

/// The catalogue's name of a core of this host.
pub(crate) const CPU_TYPE: &str = "cpu-core";

/// A profile, and whether an emulated speed was kept.
pub(crate) struct Profiled {
    /// The rows.
    pub(crate) profile: Profile,
    /// Asked and achieved speed.
    pub(crate) check: SpeedCheck,
}

/// Measures the operators that shards of a model meet, on the calling thread, for 1 to `tokens` tokens.
pub(crate) fn profile(
    model: &Model,
    tokens: usize,
    speed: Speed,
    device_type: &str,
) -> anyhow::Result<Profiled> {
    let mut pacer = Pacer::new(speed);
    let measurements = measure(&Cpu::default(), &ProfileGrid::of_model(model, tokens), &mut pacer)?;
    let emulated = (speed != Speed::FULL)
        .then(|| Fraction::new(speed.factor()))
        .flatten();
    Ok(Profiled {
        profile: Profile {
            device_type: device_type.to_owned(),
            provenance: Provenance {
                device_name: crate::commands::doctor::cpu_name(),
                driver: CPU_F32.to_owned(),
                date: today(),
                source: "infercluster profile".to_owned(),
                emulated_speed: emulated,
            },
            measurements,
        },
        check: SpeedCheck::of(GpuId(0), speed, &pacer.take()),
    })
}

/// The day of a measurement: a wall-clock fact, which no result depends on.
fn today() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d").to_string()
}
