//! Request traces: the formats that people have into [`Trace`](infercluster_spec::Trace), statistics of
//! one, seeded generators, and conversions. Nothing here knows what serves the requests.
//!
//! ```
//! use infercluster_traces::{read, statistics};
//! let text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n";
//! let loaded = read("vidur.csv", text.as_bytes())?;
//! let found = statistics(&loaded.trace);
//! assert_eq!((found.rows, found.span_s, found.input.max), (2, Some(4.314579), 396));
//! # Ok::<(), infercluster_traces::TraceError>(())
//! ```

mod csv_rows;
mod decimal;
pub mod error;
pub mod format;
mod json_rows;
mod packed;
pub mod read;
pub mod servegen;
pub mod statistics;
pub mod synth;
pub mod transform;
pub mod write;

pub use error::TraceError;
pub use format::TraceFormat;
pub use read::{Loaded, load, read};
pub use servegen::ClientPool;
pub use statistics::{TraceStatistics, statistics, statistics_of_file};
pub use synth::{ArrivalProcess, LengthDistribution, SynthSpec, synthesise};
pub use write::{Written, write};

/// Longest prompt or answer that is read or made, so that sums over a trace fit 64 bits.
pub const TOKENS_LIMIT: u64 = 1 << 30;
