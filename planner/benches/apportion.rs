//! Time to share 64 query heads on 8 KV heads, 224 column quanta and 250 vocabulary units among 2, 4 and 8
//! unlike ranks, with and without a memory limit that moves the cuts.

use std::convert::Infallible;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use infercluster_planner::apportion::{
    CountShare, CountTimes, GroupProblem, HeadShare, HeadTimes, apportion,
};
use infercluster_spec::{Bytes, SimDuration};

const SLOWNESS: [u64; 8] = [10, 17, 23, 11, 29, 10, 31, 13];

fn tabulated<T>(result: Result<T, Infallible>) -> T {
    match result {
        Ok(table) => table,
        Err(never) => match never {},
    }
}

fn count_share(ranks: usize, units: u32, unit_bytes: Bytes, unit_cost: u64) -> CountShare {
    let time = |rank: usize, count: u32| -> Result<_, Infallible> {
        Ok(SimDuration(
            SLOWNESS[rank] * (2_000_000 + unit_cost * u64::from(count)),
        ))
    };
    CountShare {
        units,
        unit_bytes,
        segments: vec![tabulated(CountTimes::tabulate(ranks, units, time))],
    }
}

fn problem(ranks: usize, memory_binds: bool) -> GroupProblem {
    let time = |rank: usize, query: u32, kv: u32| -> Result<_, Infallible> {
        let work = 3_000_000 + 40_000 * u64::from(query) + 900_000 * u64::from(kv);
        Ok(SimDuration(SLOWNESS[rank] * work))
    };
    let heads = HeadShare {
        query_heads: 64,
        group_size: 8,
        unit: 1,
        query_bytes: Bytes(4 << 20),
        kv_bytes: Bytes(64 << 20),
        segments: vec![tabulated(HeadTimes::tabulate(ranks, (64, 8, 1), time))],
    };
    let counts = vec![
        count_share(ranks, 224, Bytes(3 << 20), 150_000),
        count_share(ranks, 250, Bytes(8 << 20), 60_000),
    ];
    // Everything together takes 3,440 MiB; the fastest rank would like more than its even share.
    let even = Bytes((3_440 << 20) / ranks as u64);
    let first = memory_binds.then_some(even);
    let memory = std::iter::once(first).chain(vec![None; ranks - 1]).collect();
    GroupProblem {
        heads,
        counts,
        memory,
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apportion_224_quanta");
    for ranks in [2, 4, 8] {
        for (name, memory_binds) in [("free", false), ("memory", true)] {
            let problem = problem(ranks, memory_binds);
            group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
                bencher.iter(|| apportion(black_box(&problem)));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
