//! What fractional shares would reach.

use infercluster_spec::SimDuration;

use super::GroupProblem;

/// The best total time if every unit could be cut at will and memory did not bind: the bound that
/// continuous shares set. For each segment, the smallest limit within which the ranks' piecewise linear
/// tables hold all units. Segments that share a kind are bounded one by one, so the bound stays valid.
pub fn continuous_bound(problem: &GroupProblem) -> SimDuration {
    let ranks = problem.memory.len();
    let counted = problem.counts.iter().flat_map(|share| {
        share
            .segments
            .iter()
            .map(move |times| continuous_makespan(&times.by_rank, f64::from(share.units)))
    });
    // Fewest KV heads for a count of query heads: what no range undercuts.
    let heads = problem.heads.segments.iter().map(|times| {
        let (unit, group) = (problem.heads.unit, problem.heads.group_size);
        let by_rank: Vec<Vec<u64>> = (0..ranks)
            .map(|rank| {
                let mut fastest: Vec<u64> = (0..=problem.heads.query_heads)
                    .step_by(unit as usize)
                    .map(|query| times.of(rank, query, query.div_ceil(group)))
                    .collect();
                for index in (1..fastest.len()).rev() {
                    fastest[index - 1] = fastest[index - 1].min(fastest[index]);
                }
                fastest
            })
            .collect();
        continuous_makespan(&by_rank, f64::from(problem.heads.query_heads / unit))
    });
    SimDuration(heads.chain(counted).sum())
}

/// The smallest limit at which the ranks hold `units` fractional units; the time between two counts is
/// the lower convex hull of the table, so that jumps (launch floors, wave steps) keep the bound valid.
fn continuous_makespan(by_rank: &[Vec<u64>], units: f64) -> u64 {
    let hulls: Vec<Vec<(f64, f64)>> = by_rank.iter().map(|table| lower_hull(table)).collect();
    let held = |limit: f64| hulls.iter().map(|hull| units_within(hull, limit)).sum::<f64>();
    let slowest = by_rank.iter().filter_map(|table| table.last()).max();
    let (mut low, mut high) = (0_u64, slowest.copied().unwrap_or(0));
    while low < high {
        let middle = low + (high - low) / 2;
        // A billionth of a unit absorbs rounding on the side that keeps the bound valid.
        if held(middle as f64) + 1e-9 * units.max(1.0) >= units {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

fn lower_hull(table: &[u64]) -> Vec<(f64, f64)> {
    let mut hull: Vec<(f64, f64)> = Vec::new();
    for (count, time) in table.iter().enumerate() {
        let point = (count as f64, *time as f64);
        while let [.., before, last] = hull[..] {
            let slope_to_last = (last.1 - before.1) * (point.0 - before.0);
            if slope_to_last < (point.1 - before.1) * (last.0 - before.0) {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

fn units_within(hull: &[(f64, f64)], limit: f64) -> f64 {
    let after = hull.partition_point(|(_, time)| *time <= limit);
    match (after.checked_sub(1).map(|index| hull[index]), hull.get(after)) {
        (None, _) => 0.0,
        (Some((count, _)), None) => count,
        (Some((count, time)), Some(next)) => count + (next.0 - count) * (limit - time) / (next.1 - time),
    }
}
