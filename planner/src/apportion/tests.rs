//! Against an enumeration of all shares that knows nothing of limits, capacities or states.

use std::convert::Infallible;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::*;

/// Every way to write `total` as an ordered sum of `parts` counts.
fn compositions(total: u32, parts: usize) -> Vec<Vec<u32>> {
    if parts == 1 {
        return vec![vec![total]];
    }
    let mut all = Vec::new();
    for first in 0..=total {
        for mut rest in compositions(total - first, parts - 1) {
            rest.insert(0, first);
            all.push(rest);
        }
    }
    all
}

fn ranges(lengths: &[u32], unit: u32) -> Vec<IndexRange> {
    let mut start = 0;
    let mut next = |length: &u32| {
        let range = IndexRange::new(start, start + length * unit).unwrap();
        start = range.end();
        range
    };
    lengths.iter().map(&mut next).collect()
}

/// Time and bytes by rank of one way to share one kind.
type Choice = (u64, [u64; 4]);

/// The least time over all shares within memory, by looking at all of them.
fn enumerate(problem: &GroupProblem) -> Option<u64> {
    let kinds: Vec<Vec<Choice>> = std::iter::once(head_choices(problem))
        .chain(
            problem
                .counts
                .iter()
                .map(|share| count_choices(share, problem.memory.len())),
        )
        .collect();
    let mut best = None;
    look(problem, &kinds, (0, [0; 4]), &mut best);
    best
}

fn look(problem: &GroupProblem, kinds: &[Vec<Choice>], chosen: Choice, best: &mut Option<u64>) {
    let mut limits = problem.memory.iter().zip(chosen.1);
    if limits.any(|(limit, used)| limit.is_some_and(|limit| used > limit.0)) {
        return;
    }
    let Some((choices, rest)) = kinds.split_first() else {
        *best = Some(best.map_or(chosen.0, |best| best.min(chosen.0)));
        return;
    };
    for (time, bytes) in choices {
        let used = std::array::from_fn(|rank| chosen.1[rank] + bytes[rank]);
        look(problem, rest, (chosen.0 + time, used), best);
    }
}

fn head_choices(problem: &GroupProblem) -> Vec<Choice> {
    let heads = &problem.heads;
    let kv_heads = |range: IndexRange| {
        let holds = |kv: &u32| range.iter().any(|head| head / heads.group_size == *kv);
        (0..heads.query_heads / heads.group_size).filter(holds).count() as u32
    };
    let choice = |lengths: Vec<u32>| {
        let cut = ranges(&lengths, heads.unit);
        let slowest = |times: &HeadTimes| {
            let each = cut.iter().enumerate();
            each.map(|(rank, range)| times.of(rank, range.len(), kv_heads(*range)))
                .max()
                .unwrap()
        };
        let mut bytes = [0; 4];
        for (rank, range) in cut.iter().enumerate() {
            bytes[rank] =
                u64::from(range.len()) * heads.query_bytes.0 + u64::from(kv_heads(*range)) * heads.kv_bytes.0;
        }
        (heads.segments.iter().map(slowest).sum(), bytes)
    };
    let all = compositions(heads.query_heads / heads.unit, problem.memory.len());
    all.into_iter().map(choice).collect()
}

fn count_choices(share: &CountShare, ranks: usize) -> Vec<Choice> {
    let choice = |counts: Vec<u32>| {
        let slowest = |times: &CountTimes| {
            let each = counts.iter().enumerate();
            each.map(|(rank, count)| times.by_rank[rank][*count as usize])
                .max()
                .unwrap()
        };
        let mut bytes = [0; 4];
        for (rank, count) in counts.iter().enumerate() {
            bytes[rank] = u64::from(*count) * share.unit_bytes.0;
        }
        (share.segments.iter().map(slowest).sum(), bytes)
    };
    compositions(share.units, ranks).into_iter().map(choice).collect()
}

fn tabulated<T>(result: Result<T, Infallible>) -> T {
    match result {
        Ok(table) => table,
        Err(never) => match never {},
    }
}

/// Speeds, floors and per-unit times of one group, as proptest draws them.
#[derive(Debug, Clone)]
struct Draw {
    ranks: usize,
    kv_heads: u32,
    group: u32,
    whole_groups: bool,
    units: Vec<u32>,
    segments: usize,
    /// Flat noise that tables read in order.
    noise: Vec<u16>,
    /// Memory by rank as a share of everything in 1/16; 0 for none.
    memory: Vec<u8>,
}

