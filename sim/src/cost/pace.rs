//! Seconds of millions of steps of one stage: the same as [`StageCost::step`] gives, bit by bit, with
//! everything remembered that depends on the number of tokens or of sampled rows alone. What is left of a
//! step is its attention kernels.

use infercluster_spec::{BatchShape, SegmentKind};

use super::segments::kinds;
use super::share::AttentionProjections;
use super::{CostError, StageCost};

/// Tokens and rows up to which answers are remembered; larger steps are rare, and asked for each time.
const REMEMBERED: u64 = 1 << 14;

/// A stage that remembers.
pub(crate) struct StagePace<'a> {
    stage: StageCost<'a>,
    by_tokens: Vec<Option<Box<[Segment]>>>,
    by_rows: Vec<Option<Box<[Segment]>>>,
    by_host_rows: Vec<Option<f64>>,
}

/// What a segment takes that does not depend on the cache, once.
#[derive(Debug, Clone)]
struct Segment {
    collective_s: f64,
    ranks: Box<[RankWork]>,
}

/// Work of one rank in a segment.
#[derive(Debug, Clone, Copy)]
enum RankWork {
    /// Attention, without its kernels.
    Attention(AttentionProjections),
    /// Seconds of any other segment, corrections applied.
    Seconds(f64),
}

impl<'a> StagePace<'a> {
    pub(crate) fn new(stage: StageCost<'a>) -> Self {
        Self {
            stage,
            by_tokens: Vec::new(),
            by_rows: Vec::new(),
            by_host_rows: Vec::new(),
        }
    }

    /// The stage.
    pub(crate) fn stage(&self) -> &StageCost<'a> {
        &self.stage
    }

    /// Seconds of one step, and into `rank_compute_s` those that each rank computes.
    pub(crate) fn step(
        &mut self,
        shape: &BatchShape,
        rank_compute_s: &mut Vec<f64>,
    ) -> Result<f64, CostError> {
        let Self {
            stage,
            by_tokens,
            by_rows,
            by_host_rows,
        } = self;
        rank_compute_s.clear();
        rank_compute_s.resize(stage.gpus().len(), 0.0);
        let mut total_s = *remembered(by_host_rows, stage.sampled_rows(shape), || {
            stage.host_seconds(shape)
        })?;
        if shape.new_tokens == 0 {
            return Ok(total_s);
        }
        let layer_segments = remembered(by_tokens, shape.new_tokens, || layer_segments(stage, shape))?;
        let head_segments: &[Segment] = match shape.logits_rows {
            0 => &[],
            rows => remembered(by_rows, rows, || head_segments(stage, shape))?,
        };
        let (mut layers, mut heads) = (layer_segments.iter(), head_segments.iter());
        for run in &stage.runs {
            let mut add = |kind: SegmentKind, segment: Option<&Segment>| {
                let segment = segment.expect("every run has its segments");
                let repeats = f64::from(run.repeats(kind));
                let mut slowest_s = 0.0_f64;
                for (rank, work) in segment.ranks.iter().enumerate() {
                    let seconds = match *work {
                        RankWork::Seconds(seconds) => seconds,
                        RankWork::Attention(projections) => {
                            let (gpu, share) = (stage.gpus()[rank], run.ranks[rank]);
                            let operators_s = stage.share.with_kernels_s(
                                projections,
                                gpu,
                                shape,
                                share.query_heads,
                                share.kv_heads,
                            )?;
                            stage.corrected(rank, kind, operators_s)
                        }
                    };
                    rank_compute_s[rank] += repeats * seconds;
                    slowest_s = slowest_s.max(seconds);
                }
                total_s += repeats * (slowest_s + segment.collective_s);
                Ok::<(), CostError>(())
            };
            for kind in kinds(stage.share.reduction()) {
                add(*kind, layers.next())?;
            }
            if run.has_head && shape.logits_rows > 0 {
                add(SegmentKind::Head, heads.next())?;
            }
        }
        Ok(total_s)
    }
}

/// The answer for `key`, asked for where it is not known yet; past the limit it takes the last place.
fn remembered<T>(
    answers: &mut Vec<Option<T>>,
    key: u64,
    ask: impl FnOnce() -> Result<T, CostError>,
) -> Result<&T, CostError> {
    let place = key.min(REMEMBERED) as usize;
    if answers.len() <= place {
        answers.resize_with(place + 1, || None);
    }
    let answer = &mut answers[place];
    if key >= REMEMBERED {
        *answer = None;
    }
    match answer {
        Some(answer) => Ok(answer),
        answer => Ok(answer.insert(ask()?)),
    }
}

