//! The group of one rank.

use infercluster_spec::Rank;

use super::{CommError, Communicator};
use crate::backend::Backend;

/// A rank without peers: a gather is a copy, a sum is what is there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl<B: Backend<Buffer = Vec<f32>>> Communicator<B> for Solo {
    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn size(&self) -> usize {
        1
    }

    fn all_gather(&mut self, mine: &Vec<f32>, counts: &[usize], out: &mut Vec<f32>) -> Result<(), CommError> {
        let count = counts[0];
        if out.len() < count {
            out.resize(count, 0.0);
        }
        out[..count].copy_from_slice(&mine[..count]);
        Ok(())
    }

    fn all_reduce(&mut self, _data: &mut Vec<f32>, _len: usize) -> Result<(), CommError> {
        Ok(())
    }
}
