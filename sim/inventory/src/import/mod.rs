//! What tools of a host print, read as people paste it: colour codes, a prompt before the table, any
//! width of columns, a missing end. Nothing is invented: what is lost becomes a [`Problem`] with its line.

mod table;
pub mod topo_matrix;

pub use topo_matrix::TopoMatrix;

/// Something that a dump lost or contradicts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line of the dump, from 1.
    pub line: usize,
    /// What is wrong there.
    pub what: String,
}
