//! `nvidia-smi topo -m`: which devices of a host reach each other over what.
//!
//! A matrix starts with a header that names GPUs and NICs; a row repeats its name and has a cell for each
//! of them. Affinity columns behind the cells are not read. Each pair stands there twice: where both cells
//! are there they must agree, and a pair whose cells do not is a problem, never a link.

use std::collections::BTreeMap;
use std::fmt;

use super::Problem;
use super::table::{Line, lines};

/// How two devices of a host are connected, closest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Connection {
    /// A bond of so many NVLinks.
    Nvlink(u32),
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
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Nvlink(links) => write!(f, "NV{links}"),
            Self::Pix => f.write_str("PIX"),
            Self::Pxb => f.write_str("PXB"),
            Self::Phb => f.write_str("PHB"),
            Self::Node => f.write_str("NODE"),
            Self::Sys => f.write_str("SYS"),
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
    Some(reader.finish(header.number))
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
    let after = line.words.get(1).map(String::as_str);
    is_gpu(&line.words[0]) && after.is_none_or(|word| cell(word).is_none() && !is_peer_status(word))
}

/// Names of a header, up to the affinity columns.
fn named(line: &Line) -> impl Iterator<Item = &String> {
    line.words
        .iter()
        .take_while(|word| !["CPU", "NUMA", "GPU"].contains(&word.as_str()))
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
    rows_done: Vec<bool>,
    seen: BTreeMap<(usize, usize), Vec<Seen>>,
}

impl Reader {
    fn new(header: &Line) -> Self {
        let mut devices: Vec<String> = Vec::new();
        let mut problems = Vec::new();
        for name in named(header) {
            if devices.contains(name) {
                problems.push(problem(header.number, format!("the header names {name} twice")));
            } else {
                devices.push(name.clone());
            }
        }
        let gpus = devices.iter().filter(|name| is_gpu(name)).count();
        Self {
            rows_done: vec![false; devices.len()],
            matrix: TopoMatrix {
                devices,
                gpus,
                problems,
                ..TopoMatrix::default()
            },
            seen: BTreeMap::new(),
        }
    }

    fn line(&mut self, line: &Line) {
        if let [label, name] = &line.words[..]
            && let Some(label) = label.strip_suffix(':')
            && self.matrix.devices.iter().any(|device| device == label)
        {
            self.matrix.nic_names.insert(label.to_owned(), name.clone());
            return;
        }
        let position = self.matrix.devices.iter().position(|name| *name == line.words[0]);
        let (Some(row), false) = (position, is_header(line)) else {
            return;
        };
        if !line.words[1..].iter().any(|word| is_peer_status(word)) {
            self.row(row, line);
        }
    }

    fn row(&mut self, row: usize, line: &Line) {
        let (count, name) = (self.matrix.devices.len(), &line.words[0]);
        let cells = &line.words[1..];
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
            let what = format!(
                "row {name} has {found} of {count} cells, then `{}`",
                cells.get(found).map_or("the end of the line", String::as_str)
            );
            self.matrix.problems.push(problem(line.number, what));
        } else if is_longer {
            let what = format!("row {name} has more cells than the header has devices");
            self.matrix.problems.push(problem(line.number, what));
        } else {
            self.rows_done[row] = true;
        }
        // Only a row whose X stands below its own name is known to stand under the right header.
        if found > row && !is_longer {
            for (column, seen) in read.into_iter().enumerate() {
                let pair = (row.min(column), row.max(column));
                self.seen.entry(pair).or_default().extend(seen);
            }
        }
    }

    fn finish(mut self, header_line: usize) -> TopoMatrix {
        for (row, _) in self.rows_done.iter().enumerate().filter(|(_, done)| !**done) {
            let name = &self.matrix.devices[row];
            let what = format!("the header names {name}, but no whole row of it follows");
            self.matrix.problems.push(problem(header_line, what));
        }
        for (pair, seen) in &self.seen {
            let Some(first) = seen.first() else {
                continue;
            };
            let names = || {
                format!(
                    "{} to {}",
                    self.matrix.devices[pair.0], self.matrix.devices[pair.1]
                )
            };
            if let Some(other) = seen.iter().find(|other| other.connection != first.connection) {
                let what = format!(
                    "{} is {} here and {} in line {}",
                    names(),
                    other.connection,
                    first.connection,
                    first.line
                );
                self.matrix.problems.push(problem(other.line, what));
            } else if let [only] = seen[..]
                && only.is_open
                && matches!(only.connection, Connection::Nvlink(_))
            {
                let what = format!("the text ends within {}, its number may go on", names());
                self.matrix.problems.push(problem(only.line, what));
            } else {
                self.matrix.connections.insert(*pair, first.connection);
            }
        }
        self.matrix.problems.sort();
        self.matrix.is_complete = self.matrix.problems.is_empty();
        self.matrix
    }
}

fn problem(line: usize, what: String) -> Problem {
    Problem { line, what }
}
