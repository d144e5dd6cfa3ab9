//! What the cross-crate tests share: the program under test, and scratch folders.
//!
//! Every test drives the program as a user does, by its command line, and judges exit code, stdout and stderr.

pub mod program;
pub mod safetensors;
pub mod scratch;
