//! Searches layouts and migration schedules: values of `infercluster-spec` in, values out.
//!
//! - [`replica`]: the best layout of one replica over given devices, why, and what it is compared with.
//! - [`apportion`]: the exact inner problem, how one tensor-parallel group shares heads, columns and rows.
//! - [`flow`]: the layer-placement flow problem on its own, with bounds.
//! - [`migrate`]: from one layout to another, in phases that fit.
//! - [`proportional`]: layouts written by hand as proportions.
//! - [`draw`]: a layout as text.
//!
//! Nothing here reads a clock, a file or a random number, and no device is touched: the cost model of
//! `infercluster-sim` answers what an operator takes.

pub mod apportion;
pub mod draw;
#[cfg(test)]
mod fixtures;
pub mod flow;
mod frame;
pub mod migrate;
pub mod proportional;
pub mod proportions;
pub mod replica;
