//! `sinfo` with a GRES column, and node records: `scontrol show node` or node lines of `slurm.conf`.

use std::collections::BTreeMap;

use super::error::ImportError;
use super::facts::NodeFacts;
use super::host_list::{self, Fault, HOSTS_LIMIT};
use super::table::{Columns, Line, lines};
use super::text::Text;
use super::{Import, Kind};

/// Headings of `sinfo`; two of them make a table one.
const HEADINGS: [&str; 16] = [
    "NODELIST",
    "GRES",
    "CPUS",
    "MEMORY",
    "PARTITION",
    "STATE",
    "NODES",
    "AVAIL",
    "TIMELIMIT",
    "HOSTNAMES",
    "AVAIL_FEATURES",
    "FEATURES",
    "ACTIVE_FEATURES",
    "GRES_USED",
    "CPUS(A/I/O/T)",
    "S:C:T",
];
/// Devices of one node.
const GPUS_PER_NODE_LIMIT: u64 = 256;

/// Last words of rows that an open one is held against.
const WORDS_KEPT: usize = 64;

/// Devices of a node: type and count.
type Gpus = Vec<(Option<String>, u64)>;

/// Puts nodes together that several partitions list.
#[derive(Default)]
struct Nodes {
    found: Vec<NodeFacts>,
    /// Group and line of every name.
    by_name: BTreeMap<String, (usize, usize)>,
}

impl Nodes {
    fn add(&mut self, names: Vec<String>, gpus: &Gpus, line: usize, import: &mut Import) {
        let group = self.found.len();
        let mut new = Vec::new();
        for name in names {
            let Some((known, first)) = self.by_name.get(&name) else {
                self.by_name.insert(name.clone(), (group, line));
                new.push(name);
                continue;
            };
            let same = self.found.get(*known).is_none_or(|known| {
                let own = known.gpus.iter().map(|(name, count, _)| (name, count));
                own.eq(gpus.iter().map(|(name, count)| (name, count)))
            });
            if !same {
                import.problem(line, format!("{name} has other devices in line {first}"));
            }
        }
        if !new.is_empty() {
            self.found.push(NodeFacts {
                line,
                count: new.len() as u64,
                names: new,
                gpus: gpus
                    .iter()
                    .map(|(name, count)| (name.clone(), *count, None))
                    .collect(),
            });
        }
    }

    fn finish(self, mut import: Import, tells_gpus: bool) -> Import {
        let each = |node: &NodeFacts| {
            node.gpus
                .iter()
                .fold(0, |sum, (_, count, _)| count.saturating_add(sum))
        };
        let total = self.found.iter().fold(0_u64, |sum, node| {
            sum.saturating_add(node.count.saturating_mul(each(node)))
        });
        import.gpus = tells_gpus.then_some(total);
        import.facts.nodes = self.found;
        import
    }
}

/// `sinfo` in any choice of columns.
pub(super) fn sinfo(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut rest = lines(text.body());
    let is_header = |line: &Line| {
        let words = line.words();
        let known = words.iter().filter(|word| HEADINGS.contains(word)).count();
        known >= 2 && (words.contains(&"NODELIST") || words.contains(&"GRES") || words.contains(&"HOSTNAMES"))
    };
    let Some(header) = rest.by_ref().find(&is_header) else {
        return Ok(None);
    };
    let columns = Columns::of(&header);
    let mut import = Import::new(Kind::SlurmSinfo);
    let mut nodes = Nodes::default();
    let gres_column = columns.position("GRES");
    let mut rows = 0;
    let mut last_words: Vec<String> = Vec::new();
    for line in rest {
        if is_header(&line) || line.text.contains("$ ") {
            continue;
        }
        let last = line.text.split_whitespace().next_back().unwrap_or_default();
        if !line.is_ended && is_shorter(last, &last_words) {
            import.lost(line.number, format!("the text ends within `{}`", shown(last)));
            continue;
        }
        if last_words.len() < WORDS_KEPT {
            last_words.push(last.to_owned());
        }
        rows += usize::from(row(&line, &columns, &mut nodes, &mut import, text)?);
    }
    if gres_column.is_none() {
        import.problem(header.number, "there is no GRES column, give sinfo -o \"%N %G\"");
    }
    if rows == 0 {
        import.lost(header.number, "no row follows the header");
    }
    Ok(Some(nodes.finish(import, gres_column.is_some())))
}

/// Whether the last word of a text without a final line end is shorter than those of all rows above, or the
/// beginning of one: then it is cut.
fn is_shorter(word: &str, above: &[String]) -> bool {
    let is_beginning = above
        .iter()
        .any(|other| other.len() > word.len() && other.starts_with(word));
    is_beginning || !above.is_empty() && above.iter().all(|other| other.len() > word.len())
}

