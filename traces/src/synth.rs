//! Seeded generators. Every use of randomness draws from a ChaCha12 stream of its own, keyed by the seed
//! and the name of the use, so that another length distribution leaves the arrivals as they were.

use infercluster_spec::{Request, RequestId, SimDuration, SimTime, Tokens, Trace};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution, Exp1, Gamma, LogNormal};

use crate::TOKENS_LIMIT;
use crate::error::{TraceError, clock_limit};

/// The seed where none is given.
pub const DEFAULT_SEED: u64 = 20_240_229;
/// Most requests that a generator makes.
pub const REQUESTS_LIMIT: u64 = 50_000_000;

/// When requests arrive. Rates are requests a second.
///
/// Random processes start with a gap, so that a window holds `rate x window` requests on average; the
/// constant one starts with a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ArrivalProcess {
    /// Exponential gaps.
    Poisson {
        /// Requests a second.
        rate: f64,
    },
    /// Gaps of a gamma distribution: burstier than Poisson where `cv` is above 1.
    Gamma {
        /// Requests a second.
        rate: f64,
        /// Standard deviation over mean of the gaps.
        cv: f64,
    },
    /// Equal gaps.
    Constant {
        /// Requests a second.
        rate: f64,
    },
    /// No arrival times: whoever drives the trace keeps a number of requests open.
    Closed,
}

/// How one of the two lengths is drawn. A result below 1 becomes 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LengthDistribution {
    /// Always the same.
    Fixed {
        /// Tokens.
        tokens: u64,
    },
    /// Every whole number of an interval alike.
    Uniform {
        /// Fewest tokens.
        min: u64,
        /// Most tokens.
        max: u64,
    },
    /// The logarithm is normal; what lies above `max` becomes `max`.
    LogNormal {
        /// Median in tokens.
        median: f64,
        /// Standard deviation of the natural logarithm.
        sigma: f64,
        /// Most tokens.
        max: u64,
    },
}

/// Where both lengths of a request come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lengths<'a> {
    /// Two distributions, drawn apart.
    Independent {
        /// Prompt tokens.
        input: LengthDistribution,
        /// Tokens to generate.
        output: LengthDistribution,
    },
    /// Rows of a trace, drawn with replacement: prompt and answer of one row stay together. Block hashes
    /// do not come along, since a row drawn twice would share a prefix with itself.
    Resampled {
        /// The trace.
        from: &'a Trace,
    },
}

/// When to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// After so many requests.
    Count(u64),
    /// Before this instant; needs an arrival process.
    Until(SimDuration),
}

/// What to make.
#[derive(Debug, Clone, PartialEq)]
pub struct SynthSpec<'a> {
    /// Name of the new trace.
    pub name: &'a str,
    /// When requests arrive.
    pub arrivals: ArrivalProcess,
    /// How long they are.
    pub lengths: Lengths<'a>,
    /// When to stop.
    pub amount: Amount,
    /// Seed of every stream.
    pub seed: u64,
}

/// Makes a trace.
///
/// ```
/// use infercluster_traces::synth::*;
/// let spec = SynthSpec {
///     name: "steady",
///     arrivals: ArrivalProcess::Constant { rate: 4.0 },
///     lengths: Lengths::Independent {
///         input: LengthDistribution::Fixed { tokens: 100 },
///         output: LengthDistribution::Uniform { min: 1, max: 20 },
///     },
///     amount: Amount::Count(3),
///     seed: DEFAULT_SEED,
/// };
/// let trace = synthesise(&spec)?;
/// assert_eq!(trace.requests[2].arrival.map(|at| at.as_seconds()), Some(0.5));
/// assert_eq!(trace, synthesise(&spec)?);
/// # Ok::<(), infercluster_traces::TraceError>(())
/// ```
pub fn synthesise(spec: &SynthSpec) -> Result<Trace, TraceError> {
    let mut arrivals = Arrivals::new(spec.arrivals, spec.seed)?;
    let mut lengths = Sampler::new(spec.lengths, spec.seed)?;
    let (count, until) = match spec.amount {
        Amount::Count(count) if count > REQUESTS_LIMIT => {
            let expected = "at most 50000000 requests";
            return Err(parameter("count", count, expected));
        }
        Amount::Count(count) => (count, None),
        Amount::Until(_) if spec.arrivals == ArrivalProcess::Closed => {
            let expected = "a number of requests, since a closed loop has no arrival times";
            return Err(parameter("amount", "a duration", expected));
        }
        Amount::Until(end) => (REQUESTS_LIMIT + 1, Some(SimTime::ZERO + end)),
    };
    let mut requests = Vec::new();
    for id in 0..count {
        let arrival = arrivals.next()?;
        if until
            .zip(arrival)
            .is_some_and(|(until, arrival)| arrival >= until)
        {
            break;
        }
        if id == REQUESTS_LIMIT {
            let expected = "a duration with at most 50000000 requests";
            return Err(parameter("amount", "a duration", expected));
        }
        let (input, output) = lengths.next();
        requests.push(Request {
            id: RequestId(id),
            arrival,
            input: Tokens(input),
            output: Tokens(output),
            block_hashes: Vec::new(),
        });
    }
    Ok(Trace {
        name: spec.name.to_owned(),
        requests,
        hash_block: None,
    })
}

