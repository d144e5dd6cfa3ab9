//! `nvidia-smi topo -m`: which devices of a host reach each other over what.
//!
//! A matrix starts with a header that names GPUs and NICs; a row repeats its name and has a cell for each
//! of them. Affinity columns behind the cells are not read. Each pair stands there twice: where both cells
//! are there they must agree, and a pair whose cells do not is a problem, never a link.

use std::collections::BTreeMap;
use std::fmt;

use super::error::ImportError;
use super::facts::{Device, GpuFacts, NicFacts, PairFacts};
use super::table::{Line, lines};
use super::text::Text;
use super::{Import, Kind, Problem};

/// Most devices of a matrix: twice what any host has.
const DEVICES_LIMIT: usize = 320;

/// How two devices of a host are connected, closest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Connection {
    /// A bond of so many NVLinks.
    Nvlink(u32),
    /// So many xGMI links.
    Xgmi(u32),
    /// One switch on the board that both are on.
    Psb,
    /// At most one PCI Express bridge.
    Pix,
    /// Several bridges below one host bridge.
    Pxb,
    /// The host bridge.
    Phb,
    /// Several host bridges of one NUMA node.
    Node,
    /// The interconnect between sockets.
    Sys,
    /// The same, as drivers before 2017 call it.
    Soc,
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Nvlink(links) => write!(f, "NV{links}"),
            Self::Xgmi(links) => write!(f, "XGMI{links}"),
            Self::Psb => f.write_str("PSB"),
            Self::Pix => f.write_str("PIX"),
            Self::Pxb => f.write_str("PXB"),
            Self::Phb => f.write_str("PHB"),
            Self::Node => f.write_str("NODE"),
            Self::Sys => f.write_str("SYS"),
            Self::Soc => f.write_str("SOC"),
        }
    }
}

/// A matrix as far as it is there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TopoMatrix {
    /// Names of the header, GPUs and NICs as they stand.
    pub devices: Vec<String>,
    /// How many of them are GPUs; the others are NICs.
    pub gpus: usize,
    /// What each pair is connected by, keyed by positions in `devices`, the lower one first.
    pub connections: BTreeMap<(usize, usize), Connection>,
    /// Device names of NICs that a legend gives, such as `NIC0` for `mlx5_0`.
    pub nic_names: BTreeMap<String, String>,
    /// Lines of the header and of each device's row; the header's where a row is missing.
    pub lines: Vec<usize>,
    /// Whether every row that the header announces is there in full.
    pub is_complete: bool,
    /// What is lost or contradicts, by line.
    pub problems: Vec<Problem>,
}

/// Reads the first matrix of a dump; `None` where there is none.
pub fn read(text: &str) -> Option<TopoMatrix> {
    let mut rest = lines(text);
    let header = rest.by_ref().find(is_header)?;
    let mut reader = Reader::new(&header);
    for line in rest {
        reader.line(&line);
    }
    Some(reader.finish())
}

impl TopoMatrix {
    /// Unordered GPU pairs by kind of connection, as `{"NV12": 28}`.
    pub fn gpu_pairs(&self) -> BTreeMap<String, u32> {
        let mut pairs = BTreeMap::new();
        for ((_, second), connection) in &self.connections {
            if *second < self.gpus {
                *pairs.entry(connection.to_string()).or_default() += 1;
            }
        }
        pairs
    }
}

/// A cell of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Itself,
    To(Connection),
}

fn cell(word: &str) -> Option<Cell> {
    let connection = match word {
        "X" => return Some(Cell::Itself),
        "PIX" => Connection::Pix,
        "PXB" => Connection::Pxb,
        "PHB" => Connection::Phb,
        "NODE" => Connection::Node,
        "SYS" => Connection::Sys,
        "SOC" => Connection::Soc,
        "PSB" => Connection::Psb,
        _ => {
            let links = word.strip_prefix("NV")?.parse().ok();
            Connection::Nvlink(links.filter(|links| *links > 0)?)
        }
    };
    Some(Cell::To(connection))
}

/// Cells of `topo -p2p`, a matrix of the same form with another meaning.
fn is_peer_status(word: &str) -> bool {
    ["OK", "CNS", "GNS", "TNS", "NS", "DR", "U"].contains(&word)
}

