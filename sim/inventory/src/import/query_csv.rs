//! `nvidia-smi --query-gpu=... --format=csv`: a header of field names with units, a row for each device.
//! Field names changed over the years, so each fact has several.

use csv::{ReaderBuilder, StringRecord, Trim};

use super::error::ImportError;
use super::facts::{GpuFacts, bus, memory, packed_pci_id};
use super::table;
use super::text::Text;
use super::{Import, Kind};

/// Devices of one host.
const GPUS_LIMIT: usize = 256;
/// Columns of a row.
const COLUMNS_LIMIT: usize = 2048;
const NAMES: [&str; 2] = ["name", "gpu_name"];
/// Fields that tell a header from any other line with commas.
const KNOWN: [&str; 16] = [
    "name",
    "gpu_name",
    "index",
    "uuid",
    "gpu_uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "memory.free",
    "pci.bus_id",
    "gpu_bus_id",
    "utilization.gpu",
    "temperature.gpu",
    "compute_cap",
    "timestamp",
    "power.draw",
];

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    if !text.body().contains(',') {
        return Ok(None);
    }
    let plain = table::plain(text.body());
    let Some((offset, line, has_header)) = start(&plain) else {
        return Ok(None);
    };
    let mut reader = ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .quoting(false)
        .trim(Trim::All)
        .from_reader(&plain.as_bytes()[offset..]);
    let mut rows = Rows::new(line);
    let mut record = StringRecord::new();
    // Lines are UTF-8 already, so nothing else can go wrong in memory.
    while let Ok(true) = reader.read_record(&mut record) {
        let number = line + record.position().map_or(0, |at| at.line() as usize - 1);
        if has_header && rows.fields.is_empty() {
            rows.header(&record);
        } else if !rows.row(&record, number) {
            break;
        }
    }
    Ok(Some(rows.finish(has_header)))
}

/// Offset and line of the header, or of the first row where the header was switched off.
fn start(text: &str) -> Option<(usize, usize, bool)> {
    let mut offset = 0;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let cells: Vec<&str> = line.split(',').take(COLUMNS_LIMIT).map(str::trim).collect();
        if is_header(&cells) {
            return Some((offset, index + 1, true));
        }
        if is_bare_row(&cells) {
            return Some((offset, index + 1, false));
        }
        offset += line.len();
    }
    None
}

fn is_header(cells: &[&str]) -> bool {
    let is_field = |cell: &&str| {
        let field = field(cell);
        !field.is_empty()
            && field
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._".contains(&byte))
    };
    cells.len() > 1
        && cells.iter().filter(|cell| KNOWN.contains(&field(cell))).count() > 0
        && cells.iter().filter(|cell| is_field(cell)).count() * 2 > cells.len()
}

/// A device's name beside an amount or an address: a row of `--format=csv,noheader`.
fn is_bare_row(cells: &[&str]) -> bool {
    (2..COLUMNS_LIMIT).contains(&cells.len())
        && cells.iter().any(|cell| is_device(cell))
        && cells
            .iter()
            .any(|cell| memory(cell).is_some() || bus(cell).is_some() || cell.starts_with("GPU-"))
}

fn is_device(cell: &str) -> bool {
    ["NVIDIA ", "Tesla ", "GeForce ", "Quadro "]
        .iter()
        .any(|maker| cell.starts_with(maker))
}

/// The name of a column without its unit.
fn field(cell: &str) -> &str {
    cell.split('[').next().unwrap_or_default().trim()
}

struct Rows {
    import: Import,
    header_line: usize,
    fields: Vec<String>,
    units: Vec<String>,
    count: Option<u64>,
}

impl Rows {
    fn new(header_line: usize) -> Self {
        Self {
            import: Import::new(Kind::QueryCsv),
            header_line,
            fields: Vec::new(),
            units: Vec::new(),
            count: None,
        }
    }

    fn header(&mut self, record: &StringRecord) {
        for cell in record.iter().take(COLUMNS_LIMIT) {
            self.fields.push(field(cell).to_owned());
            let unit = cell.split_once('[').and_then(|(_, unit)| unit.strip_suffix(']'));
            self.units.push(unit.unwrap_or_default().to_owned());
            if cell.contains('[') && !cell.ends_with(']') {
                self.import.lost(self.header_line, "the header is cut");
            }
        }
        self.import.count("columns", self.fields.len());
    }

