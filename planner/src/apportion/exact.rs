//! Feasibility by dynamic programming over ranks.
//!
//! State after some ranks: query heads held so far and units held so far of every counted kind but the last;
//! value: the most units of the last kind that those ranks can hold. Holding fewer of the last kind is always
//! possible, so the most is all that has to be kept, and the answer is exact.

use super::Feasible;
use super::oracle::Room;

/// States times choices of one rank, up to which the program runs.
pub(super) const STATE_LIMIT: u64 = 4_000_000;

/// Elementary steps of the program; `None` where it is too large to run.
pub(super) fn steps(room: &Room) -> Option<u64> {
    let states = sizes(room)
        .iter()
        .fold(1_u64, |states, size| states.saturating_mul(*size as u64));
    let steps = states.saturating_mul(states);
    (steps <= STATE_LIMIT).then(|| steps.saturating_mul(room.problem.memory.len() as u64) / 4)
}

/// One way into a state.
#[derive(Clone, Copy)]
struct Arrival {
    /// Units of the last kind held so far.
    last_held: u32,
    /// The state before.
    from: usize,
}

/// Shares within the limits, if there are any.
pub(super) fn solve(room: &Room) -> Option<Feasible> {
    let sizes = sizes(room);
    let states: usize = sizes.iter().product();
    let mut layers: Vec<Vec<Option<Arrival>>> = Vec::new();
    let mut reached = vec![None; states];
    reached[0] = Some(Arrival {
        last_held: 0,
        from: 0,
    });
    for rank in 0..room.problem.memory.len() {
        let mut next: Vec<Option<Arrival>> = vec![None; states];
        for (from, arrival) in reached.iter().enumerate() {
            let Some(arrival) = arrival else { continue };
            let before = digits(from, &sizes);
            for end in before[0]..sizes[0] {
                let Some(left) = room.beside(rank, room.range(before[0], end)) else {
                    continue;
                };
                let mut after = before.clone();
                after[0] = end;
                extend(room, rank, &sizes, &mut after, 1, left, &mut |after, left| {
                    let held = arrival.last_held.saturating_add(most_of_last(room, rank, left));
                    let last_held = held.min(last(room).units);
                    let slot = &mut next[index(after, &sizes)];
                    if slot.is_none_or(|best: Arrival| last_held > best.last_held) {
                        *slot = Some(Arrival { last_held, from });
                    }
                });
            }
        }
        layers.push(std::mem::replace(&mut reached, next));
    }
    layers.push(reached);
    trace_back(room, &sizes, &layers)
}

/// Tries every count of the kinds from `kind` on.
fn extend(
    room: &Room,
    rank: usize,
    sizes: &[usize],
    after: &mut Vec<usize>,
    kind: usize,
    left: u64,
    reach: &mut dyn FnMut(&[usize], u64),
) {
    if kind == sizes.len() {
        return reach(after, left);
    }
    let held = after[kind];
    let unit_bytes = room.problem.counts[kind - 1].unit_bytes.0;
    for more in 0..=room.caps[kind - 1][rank] as usize {
        let (Some(left), true) = (
            left.checked_sub(unit_bytes.saturating_mul(more as u64)),
            held + more < sizes[kind],
        ) else {
            break;
        };
        after[kind] = held + more;
        extend(room, rank, sizes, after, kind + 1, left, reach);
    }
    after[kind] = held;
}

fn last<'a>(room: &Room<'a>) -> &'a super::CountShare {
    room.problem.counts.last().expect("a group shares a counted kind")
}

fn most_of_last(room: &Room, rank: usize, left: u64) -> u32 {
    let cap = room.caps.last().expect("a group shares a counted kind")[rank];
    match last(room).unit_bytes.0 {
        0 => cap,
        bytes => u64::from(cap).min(left / bytes) as u32,
    }
}

fn trace_back(room: &Room, sizes: &[usize], layers: &[Vec<Option<Arrival>>]) -> Option<Feasible> {
    let ranks = layers.len() - 1;
    let kinds = room.problem.counts.len();
    let mut state = layers[ranks].len() - 1;
    let mut arrival = layers[ranks][state].filter(|end| end.last_held == last(room).units)?;
    let mut heads = Vec::new();
    let mut counts = vec![vec![0; ranks]; kinds];
    for rank in (0..ranks).rev() {
        let before = layers[rank][arrival.from].expect("a state is entered from a reached one");
        let (start, end) = (digits(arrival.from, sizes), digits(state, sizes));
        heads.push(room.range(start[0], end[0]));
        for kind in 0..kinds - 1 {
            counts[kind][rank] = (end[kind + 1] - start[kind + 1]) as u32;
        }
        counts[kinds - 1][rank] = arrival.last_held - before.last_held;
        (state, arrival) = (arrival.from, before);
    }
    heads.reverse();
    Some(Feasible { heads, counts })
}

/// Values of every dimension of the state: head units, then all counted kinds but the last.
fn sizes(room: &Room) -> Vec<usize> {
    let heads = &room.problem.heads;
    let counts = &room.problem.counts;
    let counted = counts[..counts.len() - 1].iter().map(|share| share.units);
    std::iter::once(heads.query_heads / heads.unit)
        .chain(counted)
        .map(|units| units as usize + 1)
        .collect()
}

fn digits(mut index: usize, sizes: &[usize]) -> Vec<usize> {
    sizes
        .iter()
        .map(|size| {
            let digit = index % size;
            index /= size;
            digit
        })
        .collect()
}

fn index(digits: &[usize], sizes: &[usize]) -> usize {
    digits
        .iter()
        .zip(sizes)
        .rev()
        .fold(0, |index, (digit, size)| index * size + digit)
}