/// Every segment of every run but the heads, in order.
fn layer_segments(stage: &StageCost, shape: &BatchShape) -> Result<Box<[Segment]>, CostError> {
    let mut segments = Vec::new();
    for run in &stage.runs {
        for kind in kinds(stage.share.reduction()) {
            let ranks = stage.gpus().iter().zip(&run.ranks).enumerate();
            let work = ranks.map(|(rank, (gpu, share))| {
                Ok(if *kind == SegmentKind::Attention {
                    RankWork::Attention(stage.share.attention_projections(
                        *gpu,
                        shape.new_tokens,
                        share.query_heads,
                        share.kv_heads,
                    )?)
                } else {
                    let operators_s = stage.operators_s(*gpu, share, *kind, shape)?;
                    RankWork::Seconds(stage.corrected(rank, *kind, operators_s))
                })
            });
            let ranks = work.collect::<Result<_, CostError>>()?;
            let collective_s = stage.collective(&stage.collective_after(run, *kind, shape))?;
            segments.push(Segment { collective_s, ranks });
        }
    }
    Ok(segments.into_boxed_slice())
}

/// The head of every run that has one.
fn head_segments(stage: &StageCost, shape: &BatchShape) -> Result<Box<[Segment]>, CostError> {
    let kind = SegmentKind::Head;
    let heads = stage.runs.iter().filter(|run| run.has_head).map(|run| {
        let ranks = stage.gpus().iter().zip(&run.ranks).enumerate();
        let work = ranks.map(|(rank, (gpu, share))| {
            let operators_s = stage.operators_s(*gpu, share, kind, shape)?;
            Ok(RankWork::Seconds(stage.corrected(rank, kind, operators_s)))
        });
        let ranks = work.collect::<Result<_, CostError>>()?;
        let collective_s = stage.collective(&stage.collective_after(run, kind, shape))?;
        Ok(Segment { collective_s, ranks })
    });
    heads.collect()
}

#[cfg(test)]
mod tests {
    use infercluster_spec::layout::Reduction;
    use infercluster_spec::{ReplicaId, StageId};

    use super::*;
    use crate::cost::AnalyticCost;
    use crate::cost::fixtures::{cluster, model};
    use crate::cost::tests::{calibration, uneven};

    #[test]
    fn what_is_remembered_changes_no_bit() {
        let (cluster, model) = (cluster(&[1.0, 0.4]), model());
        let mut calibration = calibration();
        let device = calibration.devices.get_mut("worker").unwrap();
        for fit in device
            .attention_prefill
            .values_mut()
            .chain(device.gemm.values_mut())
        {
            (fit.floor_s, fit.flops_per_s, fit.bytes_per_s, fit.sharpness) = (0.3, 7e3, 3e2, 3.0);
        }
        for fit in device.attention_decode.values_mut() {
            (fit.bytes_per_s, fit.per_pair_s, fit.flops_per_s) = (1e3, 0.1, 7e3);
        }
        let cost = AnalyticCost::new(&cluster, &calibration).unwrap();
        let mut state = 3_u64;
        let mut draw = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % limit
        };
        for reduction in [Reduction::Fast, Reduction::Invariant] {
            let layout = uneven(reduction);
            let stage = StageCost::new(&cost, &layout, &model, ReplicaId(0), StageId(0)).unwrap();
            let mut pace = StagePace::new(stage.clone());
            for round in 0..500 {
                let mut shape = BatchShape::default();
                for _ in 0..draw(4) {
                    // Every tenth step is larger than what is remembered.
                    shape.add_prefill(
                        1 + draw(40) + 10_000 * u64::from(round % 10 == 0),
                        draw(90),
                        draw(2) == 0,
                    );
                }
                for _ in 0..draw(5) {
                    shape.add_decode(1 + draw(300));
                }
                let expected = stage.step(&shape).unwrap();
                let mut ranks = vec![7.0];
                let total = pace.step(&shape, &mut ranks).unwrap();
                let bits = |seconds: &[f64]| seconds.iter().map(|one| one.to_bits()).collect::<Vec<_>>();
                assert_eq!(total.to_bits(), expected.total_s.to_bits(), "{shape:?}");
                assert_eq!(bits(&ranks), bits(&expected.rank_compute_s), "{shape:?}");
            }
        }
    }
}