fn problem(draw: &Draw) -> GroupProblem {
    let mut noise = draw.noise.iter().cycle().map(|value| u64::from(*value));
    let mut next = || noise.next().unwrap();
    let query_heads = draw.kv_heads * draw.group;
    let unit = if draw.whole_groups { draw.group } else { 1 };
    let speeds: Vec<u64> = (0..draw.ranks).map(|_| 1 + next() % 9).collect();
    let head_times = (0..draw.segments).map(|_| {
        let (query_cost, kv_cost, floor) = (next() % 50, next() % 200, next() % 20);
        let time = |rank: usize, query: u32, kv: u32| -> Result<_, Infallible> {
            let floor = if query > 0 { floor } else { 0 };
            let work = floor + query_cost * u64::from(query) + kv_cost * u64::from(kv);
            Ok(SimDuration(work * speeds[rank]))
        };
        tabulated(HeadTimes::tabulate(
            draw.ranks,
            (query_heads, draw.group, unit),
            time,
        ))
    });
    let segments = head_times.collect();
    let heads = HeadShare {
        query_heads,
        group_size: draw.group,
        unit,
        query_bytes: Bytes(next() % 5),
        kv_bytes: Bytes(next() % 9),
        segments,
    };
    let mut counts = Vec::new();
    for units in &draw.units {
        let segments = (0..draw.segments).map(|_| {
            // Rows that are monotone but not linear, and differ by rank beyond a factor.
            let rows: Vec<Vec<u64>> = speeds
                .iter()
                .map(|speed| {
                    let mut time = 0;
                    let mut step = |_| {
                        time += next() % 40 * speed;
                        time
                    };
                    (0..=*units).map(&mut step).collect()
                })
                .collect();
            let time = |rank: usize, count: u32| -> Result<_, Infallible> {
                Ok(SimDuration(rows[rank][count as usize]))
            };
            tabulated(CountTimes::tabulate(draw.ranks, *units, time))
        });
        let segments = segments.collect();
        counts.push(CountShare {
            units: *units,
            unit_bytes: Bytes(next() % 7),
            segments,
        });
    }
    let all_heads =
        u64::from(query_heads) * heads.query_bytes.0 + u64::from(draw.kv_heads) * heads.kv_bytes.0;
    let all_counts: u64 = counts
        .iter()
        .map(|share| u64::from(share.units) * share.unit_bytes.0)
        .sum();
    let memory = draw.memory.iter().map(|share| match share {
        0 => None,
        share => Some(Bytes((all_heads + all_counts) * u64::from(*share) / 16)),
    });
    GroupProblem {
        heads,
        counts,
        memory: memory.collect(),
    }
}

fn draws(
    ranks: usize,
    most_heads: u32,
    units: Vec<std::ops::RangeInclusive<u32>>,
    segments: usize,
) -> impl Strategy<Value = Draw> {
    let shape = (1..=most_heads).prop_flat_map(move |kv_heads| (Just(kv_heads), 1..=most_heads / kv_heads));
    let noise = prop::collection::vec(any::<u16>(), 40..80);
    let memory = prop::collection::vec(prop_oneof![1 => Just(0_u8), 3 => 1..12_u8], ranks);
    (shape, any::<bool>(), units, noise, memory).prop_map(
        move |((kv_heads, group), whole_groups, units, noise, memory)| Draw {
            ranks,
            kv_heads,
            group,
            whole_groups,
            units,
            segments,
            noise,
            memory,
        },
    )
}

/// Counts what the cases met, so that a test that only ever sees easy ones is noticed.
#[derive(Debug, Default)]
struct Seen {
    infeasible: u32,
    memory_bound: u32,
    unproven: u32,
}

fn compare(draw: &Draw, seen: &mut Seen) -> Result<(), TestCaseError> {
    let problem = problem(draw);
    let truth = enumerate(&problem);
    match apportion(&problem) {
        Ok(shares) => {
            let truth = truth.expect("shares that fit are among all shares");
            if shares.exact {
                prop_assert_eq!(shares.time.0, truth);
                prop_assert_eq!(shares.bound, shares.time);
            } else {
                // Two unrelated tables for one kind may exhaust the search; it then says so.
                prop_assert!(draw.segments > 1 && shares.bound.0 <= truth && truth <= shares.time.0);
                seen.unproven += 1;
            }
            prop_assert_eq!(shares.time, problem.time(&shares.heads, &shares.counts));
            prop_assert_eq!(
                infercluster_spec::range::check_partition(shares.heads.clone(), problem.heads.query_heads),
                []
            );
            for (share, counts) in problem.counts.iter().zip(&shares.counts) {
                prop_assert_eq!(counts.iter().sum::<u32>(), share.units);
            }
            for (used, limit) in problem
                .bytes(&shares.heads, &shares.counts)
                .iter()
                .zip(&problem.memory)
            {
                prop_assert!(limit.is_none_or(|limit| *used <= limit));
            }
            prop_assert!(continuous_bound(&problem) <= shares.time);
            let free = GroupProblem {
                memory: vec![None; draw.ranks],
                ..problem.clone()
            };
            let free = apportion(&free).expect("no limit is no shortage");
            prop_assert!(free.time <= shares.time);
            seen.memory_bound += u32::from(free.time < shares.time);
        }
        Err(shortage) => {
            prop_assert_eq!(truth, None);
            prop_assert!(shortage.exact);
            seen.infeasible += 1;
        }
    }
    Ok(())
}

