//! What operators have, read into spec values: model configs, cluster files and the hardware catalogue.
//! Nothing here knows what a device costs in time or what a layout is.

pub mod catalogue;
pub mod cluster_file;
pub mod config;
pub mod error;
pub mod gguf;
pub mod import;
pub mod results;
mod toml_file;

pub use catalogue::Catalogue;
pub use cluster_file::ClusterFile;
pub use config::ModelConfig;
pub use error::InventoryError;
