//! The formats as data: which fields they have, what the fields mean, and how one is recognised.

use std::fmt;
use std::str::FromStr;

/// A trace format, named after the project that publishes in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TraceFormat {
    /// Azure LLM inference traces: datetimes of 100 ns.
    Azure,
    /// vidur: seconds from the first request.
    Vidur,
    /// vidur without arrivals.
    VidurLengths,
    /// splitwise-sim: whole seconds.
    Splitwise,
    /// BurstGPT: seconds.
    BurstGpt,
    /// Mooncake: milliseconds, hashes of blocks of 512 tokens.
    Mooncake,
    /// Qwen-Bailian usage traces: seconds, hashes of blocks of 16 tokens.
    QwenBailian,
    /// LLMServingSim: nanoseconds.
    LlmServingSim,
    /// The product's own lines: picoseconds, nothing lost.
    Lines,
}

/// What a number in an arrival field counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// A calendar date with time: counted from the first request.
    Datetime,
    /// `10^-exponent` seconds from a zero of the file's own.
    Decimal {
        /// Powers of ten from the unit to picoseconds.
        to_picoseconds: i32,
    },
}

pub(crate) const SECONDS: Clock = Clock::Decimal { to_picoseconds: 12 };
pub(crate) const MILLISECONDS: Clock = Clock::Decimal { to_picoseconds: 9 };
pub(crate) const NANOSECONDS: Clock = Clock::Decimal { to_picoseconds: 3 };
pub(crate) const PICOSECONDS: Clock = Clock::Decimal { to_picoseconds: 0 };

/// Fields of a format.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) format: TraceFormat,
    pub(crate) name: &'static str,
    pub(crate) arrival: Option<(&'static str, Clock)>,
    pub(crate) input: &'static str,
    pub(crate) output: &'static str,
    /// A field that must be there too, to tell formats with the same names apart.
    pub(crate) mark: Option<&'static str>,
    /// Field of block hashes and the tokens of a block.
    pub(crate) hashes: Option<(&'static str, u32)>,
}

/// Formats in rows of cells, the more particular first.
pub(crate) const CSV_SHAPES: [Shape; 5] = [
    Shape {
        format: TraceFormat::Azure,
        name: "azure",
        arrival: Some(("TIMESTAMP", Clock::Datetime)),
        input: "ContextTokens",
        output: "GeneratedTokens",
        mark: None,
        hashes: None,
    },
    Shape {
        format: TraceFormat::Vidur,
        name: "vidur",
        arrival: Some(("arrived_at", SECONDS)),
        input: "num_prefill_tokens",
        output: "num_decode_tokens",
        mark: None,
        hashes: None,
    },
    Shape {
        format: TraceFormat::VidurLengths,
        name: "vidur-lengths",
        arrival: None,
        input: "num_prefill_tokens",
        output: "num_decode_tokens",
        mark: None,
        hashes: None,
    },
    Shape {
        format: TraceFormat::Splitwise,
        name: "splitwise",
        arrival: Some(("arrival_timestamp", SECONDS)),
        input: "prompt_size",
        output: "token_size",
        mark: None,
        hashes: None,
    },
    Shape {
        format: TraceFormat::BurstGpt,
        name: "burstgpt",
        arrival: Some(("Timestamp", SECONDS)),
        input: "Request tokens",
        output: "Response tokens",
        mark: None,
        hashes: None,
    },
];

/// Formats in lines of JSON, the more particular first.
pub(crate) const JSON_SHAPES: [Shape; 3] = [
    Shape {
        format: TraceFormat::QwenBailian,
        name: "qwen-bailian",
        arrival: Some(("timestamp", SECONDS)),
        input: "input_length",
        output: "output_length",
        mark: Some("chat_id"),
        hashes: Some(("hash_ids", 16)),
    },
    Shape {
        format: TraceFormat::Mooncake,
        name: "mooncake",
        arrival: Some(("timestamp", MILLISECONDS)),
        input: "input_length",
        output: "output_length",
        mark: None,
        hashes: Some(("hash_ids", 512)),
    },
    Shape {
        format: TraceFormat::LlmServingSim,
        name: "llmservingsim",
        arrival: Some(("arrival_time_ns", NANOSECONDS)),
        input: "input_toks",
        output: "output_toks",
        mark: None,
        hashes: None,
    },
];

/// First line of the product's own format says this.
pub const LINES_SCHEMA: &str = "infercluster-trace-lines/1";

const LINES_NAME: &str = "lines";

impl Shape {
    fn fields(&self) -> impl Iterator<Item = &'static str> {
        let arrival = self.arrival.map(|(field, _)| field);
        arrival
            .into_iter()
            .chain([self.input, self.output])
            .chain(self.mark)
    }

    fn fits(&self, has: impl Fn(&str) -> bool) -> bool {
        self.fields().all(has)
    }
}

/// The first shape whose every field is there.
pub(crate) fn detect(shapes: &'static [Shape], has: impl Fn(&str) -> bool) -> Option<&'static Shape> {
    shapes.iter().find(|shape| shape.fits(&has))
}

/// Every format with its fields, for the error that found none of them.
pub(crate) fn known() -> String {
    let shapes = CSV_SHAPES.iter().chain(&JSON_SHAPES);
    let listed = shapes.map(|shape| {
        format!(
            "{} ({})",
            shape.name,
            shape.fields().collect::<Vec<_>>().join(", ")
        )
    });
    listed
        .chain([format!("{LINES_NAME} (schema {LINES_SCHEMA})")])
        .collect::<Vec<_>>()
        .join("; ")
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let shapes = CSV_SHAPES.iter().chain(&JSON_SHAPES);
        let name = shapes
            .into_iter()
            .find(|shape| shape.format == *self)
            .map_or(LINES_NAME, |shape| shape.name);
        f.pad(name)
    }
}

/// A text that names no [`TraceFormat`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no trace format, known are {known}")]
pub struct FormatError {
    /// What was found.
    pub text: String,
    /// The names.
    pub known: String,
}

impl FromStr for TraceFormat {
    type Err = FormatError;
    fn from_str(text: &str) -> Result<Self, FormatError> {
        let shapes = || CSV_SHAPES.iter().chain(&JSON_SHAPES);
        if text == LINES_NAME {
            return Ok(Self::Lines);
        }
        shapes()
            .find(|shape| shape.name == text)
            .map(|shape| shape.format)
            .ok_or_else(|| FormatError {
                text: text.to_owned(),
                known: shapes()
                    .map(|shape| shape.name)
                    .chain([LINES_NAME])
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }
}
