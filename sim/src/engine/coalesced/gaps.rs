//! The longest gap since a step, for limits on every gap of a request.

use infercluster_spec::SimDuration;

/// Longest gaps of a replica's decode steps, by where in its count of decode steps they ended. Only what
/// could still be the longest of some request is kept: later entries are shorter.
#[derive(Debug, Default)]
pub(super) struct LongestGaps(Vec<(u64, SimDuration)>);

impl LongestGaps {
    /// The steps up to the count `decoded` had gaps of at most `longest`.
    pub(super) fn push(&mut self, decoded: u64, longest: SimDuration) {
        while self.0.last().is_some_and(|(_, shorter)| *shorter <= longest) {
            self.0.pop();
        }
        self.0.push((decoded, longest));
    }

    /// The longest gap in steps past the count `decoded`; `None` where there was no step, or nobody kept any.
    pub(super) fn since(&self, decoded: u64) -> Option<SimDuration> {
        let first = self.0.partition_point(|(at, _)| *at <= decoded);
        self.0.get(first).map(|(_, longest)| *longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_since_a_step_is_found() {
        let mut gaps = LongestGaps::default();
        for (decoded, longest) in [(1, 5), (4, 9), (6, 3), (7, 4), (9, 2)] {
            gaps.push(decoded, SimDuration(longest));
        }
        let found = [0, 1, 4, 6, 7, 9].map(|decoded| gaps.since(decoded).map(|span| span.0));
        assert_eq!(found, [Some(9), Some(9), Some(4), Some(4), Some(2), None]);
    }
}
