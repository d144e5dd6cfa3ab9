//! Writing a trace in the formats of others and in the product's own, which loses nothing.

use std::fmt::Write as _;
use std::io::Write;

use infercluster_spec::{Request, Trace};
use serde_json::{Value, json};

use crate::error::TraceError;
use crate::format::{LINES_SCHEMA, TraceFormat};
use crate::read::require_arrivals;

/// What writing did, and what the format could not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Requests written.
    pub rows: u64,
    /// Arrivals rounded to the resolution of the format.
    pub rounded: u64,
    /// Requests that lost their block hashes.
    pub hashes_dropped: u64,
}

/// Writes `trace` as `format`; `file` is only the name that errors carry.
///
/// Azure files hold datetimes, so the first one stands for the instant 0 when read back.
pub fn write(
    trace: &Trace,
    format: TraceFormat,
    file: &str,
    target: impl Write,
) -> Result<Written, TraceError> {
    let mut target = std::io::BufWriter::new(target);
    let mut written = Written::default();
    let io = |source| TraceError::Io {
        file: file.to_owned(),
        source,
    };
    let row: fn(&Request, &mut Written) -> String = match format {
        TraceFormat::Azure | TraceFormat::Vidur | TraceFormat::Mooncake => {
            require_arrivals(trace)?;
            match format {
                TraceFormat::Azure => azure_row,
                TraceFormat::Vidur => vidur_row,
                _ => mooncake_row,
            }
        }
        TraceFormat::VidurLengths => lengths_row,
        TraceFormat::Lines => lines_row,
        _ => {
            return Err(unwritable(
                trace,
                format,
                "only azure, vidur, vidur-lengths, mooncake and lines are written",
            ));
        }
    };
    if format == TraceFormat::Mooncake && trace.hash_block.is_some_and(|block| block != MOONCAKE_BLOCK) {
        return Err(unwritable(
            trace,
            format,
            "its block hashes are not of 512 tokens",
        ));
    }
    let keeps_hashes = matches!(format, TraceFormat::Mooncake | TraceFormat::Lines);
    target.write_all(header(trace, format).as_bytes()).map_err(io)?;
    for request in &trace.requests {
        written.rows += 1;
        written.hashes_dropped += u64::from(!keeps_hashes && !request.block_hashes.is_empty());
        let mut text = row(request, &mut written);
        text.push('\n');
        target.write_all(text.as_bytes()).map_err(io)?;
    }
    target.flush().map_err(io)?;
    Ok(written)
}

const MOONCAKE_BLOCK: u32 = 512;
const PICOSECONDS_PER_SECOND: u64 = 1_000_000_000_000;

fn unwritable(trace: &Trace, format: TraceFormat, reason: &'static str) -> TraceError {
    TraceError::Unwritable {
        trace: trace.name.clone(),
        format,
        reason,
    }
}

fn header(trace: &Trace, format: TraceFormat) -> String {
    match format {
        TraceFormat::Azure => "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned(),
        TraceFormat::Vidur => "arrived_at,num_prefill_tokens,num_decode_tokens\n".to_owned(),
        TraceFormat::VidurLengths => "num_prefill_tokens,num_decode_tokens\n".to_owned(),
        TraceFormat::Lines => {
            let mut header = json!({ "schema": LINES_SCHEMA, "name": trace.name });
            if let Some(block) = trace.hash_block {
                header["hash_block"] = Value::from(block);
            }
            format!("{header}\n")
        }
        _ => String::new(),
    }
}

/// Picoseconds of an arrival in units of `unit`, rounded half up; counts what was rounded.
fn in_units(request: &Request, unit: u64, written: &mut Written) -> u64 {
    let picoseconds = request.arrival.expect("arrivals were checked").0;
    written.rounded += u64::from(!picoseconds.is_multiple_of(unit));
    picoseconds / unit + u64::from(picoseconds % unit >= unit.div_ceil(2))
}

fn azure_row(request: &Request, written: &mut Written) -> String {
    const TICK: u64 = 100_000;
    const TICKS_PER_SECOND: u64 = PICOSECONDS_PER_SECOND / TICK;
    let ticks = in_units(request, TICK, written);
    let (seconds, fraction) = (ticks / TICKS_PER_SECOND, ticks % TICKS_PER_SECOND);
    let day = jiff::civil::date(2000, 1, 1)
        .checked_add(jiff::Span::new().days((seconds / 86_400) as i64))
        .expect("213 days after the first of January 2000 is a day");
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!(
        "{day} {hour:02}:{minute:02}:{second:02}.{fraction:07},{},{}",
        request.input, request.output
    )
}

fn vidur_row(request: &Request, written: &mut Written) -> String {
    let picoseconds = in_units(request, 1, written);
    let (seconds, fraction) = (
        picoseconds / PICOSECONDS_PER_SECOND,
        picoseconds % PICOSECONDS_PER_SECOND,
    );
    let digits = format!("{fraction:012}");
    let digits = digits.trim_end_matches('0');
    let digits = if digits.is_empty() { "0" } else { digits };
    format!("{seconds}.{digits},{},{}", request.input, request.output)
}

fn lengths_row(request: &Request, _: &mut Written) -> String {
    format!("{},{}", request.input, request.output)
}

fn mooncake_row(request: &Request, written: &mut Written) -> String {
    let milliseconds = in_units(request, 1_000_000_000, written);
    format!(
        r#"{{"timestamp": {milliseconds}, "input_length": {}, "output_length": {}, "hash_ids": [{}]}}"#,
        request.input,
        request.output,
        list(&request.block_hashes)
    )
}

fn lines_row(request: &Request, _: &mut Written) -> String {
    let mut text = String::from("{");
    if let Some(arrival) = request.arrival {
        let _ = write!(text, r#""arrival_ps": {}, "#, arrival.0);
    }
    let _ = write!(
        text,
        r#""input": {}, "output": {}"#,
        request.input, request.output
    );
    if !request.block_hashes.is_empty() {
        let _ = write!(text, r#", "block_hashes": [{}]"#, list(&request.block_hashes));
    }
    text.push('}');
    text
}

fn list(hashes: &[u64]) -> String {
    let texts: Vec<String> = hashes.iter().map(u64::to_string).collect();
    texts.join(", ")
}