fn row(
    line: &Line,
    columns: &Columns,
    nodes: &mut Nodes,
    import: &mut Import,
    text: &Text,
) -> Result<bool, ImportError> {
    let Some(cells) = columns.cells(line) else {
        import.lost(
            line.number,
            format!("the row does not stand under the {} columns", columns.len()),
        );
        return Ok(false);
    };
    let cell = |heading: &str| columns.position(heading).and_then(|at| cells[at]);
    let last = cells.iter().rposition(Option::is_some);
    if cells.last() == Some(&None) && !line.is_ended {
        let filled = last.map_or(0, |last| last + 1);
        import.lost(
            line.number,
            format!("the row has {filled} of {} columns", columns.len()),
        );
        // Its last cell may be cut, and a shorter count of devices would be wrong.
        return Ok(false);
    }
    let list = cell("NODELIST").or_else(|| cell("HOSTNAMES"));
    let gpus = match cell("GRES") {
        Some(word) => match gres(word) {
            Some(gpus) => gpus,
            None => {
                import.lost(line.number, format!("`{}` is no list of devices", shown(word)));
                return Ok(true);
            }
        },
        None => Vec::new(),
    };
    if columns.position("GRES").is_some() && cell("GRES").is_none() {
        import.lost(line.number, "the row has no GRES cell");
        return Ok(true);
    }
    let names = match list {
        Some(list) if HEADINGS.contains(&list) => {
            import.lost(
                line.number,
                "the header goes on in this line, the table is wrapped",
            );
            return Ok(true);
        }
        Some(list) => match host_list::expand(list) {
            Ok(names) => names,
            Err(Fault::TooMany) => return Err(text.too_many(line.number, "hosts", HOSTS_LIMIT)),
            Err(Fault::Malformed) => {
                import.lost(
                    line.number,
                    format!("`{}` is no list of hosts, it may be cut", shown(list)),
                );
                return Ok(true);
            }
        },
        None => return unnamed(line, cell("NODES"), &gpus, nodes, import, text),
    };
    if nodes.by_name.len() as u64 + names.len() as u64 > HOSTS_LIMIT {
        return Err(text.too_many(line.number, "hosts", HOSTS_LIMIT));
    }
    let stated = cell("NODES").and_then(|count| count.split('/').next()?.parse::<u64>().ok());
    if let Some(count) = stated.filter(|count| *count != names.len() as u64) {
        let what = format!("{count} nodes are stated, the list names {}", names.len());
        import.problem(line.number, what);
    }
    nodes.add(names, &gpus, line.number, import);
    Ok(true)
}

/// A row that counts nodes without naming them.
fn unnamed(
    line: &Line,
    count: Option<&str>,
    gpus: &Gpus,
    nodes: &mut Nodes,
    import: &mut Import,
    text: &Text,
) -> Result<bool, ImportError> {
    let Some(count) = count.and_then(|count| count.parse::<u64>().ok()) else {
        import.lost(line.number, "the row names no node and says no number of them");
        return Ok(true);
    };
    if count > HOSTS_LIMIT {
        return Err(text.too_many(line.number, "hosts", HOSTS_LIMIT));
    }
    nodes.found.push(NodeFacts {
        line: line.number,
        names: Vec::new(),
        count,
        gpus: gpus
            .iter()
            .map(|(name, count)| (name.clone(), *count, None))
            .collect(),
    });
    Ok(true)
}

fn shown(word: &str) -> String {
    word.chars().take(40).collect()
}

/// `gpu:v100:4(S:0-1),gpu:a100:2,shard:8`: the devices of it; `None` where a part breaks off.
fn gres(word: &str) -> Option<Gpus> {
    if ["(null)", "N/A", "none", "(none)"].contains(&word) {
        return Some(Vec::new());
    }
    let mut gpus = Gpus::new();
    for item in outside_brackets(word)? {
        let plain = item.split('(').next().unwrap_or_default();
        let parts: Vec<&str> = plain.split(':').collect();
        // Slices of devices are named after their profile, such as `1g.10gb`.
        let is_slice = |name: &str| name.contains("g.") && name.ends_with("gb");
        if !parts[0].starts_with(|letter: char| letter.is_ascii_alphabetic()) {
            return None;
        }
        match parts[..] {
            ["gpu"] => gpus.push((None, 1)),
            ["gpu", count] if count.parse::<u64>().is_ok() => gpus.push((None, count.parse().ok()?)),
            ["gpu", name, count] if !is_slice(name) => {
                gpus.push((Some(name.to_owned()), count.parse().ok()?))
            }
            ["gpu", name] if !is_slice(name) => gpus.push((Some(name.to_owned()), 1)),
            _ => {}
        }
    }
    gpus.retain(|(_, count)| *count > 0);
    let total = gpus
        .iter()
        .fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
    (total <= GPUS_PER_NODE_LIMIT).then_some(gpus)
}

