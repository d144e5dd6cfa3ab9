//! Runs a layout on real devices: kernels, checkpoints, workers, coordinator and service.
//!
//! Knows neither the simulator nor the planner: it takes a `Layout` or a `MigrationPlan` and checks it again.

pub mod backend;
pub mod clock;
pub mod comm;
pub mod launch;
pub mod step;
pub mod wire;
