//! The shared vocabulary of InferCluster: clusters, models, layouts, migration plans, measurements,
//! calibrations, traces and reports as plain values with units, one validator and a JSON form.
//!
//! Nothing here reads a clock, a file or a random number, and nothing here knows the other crates.
//!
//! ```
//! use infercluster_spec::{Bytes, json, layout::{Layout, Reduction}, validate::validate_layout};
//! # let model: infercluster_spec::Model = json::read("model.json", include_str!("../examples/model.json"))?;
//! let layout = Layout::single(&model, Reduction::Invariant);
//! validate_layout(&layout, &model, None)?;
//! assert_eq!("80 GiB".parse(), Ok(Bytes(80 << 30)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod calibration;
pub mod cluster;
pub mod engine;
pub mod ids;
pub mod json;
pub mod layout;
pub mod memory;
pub mod migration;
pub mod model;
pub mod operator;
pub mod range;
pub mod report;
pub mod spans;
pub mod stats;
pub mod trace;
pub mod units;
pub mod validate;

pub use calibration::Calibration;
pub use cluster::Cluster;
pub use engine::EngineOptions;
pub use ids::*;
pub use json::Document;
pub use layout::Layout;
pub use migration::MigrationPlan;
pub use model::{Dtype, Model};
pub use operator::{BatchShape, Measurement, Operator, Profile, SegmentKind, StepRecord, StepRun};
pub use range::IndexRange;
pub use report::Report;
pub use trace::{Request, Trace};
pub use units::*;
