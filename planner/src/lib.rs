//! Searches layouts and migration schedules.
//!
//! Start at [`proportional`] for layouts written by hand as proportions.

pub mod apportion;
pub mod draw;
#[cfg(test)]
mod fixtures;
pub mod migrate;
pub mod proportional;
pub mod proportions;
pub mod replica;
