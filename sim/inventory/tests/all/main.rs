//! Everything that the crate promises about files, in one binary.

mod configs;
mod reference;
