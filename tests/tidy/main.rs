//! Tidiness as a test: the rules that no compiler checks.

mod arrows;
mod commands;
mod names;

mod sources;
mod words;
