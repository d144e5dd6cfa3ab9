//! Traces in rows of cells with a header.

use std::io::BufRead;

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};
use infercluster_spec::SimTime;

use crate::error::TraceError;
use crate::format::{self, CSV_SHAPES, Clock, TraceFormat};
use crate::read::{Builder, Loaded, Row};

/// Where the fields of a format stand in this file.
struct Columns {
    arrival: Option<(usize, &'static str, Clock)>,
    input: (usize, &'static str),
    output: (usize, &'static str),
    batch_size: Option<usize>,
}

pub(crate) fn read(mut builder: Builder, source: impl BufRead) -> Result<Loaded, TraceError> {
    let mut rows = ReaderBuilder::new().trim(Trim::All).from_reader(source);
    let header = rows
        .headers()
        .map_err(|error| csv_error(builder.file(), error))?
        .clone();
    let (format, columns) = columns(builder.file(), &header)?;
    let mut record = StringRecord::new();
    let mut epoch = None;
    loop {
        let more = rows
            .read_record(&mut record)
            .map_err(|error| csv_error(builder.file(), error))?;
        if !more {
            return builder.finish(format);
        }
        let line = record.position().map_or(0, csv::Position::line);
        let row = row(&builder, &columns, &record, line, &mut epoch)?;
        builder.push(row, None)?;
    }
}

fn columns(file: &str, header: &StringRecord) -> Result<(TraceFormat, Columns), TraceError> {
    let position = |name: &str| header.iter().position(|cell| cell == name);
    // Without a header: a start in seconds, a rate, a variation, a form and two parameters of it.
    let is_number = |cell: &str| cell.parse::<f64>().is_ok();
    if header.len() == 6
        && header.iter().take(3).all(is_number)
        && header.get(3).is_some_and(|form| !is_number(form))
    {
        return Err(TraceError::OneClient {
            file: file.to_owned(),
        });
    }
    let shape = format::detect(&CSV_SHAPES, |name| position(name).is_some()).ok_or_else(|| {
        let cells: Vec<String> = header
            .iter()
            .take(20)
            .map(|cell| cell.chars().take(40).collect())
            .collect();
        TraceError::UnknownFormat {
            file: file.to_owned(),
            found: cells.join(", "),
            known: format::known(),
        }
    })?;
    let needed = shape
        .arrival
        .iter()
        .map(|(name, _)| *name)
        .chain([shape.input, shape.output]);
    for column in needed {
        if header.iter().filter(|cell| *cell == column).count() > 1 {
            return Err(TraceError::DuplicateColumn {
                file: file.to_owned(),
                column,
            });
        }
    }
    let found = |name: &'static str| {
        let column = position(name).expect("detection saw every field of the shape");
        (column, name)
    };
    let columns = Columns {
        arrival: shape.arrival.map(|(name, clock)| (found(name).0, name, clock)),
        input: found(shape.input),
        output: found(shape.output),
        batch_size: position("batch_size").filter(|_| shape.format == TraceFormat::Splitwise),
    };
    Ok((shape.format, columns))
}

fn row(
    builder: &Builder,
    columns: &Columns,
    record: &StringRecord,
    line: u64,
    epoch: &mut Option<i128>,
) -> Result<Row, TraceError> {
    let cell = |column: usize| record.get(column).unwrap_or_default();
    let arrival: Option<SimTime> = match columns.arrival {
        Some((column, name, clock)) => Some(builder.instant(line, name, cell(column), clock, epoch)?),
        None => None,
    };
    if let Some(size) = columns.batch_size.map(cell).filter(|size| *size != "1") {
        return Err(builder.bad(line, "batch_size", size, "1: a row is one request"));
    }
    let tokens = |(column, name): (usize, &str)| builder.tokens(line, name, cell(column));
    Ok(Row {
        line,
        arrival,
        input: tokens(columns.input)?,
        output: tokens(columns.output)?,
        block_hashes: Vec::new(),
    })
}

fn csv_error(file: &str, error: csv::Error) -> TraceError {
    let file = file.to_owned();
    let line = error.position().map_or(0, csv::Position::line);
    match error.into_kind() {
        ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => TraceError::RowLength {
            file,
            line,
            found: len,
            expected: expected_len,
        },
        ErrorKind::Utf8 { .. } => TraceError::NotText { file, line },
        ErrorKind::Io(source) => TraceError::Io { file, source },
        other => TraceError::Io {
            file,
            source: std::io::Error::other(format!("{other:?}")),
        },
    }
}
