//! Everything that the crate promises about files, in one binary.

mod catalogue;
mod cluster_files;
mod configs;
mod import_index;
mod reference;
mod topo_matrix;
