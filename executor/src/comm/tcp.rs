//! The communicator over a mesh of TCP connections, one for every pair of ranks.

use std::net::TcpStream;
use std::time::Duration;

use infercluster_spec::Rank;

use super::exchange::{self, Lane};
use super::{CommError, Communicator};
use crate::backend::Backend;

/// Elements of a vector below which every rank sends it whole and adds it up alone.
const WHOLE_REDUCE_LIMIT: usize = 4096;

/// One rank's end of a tensor-parallel group.
#[derive(Debug)]
pub struct TcpCommunicator {
    rank: Rank,
    /// By rank; `None` at this rank's own place.
    peers: Vec<Option<TcpStream>>,
    deadline: Duration,
    /// Number of the next collective: both ends of a connection count alike.
    tag: u32,
    /// What the peers sent, in rank order.
    gathered: Vec<f32>,
}

impl TcpCommunicator {
    /// Takes over one connected socket a peer, in rank order with `None` at this rank's place. A collective in
    /// which a peer is silent for `deadline` fails and names it.
    pub fn new(
        rank: Rank,
        peers: Vec<Option<TcpStream>>,
        deadline: Duration,
    ) -> Result<Self, std::io::Error> {
        assert!(
            peers.get(rank.index()).is_some_and(Option::is_none)
                && peers.iter().flatten().count() + 1 == peers.len(),
            "{rank} has a connection to every rank but itself"
        );
        for peer in peers.iter().flatten() {
            prepare(peer)?;
        }
        Ok(Self {
            rank,
            peers,
            deadline,
            tag: 0,
            gathered: Vec::new(),
        })
    }

    /// Every rank sends `mine` to every other and receives `counts[r]` elements from rank `r` into `out`.
    fn gather(
        &mut self,
        mine: &[f32],
        counts: &[usize],
        out: &mut [f32],
        what: &'static str,
    ) -> Result<(), CommError> {
        let tag = self.next_tag();
        let mut lanes = Vec::with_capacity(self.peers.len());
        let mut rest = out;
        for (index, (peer, &count)) in self.peers.iter().zip(counts).enumerate() {
            let (part, tail) = rest.split_at_mut(count);
            rest = tail;
            let Some(stream) = peer else {
                part.copy_from_slice(mine);
                continue;
            };
            let mut lane = Lane::new(Rank(index as u32), stream);
            if !mine.is_empty() {
                lane.send(tag, bytemuck::cast_slice(mine), what)?;
            }
            if count > 0 {
                lane.receive(tag, bytemuck::cast_slice_mut(part));
            }
            lanes.push(lane);
        }
        exchange::run(&mut lanes, self.deadline, what)
    }

    /// Every rank sends slice `r` of `data` to rank `r`, and adds up what it receives for its own slice.
    fn reduce_own_slice(
        &mut self,
        data: &[f32],
        slices: &[std::ops::Range<usize>],
        what: &'static str,
    ) -> Result<Vec<f32>, CommError> {
        let tag = self.next_tag();
        let own = slices[self.rank.index()].clone();
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.clear();
        gathered.resize(own.len() * self.peers.len(), 0.0);
        let mut lanes = Vec::with_capacity(self.peers.len());
        let mut rest = gathered.as_mut_slice();
        for (index, (peer, slice)) in self.peers.iter().zip(slices).enumerate() {
            let (part, tail) = rest.split_at_mut(own.len());
            rest = tail;
            let Some(stream) = peer else {
                part.copy_from_slice(&data[own.clone()]);
                continue;
            };
            let mut lane = Lane::new(Rank(index as u32), stream);
            if !slice.is_empty() {
                lane.send(tag, bytemuck::cast_slice(&data[slice.clone()]), what)?;
            }
            if !own.is_empty() {
                lane.receive(tag, bytemuck::cast_slice_mut(part));
            }
            lanes.push(lane);
        }
        exchange::run(&mut lanes, self.deadline, what)?;
        let mut sum = vec![0.0; own.len()];
        add_in_rank_order(&gathered, &mut sum);
        self.gathered = gathered;
        Ok(sum)
    }