/// Gives every request of a trace a new arrival time, lengths and order kept.
pub fn attach_arrivals(trace: &mut Trace, process: ArrivalProcess, seed: u64) -> Result<(), TraceError> {
    let mut arrivals = Arrivals::new(process, seed)?;
    let instants = trace.requests.iter().map(|_| arrivals.next());
    let instants: Vec<Option<SimTime>> = instants.collect::<Result<_, _>>()?;
    for (request, arrival) in trace.requests.iter_mut().zip(instants) {
        request.arrival = arrival;
    }
    Ok(())
}

/// The ChaCha12 stream of one named use.
pub(crate) fn stream(seed: u64, name: &str) -> ChaCha12Rng {
    let mut key = [0_u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (byte, letter) in key[8..].iter_mut().zip(name.bytes()) {
        *byte = letter;
    }
    ChaCha12Rng::from_seed(key)
}

fn parameter(parameter: &'static str, found: impl ToString, expected: &'static str) -> TraceError {
    TraceError::Parameter {
        parameter,
        found: found.to_string(),
        expected,
    }
}

/// The gaps of a process and where it stands.
struct Arrivals {
    gaps: Gaps,
    index: u64,
    now: SimTime,
    random: ChaCha12Rng,
}

enum Gaps {
    Exponential { mean_s: f64 },
    Gamma(Gamma<f64>),
    Constant { mean_s: f64 },
    None,
}

impl Arrivals {
    fn new(process: ArrivalProcess, seed: u64) -> Result<Self, TraceError> {
        let mean = |rate: f64| {
            let mean_s = 1.0 / rate;
            if rate > 0.0 && rate.is_finite() && mean_s.is_finite() {
                Ok(mean_s)
            } else {
                Err(parameter(
                    "rate",
                    rate,
                    "a finite number of requests a second above zero",
                ))
            }
        };
        let gaps = match process {
            ArrivalProcess::Poisson { rate } => Gaps::Exponential { mean_s: mean(rate)? },
            ArrivalProcess::Constant { rate } => Gaps::Constant { mean_s: mean(rate)? },
            ArrivalProcess::Closed => Gaps::None,
            ArrivalProcess::Gamma { rate, cv } => {
                // Mean `shape x scale`, standard deviation `sqrt(shape) x scale`.
                let refuse = || parameter("cv", cv, "between 0.01 and 100");
                if !(0.01..=100.0).contains(&cv) {
                    return Err(refuse());
                }
                let shape = 1.0 / (cv * cv);
                Gaps::Gamma(Gamma::new(shape, mean(rate)? / shape).map_err(|_| refuse())?)
            }
        };
        Ok(Self {
            gaps,
            index: 0,
            now: SimTime::ZERO,
            random: stream(seed, "arrivals"),
        })
    }

    fn next(&mut self) -> Result<Option<SimTime>, TraceError> {
        let index = self.index;
        self.index += 1;
        let past_the_end = || TraceError::ClockRange {
            index,
            limit: clock_limit(),
        };
        let gap_s = match &self.gaps {
            Gaps::None => return Ok(None),
            // From the number of the request, so that rounding does not add up.
            Gaps::Constant { mean_s } => {
                let since = SimDuration::from_seconds(index as f64 * mean_s).ok_or_else(past_the_end)?;
                return Ok(Some(SimTime(since.0)));
            }
            Gaps::Exponential { mean_s } => {
                let unit: f64 = Exp1.sample(&mut self.random);
                unit * mean_s
            }
            Gaps::Gamma(gamma) => gamma.sample(&mut self.random),
        };
        let gap = SimDuration::from_seconds(gap_s).ok_or_else(past_the_end)?;
        let now = self.now.0.checked_add(gap.0).ok_or_else(past_the_end)?;
        self.now = SimTime(now);
        Ok(Some(self.now))
    }
}

/// Draws pairs of lengths; each use has its own stream.
struct Sampler<'a> {
    lengths: Lengths<'a>,
    input_random: ChaCha12Rng,
    output_random: ChaCha12Rng,
    row_random: ChaCha12Rng,
}

