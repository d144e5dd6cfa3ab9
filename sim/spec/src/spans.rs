//! Exact summaries of many spans of time, without keeping each.
//!
//! A decode run of the simulator gives thousands of gaps that form an arithmetic progression, each of them
//! as often as sequences decode. [`SpanRuns`] keeps the progressions and answers the same [`Summary`] that
//! sorting every single span would give, bit by bit: a mean is the exact integer sum over the count, and a
//! percentile interpolates between order statistics that rounded to nanoseconds, which rounding keeps in
//! order.

use std::ops::RangeInclusive;

use crate::stats::Summary;
use crate::units::SimDuration;

/// Spans in arithmetic progression, each of them `times` times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpanRun {
    /// The first span in picoseconds.
    pub first: u64,
    /// What each next one is longer by, in picoseconds; negative where they get shorter.
    pub increment: i64,
    /// How many spans the progression has.
    pub length: u32,
    /// How often each occurs.
    pub times: u32,
}

impl SpanRun {
    /// The span at a position, in picoseconds.
    ///
    /// # Panics
    /// Where it would be negative or past 64 bits: a progression of spans has none such.
    pub fn at(&self, position: u32) -> u64 {
        let shift = i128::from(self.increment) * i128::from(position);
        u64::try_from(i128::from(self.first) + shift).expect("every span of a progression is one")
    }

    /// Sum of its different spans, in picoseconds.
    pub fn sum_once(&self) -> u128 {
        let length = i128::from(self.length);
        let sum =
            i128::from(self.first) * length + i128::from(self.increment) * (length * (length - 1).max(0) / 2);
        u128::try_from(sum).expect("spans are not negative")
    }
}

/// Slots of the table of spans seen lately; a power of two.
const RECENT: usize = 16;
/// Classes that order statistics are first counted in.
const CLASSES: u64 = 1 << 12;

/// A bag of spans.
#[derive(Debug, Clone, Default)]
pub struct SpanRuns {
    /// Single spans that were crowded out of `recent`.
    singles: Vec<(u64, u32)>,
    /// Progressions of several different spans.
    runs: Vec<SpanRun>,
    /// Spans seen lately with their counts: fixed step times repeat a handful of spans for ever.
    recent: [(u64, u64); RECENT],
    samples: u64,
    sum: u128,
}

impl SpanRuns {
    /// Adds one span, `times` times.
    pub fn push(&mut self, span: SimDuration, times: u64) {
        if times == 0 {
            return;
        }
        self.samples += times;
        self.sum += u128::from(span.0) * u128::from(times);
        // Fibonacci hashing: the upper bits of the product mix all bits of the span.
        let slot = (span.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60) as usize % RECENT;
        let (known, count) = self.recent[slot];
        if count > 0 && known != span.0 {
            self.retire(known, count);
            self.recent[slot] = (span.0, times);
        } else {
            self.recent[slot] = (span.0, count + times);
        }
    }

    /// Adds a progression.
    pub fn push_run(&mut self, run: SpanRun) {
        if run.increment == 0 || run.length <= 1 {
            return self.push(
                SimDuration(run.first),
                u64::from(run.length) * u64::from(run.times),
            );
        }
        if run.times == 0 {
            return;
        }
        self.samples += u64::from(run.length) * u64::from(run.times);
        self.sum += run.sum_once() * u128::from(run.times);
        self.runs.push(run);
    }

    fn retire(&mut self, span: u64, mut count: u64) {
        while count > 0 {
            let part = u32::try_from(count).unwrap_or(u32::MAX);
            self.singles.push((span, part));
            count -= u64::from(part);
        }
    }

    /// How many spans there are.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Mean and percentiles, as [`Summary::of_spans`] of every single span gives them.
    pub fn summary(&self) -> Summary {
        let Some((least, most)) = self.extremes() else {
            return Summary::default();
        };
        let classes = self.classes(least, most);
        Summary::of_order(self.sum, self.samples, |ranks| {
            let mut found = Vec::with_capacity(ranks.len());
            for group in classes.groups(ranks) {
                self.select(&classes, &group, &mut found);
            }
            found
        })
    }

    /// Every part as a progression.
    fn parts(&self) -> impl Iterator<Item = (SpanRun, u64)> {
        let recent = self.recent.iter().filter(|(_, count)| *count > 0).copied();
        let singles = self
            .singles
            .iter()
            .map(|(span, count)| (*span, u64::from(*count)));
        let constant = |(first, count)| {
            let run = SpanRun {
                first,
                increment: 0,
                length: 1,
                times: 1,
            };
            (run, count)
        };
        let runs = self.runs.iter().map(|run| (*run, u64::from(run.times)));
        recent.chain(singles).map(constant).chain(runs)
    }

