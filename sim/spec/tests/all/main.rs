//! The documents of `examples/` and the rules of the validator, in one binary.

mod documents;
mod violations;
