//! From logits slices to tokens: every rank of the last stage holds some vocabulary rows, rank 0 answers.

use infercluster_spec::IndexRange;
use xxhash_rust::xxh3::Xxh3;

use crate::backend::Backend;
use crate::comm::{CommError, Communicator};
use crate::wire::message::Wants;

/// What one row of logits gave.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    pub(super) token: u32,
    pub(super) logits_hash: Option<u64>,
    pub(super) logits: Option<Vec<f32>>,
}

/// Logits of this rank: rows of `vocab.len()` numbers.
pub(super) struct LogitsSlice {
    pub(super) numbers: Vec<f32>,
    pub(super) vocab: IndexRange,
}

/// The highest logit and its id; the lowest id where several are equal. `None` without a comparable number.
fn highest(row: &[f32], first_id: u32) -> Option<(f32, u32)> {
    let mut best: Option<(f32, u32)> = None;
    for (id, &value) in (first_id..).zip(row) {
        if !value.is_nan() && best.is_none_or(|(highest, _)| value > highest) {
            best = Some((value, id));
        }
    }
    best
}

/// Chooses a token for every row, one `wants` a row, and hashes or hands out the whole rows that are asked for.
/// `widths` are the vocabulary rows of each rank. The choices are complete on rank 0.
pub(super) fn choose<B: Backend<Buffer = Vec<f32>>>(
    comm: &mut dyn Communicator<B>,
    slice: &LogitsSlice,
    widths: &[usize],
    wants: &[Wants],
) -> Result<Vec<Choice>, CommError> {
    let mut choices = best_tokens(comm, slice, wants.len())?;
    let whole: Vec<usize> = (0..wants.len())
        .filter(|&row| wants[row].hash || wants[row].logits)
        .collect();
    if whole.is_empty() {
        return Ok(choices);
    }
    for (row, logits) in whole
        .iter()
        .copied()
        .zip(whole_rows(comm, slice, widths, &whole)?)
    {
        choices[row].logits_hash = wants[row].hash.then(|| hash_of(&logits));
        choices[row].logits = wants[row].logits.then_some(logits);
    }
    Ok(choices)
}

/// Each rank sends its highest value and id of every row: eight bytes a row instead of the row.
fn best_tokens<B: Backend<Buffer = Vec<f32>>>(
    comm: &mut dyn Communicator<B>,
    slice: &LogitsSlice,
    rows: usize,
) -> Result<Vec<Choice>, CommError> {
    const NOTHING: u32 = u32::MAX;
    let width = slice.vocab.len() as usize;
    let best: Vec<Option<(f32, u32)>> = (0..rows)
        .map(|row| {
            highest(
                &slice.numbers[row * width..(row + 1) * width],
                slice.vocab.start(),
            )
        })
        .collect();
    let values = best.iter().map(|best| best.map_or(0.0, |(value, _)| value));
    // Ids travel as the bits of a number; nothing computes with it.
    let ids = best
        .iter()
        .map(|best| f32::from_bits(best.map_or(NOTHING, |(_, id)| id)));
    let mine: Vec<f32> = values.chain(ids).collect();
    let mut all = vec![0.0; mine.len() * comm.size()];
    comm.all_gather(&mine, &vec![mine.len(); comm.size()], &mut all)?;
    let choice = |row: usize| {
        let candidates = all.chunks_exact(2 * rows).filter_map(|rank| {
            let id = rank[rows + row].to_bits();
            (id != NOTHING).then_some((rank[row], id))
        });
        // Ranks hold ascending ids, so only a higher value replaces an earlier one.
        let best = candidates.fold(None, |best: Option<(f32, u32)>, next| match best {
            Some(best) if next.0 <= best.0 => Some(best),
            _ => Some(next),
        });
        Choice {
            token: best.map_or(0, |(_, id)| id),
            logits_hash: None,
            logits: None,
        }
    };
    Ok((0..rows).map(choice).collect())
}

/// The given rows over the whole vocabulary.
fn whole_rows<B: Backend<Buffer = Vec<f32>>>(
    comm: &mut dyn Communicator<B>,
    slice: &LogitsSlice,
    widths: &[usize],
    rows: &[usize],
) -> Result<Vec<Vec<f32>>, CommError> {
    let width = slice.vocab.len() as usize;
    let mine: Vec<f32> = rows
        .iter()
        .flat_map(|row| &slice.numbers[row * width..(row + 1) * width])
        .copied()
        .collect();
    let counts: Vec<usize> = widths.iter().map(|width| width * rows.len()).collect();
    let mut all = vec![0.0; counts.iter().sum()];
    comm.all_gather(&mine, &counts, &mut all)?;
    let row = |index: usize| {
        let mut logits = Vec::with_capacity(widths.iter().sum());
        let mut rank_start = 0;
        for (&width, &count) in widths.iter().zip(&counts) {
            let from = rank_start + index * width;
            logits.extend_from_slice(&all[from..from + width]);
            rank_start += count;
        }
        logits
    };
    Ok((0..rows.len()).map(row).collect())
}

/// xxh3 over the little-endian bits of a whole row.
fn hash_of(logits: &[f32]) -> u64 {
    let mut hash = Xxh3::new();
    for number in logits {
        hash.update(&number.to_le_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backend::Cpu;
    use crate::comm::local;

    /// Two rows over a vocabulary of 7, cut at the given ids over threads.
    fn choices(cuts: &[u32], wants: [Wants; 2]) -> Vec<Choice> {
        let rows: [[f32; 7]; 2] = [
            [0.5, 2.0, -1.0, 2.0, 1.0, 2.0, 0.0],
            [f32::NAN, -3.0, -2.0, -9.0, -2.0, f32::NEG_INFINITY, -4.0],
        ];
        let widths: Vec<usize> = cuts.windows(2).map(|cut| (cut[1] - cut[0]) as usize).collect();
        let group = local::group(widths.len(), Duration::from_secs(10));
        let results = std::thread::scope(|scope| {
            let threads: Vec<_> = group
                .into_iter()
                .zip(cuts.windows(2))
                .map(|(mut comm, cut)| {
                    let vocab = IndexRange::new(cut[0], cut[1]).unwrap();
                    let numbers = rows
                        .iter()
                        .flat_map(|row| &row[vocab.as_usize()])
                        .copied()
                        .collect();
                    let (slice, widths) = (LogitsSlice { numbers, vocab }, &widths);
                    scope.spawn(move || choose::<Cpu>(&mut comm, &slice, widths, &wants).unwrap())
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect::<Vec<_>>()
        });
        results[0].clone()
    }

    #[test]
    fn cuts_change_nothing_and_ties_go_to_the_lowest_id() {
        let wants = [
            Wants {
                logits: true,
                hash: false,
            },
            Wants {
                logits: false,
                hash: true,
            },
        ];
        let whole = choices(&[0, 7], wants);
        assert_eq!((whole[0].token, whole[1].token), (1, 2));
        assert_eq!(
            whole[0].logits.as_deref(),
            Some(&[0.5, 2.0, -1.0, 2.0, 1.0, 2.0, 0.0][..])
        );
        assert!(whole[1].logits_hash.is_some() && whole[0].logits_hash.is_none());
        let cuts: [&[u32]; 4] = [&[0, 2, 7], &[0, 0, 7], &[0, 1, 4, 4, 7], &[0, 7, 7]];
        for cut in cuts {
            assert_eq!(choices(cut, wants), whole, "{cut:?}");
        }
    }
}