    fn extremes(&self) -> Option<(u64, u64)> {
        self.parts().fold(None, |so_far, (run, _)| {
            let (one, other) = (run.first, run.at(run.length - 1));
            let (least, most) = so_far.unwrap_or((one, one));
            Some((least.min(one).min(other), most.max(one).max(other)))
        })
    }

    /// Counts spans by class of equal width.
    fn classes(&self, least: u64, most: u64) -> Classes {
        let width = (most - least) / CLASSES + 1;
        let mut counts = vec![0_u64; ((most - least) / width + 1) as usize];
        for (run, times) in self.parts() {
            let (one, other) = (run.first, run.at(run.length - 1));
            let class = |span: u64| ((span - least) / width) as usize;
            if class(one) == class(other) {
                counts[class(one)] += times * u64::from(run.length);
                continue;
            }
            for position in 0..run.length {
                counts[class(run.at(position))] += times;
            }
        }
        Classes { least, width, counts }
    }

    /// Finds the spans of some ranks of one class.
    fn select(&self, classes: &Classes, group: &RankGroup, found: &mut Vec<SimDuration>) {
        let range = classes.range(group.class);
        let mut spans: Vec<(u64, u64)> = Vec::new();
        for (run, times) in self.parts() {
            let (one, other) = (run.first, run.at(run.length - 1));
            if one.min(other) <= *range.end() && one.max(other) >= *range.start() {
                let all = (0..run.length).map(|position| run.at(position));
                spans.extend(all.filter(|span| range.contains(span)).map(|span| (span, times)));
            }
        }
        spans.sort_unstable();
        let mut spans = spans.into_iter();
        let (mut current, mut below) = (0, group.below);
        for rank in &group.ranks {
            while below <= *rank {
                let (span, times) = spans.next().expect("the class holds its ranks");
                current = span;
                below += times;
            }
            found.push(SimDuration(current));
        }
    }
}

/// Spans counted by class.
struct Classes {
    least: u64,
    width: u64,
    counts: Vec<u64>,
}

/// Ranks that lie in one class, ascending.
struct RankGroup {
    class: usize,
    /// Spans in the classes before.
    below: u64,
    ranks: Vec<u64>,
}

impl Classes {
    fn range(&self, class: usize) -> RangeInclusive<u64> {
        let start = self.least + class as u64 * self.width;
        start..=start.saturating_add(self.width - 1)
    }

    /// The classes of ascending ranks.
    fn groups(&self, ranks: &[u64]) -> Vec<RankGroup> {
        let mut groups: Vec<RankGroup> = Vec::new();
        let (mut class, mut below) = (0, 0);
        for rank in ranks {
            while below + self.counts[class] <= *rank {
                below += self.counts[class];
                class += 1;
            }
            match groups.last_mut().filter(|group| group.class == class) {
                Some(group) => group.ranks.push(*rank),
                None => groups.push(RankGroup {
                    class,
                    below,
                    ranks: vec![*rank],
                }),
            }
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(runs: &[SpanRun]) -> Vec<SimDuration> {
        let each = |run: &SpanRun| {
            let run = *run;
            (0..run.length)
                .flat_map(move |position| (0..run.times).map(move |_| SimDuration(run.at(position))))
        };
        runs.iter().flat_map(each).collect()
    }

    fn check(runs: &[SpanRun]) {
        let mut bag = SpanRuns::default();
        for run in runs {
            bag.push_run(*run);
        }
        let mut spans = all(runs);
        assert_eq!(bag.samples(), spans.len() as u64);
        assert_eq!(bag.summary(), Summary::of_spans(&mut spans), "{runs:?}");
    }

    #[test]
    fn progressions_summarise_as_their_spans_do() {
        let run = |first, increment, length, times| SpanRun {
            first,
            increment,
            length,
            times,
        };
        check(&[]);
        check(&[run(5, 3, 0, 2), run(7, 0, 4, 0)]);
        check(&[run(1000, 0, 1, 1)]);
        // 2, 4, 6, 8 us twice and 3 us five times.
        check(&[run(2_000_000, 2_000_000, 4, 2), run(3_000_000, 0, 5, 1)]);
        // Shorter and shorter, to zero.
        check(&[run(9_000, -1_000, 10, 3), run(4_500, 1, 2, 1)]);
        check(&[run(u64::MAX, 0, 1, 1), run(0, 0, 1, 3)]);
    }

    #[test]
    fn random_progressions_summarise_as_their_spans_do() {
        // A linear congruential generator, whose upper bits are good enough to stir spans.
        let mut state = 7_u64;
        let mut draw = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % limit
        };
        for round in 0..300 {
            let scale = 10_u64.pow(round % 9);
            let runs: Vec<SpanRun> = (0..draw(60))
                .map(|_| SpanRun {
                    first: (50 + draw(50)) * scale,
                    increment: draw(5) as i64 - 1,
                    length: draw(40) as u32,
                    times: draw(4) as u32,
                })
                .collect();
            check(&runs);
        }
    }
}
