//! Reading: the format is found from the first line, then rows stream through one at a time. Memory grows
//! with the rows that are really there, never by a number that the file states.
//!
//! Instants count from the zero of the file, datetimes from the first request. Rows with an empty prompt
//! or an empty answer (failed requests in some published traces) are left out and counted.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use infercluster_spec::{Request, RequestId, SimTime, Tokens, Trace};

use crate::decimal::{DecimalError, scaled};
use crate::error::TraceError;
use crate::format::{Clock, TraceFormat};
use crate::packed::{self, Unpacked};
use crate::{TOKENS_LIMIT, csv_rows, json_rows};

/// A trace with what is known about its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The requests.
    pub trace: Trace,
    /// The format that the file turned out to have.
    pub format: TraceFormat,
    /// Rows left out because their prompt or their answer is empty.
    pub dropped_rows: u64,
    /// Those rows, for statistics of the file as it is.
    pub dropped: Vec<DroppedRow>,
}

/// A row that no request can be made of: its prompt or its answer is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DroppedRow {
    /// When it arrived.
    pub arrival: Option<SimTime>,
    /// Prompt tokens.
    pub input: u64,
    /// Generated tokens.
    pub output: u64,
}

/// Longest line that is read: 200,000 block hashes of 20 digits.
pub(crate) const LINE_LIMIT: u64 = 4 << 20;
/// Bytes that are looked at to tell text from what is no trace.
const HEAD_BYTES: u64 = 512;

/// Reads the trace at `path`, compressed with gzip or not.
pub fn load(path: &Path) -> Result<Loaded, TraceError> {
    let file = path.display().to_string();
    match std::fs::File::open(path) {
        Ok(handle) => read(&file, handle),
        Err(source) => Err(TraceError::Io { file, source }),
    }
}

/// Reads a trace from anywhere; `file` names it in errors, and without folder and ending in reports.
pub fn read(file: &str, source: impl Read) -> Result<Loaded, TraceError> {
    let io = |source| TraceError::Io {
        file: file.to_owned(),
        source,
    };
    let mut source = BufReader::new(source);
    if source.fill_buf().map_err(io)?.starts_with(packed::MAGIC) {
        return read_text(file, Unpacked::new(source));
    }
    read_text(file, source)
}

fn read_text(file: &str, mut source: impl Read) -> Result<Loaded, TraceError> {
    let io = |source| TraceError::Io {
        file: file.to_owned(),
        source,
    };
    let mut head = Vec::new();
    source
        .by_ref()
        .take(HEAD_BYTES)
        .read_to_end(&mut head)
        .map_err(io)?;
    let without_mark = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head);
    let start = without_mark.trim_ascii_start();
    let file_name = || file.to_owned();
    if start.is_empty() && (head.len() as u64) < HEAD_BYTES {
        return Err(TraceError::Empty { file: file_name() });
    }
    if start.starts_with(b"version https://git-lfs") {
        return Err(TraceError::LfsPointer { file: file_name() });
    }
    if head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff") {
        return Err(TraceError::Utf16 { file: file_name() });
    }
    if start.starts_with(b"<") {
        return Err(TraceError::Html { file: file_name() });
    }
    let is_json = start.starts_with(b"{");
    let rest = without_mark.to_owned();
    let all = BufReader::new(std::io::Cursor::new(rest).chain(source));
    let builder = Builder::new(file);
    if is_json {
        json_rows::read(builder, all)
    } else {
        csv_rows::read(builder, all)
    }
}

/// Refuses a trace of lengths only, where arrival times are needed.
pub fn require_arrivals(trace: &Trace) -> Result<(), TraceError> {
    if trace.requests.iter().all(|request| request.arrival.is_some()) {
        return Ok(());
    }
    Err(TraceError::NoArrivals {
        trace: trace.name.clone(),
    })
}

/// One row as both readers hand it on.
pub(crate) struct Row {
    pub(crate) line: u64,
    pub(crate) arrival: Option<SimTime>,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) block_hashes: Vec<u64>,
}

/// Checks rows and collects them.
pub(crate) struct Builder {
    file: String,
    trace: Trace,
    dropped: Vec<DroppedRow>,
    previous: SimTime,
}

