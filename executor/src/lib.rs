//! Runs a layout on real devices: kernels, checkpoints, workers, coordinator and service.
//!
//! Knows neither the simulator nor the planner: it takes a `Layout` or a `MigrationPlan` and checks it again.

pub mod admin;
pub mod backend;
pub mod bench;
pub mod checkpoint;
pub mod clock;
pub mod comm;
pub mod coordinator;
pub mod cores;
pub mod generate;
pub mod inprocess;
pub mod kv;
pub mod lanes;
pub mod launch;
pub mod model;
mod numerics;
pub mod probe;
pub mod profile;
pub mod replay;
pub mod service;
pub mod speed;
pub mod step;
pub mod store;
pub mod wire;
pub mod worker;
