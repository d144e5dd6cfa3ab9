//! The plain `nvidia-smi` table: a block of two or three rows for each device, closed by a rule.

use super::error::ImportError;
use super::facts::{GpuFacts, bus, memory};
use super::table::{Line, lines};
use super::text::Text;
use super::{Import, Kind};

/// Devices of one host.
const GPUS_LIMIT: usize = 256;

/// Which part of the output a line stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Before,
    Devices,
    Mig,
    After,
}

/// A block that is not closed yet.
struct Open {
    facts: GpuFacts,
    last_line: usize,
}

struct Reader {
    import: Import,
    part: Part,
    open: Option<Open>,
    mig_devices: Option<usize>,
    /// Columns of the widest rule.
    width: usize,
}

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut reader = Reader {
        import: Import::new(Kind::SmiTable),
        part: Part::Before,
        open: None,
        mig_devices: None,
        width: 0,
    };
    let mut last_line = 0;
    for line in lines(text.body()) {
        reader.line(&line);
        last_line = line.number;
    }
    if reader.part == Part::Before {
        return Ok(None);
    }
    reader.close(last_line, false);
    let mut import = reader.import;
    let gpus = &import.facts.host.gpus;
    import.gpus = Some(gpus.len() as u64);
    if gpus.is_empty() {
        import.lost(last_line, "the table shows no device");
    }
    if let Some(count) = reader.mig_devices {
        import.count("mig_devices", count);
    }
    gaps(&mut import);
    Ok(Some(import))
}

/// Devices are numbered from zero; a number that is left out was lost.
fn gaps(import: &mut Import) {
    let gpus = import.facts.host.gpus.iter();
    let mut numbered: Vec<(u32, usize)> = gpus.filter_map(|gpu| Some((gpu.index?, gpu.line))).collect();
    numbered.sort_unstable();
    let gap = (0..)
        .zip(&numbered)
        .find(|(expected, (index, _))| expected != index);
    if let Some((expected, (index, line))) = gap {
        import.lost(
            *line,
            format!("the rows of GPU {expected} are missing before GPU {index}"),
        );
    }
}

impl Reader {
    fn line(&mut self, line: &Line) {
        let text = line.text.trim();
        let cells = line.cells();
        let width = text.chars().count();
        if text.starts_with("+-") || text.starts_with("|-") {
            self.width = self.width.max(width);
        }
        if self.part == Part::Devices && !line.is_ended && width < self.width {
            self.import.lost(line.number, "the text ends within the table");
        }
        if text.contains("Bus-Id") && text.contains("Name") {
            self.close(line.number, false);
            self.part = Part::Devices;
        } else if text.contains("MIG devices:") {
            self.close(line.number, false);
            self.part = Part::Mig;
            self.mig_devices.get_or_insert(0);
        } else if text.contains("Processes:") {
            self.close(line.number, false);
            self.part = Part::After;
        } else if text.starts_with("+-") && self.part == Part::Devices {
            self.close(line.number, true);
        } else if self.part == Part::Devices && !cells.is_empty() {
            self.device_row(&cells, line);
        } else if self.part == Part::Mig && !cells.is_empty() {
            let numbers = cells[0].split_whitespace();
            if numbers.clone().count() == 4 && numbers.into_iter().all(|word| word.parse::<u32>().is_ok()) {
                self.mig_devices = self.mig_devices.map(|count| count + 1);
            }
        } else if self.part == Part::Devices && self.open.is_some() && !text.starts_with('|') {
            self.import.lost(
                line.number,
                "the line belongs to no row of the table, it may be wrapped",
            );
        }
    }

    fn device_row(&mut self, cells: &[&str], line: &Line) {
        let mut words = cells[0].split_whitespace();
        let index = words.next().and_then(|word| word.parse::<u32>().ok());
        let is_first = index.is_some() && !cells[0].contains('%') && !cells[0].contains('W');
        let address = cells.get(1).and_then(|cell| bus(cell.split_whitespace().next()?));
        if is_first || (address.is_some() && self.open.is_none()) {
            self.close(line.number, false);
            let facts = GpuFacts {
                line: line.number,
                index,
                name: (cells.len() > 1).then(|| name(cells[0])).flatten(),
                bus: address,
                ..GpuFacts::default()
            };
            if facts.name.is_none() || facts.bus.is_none() {
                self.import.lost(line.number, "the row of the device is cut");
            }
            self.open = Some(Open {
                facts,
                last_line: line.number,
            });
        } else if let Some(open) = &mut self.open {
            open.last_line = line.number;
            let total = cells
                .iter()
                .find_map(|cell| cell.split_once('/').filter(|(used, _)| used.contains("iB")));
            if let Some((_, total)) = total {
                open.facts.memory = memory(total);
            }
        }
    }

    /// Ends the open block; `by_rule` where the rule below it stands there.
    fn close(&mut self, line: usize, by_rule: bool) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = open
            .facts
            .index
            .map_or("a device".to_owned(), |index| format!("GPU {index}"));
        if open.facts.memory.is_none() {
            self.import
                .lost(open.last_line, format!("the memory of {index} is missing"));
        } else if !by_rule {
            self.import.lost(
                line.min(open.last_line),
                format!("the rows of {index} are not closed by a rule"),
            );
        }
        let gpus = &mut self.import.facts.host.gpus;
        let known = gpus
            .iter()
            .find(|gpu| gpu.index == open.facts.index && gpu.index.is_some());
        match known {
            // The table may be printed again and again.
            Some(known) if known.name == open.facts.name && known.bus == open.facts.bus => {}
            Some(known) => {
                let what = format!("{index} is another device than in line {}", known.line);
                self.import.problem(open.facts.line, what);
            }
            None if gpus.len() == GPUS_LIMIT => {
                self.import.lost(line, format!("more than {GPUS_LIMIT} devices"));
            }
            None => gpus.push(open.facts),
        }
    }
}

/// The name between the index and the persistence mode; names that the table shortens end in dots.
fn name(cell: &str) -> Option<String> {
    let words: Vec<&str> = cell.split_whitespace().skip(1).collect();
    let words = match words.split_last() {
        Some((last, rest)) if ["On", "Off", "N/A", "WDDM", "TCC", "MCDM"].contains(last) => rest,
        _ => &words[..],
    };
    (!words.is_empty()).then(|| words.join(" "))
}
