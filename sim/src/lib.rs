//! Discrete-event simulator, cost model and calibration fit.

pub mod cost;
pub mod topology;
