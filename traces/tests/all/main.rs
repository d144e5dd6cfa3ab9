//! Everything that the crate promises about traces, in one binary.

mod clients;
mod formats;
mod hostile;
mod reference;
mod round_trip;
mod synthetic;