impl<'a> Sampler<'a> {
    fn new(lengths: Lengths<'a>, seed: u64) -> Result<Self, TraceError> {
        match lengths {
            Lengths::Independent { input, output } => {
                check(input)?;
                check(output)?;
            }
            Lengths::Resampled { from } if from.requests.is_empty() => {
                return Err(parameter("lengths", "an empty trace", "a trace with requests"));
            }
            Lengths::Resampled { .. } => {}
        }
        Ok(Self {
            lengths,
            input_random: stream(seed, "input lengths"),
            output_random: stream(seed, "output lengths"),
            row_random: stream(seed, "resampled lengths"),
        })
    }

    fn next(&mut self) -> (u64, u64) {
        match self.lengths {
            Lengths::Independent { input, output } => (
                draw(input, &mut self.input_random),
                draw(output, &mut self.output_random),
            ),
            Lengths::Resampled { from } => {
                let row = &from.requests[self.row_random.random_range(0..from.requests.len())];
                (row.input.0, row.output.0)
            }
        }
    }
}

fn check(distribution: LengthDistribution) -> Result<(), TraceError> {
    let tokens = |name: &'static str, tokens: u64| {
        if (1..=TOKENS_LIMIT).contains(&tokens) {
            Ok(())
        } else {
            Err(parameter(name, tokens, "from 1 to 1073741824 tokens"))
        }
    };
    match distribution {
        LengthDistribution::Fixed { tokens: count } => tokens("tokens", count),
        LengthDistribution::Uniform { min, max } => {
            tokens("min", min)?;
            tokens("max", max)?;
            if min > max {
                return Err(parameter("min", min, "at most max"));
            }
            Ok(())
        }
        LengthDistribution::LogNormal { median, sigma, max } => {
            tokens("max", max)?;
            if !(median.is_finite() && median >= 1.0) {
                return Err(parameter(
                    "median",
                    median,
                    "a finite number of tokens of at least 1",
                ));
            }
            if !(0.0..=10.0).contains(&sigma) {
                return Err(parameter("sigma", sigma, "between 0 and 10"));
            }
            Ok(())
        }
    }
}

fn draw(distribution: LengthDistribution, random: &mut ChaCha12Rng) -> u64 {
    match distribution {
        LengthDistribution::Fixed { tokens } => tokens,
        LengthDistribution::Uniform { min, max } => random.random_range(min..=max),
        LengthDistribution::LogNormal { median, sigma, max } => log_normal(random, median, sigma, max),
    }
}

fn log_normal(random: &mut impl Rng, median: f64, sigma: f64, max: u64) -> u64 {
    let distribution = LogNormal::new(median.ln(), sigma).expect("median and sigma were checked");
    let drawn: f64 = distribution.sample(random);
    // A float above the range converts to the largest integer, so the clip holds for infinities too.
    (drawn.round() as u64).clamp(1, max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_streams_differ_and_repeat() {
        let first = |seed, name| stream(seed, name).random::<u64>();
        assert_eq!(first(1, "arrivals"), first(1, "arrivals"));
        assert_ne!(first(1, "arrivals"), first(1, "input lengths"));
        assert_ne!(first(1, "arrivals"), first(2, "arrivals"));
        assert_ne!(first(1, "input lengths"), first(1, "output lengths"));
    }
}
