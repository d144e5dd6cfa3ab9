//! Changes to a trace: time scaled, a window cut out, lengths clipped.

use infercluster_spec::{RequestId, SimDuration, SimTime, Tokens, Trace};

use crate::error::{TraceError, clock_limit};
use crate::read::require_arrivals;

/// Multiplies every arrival by `factor`: 0.5 doubles the rate.
pub fn scale_time(trace: &mut Trace, factor: f64) -> Result<(), TraceError> {
    require_arrivals(trace)?;
    if !(factor.is_finite() && factor > 0.0) {
        return Err(TraceError::Parameter {
            parameter: "factor",
            found: factor.to_string(),
            expected: "a finite number above zero",
        });
    }
    let scaled = |arrival: SimTime| {
        let picoseconds = (arrival.0 as f64 * factor).round();
        // Below 2^64 exactly where the cast does not saturate.
        (picoseconds < u64::MAX as f64).then_some(SimTime(picoseconds as u64))
    };
    if let Some(late) = trace
        .requests
        .iter()
        .find(|request| request.arrival.is_some_and(|arrival| scaled(arrival).is_none()))
    {
        return Err(TraceError::ClockRange {
            index: late.id.0,
            limit: clock_limit(),
        });
    }
    for request in &mut trace.requests {
        request.arrival = request.arrival.and_then(scaled);
    }
    Ok(())
}

/// Keeps the requests that arrive in `from..to` and counts time from `from`.
pub fn cut_window(trace: &mut Trace, from: SimTime, to: SimTime) -> Result<(), TraceError> {
    require_arrivals(trace)?;
    if from >= to {
        return Err(TraceError::Parameter {
            parameter: "from",
            found: format!("{} s", from.as_seconds()),
            expected: "before the end of the window",
        });
    }
    trace.requests.retain(|request| {
        request
            .arrival
            .is_some_and(|arrival| from <= arrival && arrival < to)
    });
    for (index, request) in trace.requests.iter_mut().enumerate() {
        request.id = RequestId(index as u64);
        request.arrival = request.arrival.map(|arrival| SimTime::ZERO + arrival.since(from));
    }
    Ok(())
}

/// The span from the first to the last arrival; `None` without arrivals.
pub fn span(trace: &Trace) -> Option<SimDuration> {
    let first = trace.requests.first()?.arrival?;
    let last = trace.requests.last()?.arrival?;
    Some(last.since(first))
}

/// Limits of the two lengths; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LengthLimits {
    /// Most prompt tokens.
    pub input: Option<Tokens>,
    /// Most tokens to generate.
    pub output: Option<Tokens>,
}

/// Shortens what is longer, with the block hashes of the prompt; returns how many requests changed.
pub fn clip_lengths(trace: &mut Trace, limits: LengthLimits) -> Result<u64, TraceError> {
    for (parameter, limit) in [("input", limits.input), ("output", limits.output)] {
        if limit == Some(Tokens::ZERO) {
            return Err(TraceError::Parameter {
                parameter,
                found: "0".to_owned(),
                expected: "at least 1 token",
            });
        }
    }
    let mut changed = 0;
    for request in &mut trace.requests {
        let input = limits
            .input
            .map_or(request.input, |limit| limit.min(request.input));
        let output = limits
            .output
            .map_or(request.output, |limit| limit.min(request.output));
        changed += u64::from((input, output) != (request.input, request.output));
        // The last block may be cut; only whole blocks are ever shared, so its hash claims nothing.
        if let Some(block) = trace
            .hash_block
            .filter(|block| *block > 0 && input < request.input)
        {
            let whole = input.0.div_ceil(u64::from(block)) as usize;
            request.block_hashes.truncate(whole);
        }
        (request.input, request.output) = (input, output);
    }
    Ok(changed)
}
