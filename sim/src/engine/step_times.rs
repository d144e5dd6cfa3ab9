//! What a step takes on a stage, in integer picoseconds: the one definition that every engine shares.
//!
//! A step that only decodes lasts a piecewise linear function of its tokens in the cache: the cost model is
//! asked at knots, eight in each octave of tokens and every token below sixteen, each answer is rounded to
//! the picosecond, and between two knots every token more adds the same whole number of picoseconds, rounded
//! down. So the steps of a constant batch, whose contexts grow by one token each, form an arithmetic
//! progression until they reach a knot, and [`StageTimes::decode_run`] gives it. Rounding down costs at most
//! a picosecond a token behind the knot, and what is not linear between knots (a rank that overtakes another
//! inside one) is an eighth of an octave wide.
//!
//! Any other step is asked of the cost model and rounded once. No step is shorter than a picosecond, the
//! clock's grain, so that time moves on.
//!
//! Compute time of the ranks follows the same rule.

use infercluster_spec::{BatchShape, GpuId, ReplicaId, SimDuration, StageId};

use crate::cost::{ShareCost, StageCost, StagePace};
use crate::scenario::{Scenario, SimError, StepTimes};

/// Step times of one stage.
pub(super) struct StageTimes<'a> {
    pace: StagePace<'a>,
    source: StepTimes,
    replica: ReplicaId,
    stage: StageId,
    /// Compute seconds of the ranks in the step that was asked for last.
    rank_compute_s: Vec<f64>,
    /// By sequences: the knots of batches of that many, where they were asked for.
    rows: Vec<Row>,
}

/// Answers at the knots of one batch size: for each knot the step and then the compute of each rank, in
/// picoseconds; [`UNKNOWN`] where nobody asked.
type Row = Vec<u64>;

/// No answer yet: a span that [`SimDuration::from_seconds`] never gives.
const UNKNOWN: u64 = u64::MAX;
/// Steps whose cost does not change with the cache end their run at this limit only.
const FOR_EVER: u64 = u64::MAX;

/// Steps of a batch whose contexts grow by one token in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecodeRun {
    /// The first step, in picoseconds.
    pub(super) first: u64,
    /// What each next one takes more.
    pub(super) increment: i64,
    /// Steps for which that holds, at least 1.
    pub(super) valid_steps: u64,
}

/// A knot: tokens from which one slope holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Knot {
    index: usize,
    /// Tokens at the knot.
    tokens: u64,
    /// Tokens to the next, as a power of two.
    spacing_log2: u32,
}

impl Knot {
    /// The last knot that is not past so many tokens.
    fn before(tokens: u64) -> Self {
        let spacing_log2 = tokens.checked_ilog2().unwrap_or(0).saturating_sub(3);
        let eighths = tokens >> spacing_log2;
        Self {
            index: 8 * spacing_log2 as usize + eighths as usize,
            tokens: eighths << spacing_log2,
            spacing_log2,
        }
    }

    fn next_tokens(self) -> u64 {
        self.tokens + (1 << self.spacing_log2)
    }
}

impl<'a> StageTimes<'a> {
    /// Step times of a stage of the scenario's layout, whose shares those are.
    pub(super) fn new(
        scenario: &Scenario<'a>,
        share: &ShareCost<'a>,
        replica: ReplicaId,
        stage: StageId,
    ) -> Result<Self, SimError> {
        let cost = StageCost::of_share(share.clone(), scenario.layout, replica, stage)?;
        Ok(Self {
            pace: StagePace::new(cost),
            source: scenario.steps,
            replica,
            stage,
            rank_compute_s: Vec::new(),
            rows: Vec::new(),
        })
    }

