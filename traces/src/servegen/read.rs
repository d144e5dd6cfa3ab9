//! Reading a folder: only files with the published names, never folders inside.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use infercluster_spec::json;
use serde_json::{Map, Value};

use super::{Client, ClientPool, Distribution, GapForm, LengthWindow, RateWindow};
use crate::error::TraceError;

/// Longest file of one client; published ones stay below 2 MB.
const FILE_LIMIT: u64 = 64 << 20;
/// Most clients of a folder; the largest published one has some thousands.
const CLIENTS_LIMIT: usize = 100_000;

/// Reads the folder at `path`.
pub fn load(path: &Path) -> Result<ClientPool, TraceError> {
    let folder = path.display().to_string();
    let mut clients: BTreeMap<u64, Client> = BTreeMap::new();
    for name in names(path)? {
        let Some((number, kind)) = client_file(&name) else {
            continue;
        };
        if clients.len() >= CLIENTS_LIMIT {
            return Err(TraceError::TooManyClients {
                folder,
                limit: CLIENTS_LIMIT as u64,
            });
        }
        let file = path.join(&name);
        let label = file.display().to_string();
        let text = text(&file, &label)?;
        let client = clients.entry(number).or_insert_with(|| Client {
            number,
            ..Client::default()
        });
        match kind {
            Kind::Rates => client.rates = rates(&label, &text)?,
            Kind::Lengths => client.lengths = lengths(&label, &text)?,
        }
    }
    clients.retain(|_, client| !client.rates.is_empty());
    if clients.is_empty() {
        return Err(TraceError::NoClients { folder });
    }
    let name = std::path::absolute(path).ok();
    let name = name.as_deref().and_then(Path::file_name);
    Ok(ClientPool {
        name: name.map_or_else(
            || "clients".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        ),
        clients: clients.into_values().collect(),
    })
}

/// Names in the folder, in order, so that messages do not depend on the file system.
fn names(path: &Path) -> Result<Vec<String>, TraceError> {
    let io = |source| TraceError::Io {
        file: path.display().to_string(),
        source,
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        names.extend(entry.map_err(io)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

enum Kind {
    Rates,
    Lengths,
}

fn client_file(name: &str) -> Option<(u64, Kind)> {
    let rest = name.strip_prefix("chunk-")?;
    let (number, kind) = rest.split_once('-')?;
    let kind = match kind {
        "trace.csv" => Kind::Rates,
        "dataset.json" => Kind::Lengths,
        _ => return None,
    };
    Some((number.parse().ok()?, kind))
}

fn text(path: &Path, label: &str) -> Result<String, TraceError> {
    let io = |source| TraceError::Io {
        file: label.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(FILE_LIMIT + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > FILE_LIMIT {
        return Err(TraceError::FileTooLong {
            file: label.to_owned(),
            limit: FILE_LIMIT,
        });
    }
    if bytes.starts_with(b"version https://git-lfs") {
        return Err(TraceError::LfsPointer {
            file: label.to_owned(),
        });
    }
    String::from_utf8(bytes).map_err(|_| TraceError::NotText {
        file: label.to_owned(),
        line: 1,
    })
}

/// Reads a client's windows of rates: `start_s, rate, cv, form of the gaps, two parameters of it`, without a header.
pub fn rates(file: &str, text: &str) -> Result<Vec<RateWindow>, TraceError> {
    let mut windows: Vec<RateWindow> = Vec::new();
    for (line, row) in (1..).zip(text.lines()).filter(|(_, row)| !row.trim().is_empty()) {
        let cells: Vec<&str> = row.split(',').map(str::trim).collect();
        let bad = |field: &str, found: &str, expected: &str| TraceError::BadValue {
            file: file.to_owned(),
            line,
            field: field.to_owned(),
            found: format!("`{}`", found.chars().take(60).collect::<String>()),
            expected: expected.to_owned(),
        };
        let [start, rate, cv, form, shape, _] = cells.as_slice() else {
            return Err(TraceError::RowLength {
                file: file.to_owned(),
                line,
                found: cells.len() as u64,
                expected: 6,
            });
        };
        let number = |field: &str, text: &str| {
            let parsed = text
                .parse::<f64>()
                .ok()
                .filter(|number| number.is_finite() && *number >= 0.0);
            parsed.ok_or_else(|| bad(field, text, "a finite number of at least zero"))
        };
        let start_s = number("start_s", start)?;
        let start_s = start_s as u64;
        if windows.last().is_some_and(|before| before.start_s >= start_s) {
            return Err(bad("start_s", start, "later than in the row above"));
        }
        let gaps = match *form {
            "" => None,
            "Gamma" | "gamma" => Some(GapForm::Gamma),
            "Weibull" | "weibull" => Some(GapForm::Weibull),
            "Exponential" | "exponential" | "Poisson" => None,
            other => {
                return Err(bad(
                    "form of the gaps",
                    other,
                    "Gamma, Weibull, Exponential or empty",
                ));
            }
        };
        windows.push(RateWindow {
            start_s,
            rate: number("rate", rate)?,
            cv: number("cv", cv)?,
            gaps: match gaps {
                Some(form) => Some((form, number("shape", shape)?)).filter(|(_, shape)| *shape > 0.0),
                None => None,
            },
        });
    }
    Ok(windows)
}

/// Reads a client's windows of lengths: an object a window, named by its start; lengths in texts that hold a Python dict.
pub fn lengths(file: &str, text: &str) -> Result<Vec<LengthWindow>, TraceError> {
    let windows: Map<String, Value> = serde_json::from_str(text).map_err(|error| TraceError::Json {
        file: file.to_owned(),
        line: error.line() as u64,
        column: error.column(),
        message: json::message_of(&error),
    })?;
    let mut lengths = Vec::new();
    for (start, window) in &windows {
        let bad = |field: &str, found: String, expected: &str| TraceError::BadWindow {
            file: file.to_owned(),
            window: start.chars().take(40).collect(),
            field: field.to_owned(),
            found,
            expected: expected.to_owned(),
        };
        let start_s = start.parse().map_err(|_| {
            bad(
                "name",
                format!("`{}`", start.chars().take(40).collect::<String>()),
                "whole seconds",
            )
        })?;
        let distribution = |field: &str| match window.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Distribution::parse(text)
                .map_err(|found| bad(field, found, "a dict of whole numbers and probabilities")),
            Some(other) => {
                let found: String = other.to_string().chars().take(60).collect();
                Err(bad(
                    field,
                    found,
                    "a text with a dict of whole numbers and probabilities",
                ))
            }
        };
        lengths.push(LengthWindow {
            start_s,
            input: distribution("input_tokens")?,
            output: distribution("output_tokens")?,
        });
    }
    lengths.sort_by_key(|window| window.start_s);
    Ok(lengths)
}
