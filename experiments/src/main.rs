//! The one program of InferCluster.
fn main() {}
