//! Discrete-event simulator, cost model and calibration fit.

pub mod calibrate;
pub mod cost;
pub mod engine;
mod events;
pub mod scenario;
pub mod topology;
