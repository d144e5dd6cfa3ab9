//! Labels that GPU feature discovery puts on a node, `nvidia.com/gpu.count=8` a line or after commas.

use std::collections::BTreeMap;

use infercluster_spec::Bytes;

use super::error::ImportError;
use super::facts::NodeFacts;
use super::table::lines;
use super::text::Text;
use super::{Import, Kind};

/// Labels that are looked at.
const LABELS_LIMIT: usize = 4096;

/// Labels of one node with their lines.
#[derive(Debug, Default)]
pub(super) struct Labels(BTreeMap<String, (String, usize)>);

impl Labels {
    /// Notes a label; the first of several with one key stands.
    pub(super) fn put(&mut self, key: &str, value: &str, line: usize) {
        if self.0.len() < LABELS_LIMIT {
            self.0
                .entry(key.to_owned())
                .or_insert_with(|| (value.to_owned(), line));
        }
    }

    fn forget(&mut self, key: &str) {
        self.0.remove(key);
    }

    fn get(&self, keys: &[&str]) -> Option<(&str, usize)> {
        let (value, line) = keys.iter().find_map(|key| self.0.get(*key))?;
        Some((value, *line))
    }

    /// Physical devices, whatever number of replicas they are shared as.
    pub(super) fn count(&self) -> Option<(u64, usize)> {
        let (value, line) = self.get(&[
            "nvidia.com/gpu.count",
            "gpu.intel.com/gpu.count",
            "amd.com/gpu.count",
        ])?;
        Some((value.parse().ok()?, line))
    }

    /// How many times each device is offered.
    pub(super) fn replicas(&self) -> Option<u64> {
        self.get(&["nvidia.com/gpu.replicas"])?.0.parse().ok()
    }

    /// The type, as the driver calls it.
    pub(super) fn product(&self) -> Option<(String, usize)> {
        let keys = [
            "nvidia.com/gpu.product",
            "amd.com/gpu.product-name",
            "gpu.intel.com/product",
        ];
        let (value, line) = self.get(&keys)?;
        let name = value.trim_end_matches("-SHARED");
        // A device in slices is named after their profile as well.
        let name = name.split("-MIG-").next().unwrap_or(name);
        is_plain(name).then(|| (name.to_owned(), line))
    }

    /// Memory of one device; the label counts MiB.
    pub(super) fn memory(&self) -> Option<Bytes> {
        let (value, _) = self.get(&["nvidia.com/gpu.memory"])?;
        Some(Bytes(value.parse::<u64>().ok()?.checked_mul(1 << 20)?))
    }
}

/// Whether a value is one, not a pattern for values.
fn is_plain(value: &str) -> bool {
    !value.is_empty() && !value.contains(['[', ']', '*', '+', '^', '$', '\\', '|', '(', ')', '{', '}'])
}

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(Kind::GfdLabels);
    let mut labels = Labels::default();
    let mut has_signs = false;
    let mut last: Option<String> = None;
    let mut lines_seen: BTreeMap<String, (String, usize)> = BTreeMap::new();
    for line in lines(text.body()) {
        for item in line.text.split([',', ' ', '\t']).filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                if is_key(item) && !line.is_ended && has_signs {
                    import.lost(line.number, format!("the label `{item}` has no value"));
                } else if let Some(last) = last.take().filter(|_| !is_key(item) && line.first() == item) {
                    // The end of a value that a terminal wrapped.
                    labels.forget(&last);
                    import.lost(
                        line.number,
                        format!("the line goes on with {last}, the text is wrapped"),
                    );
                }
                continue;
            };
            let key = key.replace('\\', "");
            if !is_key(&key) {
                continue;
            }
            has_signs = true;
            if value.is_empty() && !key.ends_with(".rev") && !key.ends_with(".revision") {
                import.lost(line.number, format!("{key} has no value"));
            } else if !line.is_ended && line.text.trim_end().ends_with(item) {
                import.lost(line.number, format!("the text ends within {key}"));
            } else if !is_plain(value) && !value.is_empty() {
                import.lost(line.number, format!("{key} is a pattern, `{value}`, not a value"));
            } else {
                let (first, first_line) = lines_seen
                    .entry(key.clone())
                    .or_insert_with(|| (value.to_owned(), line.number));
                if first != value {
                    let what = format!("{key} is {value} here and {first} in line {first_line}");
                    import.problem(line.number, what);
                }
                labels.put(&key, value, line.number);
                last = Some(key);
            }
        }
    }
    if !has_signs {
        return Ok(None);
    }
    let count = labels.count();
    import.gpus = count.map(|(count, _)| count);
    if let Some((count, line)) = count.filter(|(count, _)| (1..=256).contains(count)) {
        import.facts.nodes.push(NodeFacts {
            line,
            names: Vec::new(),
            count: 1,
            gpus: vec![(labels.product().map(|(name, _)| name), count, labels.memory())],
        });
    } else if import.complete {
        import.lost(1, "no label counts the devices");
    }
    Ok(Some(import))
}

fn is_key(key: &str) -> bool {
    let plain = key.replace('\\', "");
    ["nvidia.com/", "amd.com/gpu", "gpu.intel.com/"]
        .iter()
        .any(|domain| plain.starts_with(domain))
}