    /// Whether another stage of the same scenario has the same step times.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.pace.stage().is_like(other.pace.stage())
    }

    /// Its devices in rank order.
    pub(super) fn gpus(&self) -> &[GpuId] {
        self.pace.stage().gpus()
    }

    /// How long a step takes; adds what each rank computes to `busy`.
    pub(super) fn step(
        &mut self,
        shape: &BatchShape,
        busy: &mut [SimDuration],
    ) -> Result<SimDuration, SimError> {
        if shape.decode_sequences > 0 && shape.new_tokens == shape.decode_sequences {
            let run = self.decode_run(shape.decode_sequences, shape.decode_kv_tokens)?;
            self.add_busy(shape.decode_sequences, shape.decode_kv_tokens, 1, busy)?;
            return Ok(SimDuration(run.first));
        }
        match self.source {
            StepTimes::Fixed(fixed) => {
                let span = fixed.of(shape);
                busy.iter_mut().try_for_each(|busy| add(busy, span.0))?;
                Ok(span)
            }
            StepTimes::CostModel => {
                let total_s = self.pace.step(shape, &mut self.rank_compute_s)?;
                for (busy, seconds) in busy.iter_mut().zip(&self.rank_compute_s) {
                    add(busy, self.span(*seconds)?)?;
                }
                Ok(SimDuration(self.span(total_s)?.max(1)))
            }
        }
    }

    /// The progression of steps that begins with `sequences` decoding, `kv_tokens` in the cache.
    pub(super) fn decode_run(&mut self, sequences: u64, kv_tokens: u64) -> Result<DecodeRun, SimError> {
        if let StepTimes::Fixed(fixed) = self.source {
            return Ok(DecodeRun {
                first: fixed.decode.0.max(1),
                increment: 0,
                valid_steps: FOR_EVER,
            });
        }
        let knot = Knot::before(kv_tokens);
        let line = self.line(sequences, knot, 0)?;
        Ok(DecodeRun {
            first: line.at(kv_tokens - knot.tokens),
            increment: line.growth(sequences)?,
            valid_steps: (knot.next_tokens() - kv_tokens).div_ceil(sequences),
        })
    }

    /// Adds what each rank computes in the first `steps` steps of that progression.
    pub(super) fn add_busy(
        &mut self,
        sequences: u64,
        kv_tokens: u64,
        steps: u64,
        busy: &mut [SimDuration],
    ) -> Result<(), SimError> {
        if let StepTimes::Fixed(fixed) = self.source {
            let span = u128::from(fixed.decode.0.max(1)) * u128::from(steps);
            let span = u64::try_from(span).map_err(|_| SimError::ClockEnds)?;
            return busy.iter_mut().try_for_each(|busy| add(busy, span));
        }
        let knot = Knot::before(kv_tokens);
        for (rank, busy) in busy.iter_mut().enumerate() {
            let line = self.line(sequences, knot, 1 + rank)?;
            let first = line.at(kv_tokens - knot.tokens);
            let span = progression_sum(first, line.growth(sequences)?, steps);
            add(busy, span.ok_or(SimError::ClockEnds)?)?;
        }
        Ok(())
    }

    /// Seconds from the end of a step here until the next stage has its input; `None` on the last stage.
    pub(super) fn handover(&self, shape: &BatchShape) -> Result<Option<SimDuration>, SimError> {
        let seconds = self.pace.stage().handover_seconds(shape)?;
        seconds
            .map(|seconds| self.span(seconds).map(SimDuration))
            .transpose()
    }

    /// Seconds of a step of 256 prompt tokens and 32 sequences at 512 tokens: what replicas are compared by.
    pub(super) fn reference_seconds(&self) -> Result<f64, SimError> {
        let mut shape = BatchShape::default();
        shape.add_prefill(256, 0, true);
        for _ in 0..32 {
            shape.add_decode(512);
        }
        match self.source {
            StepTimes::Fixed(fixed) => Ok(fixed.of(&shape).as_seconds()),
            StepTimes::CostModel => Ok(self.pace.stage().step(&shape)?.total_s),
        }
    }

    /// The line between two knots; column 0 is the step, the others are ranks.
    fn line(&mut self, sequences: u64, knot: Knot, column: usize) -> Result<Line, SimError> {
        let columns = 1 + self.gpus().len();
        let from = self.knot_value(sequences, knot.index * columns + column, knot.tokens)?;
        let next = (knot.index + 1) * columns + column;
        let to = self.knot_value(sequences, next, knot.next_tokens())?;
        Ok(Line {
            from,
            slope: (to as i64 - from as i64) >> knot.spacing_log2,
        })
    }

    fn knot_value(&mut self, sequences: u64, cell: usize, tokens: u64) -> Result<u64, SimError> {
        let row = self.rows.get(sequences as usize);
        if let Some(value) = row
            .and_then(|row| row.get(cell))
            .filter(|value| **value != UNKNOWN)
        {
            return Ok(*value);
        }
        self.ask(sequences, cell / (1 + self.gpus().len()), tokens)?;
        Ok(self.rows[sequences as usize][cell])
    }

    /// Asks the cost model at a knot and remembers the answers.
    #[cold]
    fn ask(&mut self, sequences: u64, index: usize, tokens: u64) -> Result<(), SimError> {
        let shape = BatchShape {
            new_tokens: sequences,
            decode_sequences: sequences,
            decode_kv_tokens: tokens,
            logits_rows: sequences,
            ..BatchShape::default()
        };
        let total_s = self.pace.step(&shape, &mut self.rank_compute_s)?;
        let ranks = self.rank_compute_s.iter().map(|seconds| self.span(*seconds));
        let ranks = ranks.collect::<Result<Vec<u64>, _>>()?;
        let total = self.span(total_s)?.max(1);
        let columns = 1 + ranks.len();
        if self.rows.len() <= sequences as usize {
            self.rows.resize(sequences as usize + 1, Row::new());
        }
        let row = &mut self.rows[sequences as usize];
        if row.len() < (index + 1) * columns {
            row.resize((index + 1) * columns, UNKNOWN);
        }
        row[index * columns] = total;
        row[index * columns + 1..(index + 1) * columns].copy_from_slice(&ranks);
        Ok(())
    }

    /// Seconds in whole picoseconds of the clock.
    fn span(&self, seconds: f64) -> Result<u64, SimError> {
        let span = SimDuration::from_seconds(seconds).filter(|span| span.0 <= i64::MAX as u64);
        span.map(|span| span.0).ok_or(SimError::StepTime {
            replica: self.replica,
            stage: self.stage,
            seconds,
        })
    }
}