    /// Takes a row in; false where the table ends.
    fn row(&mut self, record: &StringRecord, line: usize) -> bool {
        let cells: Vec<&str> = record.iter().take(COLUMNS_LIMIT).collect();
        if cells.len() == 1 && (cells[0].contains("$ ") || cells[0].ends_with(['$', '#'])) {
            return false;
        }
        if is_header(&cells) {
            return true;
        }
        if self.fields.is_empty() {
            self.fields = vec![String::new(); cells.len()];
            self.import.problem(
                line,
                "the table has no header, its columns are guessed by their values",
            );
        }
        let is_bare = self.fields.iter().all(String::is_empty);
        if cells.len() != self.fields.len() {
            let what = format!("the row has {} of {} columns", cells.len(), self.fields.len());
            self.import.lost(line, what);
            if is_bare || cells.len() > self.fields.len() {
                return true;
            }
        }
        let facts = if is_bare {
            bare(&cells, line)
        } else {
            self.facts(&cells, line)
        };
        self.put(facts);
        true
    }

    fn cell<'a>(&self, cells: &[&'a str], names: &[&str]) -> Option<&'a str> {
        let position = self
            .fields
            .iter()
            .position(|field| names.contains(&field.as_str()))?;
        // The last cell of a row that is too short may be cut.
        let is_sure = cells.len() == self.fields.len() || position + 1 < cells.len();
        let cell = cells.get(position).filter(|_| is_sure)?;
        (!cell.is_empty() && !cell.starts_with('[') && *cell != "N/A").then_some(cell)
    }

    fn facts(&mut self, cells: &[&str], line: usize) -> GpuFacts {
        if let Some(count) = self.cell(cells, &["count"]).and_then(|count| count.parse().ok()) {
            self.count = Some(count);
        }
        let number = |names: &[&str]| self.cell(cells, names)?.parse::<u32>().ok();
        let total = self.cell(cells, &["memory.total"]);
        let unit = self
            .fields
            .iter()
            .position(|field| field == "memory.total")
            .map(|at| &self.units[at]);
        GpuFacts {
            line,
            index: number(&["index"]),
            bus: self.cell(cells, &["pci.bus_id", "gpu_bus_id"]).and_then(bus),
            name: self.cell(cells, &NAMES).map(str::to_owned),
            pci_id: self.cell(cells, &["pci.device_id"]).and_then(packed_pci_id),
            memory: total.and_then(|total| memory(total).or_else(|| memory(&format!("{total} {}", unit?)))),
            slot: number(&["pcie.link.gen.max"]).zip(number(&["pcie.link.width.max"])),
            ..GpuFacts::default()
        }
    }

    /// Rows of one device repeat where the query was looped.
    fn put(&mut self, facts: GpuFacts) {
        let gpus = &self.import.facts.host.gpus;
        let known = gpus
            .iter()
            .find(|gpu| match (gpu.index, facts.index, &gpu.bus, &facts.bus) {
                (Some(own), Some(other), _, _) => own == other,
                (_, _, Some(own), Some(other)) => own == other,
                _ => false,
            });
        if let Some(known) = known {
            if known.name != facts.name && known.name.is_some() && facts.name.is_some() {
                let what = format!("the device has another name in line {}", known.line);
                self.import.problem(facts.line, what);
            }
        } else if gpus.len() == GPUS_LIMIT {
            self.import
                .lost(facts.line, format!("more than {GPUS_LIMIT} devices"));
        } else {
            self.import.facts.host.gpus.push(facts);
        }
    }

    fn finish(mut self, has_header: bool) -> Import {
        let found = self.import.facts.host.gpus.len() as u64;
        self.import.gpus = Some(found);
        if found == 0 {
            self.import.lost(self.header_line, "no row follows the header");
        }
        if let Some(count) = self.count {
            self.import.facts.host.announced_gpus = Some((count, self.header_line));
            let what = format!("the count column says {count} devices, {found} have a row");
            if count > found {
                self.import.lost(self.header_line, what);
            } else if count < found {
                self.import.problem(self.header_line, what);
            }
        }
        let mut indices: Vec<(u32, usize)> = self
            .import
            .facts
            .host
            .gpus
            .iter()
            .filter_map(|gpu| Some((gpu.index?, gpu.line)))
            .collect();
        indices.sort_unstable();
        let gap = (0..)
            .zip(&indices)
            .find(|(expected, (index, _))| expected != index);
        if let Some((expected, (index, line))) = gap {
            self.import
                .lost(*line, format!("no row of GPU {expected} before GPU {index}"));
        }
        if !has_header {
            self.import.count("columns", self.fields.len());
        }
        self.import
    }
}

/// A row without a header: what its values alone can mean.
fn bare(cells: &[&str], line: usize) -> GpuFacts {
    GpuFacts {
        line,
        name: cells
            .iter()
            .find(|cell| is_device(cell))
            .map(|cell| (*cell).to_owned()),
        bus: cells.iter().find_map(|cell| bus(cell)),
        // The total is the largest of the amounts that a row can hold.
        memory: cells.iter().filter_map(|cell| memory(cell)).max(),
        ..GpuFacts::default()
    }
}
