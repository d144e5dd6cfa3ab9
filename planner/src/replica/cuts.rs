//! Layer cuts of one structure by dynamic programming.

use super::Objective;

/// Layers by stage and what they give.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) layers: Vec<u32>,
    pub(super) value: u64,
}

/// What makes a step of stage times.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// What counts.
    pub(super) objective: Objective,
    /// Time of all hand-overs, which the way through all stages has beside the stages.
    pub(super) handover: u64,
    /// Micro-batches in flight.
    pub(super) micro_batches: u64,
}

/// What stage times give.
pub(super) fn value(times: &[u64], pace: Pace) -> u64 {
    let way = times
        .iter()
        .fold(pace.handover, |way, time| way.saturating_add(*time));
    let slowest = times.iter().max().copied().unwrap_or(0);
    match pace.objective {
        Objective::Latency => way,
        Objective::Throughput => way.max(pace.micro_batches.saturating_mul(slowest)),
    }
}

/// The best cut, where `times[stage][layers]` is the time of a stage with that many layers, if it can hold
/// them.
///
/// With a limit on the slowest stage, the least sum is a plain dynamic program; it does not grow with the
/// limit, while micro-batches times the limit do. So the best of their maximum lies where they cross, which
/// bisection over the times finds.
pub(super) fn best(times: &[Vec<Option<u64>>], pace: Pace, layers: u32) -> Option<Cut> {
    let value = |cut: &[u32]| {
        let each = cut.iter().zip(times);
        let each = each.map(|(layers, times)| times[*layers as usize].unwrap_or(u64::MAX));
        value(&each.collect::<Vec<_>>(), pace)
    };
    let mut limits: Vec<u64> = times.iter().flatten().flatten().copied().collect();
    limits.sort_unstable();
    limits.dedup();
    let slowest = *limits.last()?;
    let mut found = least_sum(times, layers, slowest)?;
    if pace.objective == Objective::Throughput {
        let crosses = |limit: u64| {
            least_sum(times, layers, limit).is_some_and(|cut| {
                sum(times, &cut).saturating_add(pace.handover) <= pace.micro_batches.saturating_mul(limit)
            })
        };
        let at = limits.partition_point(|limit| !crosses(*limit));
        let around = [at.checked_sub(1), Some(at)].into_iter().flatten();
        for limit in around.filter_map(|index| limits.get(index)) {
            if let Some(cut) = least_sum(times, layers, *limit)
                && value(&cut) < value(&found)
            {
                found = cut;
            }
        }
    }
    Some(Cut {
        value: value(&found),
        layers: found,
    })
}

fn sum(times: &[Vec<Option<u64>>], cut: &[u32]) -> u64 {
    let each = cut
        .iter()
        .zip(times)
        .map(|(layers, times)| times[*layers as usize]);
    each.fold(0, |sum, time| sum.saturating_add(time.unwrap_or(u64::MAX)))
}

/// The cut of the least sum whose every stage keeps within `limit`; equal sums give earlier stages more layers.
fn least_sum(times: &[Vec<Option<u64>>], layers: u32, limit: u64) -> Option<Vec<u32>> {
    let layers = layers as usize;
    let mut reached: Vec<Option<u64>> = vec![None; layers + 1];
    reached[0] = Some(0);
    let mut chosen: Vec<Vec<usize>> = Vec::with_capacity(times.len());
    for times in times {
        let mut next: Vec<Option<u64>> = vec![None; layers + 1];
        let mut choice = vec![0; layers + 1];
        for held in 1..=layers {
            for own in 1..=held {
                let time = times.get(own).copied().flatten().filter(|time| *time <= limit);
                let (Some(before), Some(time)) = (reached[held - own], time) else {
                    continue;
                };
                let total = before.saturating_add(time);
                if next[held].is_none_or(|best| total < best) {
                    next[held] = Some(total);
                    choice[held] = own;
                }
            }
        }
        chosen.push(choice);
        reached = next;
    }
    reached[layers]?;
    let mut held = layers;
    let mut cut: Vec<u32> = chosen
        .iter()
        .rev()
        .map(|choice| {
            let own = choice[held];
            held -= own;
            own as u32
        })
        .collect();
    cut.reverse();
    Some(cut)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pace(objective: Objective, handover: u64, micro_batches: u64) -> Pace {
        Pace {
            objective,
            handover,
            micro_batches,
        }
    }

    fn all_cuts(layers: u32, stages: usize) -> Vec<Vec<u32>> {
        if stages == 1 {
            return vec![vec![layers]];
        }
        let firsts = 1..layers;
        firsts
            .flat_map(|first| {
                all_cuts(layers - first, stages - 1)
                    .into_iter()
                    .map(move |mut rest| {
                        rest.insert(0, first);
                        rest
                    })
            })
            .collect()
    }

    #[test]
    fn cuts_by_hand() {
        // Stage 1 takes twice as long a layer: 4 and 2 layers balance at 4.
        let times = [
            (0..=6).map(Some).collect::<Vec<_>>(),
            (0..=6).map(|layers| Some(2 * layers)).collect(),
        ];
        let cut = best(&times, pace(Objective::Throughput, 0, 2), 6).unwrap();
        assert_eq!((cut.layers, cut.value), (vec![4, 2], 8));
        // For one micro-batch the fast stage takes all it can: 5 + 2.
        let cut = best(&times, pace(Objective::Latency, 1, 2), 6).unwrap();
        assert_eq!((cut.layers, cut.value), (vec![5, 1], 8));
        // Memory holds 3 layers there.
        let mut short = times.clone();
        short[0][4..].fill(None);
        assert_eq!(
            best(&short, pace(Objective::Throughput, 0, 2), 6).unwrap().layers,
            [3, 3]
        );
        short[1][3..].fill(None);
        assert_eq!(best(&short, pace(Objective::Throughput, 0, 2), 6), None);
    }

    proptest! {
        #[test]
        fn cuts_equal_enumeration(
            rows in prop::collection::vec(prop::collection::vec(prop::option::weighted(0.9, 0_u64..60), 8), 1..4),
            handover in 0_u64..30, micro_batches in 1_u64..5, layers in 1_u32..8, latency: bool,
        ) {
            let objective = if latency { Objective::Latency } else { Objective::Throughput };
            let value = |cut: &Vec<u32>| {
                let times: Option<Vec<u64>> =
                    cut.iter().zip(&rows).map(|(own, row)| row[*own as usize]).collect();
                let times = times?;
                let way = times.iter().sum::<u64>() + handover;
                Some(if latency { way } else { way.max(micro_batches * times.iter().max().unwrap()) })
            };
            let truth = all_cuts(layers, rows.len()).iter().filter_map(value).min();
            prop_assert_eq!(best(&rows, pace(objective, handover, micro_batches), layers).map(|cut| cut.value), truth);
        }
    }
}
