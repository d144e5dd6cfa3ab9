//! Everything that the crate promises about files, in one binary.

mod cards;
mod catalogue;
mod cluster_files;
mod configs;
mod gguf;
mod import_fixtures;
mod import_index;
mod import_mangled;
mod import_merge;
mod reference;
mod results;
mod topo_matrix;