fn is_gpu(word: &str) -> bool {
    let digits = word.strip_prefix("GPU").unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// A row starts with a device too, but a cell follows it.
fn is_header(line: &Line) -> bool {
    let words = line.words();
    is_gpu(words[0])
        && words
            .get(1)
            .is_none_or(|word| cell(word).is_none() && !is_peer_status(word))
}

/// Names of a header, up to the affinity columns.
fn named<'a>(line: &'a Line) -> impl Iterator<Item = &'a str> {
    let words = line.words().into_iter();
    words.take_while(|word| !["CPU", "NUMA", "GPU"].contains(word))
}

/// A cell with the line that it stands in.
#[derive(Debug, Clone, Copy)]
struct Seen {
    connection: Connection,
    line: usize,
    /// The text ends with it, so its end may be missing.
    is_open: bool,
}

struct Reader {
    matrix: TopoMatrix,
    header_line: usize,
    rows_done: Vec<bool>,
    seen: BTreeMap<(usize, usize), Vec<Seen>>,
    /// Affinity words behind the cells of GPU rows: the most of any ended row.
    affinity_words: usize,
    /// The same of a last row that no line end follows, with its line.
    open_affinity: Option<(usize, usize)>,
    is_lossy: bool,
}

impl Reader {
    fn new(header: &Line) -> Self {
        let mut reader = Self {
            matrix: TopoMatrix::default(),
            header_line: header.number,
            rows_done: Vec::new(),
            seen: BTreeMap::new(),
            affinity_words: 0,
            open_affinity: None,
            is_lossy: false,
        };
        for name in named(header) {
            if reader.matrix.devices.iter().any(|known| known == name) {
                reader.lost(header.number, format!("the header names {name} twice"));
            } else if reader.matrix.devices.len() == DEVICES_LIMIT {
                let what = format!("the header names more than {DEVICES_LIMIT} devices");
                reader.lost(header.number, what);
                break;
            } else {
                reader.matrix.devices.push(name.to_owned());
            }
        }
        let devices = &reader.matrix.devices;
        reader.matrix.gpus = devices.iter().take_while(|name| is_gpu(name)).count();
        reader.matrix.lines = vec![header.number; devices.len()];
        reader.rows_done = vec![false; devices.len()];
        let behind = devices[reader.matrix.gpus..]
            .iter()
            .find(|name| is_gpu(name))
            .cloned();
        if let Some(name) = behind {
            let what = format!("the header names {name} behind other devices, a name may be damaged");
            reader.lost(header.number, what);
        }
        reader
    }

    fn lost(&mut self, line: usize, what: String) {
        self.is_lossy = true;
        self.contradiction(line, what);
    }

    fn contradiction(&mut self, line: usize, what: String) {
        self.matrix.problems.push(Problem { line, what });
    }

    fn line(&mut self, line: &Line) {
        let words = line.words();
        if let [label, name] = words[..]
            && let Some(label) = label.strip_suffix(':')
            && self.matrix.devices.iter().any(|device| device == label)
        {
            self.matrix.nic_names.insert(label.to_owned(), name.to_owned());
            return;
        }
        if is_header(line) {
            let unknown = named(line).find(|name| !self.matrix.devices.iter().any(|known| known == name));
            if let Some(name) = unknown.filter(|name| is_gpu(name)) {
                self.lost(
                    line.number,
                    format!("{name} stands in a header of its own, the table is wrapped"),
                );
            }
            return;
        }
        let Some(row) = self.matrix.devices.iter().position(|name| name == words[0]) else {
            // A legend explains a cell behind an equals sign.
            if cell(words[0]).is_some() && words.get(1) != Some(&"=") {
                let what = format!(
                    "the line starts with a cell, `{}`: the table is wrapped",
                    words[0]
                );
                self.lost(line.number, what);
            } else if !line.is_ended {
                self.cut_row(line);
            }
            return;
        };
        if !words[1..].iter().any(|word| is_peer_status(word)) {
            self.row(row, &words, line);
        }
    }

    /// The text may end within the name of a row.
    fn cut_row(&mut self, line: &Line) {
        let is_cut = |(row, name): (usize, &String)| !self.rows_done[row] && name.starts_with(line.first());
        if self.matrix.devices.iter().enumerate().any(is_cut) {
            self.lost(
                line.number,
                format!("the text ends within the row of {}", line.first()),
            );
        }
    }