/// A value at a knot and what each token behind it adds, in picoseconds.
#[derive(Debug, Clone, Copy)]
struct Line {
    from: u64,
    slope: i64,
}

impl Line {
    /// Rounding the slope down keeps the line between the values of its knots, so it is never negative.
    fn at(self, tokens: u64) -> u64 {
        (self.from as i64 + self.slope * tokens as i64) as u64
    }

    /// What a step adds to the next one, a token a sequence later.
    fn growth(self, sequences: u64) -> Result<i64, SimError> {
        let sequences = i64::try_from(sequences).ok();
        let growth = sequences.and_then(|sequences| self.slope.checked_mul(sequences));
        growth.ok_or(SimError::ClockEnds)
    }
}

/// `count` terms of an arithmetic progression; `None` past 64 bits.
pub(super) fn progression_sum(first: u64, increment: i64, count: u64) -> Option<u64> {
    let pairs = i128::from(count) * (i128::from(count) - 1) / 2;
    let sum = i128::from(first) * i128::from(count) + i128::from(increment) * pairs;
    u64::try_from(sum).ok()
}

fn add(busy: &mut SimDuration, span: u64) -> Result<(), SimError> {
    *busy = busy.checked_add(SimDuration(span)).ok_or(SimError::ClockEnds)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knots_stand_eight_to_an_octave() {
        let mut expected = Knot::before(0);
        assert_eq!((expected.index, expected.tokens), (0, 0));
        for tokens in 1..5000 {
            let knot = Knot::before(tokens);
            if tokens == expected.next_tokens() {
                assert_eq!((knot.index, knot.tokens), (expected.index + 1, tokens));
                expected = knot;
            }
            assert_eq!(knot, expected, "{tokens} tokens");
        }
        // 16 to 32 in steps of two: 8 knots.
        assert_eq!(Knot::before(31), Knot::before(30));
        assert_eq!(Knot::before(32).index - Knot::before(16).index, 8);
    }

    #[test]
    fn progressions_sum_in_closed_form() {
        assert_eq!(progression_sum(10, 3, 4), Some(10 + 13 + 16 + 19));
        assert_eq!(progression_sum(10, -3, 4), Some(10 + 7 + 4 + 1));
        assert_eq!(progression_sum(10, 3, 0), Some(0));
        assert_eq!(progression_sum(u64::MAX, 1, 2), None);
    }
}
