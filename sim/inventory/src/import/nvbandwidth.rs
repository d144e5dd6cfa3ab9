//! The log of nvbandwidth: a matrix for each test, closed by its sum. Its JSON form says the same.

use super::error::ImportError;
use super::facts::GpuFacts;
use super::table::{Line, lines};
use super::text::Text;
use super::tree::Document;
use super::{Import, Kind};

/// Devices of one host.
const DEVICES_LIMIT: usize = 256;

/// A test whose sum has not come yet.
struct Open {
    name: String,
    line: usize,
    columns: usize,
    rows: usize,
    sum: f64,
    is_broken: bool,
}

struct Reader {
    import: Import,
    devices: Vec<GpuFacts>,
    open: Option<Open>,
    has_signs: bool,
    /// Tests that ended.
    sums: usize,
}

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    if !text.body().contains("nvbandwidth") && !text.body().contains("memcpy") {
        return Ok(None);
    }
    let mut reader = Reader {
        import: Import::new(Kind::Nvbandwidth),
        devices: Vec::new(),
        open: None,
        has_signs: false,
        sums: 0,
    };
    let mut last_line = 0;
    for line in lines(text.body()) {
        reader.line(&line);
        last_line = line.number;
    }
    if !reader.has_signs {
        return Ok(None);
    }
    reader.close(last_line);
    if reader.sums == 0 {
        reader.import.lost(last_line, "no test of the log has ended");
    }
    let mut import = reader.import;
    import.gpus = (!reader.devices.is_empty()).then_some(reader.devices.len() as u64);
    import.facts.host.gpus = reader.devices;
    Ok(Some(import))
}

impl Reader {
    fn line(&mut self, line: &Line) {
        let words = line.words();
        match words[..] {
            ["nvbandwidth", "Version:", ..] => self.has_signs = true,
            ["Device", index, ..] if index.ends_with(':') => self.device(index, line),
            ["Running", name] => {
                self.close(line.number);
                self.has_signs |= name.contains("memcpy") || name.contains("latency") || name.ends_with('.');
                self.open = Some(Open {
                    name: name.trim_end_matches('.').to_owned(),
                    line: line.number,
                    columns: 0,
                    rows: 0,
                    sum: 0.0,
                    is_broken: false,
                });
            }
            ["SUM", name, sum] => self.sum(name, sum, line),
            ["Waived:", ..] => {}
            _ => self.matrix_line(&words, line),
        }
    }

    /// `Device 0: NVIDIA GH200 480GB (00000009:01:00)`, the address without its function.
    fn device(&mut self, index: &str, whole: &Line) {
        let (text, line) = (&whole.text, whole.number);
        let Ok(index) = index.trim_end_matches(':').parse::<u32>() else {
            return;
        };
        let Some((_, rest)) = text.split_once(':') else {
            return;
        };
        self.has_signs = true;
        let (name, address) = match rest.rsplit_once('(') {
            Some((name, address)) => (name.trim(), address.trim_end().strip_suffix(')')),
            None => (rest.trim(), None),
        };
        let is_cut = address.is_none();
        if is_cut {
            self.import
                .lost(line, format!("the line of device {index} is cut"));
        }
        if self.devices.iter().any(|device| device.index == Some(index)) {
            return self
                .import
                .problem(line, format!("device {index} is listed twice"));
        }
        if self.devices.len() == DEVICES_LIMIT {
            return self
                .import
                .lost(line, format!("more than {DEVICES_LIMIT} devices"));
        }
        self.devices.push(GpuFacts {
            line,
            index: Some(index),
            bus: address.and_then(|address| super::facts::bus(&format!("{address}.0"))),
            name: (!name.is_empty() && !is_cut).then(|| name.to_owned()),
            ..GpuFacts::default()
        });
    }

