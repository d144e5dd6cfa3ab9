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
    let last_line = plain.lines().count();
    let is_open = !plain.ends_with('\n');
    let mut record = StringRecord::new();
    // Lines are UTF-8 already, so nothing else can go wrong in memory.
    while let Ok(true) = reader.read_record(&mut record) {
        let number = line + record.position().map_or(0, |at| at.line() as usize - 1);
        if has_header && rows.fields.is_empty() {
            rows.header(&record);
        } else if !rows.row(
            &record,
            number,
            number == last_line,
            is_open && number == last_line,
        ) {
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
    /// Last cells of the rows so far.
    last_cells: Vec<String>,
    /// Whether a row had another number of columns.
    is_broken: bool,
    /// Whether a row was longer than the header, so that the header's beginning or end is missing.
    is_shifted: bool,
}

impl Rows {
    fn new(header_line: usize) -> Self {
        Self {
            import: Import::new(Kind::QueryCsv),
            header_line,
            fields: Vec::new(),
            units: Vec::new(),
            count: None,
            last_cells: Vec::new(),
            is_broken: false,
            is_shifted: false,
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
    fn row(&mut self, record: &StringRecord, line: usize, is_last: bool, is_open: bool) -> bool {
        let mut cells: Vec<&str> = record.iter().take(COLUMNS_LIMIT).collect();
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
        let last = cells.last().copied().unwrap_or_default();
        if is_open && cells.len() == self.fields.len() && self.is_cut(last) {
            self.import.lost(
                line,
                format!(
                    "the text ends within `{}`",
                    last.chars().take(40).collect::<String>()
                ),
            );
            cells.pop();
        } else if cells.len() == self.fields.len() {
            self.last_cells.push(last.to_owned());
            self.last_cells.truncate(GPUS_LIMIT);
        }
        if record.len() != self.fields.len() {
            let what = format!("the row has {} of {} columns", record.len(), self.fields.len());
            self.import.lost(line, what);
            self.is_shifted |= record.len() > self.fields.len();
            // A row that is too short is the last one, cut; any other may be a piece of a wrapped one.
            if is_bare || !is_last || self.is_broken || record.len() < 2 {
                self.is_broken = true;
                return true;
            }
        }
        let facts = if is_bare {
            bare(&cells, line)
        } else {
            self.facts(&cells, line)
        };
        // A type has letters; a number in its column means that the header is not whole.
        let is_name = |name: &String| name.contains(|letter: char| letter.is_ascii_alphabetic());
        self.is_shifted |= facts.name.as_ref().is_some_and(|name| !is_name(name));
        if self.is_shifted {
            self.import.lost(line, "the row does not stand under its header");
        } else {
            self.put(facts);
        }
        true
    }

    /// Whether a last cell breaks off: it begins another row's, or it is an amount without its unit.
    fn is_cut(&self, cell: &str) -> bool {
        let is_beginning = |other: &String| other.len() > cell.len() && other.starts_with(cell);
        let has_unit = |other: &String| memory(other).is_some();
        self.last_cells.iter().any(is_beginning)
            || self.last_cells.iter().any(has_unit) && memory(cell).is_none() && !cell.starts_with('[')
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
        if self.is_shifted {
            self.import.facts.host.gpus.clear();
        }
        if self.is_broken
            && self
                .fields
                .last()
                .is_some_and(|field| NAMES.contains(&field.as_str()))
        {
            // Rows that were wrapped with their header break within the last column.
            self.import
                .facts
                .host
                .gpus
                .iter_mut()
                .for_each(|gpu| gpu.name = None);
        }
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