    fn row(&mut self, row: usize, words: &[&str], line: &Line) {
        let (count, name, cells) = (self.matrix.devices.len(), words[0], &words[1..]);
        let mut read = Vec::new();
        for (column, word) in cells.iter().take(count).enumerate() {
            match cell(word) {
                Some(Cell::Itself) if column == row => read.push(None),
                Some(Cell::To(connection)) if column != row => read.push(Some(Seen {
                    connection,
                    line: line.number,
                    is_open: !line.is_ended && column + 1 == cells.len(),
                })),
                _ => break,
            }
        }
        let found = read.len();
        let is_longer = found == count && cells.get(count).is_some_and(|word| cell(word).is_some());
        if found < count {
            let next = cells.get(found).copied().unwrap_or("the end of the line");
            let next: String = next.chars().take(24).collect();
            self.lost(
                line.number,
                format!("row {name} has {found} of {count} cells, then `{next}`"),
            );
        } else if is_longer {
            let what = format!("row {name} has more cells than the header has devices");
            self.lost(line.number, what);
        } else {
            self.rows_done[row] = true;
            self.matrix.lines[row] = line.number;
            let behind = cells.len() - count;
            if row < self.matrix.gpus && line.is_ended {
                self.affinity_words = self.affinity_words.max(behind);
            } else if row < self.matrix.gpus {
                self.open_affinity = Some((line.number, behind));
            }
        }
        // Only a row whose X stands below its own name is known to stand under the right header.
        if found > row && !is_longer {
            for (column, seen) in read.into_iter().enumerate() {
                let pair = (row.min(column), row.max(column));
                self.seen.entry(pair).or_default().extend(seen);
            }
        }
    }

    fn finish(mut self) -> TopoMatrix {
        for row in 0..self.rows_done.len() {
            if !self.rows_done[row] {
                let name = &self.matrix.devices[row];
                let what = format!("the header names {name}, but no whole row of it follows");
                self.lost(self.header_line, what);
            }
        }
        if let Some((line, _)) = self
            .open_affinity
            .filter(|(_, words)| *words < self.affinity_words)
        {
            self.lost(line, "the text ends within the affinity columns".to_owned());
        }
        for (pair, seen) in std::mem::take(&mut self.seen) {
            self.settle(pair, &seen);
        }
        self.matrix.problems.sort();
        self.matrix.is_complete = !self.is_lossy;
        self.matrix
    }

    /// Decides on a pair from its cells.
    fn settle(&mut self, pair: (usize, usize), seen: &[Seen]) {
        let Some(first) = seen.first() else {
            return;
        };
        let names = format!(
            "{} to {}",
            self.matrix.devices[pair.0], self.matrix.devices[pair.1]
        );
        if let Some(other) = seen.iter().find(|other| other.connection != first.connection) {
            let (here, there) = (other.connection, first.connection);
            let what = format!("{names} is {here} here and {there} in line {}", first.line);
            self.contradiction(other.line, what);
        } else if let [only] = seen
            && only.is_open
            && matches!(only.connection, Connection::Nvlink(_))
        {
            self.lost(
                only.line,
                format!("the text ends within {names}, its number may go on"),
            );
        } else {
            self.matrix.connections.insert(pair, first.connection);
        }
    }
}

/// The matrix as a dump.
pub(super) fn import(text: &Text) -> Result<Option<Import>, ImportError> {
    let Some(matrix) = read(text.body()) else {
        return Ok(None);
    };
    let mut import = Import::new(Kind::TopoMatrix);
    import.gpus = Some(matrix.gpus as u64);
    import.nics = Some((matrix.devices.len() - matrix.gpus) as u64);
    for (connection, pairs) in matrix.gpu_pairs() {
        import.count(&connection, pairs as usize);
    }
    import.complete = matrix.is_complete;
    for problem in &matrix.problems {
        import.problem(problem.line, problem.what.clone());
    }
    let (gpus, nics) = matrix.devices.split_at(matrix.gpus);
    let host = &mut import.facts.host;
    host.gpus = gpus
        .iter()
        .zip(&matrix.lines)
        .map(|(name, line)| GpuFacts {
            line: *line,
            index: name.strip_prefix("GPU").and_then(|number| number.parse().ok()),
            ..GpuFacts::default()
        })
        .collect();
    host.nics = nics
        .iter()
        .zip(&matrix.lines[matrix.gpus..])
        .map(|(name, line)| NicFacts {
            line: *line,
            name: matrix.nic_names.get(name).unwrap_or(name).clone(),
            ..NicFacts::default()
        })
        .collect();
    let end = |position: usize| match position.checked_sub(matrix.gpus) {
        None => Device::Gpu(position),
        Some(nic) => Device::Nic(nic),
    };
    host.pairs = matrix
        .connections
        .iter()
        .map(|((a, b), connection)| PairFacts {
            line: matrix.lines[*a],
            a: end(*a),
            b: end(*b),
            connection: *connection,
        })
        .collect();
    Ok(Some(import))
}
