//! A tensor-parallel group inside one process: one thread a rank, channels between them.
//!
//! For tests and one-process runs on devices whose buffers are host memory.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use infercluster_spec::Rank;

use super::{CommError, Communicator};
use crate::backend::Backend;

/// One rank's end of a group.
pub struct LocalCommunicator {
    rank: usize,
    to: Vec<Sender<Arc<Vec<f32>>>>,
    from: Vec<Receiver<Arc<Vec<f32>>>>,
    deadline: Duration,
}

/// The ends of a group of `size` ranks, in rank order. A collective that a peer does not join within
/// `deadline` fails.
pub fn group(size: usize, deadline: Duration) -> Vec<LocalCommunicator> {
    let mut ends: Vec<LocalCommunicator> = (0..size)
        .map(|rank| LocalCommunicator {
            rank,
            to: Vec::new(),
            from: Vec::new(),
            deadline,
        })
        .collect();
    for sender in 0..size {
        for receiver in 0..size {
            let (to, from) = channel();
            ends[sender].to.push(to);
            ends[receiver].from.push(from);
        }
    }
    ends
}

impl LocalCommunicator {
    /// Gives `mine` to every rank, itself included, and takes everyone's in rank order.
    fn exchange(&mut self, mine: &[f32], what: &'static str) -> Result<Vec<Arc<Vec<f32>>>, CommError> {
        let mine = Arc::new(mine.to_vec());
        for (peer, to) in self.to.iter().enumerate() {
            let peer = Rank(peer as u32);
            to.send(Arc::clone(&mine))
                .map_err(|_| CommError::Closed { peer, what })?;
        }
        let take = |(peer, from): (usize, &Receiver<Arc<Vec<f32>>>)| {
            let peer = Rank(peer as u32);
            from.recv_timeout(self.deadline).map_err(|error| match error {
                RecvTimeoutError::Timeout => CommError::Silent {
                    peer,
                    waited_ms: self.deadline.as_millis() as u64,
                    what,
                },
                RecvTimeoutError::Disconnected => CommError::Closed { peer, what },
            })
        };
        self.from.iter().enumerate().map(take).collect()
    }
}

fn check(peer: usize, found: usize, expected: usize, what: &'static str) -> Result<(), CommError> {
    if found == expected {
        return Ok(());
    }
    Err(CommError::Mismatch {
        peer: Rank(peer as u32),
        found: 4 * found as u64,
        expected: 4 * expected as u64,
        what,
    })
}

impl<B: Backend<Buffer = Vec<f32>>> Communicator<B> for LocalCommunicator {
    fn rank(&self) -> Rank {
        Rank(self.rank as u32)
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn all_gather(&mut self, mine: &Vec<f32>, counts: &[usize], out: &mut Vec<f32>) -> Result<(), CommError> {
        let what = "all-gather";
        let parts = self.exchange(&mine[..counts[self.rank]], what)?;
        let mut at = 0;
        for (peer, (part, count)) in parts.iter().zip(counts).enumerate() {
            check(peer, part.len(), *count, what)?;
            out[at..at + count].copy_from_slice(part);
            at += count;
        }
        Ok(())
    }

    fn all_reduce(&mut self, data: &mut Vec<f32>, len: usize) -> Result<(), CommError> {
        let what = "all-reduce";
        let parts = self.exchange(&data[..len], what)?;
        for (peer, part) in parts.iter().enumerate() {
            check(peer, part.len(), len, what)?;
            for (sum, number) in data[..len].iter_mut().zip(part.iter()) {
                *sum = if peer == 0 { *number } else { *sum + *number };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Reference;

    #[test]
    fn a_silent_peer_is_an_error_and_not_a_hang() {
        let mut ends = group(2, Duration::from_millis(1));
        let mut data = vec![1.0];
        let found = Communicator::<Reference>::all_reduce(&mut ends[0], &mut data, 1);
        assert!(matches!(found, Err(CommError::Silent { peer: Rank(1), .. })));
        let last = ends.pop();
        drop(last);
        let found = Communicator::<Reference>::all_reduce(&mut ends[0], &mut data, 1);
        assert!(matches!(found, Err(CommError::Closed { peer: Rank(1), .. })));
    }
}