    fn next_tag(&mut self) -> u32 {
        self.tag = self.tag.wrapping_add(1);
        self.tag
    }
}

impl<B: Backend<Buffer = Vec<f32>>> Communicator<B> for TcpCommunicator {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn all_gather(&mut self, mine: &Vec<f32>, counts: &[usize], out: &mut Vec<f32>) -> Result<(), CommError> {
        assert_eq!(counts.len(), self.peers.len(), "one count a rank");
        let total = counts.iter().sum();
        if out.len() < total {
            out.resize(total, 0.0);
        }
        let mine = &mine[..counts[self.rank.index()]];
        self.gather(mine, counts, &mut out[..total], "an all-gather")
    }

    fn all_reduce(&mut self, data: &mut Vec<f32>, len: usize) -> Result<(), CommError> {
        const WHAT: &str = "an all-reduce";
        let ranks = self.peers.len();
        if ranks <= 2 || len <= WHOLE_REDUCE_LIMIT {
            let mut gathered = std::mem::take(&mut self.gathered);
            gathered.clear();
            gathered.resize(len * ranks, 0.0);
            self.gather(&data[..len], &vec![len; ranks], &mut gathered, WHAT)?;
            add_in_rank_order(&gathered, &mut data[..len]);
            self.gathered = gathered;
            return Ok(());
        }
        let share = len.div_ceil(ranks);
        let slices: Vec<_> = (0..ranks)
            .map(|rank| (rank * share).min(len)..((rank + 1) * share).min(len))
            .collect();
        let sum = self.reduce_own_slice(&data[..len], &slices, WHAT)?;
        let counts: Vec<usize> = slices.iter().map(ExactSizeIterator::len).collect();
        self.gather(&sum, &counts, &mut data[..len], WHAT)
    }
}

/// Adds vectors that lie one after another; the first is the start, so no rank adds a zero that another does not.
fn add_in_rank_order(vectors: &[f32], sum: &mut [f32]) {
    if sum.is_empty() {
        return;
    }
    for (rank, vector) in vectors.chunks_exact(sum.len()).enumerate() {
        if rank == 0 {
            sum.copy_from_slice(vector);
        } else {
            for (total, value) in sum.iter_mut().zip(vector) {
                *total += value;
            }
        }
    }
}

/// One direction of activations between two stages.
#[derive(Debug)]
pub struct TensorLink {
    peer: Rank,
    stream: TcpStream,
    deadline: Duration,
    tag: u32,
}

impl TensorLink {
    /// Takes over a connected socket; `peer` is the rank that errors name.
    pub fn new(peer: Rank, stream: TcpStream, deadline: Duration) -> Result<Self, std::io::Error> {
        prepare(&stream)?;
        Ok(Self {
            peer,
            stream,
            deadline,
            tag: 0,
        })
    }

    /// Sends a tensor.
    pub fn send(&mut self, tensor: &[f32]) -> Result<(), CommError> {
        const WHAT: &str = "sending activations";
        self.tag = self.tag.wrapping_add(1);
        let mut lane = Lane::new(self.peer, &self.stream);
        lane.send(self.tag, bytemuck::cast_slice(tensor), WHAT)?;
        exchange::run(&mut [lane], self.deadline, WHAT)
    }

    /// Receives a tensor of exactly this size.
    pub fn receive(&mut self, tensor: &mut [f32]) -> Result<(), CommError> {
        const WHAT: &str = "receiving activations";
        self.tag = self.tag.wrapping_add(1);
        let mut lane = Lane::new(self.peer, &self.stream);
        lane.receive(self.tag, bytemuck::cast_slice_mut(tensor));
        exchange::run(&mut [lane], self.deadline, WHAT)
    }
}

fn prepare(stream: &TcpStream) -> Result<(), std::io::Error> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}