fn check(name: &str, cases: u32, strategy: impl Strategy<Value = Draw>) {
    let seen = std::cell::RefCell::new(Seen::default());
    let config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    runner
        .run(&strategy, |draw| compare(&draw, &mut seen.borrow_mut()))
        .unwrap();
    let seen = seen.into_inner();
    println!("{name}: {cases} groups, {seen:?}");
    assert!(
        seen.infeasible * 50 > cases && seen.memory_bound * 50 > cases,
        "{name}: {seen:?}"
    );
}

#[test]
fn two_ranks_equal_enumeration() {
    check("2 ranks", 3000, draws(2, 14, vec![1..=16, 1..=8], 1));
}

#[test]
fn three_ranks_equal_enumeration() {
    check("3 ranks", 1000, draws(3, 8, vec![1..=12, 1..=4], 1));
    check("3 ranks, one kind", 1000, draws(3, 8, vec![1..=16], 1));
}

#[test]
fn four_ranks_equal_enumeration() {
    check("4 ranks", 500, draws(4, 8, vec![1..=8], 1));
}

#[test]
fn several_segments_a_kind_equal_enumeration() {
    check("2 ranks, 2 segments", 300, draws(2, 8, vec![1..=8, 1..=5], 2));
    check("3 ranks, 2 segments", 100, draws(3, 6, vec![1..=6], 2));
}

/// Equal cost a query head, nothing else.
fn heads_only(query_heads: u32, group_size: u32, unit: u32, slowness: &[u64], kv_cost: u64) -> GroupProblem {
    let ranks = slowness.len();
    let time = |rank: usize, query: u32, kv: u32| -> Result<_, Infallible> {
        Ok(SimDuration(
            (u64::from(query) * 10 + u64::from(kv) * kv_cost) * slowness[rank],
        ))
    };
    GroupProblem {
        heads: HeadShare {
            query_heads,
            group_size,
            unit,
            query_bytes: Bytes(1),
            kv_bytes: Bytes(10),
            segments: vec![tabulated(HeadTimes::tabulate(
                ranks,
                (query_heads, group_size, unit),
                time,
            ))],
        },
        counts: vec![CountShare {
            units: 0,
            unit_bytes: Bytes(0),
            segments: Vec::new(),
        }],
        memory: vec![None; ranks],
    }
}

fn cuts(problem: &GroupProblem) -> Vec<String> {
    let shares = apportion(problem).unwrap();
    shares.heads.iter().map(IndexRange::to_string).collect()
}

#[test]
fn heads_by_hand() {
    // Three heads on a rank of twice the speed of the other: 20 against 20.
    assert_eq!(cuts(&heads_only(3, 1, 1, &[1, 2], 0)), ["0..2", "2..3"]);
    // Equal ranks, three heads: the lower rank takes the odd one.
    assert_eq!(cuts(&heads_only(3, 1, 1, &[1, 1], 0)), ["0..2", "2..3"]);
    // Eight groups of 4 at speeds 3:1: 24 x 10 = 240 against 8 x 10 x 3 = 240.
    assert_eq!(cuts(&heads_only(32, 4, 4, &[1, 3], 0)), ["0..24", "24..32"]);
    // 14 heads in 2 groups of 7 on ranks of speed 9 and 5: only a cut group balances, 9 x 5 = 5 x 9.
    assert_eq!(cuts(&heads_only(14, 7, 1, &[5, 9], 0)), ["0..9", "9..14"]);
    // The same where a KV head costs as much as 100 query heads: sharing one no longer pays.
    assert_eq!(cuts(&heads_only(14, 7, 1, &[5, 9], 1000)), ["0..7", "7..14"]);
}

#[test]
fn memory_moves_the_cut() {
    // The fast rank holds 24 of 32 heads if it may; each group of 4 takes 4 + 10 bytes.
    let mut problem = heads_only(32, 4, 4, &[1, 3], 0);
    problem.memory = vec![Some(Bytes(5 * 14)), None];
    assert_eq!(cuts(&problem), ["0..20", "20..32"]);
    problem.memory = vec![Some(Bytes(70)), Some(Bytes(41))];
    // Eight groups need 112 bytes; 70 and 41 are 111.
    assert_eq!(
        apportion(&problem),
        Err(Shortage {
            missing: Bytes(1),
            exact: true
        })
    );
}

#[test]
fn fractional_shares_bound_by_hand() {
    // Three heads on two equal ranks: 15 each if heads could be halved, 20 in whole heads.
    let problem = heads_only(3, 1, 1, &[1, 1], 0);
    assert_eq!(continuous_bound(&problem), SimDuration(15));
    assert_eq!(apportion(&problem).unwrap().time, SimDuration(20));
}
