//! Rates of the CPU kernels on one thread: `cargo bench -p infercluster-executor --bench kernels`.
//!
//! Prints one row a shape with the median, 10th and 90th percentile of its time, from the same measurements
//! that `profile` writes.

use std::time::Duration;

use infercluster_executor::backend::Cpu;
use infercluster_executor::model::NoMeter;
use infercluster_executor::profile::{AttentionBatch, GemmShape, ProfileGrid, measure};
use infercluster_spec::{Bytes, Dtype};

const SIDE: usize = 4096;

#[expect(clippy::print_stdout, reason = "a bench prints its figures")]
fn main() {
    let backend = Cpu::new();
    println!("kernels: {:?}, one thread", backend.isa());
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let gemm = [1, 2, 4, 8, 16, 64, 256].map(|m| GemmShape { m, n: SIDE, k: SIDE });
        let first = dtype == Dtype::F32;
        let batch = |sequences, cached, new| AttentionBatch {
            sequences,
            cached,
            new,
        };
        let grid = ProfileGrid {
            dtype,
            gemm: gemm.to_vec(),
            query_heads: if first { vec![8] } else { Vec::new() },
            group_size: 4,
            head_dim: 64,
            attention: vec![batch(1, 2047, 1), batch(8, 255, 1), batch(1, 0, 512)],
            bytes: if first { vec![Bytes(1 << 20)] } else { Vec::new() },
            working_set: Bytes(256 << 20),
            samples: 15,
            row_limit: Duration::from_millis(300),
        };
        for row in measure(&backend, &grid, &mut NoMeter).expect("the shapes fit in memory") {
            let rate = row.operator.flops().as_f64() / row.median_s / 1e9;
            println!(
                "{:<5} {:>10.1} us  [{:.1}, {:.1}]  {rate:>6.1} GFLOP/s  {:?}",
                dtype.name(),
                row.median_s * 1e6,
                row.p10_s * 1e6,
                row.p90_s * 1e6,
                row.operator,
            );
        }
    }
}