/// Cuts at commas outside parentheses; `None` where one is not closed.
fn outside_brackets(word: &str) -> Option<Vec<&str>> {
    let mut items = Vec::new();
    let (mut start, mut depth) = (0, 0_u32);
    for (position, letter) in word.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                items.push(&word[start..position]);
                start = position + 1;
            }
            _ => {}
        }
    }
    items.push(&word[start..]);
    (depth == 0).then_some(items)
}

/// `scontrol show node`, one line or many for each node, and `NodeName=` lines of `slurm.conf`.
pub(super) fn nodes(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(Kind::SlurmNode);
    let mut nodes = Nodes::default();
    let mut open: Option<Record> = None;
    for line in lines(text.body()) {
        let words = line.words();
        for (position, word) in words.iter().enumerate() {
            let Some((key, value)) = word.split_once('=') else {
                continue;
            };
            let is_open = !line.is_ended && position + 1 == words.len();
            match key {
                "NodeName" if is_open => {
                    close(open.take(), &mut nodes, &mut import, text)?;
                    import.lost(line.number, "the text ends within the name of a node");
                }
                "NodeName" if value != "DEFAULT" => {
                    close(open.take(), &mut nodes, &mut import, text)?;
                    open = Some(Record::new(value, line.number));
                }
                "Gres" => {
                    if let Some(record) = &mut open {
                        record.is_told = true;
                        match gres(value).filter(|_| !is_open) {
                            Some(gpus) => record.gpus = gpus,
                            None => {
                                import.lost(line.number, format!("`{}` is no list of devices", shown(value)))
                            }
                        }
                    }
                }
                "Arch" | "CPUAlloc" => {
                    if let Some(record) = &mut open {
                        record.is_shown = true;
                    }
                }
                "CfgTRES" if !is_open => {
                    if let Some(record) = &mut open {
                        record.has_configured = true;
                        record.configured = configured(value).map(|count| (count, line.number));
                    }
                }
                _ => {}
            }
        }
    }
    if open.is_none() && nodes.found.is_empty() && import.complete {
        return Ok(None);
    }
    close(open, &mut nodes, &mut import, text)?;
    Ok(Some(nodes.finish(import, true)))
}

struct Record {
    list: String,
    line: usize,
    gpus: Gpus,
    is_told: bool,
    /// Whether `scontrol` printed it, which ends each record with `CfgTRES`.
    is_shown: bool,
    has_configured: bool,
    /// Devices that `CfgTRES` counts, with its line.
    configured: Option<(u64, usize)>,
}

impl Record {
    fn new(list: &str, line: usize) -> Self {
        Self {
            list: list.to_owned(),
            line,
            gpus: Vec::new(),
            is_told: false,
            is_shown: false,
            has_configured: false,
            configured: None,
        }
    }
}

/// `cpu=40,mem=192G,gres/gpu=4,gres/gpu:v100=4`.
fn configured(value: &str) -> Option<u64> {
    value
        .split(',')
        .find_map(|item| item.strip_prefix("gres/gpu=")?.parse().ok())
}

fn close(
    record: Option<Record>,
    nodes: &mut Nodes,
    import: &mut Import,
    text: &Text,
) -> Result<(), ImportError> {
    let Some(record) = record else {
        return Ok(());
    };
    let names = match host_list::expand(&record.list) {
        Ok(names) => names,
        Err(Fault::TooMany) => return Err(text.too_many(record.line, "hosts", HOSTS_LIMIT)),
        Err(Fault::Malformed) => {
            import.lost(
                record.line,
                format!("`{}` is no list of hosts", shown(&record.list)),
            );
            return Ok(());
        }
    };
    if nodes.by_name.len() as u64 + names.len() as u64 > HOSTS_LIMIT {
        return Err(text.too_many(record.line, "hosts", HOSTS_LIMIT));
    }
    let listed = record.gpus.iter().fold(0, |sum, (_, count)| sum + count);
    if let Some((count, line)) = record
        .configured
        .filter(|(count, _)| record.is_told && *count != listed)
    {
        let what = format!(
            "{} has {listed} devices by Gres and {count} by CfgTRES",
            shown(&record.list)
        );
        import.problem(line, what);
    }
    if record.is_shown && !record.has_configured {
        let what = format!("the record of {} ends before its CfgTRES", shown(&record.list));
        import.lost(record.line, what);
    } else if !record.is_told {
        import.problem(
            record.line,
            format!("{} does not say its Gres", shown(&record.list)),
        );
    }
    nodes.add(names, &record.gpus, record.line, import);
    Ok(())
}
