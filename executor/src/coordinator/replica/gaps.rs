//! What a change of layout does to the gaps between tokens.

use std::collections::VecDeque;

use infercluster_spec::StepId;

/// Gaps that are kept from before a migration.
const RECENT_GAPS: usize = 512;

/// Gaps between the tokens of each stream around a change of layout, in seconds.
#[derive(Debug, Clone, Default)]
pub(in crate::coordinator) struct Gaps {
    /// The latest ones.
    recent: VecDeque<f64>,
    /// Those when the migration began.
    pub(in crate::coordinator) before: VecDeque<f64>,
    pub(in crate::coordinator) meanwhile: Vec<f64>,
    /// From the last token of the old layout to the first of the new one.
    pub(in crate::coordinator) pauses: Vec<f64>,
    pub(in crate::coordinator) after: Vec<f64>,
    /// From the last result before the new layout's first step to that step's leaving.
    pub(in crate::coordinator) dispatch_s: Option<f64>,
    /// Whether a migration is under way.
    watches: bool,
    /// The first step of the new layout.
    first_step: Option<StepId>,
}

impl Gaps {
    /// A migration begins.
    pub(in crate::coordinator) fn begin(&mut self) {
        *self = Self {
            recent: std::mem::take(&mut self.recent),
            watches: true,
            ..Self::default()
        };
        self.before.clone_from(&self.recent);
    }

    /// The first step of the new layout is named.
    pub(in crate::coordinator) fn name_first_step(&mut self, step: StepId) {
        self.first_step = Some(step);
    }

    /// The migration is over.
    pub(in crate::coordinator) fn end(&mut self) {
        self.watches = false;
    }

    /// A stream got a token from `step` after one from the step `before`.
    pub(in crate::coordinator) fn note(&mut self, gap_s: f64, before: StepId, step: StepId) {
        if self.recent.len() == RECENT_GAPS {
            self.recent.pop_front();
        }
        self.recent.push_back(gap_s);
        if !self.watches {
            return;
        }
        match self.first_step {
            Some(first) if before >= first => self.after.push(gap_s),
            Some(first) if step >= first => self.pauses.push(gap_s),
            _ => self.meanwhile.push(gap_s),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_over_the_first_step_is_a_pause() {
        let mut gaps = Gaps::default();
        gaps.note(0.1, StepId(1), StepId(2));
        gaps.begin();
        gaps.note(0.2, StepId(2), StepId(3));
        gaps.name_first_step(StepId(5));
        // A stream may skip steps: what counts is on which side of the first step its two tokens are.
        gaps.note(0.3, StepId(3), StepId(4));
        gaps.note(0.4, StepId(4), StepId(6));
        gaps.note(0.5, StepId(3), StepId(5));
        gaps.note(0.6, StepId(5), StepId(6));
        gaps.end();
        gaps.note(0.7, StepId(6), StepId(7));
        assert_eq!(gaps.before, [0.1]);
        assert_eq!(gaps.meanwhile, [0.2, 0.3]);
        assert_eq!(gaps.pauses, [0.4, 0.5]);
        assert_eq!(gaps.after, [0.6]);
        gaps.begin();
        assert_eq!(gaps.before, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]);
        assert!(gaps.pauses.is_empty());
    }
}
