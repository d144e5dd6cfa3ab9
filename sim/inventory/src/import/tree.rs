//! JSON and YAML as one tree with lines, as far as it is there: where the text breaks off, what was read
//! so far is kept.

use super::error::ImportError;
use super::text::Text;

/// Values of one file; a tree of so many takes less than 40 MB.
const VALUES_LIMIT: usize = 250_000;
/// Levels; no dump comes near.
const DEPTH_LIMIT: usize = 48;
/// Parts of a node's status that are long and say nothing about devices.
const SKIPPED: [&str; 4] = ["managedFields", "images", "conditions", "filesystem"];

/// A value with the line that it starts in.
#[derive(Debug, PartialEq)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) value: Value,
}

/// Scalars stay text: whether a count is quoted differs from tool to tool.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    pub(super) fn line(&self) -> usize {
        self.line as usize
    }

    /// The value of a key; the first where it stands twice.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.entries()
            .iter()
            .find(|(own, _)| own == key)
            .map(|(_, node)| node)
    }

    pub(super) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn count(&self) -> Option<u64> {
        self.text()?.parse().ok()
    }

    pub(super) fn entries(&self) -> &[(String, Node)] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    pub(super) fn list(&self) -> Option<&[Node]> {
        match &self.value {
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// Keys of a map, for a message.
    pub(super) fn keys(&self) -> String {
        let keys: Vec<String> = self
            .entries()
            .iter()
            .take(8)
            .map(|(key, _)| key.chars().take(24).collect())
            .collect();
        if keys.is_empty() {
            "a value without keys".to_owned()
        } else {
            format!("keys {}", keys.join(", "))
        }
    }
}

/// Everything of a file.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) roots: Vec<Node>,
    /// Where and why reading stopped early.
    pub(super) cut: Option<(usize, String)>,
}

/// Puts a tree together from events.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    text: &'a Text<'a>,
    open: Vec<Open>,
    roots: Vec<Node>,
    values: usize,
    /// Levels inside a skipped value; zero before it starts.
    skipped: Option<usize>,
}

#[derive(Debug)]
struct Open {
    node: Node,
    key: Option<(String, usize)>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(text: &'a Text<'a>) -> Self {
        Self {
            text,
            open: Vec::new(),
            roots: Vec::new(),
            values: 0,
            skipped: None,
        }
    }

    /// Values so far.
    pub(super) fn values(&self) -> usize {
        self.values
    }

    /// Whether the next scalar of a map is a key; a list and the top have none.
    pub(super) fn wants_key(&self) -> bool {
        let last = self.open.last();
        self.skipped.is_none()
            && last.is_some_and(|open| matches!(open.node.value, Value::Map(_)) && open.key.is_none())
    }

    pub(super) fn key(&mut self, line: usize, key: String) {
        if SKIPPED.contains(&key.as_str()) {
            self.skipped = Some(0);
        } else if let Some(open) = self.open.last_mut() {
            open.key = Some((key, line));
        }
    }

    pub(super) fn start(&mut self, line: usize, value: Value) -> Result<(), ImportError> {
        if let Some(levels) = &mut self.skipped {
            *levels += 1;
            return Ok(());
        }
        self.admit(line)?;
        if self.open.len() >= DEPTH_LIMIT {
            return Err(ImportError::TooDeep {
                file: self.text.name().to_owned(),
                line,
                limit: DEPTH_LIMIT,
            });
        }
        let line = line as u32;
        let node = Node { line, value };
        self.open.push(Open { node, key: None });
        Ok(())
    }

    pub(super) fn end(&mut self) {
        if let Some(levels) = self.skipped {
            self.skipped = levels.checked_sub(1).filter(|levels| *levels > 0);
        } else if let Some(open) = self.open.pop() {
            self.put(open.node);
        }
    }

    pub(super) fn scalar(&mut self, line: usize, value: Value) -> Result<(), ImportError> {
        if let Some(levels) = self.skipped {
            self.skipped = Some(levels).filter(|levels| *levels > 0);
            return Ok(());
        }
        self.admit(line)?;
        // A reader may be past the line end before it tells of a number; the key's line is sure.
        let key_line = self
            .open
            .last()
            .and_then(|open| open.key.as_ref())
            .map(|(_, line)| *line);
        let line = key_line.unwrap_or(line) as u32;
        self.put(Node { line, value });
        Ok(())
    }

    fn admit(&mut self, line: usize) -> Result<(), ImportError> {
        self.values += 1;
        if self.values > VALUES_LIMIT {
            return Err(self.text.too_many(line, "values", VALUES_LIMIT as u64));
        }
        Ok(())
    }

    fn put(&mut self, node: Node) {
        match self.open.last_mut() {
            None => self.roots.push(node),
            Some(Open { node: parent, key }) => match &mut parent.value {
                Value::List(items) => items.push(node),
                Value::Map(entries) => {
                    if let Some((key, _)) = key.take() {
                        entries.push((key, node));
                    }
                }
                Value::Null | Value::Scalar(_) => {}
            },
        }
    }

    /// Drops the last scalar, which may be cut: the rightmost leaf.
    pub(super) fn forget_last(&mut self) {
        let mut at = match self.open.last_mut() {
            Some(open) => Some(&mut open.node),
            None => self.roots.last_mut(),
        };
        while let Some(node) = at {
            if let Value::Scalar(_) = node.value {
                node.value = Value::Null;
                return;
            }
            at = match &mut node.value {
                Value::List(items) => items.last_mut(),
                Value::Map(entries) => entries.last_mut().map(|(_, node)| node),
                Value::Null | Value::Scalar(_) => None,
            };
        }
    }

    /// The trees, open ones closed where they stand.
    pub(super) fn finish(mut self, cut: Option<(usize, String)>) -> Document {
        self.skipped = None;
        while !self.open.is_empty() {
            self.end();
        }
        Document {
            roots: self.roots,
            cut,
        }
    }
}
