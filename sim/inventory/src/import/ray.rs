//! `ray status`: what the whole cluster has, `used/total` a line, and its nodes where the list is there.

use super::error::ImportError;
use super::facts::NodeFacts;
use super::table::{Line, lines};
use super::text::Text;
use super::{Import, Kind};

/// Nodes of one cluster.
const NODES_LIMIT: u64 = 65_536;

struct Reader {
    import: Import,
    /// Devices in use and in all, with the line.
    gpus: Option<(u64, usize)>,
    /// Types and how often their marker resource is there, one on each node.
    types: Vec<(String, u64, usize)>,
    has_signs: bool,
    /// Whether the last resource of the totals was read.
    has_end: bool,
    nodes: u64,
    /// Whether active nodes are being listed.
    is_in_nodes: bool,
    /// Whether the totals are over: resources of single nodes follow.
    is_past_totals: bool,
    demands: bool,
}

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut reader = Reader {
        import: Import::new(Kind::RayStatus),
        gpus: None,
        types: Vec::new(),
        has_signs: false,
        has_end: false,
        nodes: 0,
        is_in_nodes: false,
        is_past_totals: false,
        demands: false,
    };
    let mut last_line = 0;
    let mut has_usage = false;
    for line in lines(text.body()) {
        last_line = line.number;
        let plain = line.text.trim();
        has_usage |= plain.ends_with("Usage:") || plain.contains("Autoscaler status");
        reader.line(&line);
    }
    if !has_usage || !reader.has_signs {
        return Ok(None);
    }
    Ok(Some(reader.finish(last_line)))
}

impl Reader {
    fn line(&mut self, line: &Line) {
        let plain = line.text.trim();
        if plain.starts_with("Active:") {
            self.is_in_nodes = true;
        } else if ["Idle:", "Pending:", "Recent failures:", "Resources"]
            .iter()
            .any(|word| plain.starts_with(word))
        {
            // Idle nodes are there too.
            self.is_in_nodes = plain.starts_with("Idle:");
        } else if plain.contains("Demands:") || plain.contains("Constraints:") {
            self.demands = true;
        } else if plain.starts_with("Node:") {
            self.is_past_totals = true;
        } else if self.is_in_nodes {
            let count = line.first().parse::<u64>().unwrap_or(0);
            self.nodes = self.nodes.saturating_add(count).min(NODES_LIMIT);
        } else if !self.demands && !self.is_past_totals {
            self.resource(line);
        }
    }

    /// `5.0/8.0 GPU`, `0.0/5.0 accelerator_type:T4`.
    fn resource(&mut self, line: &Line) {
        let words = line.words();
        if self.has_signs && !self.has_end && words.first().is_some_and(|word| !word.contains('/')) {
            // What a terminal wrapped belongs to the line above.
            self.types.pop();
            return self.import.lost(
                line.number,
                format!("the line starts with `{}`, it may be wrapped", line.first()),
            );
        }
        let [amounts, name, ..] = words[..] else {
            if words.first().is_some_and(|word| word.contains('/')) && !line.is_ended && self.has_signs {
                self.import.lost(line.number, "the line is cut");
            }
            return;
        };
        let Some((used, total)) = amounts.split_once('/') else {
            return;
        };
        let number = |text: &str| {
            text.parse::<f64>()
                .ok()
                .filter(|value| (0.0..=1e7).contains(value))
        };
        if name == "CPU" || name == "memory" || name == "object_store_memory" {
            self.has_signs = true;
            self.has_end |= name == "object_store_memory";
        }
        let Some((used, total)) = number(used).zip(number(total)) else {
            return;
        };
        let whole = total.round() as u64;
        if let Some(name) = name.strip_prefix("accelerator_type:") {
            if !line.is_ended && words.len() == 2 {
                return self
                    .import
                    .lost(line.number, "the text ends within the name of a type");
            }
            self.types.push((name.to_owned(), whole, line.number));
        } else if name == "GPU" {
            self.has_signs = true;
            if used > total {
                self.import
                    .problem(line.number, format!("{used} devices are used of {total}"));
            }
            match self.gpus {
                None => self.gpus = Some((whole, line.number)),
                Some((known, first)) if known != whole => {
                    self.import.problem(
                        line.number,
                        format!("{whole} devices here, {known} in line {first}"),
                    );
                }
                Some(_) => {}
            }
        }
    }

    fn finish(self, last_line: usize) -> Import {
        let mut import = self.import;
        if !self.has_end {
            import.lost(last_line, "the totals end without object_store_memory");
        }
        let Some((gpus, line)) = self.gpus else {
            import.gpus = Some(0);
            import.problem(last_line, "no line counts GPUs");
            return import;
        };
        import.gpus = Some(gpus);
        // Each node has one marker of each type on it, so markers count nodes.
        let marked: u64 = self
            .types
            .iter()
            .fold(0, |sum, (_, count, _)| sum.saturating_add(*count));
        let nodes = if marked > 0 { marked } else { self.nodes };
        if nodes > NODES_LIMIT || (nodes > 0 && gpus % nodes != 0) {
            let what = format!("{gpus} devices on {nodes} nodes: how many each has is not said");
            import.problem(line, what);
            return import;
        }
        let marks: Vec<(Option<String>, u64, usize)> = if marked > 0 {
            self.types
                .into_iter()
                .map(|(name, count, line)| (Some(name), count, line))
                .collect()
        } else {
            vec![(None, nodes, line)]
        };
        for (name, count, line) in marks.into_iter().filter(|(_, count, _)| *count > 0) {
            import.facts.nodes.push(NodeFacts {
                line,
                names: Vec::new(),
                count,
                gpus: vec![(name, gpus / nodes, None)],
            });
        }
        import
    }
}