impl Builder {
    fn new(file: &str) -> Self {
        let stem = Path::new(file).file_stem().filter(|_| file != "-");
        let name = stem.map_or_else(|| "trace".to_owned(), |stem| stem.to_string_lossy().into_owned());
        Self {
            file: file.to_owned(),
            trace: Trace {
                name,
                ..Trace::default()
            },
            dropped: Vec::new(),
            previous: SimTime::ZERO,
        }
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn rename(&mut self, name: &str) {
        self.trace.name = name.to_owned();
    }

    pub(crate) fn push(&mut self, row: Row, hash_block: Option<u32>) -> Result<(), TraceError> {
        if let Some(arrival) = row.arrival {
            if arrival < self.previous {
                return Err(TraceError::OutOfOrder {
                    file: self.file.clone(),
                    line: row.line,
                    found: arrival.as_seconds(),
                    previous: self.previous.as_seconds(),
                });
            }
            self.previous = arrival;
        }
        if row.input == 0 || row.output == 0 {
            self.dropped.push(DroppedRow {
                arrival: row.arrival,
                input: row.input,
                output: row.output,
            });
            return Ok(());
        }
        self.check_hashes(&row, hash_block)?;
        if !row.block_hashes.is_empty() {
            self.trace.hash_block = hash_block;
        }
        self.trace.requests.push(Request {
            id: RequestId(self.trace.requests.len() as u64),
            arrival: row.arrival,
            input: Tokens(row.input),
            output: Tokens(row.output),
            block_hashes: row.block_hashes,
        });
        Ok(())
    }

    fn check_hashes(&self, row: &Row, hash_block: Option<u32>) -> Result<(), TraceError> {
        let Some(block) = hash_block.filter(|block| *block > 0 && !row.block_hashes.is_empty()) else {
            return Ok(());
        };
        let (found, expected) = (
            row.block_hashes.len() as u64,
            row.input.div_ceil(u64::from(block)),
        );
        if found == expected {
            return Ok(());
        }
        Err(TraceError::HashCount {
            file: self.file.clone(),
            line: row.line,
            found,
            input: row.input,
            block,
            expected,
        })
    }

    pub(crate) fn finish(self, format: TraceFormat) -> Result<Loaded, TraceError> {
        if self.trace.requests.is_empty() && self.dropped.is_empty() {
            return Err(TraceError::Empty { file: self.file });
        }
        Ok(Loaded {
            trace: self.trace,
            format,
            dropped_rows: self.dropped.len() as u64,
            dropped: self.dropped,
        })
    }

    pub(crate) fn bad(&self, line: u64, field: &str, found: &str, expected: &str) -> TraceError {
        let shown: String = found.chars().take(80).collect();
        TraceError::BadValue {
            file: self.file.clone(),
            line,
            field: field.to_owned(),
            found: format!("`{shown}`"),
            expected: expected.to_owned(),
        }
    }

    /// A count of tokens.
    pub(crate) fn tokens(&self, line: u64, field: &str, text: &str) -> Result<u64, TraceError> {
        // Tools that keep columns as floats write `374.0`.
        let whole = text.strip_suffix(".0").unwrap_or(text);
        let count = whole.parse::<u64>().ok().filter(|count| *count <= TOKENS_LIMIT);
        count.ok_or_else(|| {
            let expected = format!("a whole number of tokens up to {TOKENS_LIMIT}");
            self.bad(line, field, text, &expected)
        })
    }

    /// An instant; `epoch` is the first datetime of the file.
    pub(crate) fn instant(
        &self,
        line: u64,
        field: &str,
        text: &str,
        clock: Clock,
        epoch: &mut Option<i128>,
    ) -> Result<SimTime, TraceError> {
        let to_picoseconds = match clock {
            Clock::Decimal { to_picoseconds } => to_picoseconds,
            Clock::Datetime => return self.datetime(line, field, text, epoch),
        };
        scaled(text, to_picoseconds).map(SimTime).map_err(|error| {
            let expected = match error {
                DecimalError::NotANumber => "a finite number",
                DecimalError::Negative => "at least zero",
                DecimalError::TooLarge => {
                    "within 213 days, counted from the start of the trace and not from a calendar date"
                }
            };
            self.bad(line, field, text, expected)
        })
    }

    fn datetime(
        &self,
        line: u64,
        field: &str,
        text: &str,
        epoch: &mut Option<i128>,
    ) -> Result<SimTime, TraceError> {
        let nanoseconds = datetime_nanoseconds(text).ok_or_else(|| {
            self.bad(
                line,
                field,
                text,
                "a datetime such as 2023-11-16 18:15:46.6805900",
            )
        })?;
        let first = *epoch.get_or_insert(nanoseconds);
        let since = nanoseconds - first;
        if since < 0 {
            return Err(TraceError::OutOfOrder {
                file: self.file.clone(),
                line,
                found: since as f64 * 1e-9,
                previous: self.previous.as_seconds(),
            });
        }
        u64::try_from(since * 1_000)
            .map(SimTime)
            .map_err(|_| self.bad(line, field, text, "within 213 days of the first request"))
    }
}

/// Nanoseconds since 1970. A datetime without an offset counts as UTC: only differences are used.
fn datetime_nanoseconds(text: &str) -> Option<i128> {
    if let Ok(instant) = text.parse::<jiff::Timestamp>() {
        return Some(instant.as_nanosecond());
    }
    let naive: jiff::civil::DateTime = text.parse().ok()?;
    let zoned = naive.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_nanosecond())
}

/// The next line without its end, up to [`LINE_LIMIT`]; `None` at the end of the file.
pub(crate) fn next_line(
    file: &str,
    line: u64,
    source: &mut impl BufRead,
    buffer: &mut Vec<u8>,
) -> Result<bool, TraceError> {
    buffer.clear();
    let read = source
        .by_ref()
        .take(LINE_LIMIT + 1)
        .read_until(b'\n', buffer)
        .map_err(|source| TraceError::Io {
            file: file.to_owned(),
            source,
        })?;
    if read as u64 > LINE_LIMIT {
        return Err(TraceError::LineTooLong {
            file: file.to_owned(),
            line,
            limit: LINE_LIMIT,
        });
    }
    Ok(read > 0)
}
