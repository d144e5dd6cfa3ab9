//! What operators have, read into spec values: model configs, and later cluster files and the hardware
//! catalogue. Nothing here knows what a device costs in time or what a layout is.

pub mod config;
pub mod error;

pub use config::ModelConfig;
pub use error::InventoryError;
