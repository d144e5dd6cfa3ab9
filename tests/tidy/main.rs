//! Tidiness as a test: the rules that no compiler checks.

mod arrows;
mod names;
mod readme;
mod sources;
mod words;