    /// The heading of a matrix counts devices, a row starts with the number of its own.
    fn matrix_line(&mut self, words: &[&str], line: &Line) {
        let Some(open) = &mut self.open else {
            return;
        };
        let is_heading = words
            .iter()
            .enumerate()
            .all(|(column, word)| word.parse::<usize>().is_ok_and(|number| number == column));
        if open.columns == 0 && is_heading {
            open.columns = words.len();
            let devices = self.devices.len();
            if devices > 0 && open.columns > devices {
                let first = self.devices[0].line;
                let what = format!(
                    "the matrix of {} has {} columns, {devices} devices are listed from line {first}",
                    open.name, open.columns
                );
                self.import.problem(line.number, what);
            }
            return;
        }
        if open.columns == 0 || words.first().and_then(|word| word.parse::<usize>().ok()) != Some(open.rows) {
            return;
        }
        open.rows += 1;
        let cells = &words[1..];
        if cells.len() != open.columns {
            open.is_broken = true;
            let what = format!("the row has {} of {} cells", cells.len(), open.columns);
            return self.import.lost(line.number, what);
        }
        for cell in cells.iter().filter(|cell| **cell != "N/A") {
            match cell.parse::<f64>() {
                Ok(value) if value.is_finite() => open.sum += value,
                _ => open.is_broken = true,
            }
        }
    }

    fn sum(&mut self, name: &str, sum: &str, line: &Line) {
        let Some(open) = self.open.take() else {
            return self
                .import
                .lost(line.number, format!("the matrix of {name} is missing"));
        };
        self.sums += 1;
        let sum = sum.parse::<f64>().ok().filter(|sum| sum.is_finite());
        if open.name != name {
            let what = format!("the matrix of {} ends with the sum of {name}", open.name);
            self.import.lost(line.number, what);
        } else if open.rows == 0 {
            self.import
                .lost(open.line, format!("the matrix of {name} has no rows"));
        } else if let Some(sum) = sum {
            // Each cell is rounded to 0.01.
            let tolerance = 0.01 * (open.rows * open.columns) as f64 + 0.01;
            if !open.is_broken && (sum - open.sum).abs() > tolerance {
                let what = format!("the sum is {sum}, that of the cells {:.2}", open.sum);
                self.import.problem(line.number, what);
            }
        } else {
            self.import.lost(line.number, "the sum is no number");
        }
    }

    /// A test without its sum is cut, unless it was waived and printed nothing.
    fn close(&mut self, line: usize) {
        if let Some(open) = self.open.take().filter(|open| open.columns > 0) {
            self.import
                .lost(line, format!("the sum of {} is missing", open.name));
        }
    }
}

/// What `nvbandwidth --json` writes.
pub(super) fn from_json(document: &Document, _: &Text) -> Result<Option<Import>, ImportError> {
    let Some(own) = document.roots.iter().find_map(|root| root.get("nvbandwidth")) else {
        return Ok(None);
    };
    let mut import = Import::new(Kind::Nvbandwidth);
    let devices = own
        .entries()
        .iter()
        .find(|(key, _)| key.to_lowercase().contains("device list"));
    let devices = devices
        .and_then(|(_, devices)| devices.list())
        .unwrap_or_default();
    for device in devices.iter().take(DEVICES_LIMIT) {
        let text = device.text().unwrap_or_default();
        let Some((index, rest)) = text.split_once(':') else {
            continue;
        };
        import.facts.host.gpus.push(GpuFacts {
            line: device.line(),
            index: index.trim().parse().ok(),
            name: rest.split('(').next().map(|name| name.trim().to_owned()),
            ..GpuFacts::default()
        });
    }
    import.gpus = (!devices.is_empty()).then_some(devices.len() as u64);
    for case in own
        .get("testcases")
        .and_then(|cases| cases.list())
        .unwrap_or_default()
    {
        let status = case
            .get("status")
            .and_then(|status| status.text())
            .unwrap_or_default();
        if status == "Error" || status == "Not Found" {
            let name = case.get("name").and_then(|name| name.text()).unwrap_or("a test");
            import.problem(case.line(), format!("{name} ended with {status}"));
        }
    }
    Ok(Some(import))
}
