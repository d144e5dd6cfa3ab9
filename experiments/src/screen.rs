//! What the user sees: results on stdout as a table or as JSON, talk and progress on stderr.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use infercluster_spec::{Document, json};
use serde::Serialize;

use crate::failure::{self, ClosedPipe};

/// The terminal, or the pipes that stand in for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    json: bool,
}

impl Screen {
    /// A screen that shows results as JSON or as tables.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether results are JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Shows a document: itself as JSON, or what `people` makes of it.
    pub(crate) fn document<T: Document, D: fmt::Display>(
        &self,
        document: &T,
        people: impl FnOnce(&T) -> D,
    ) -> anyhow::Result<()> {
        if self.json {
            self.out(json::write(document))
        } else {
            self.out(people(document))
        }
    }

    /// Shows an answer that is no document of its own, with sorted keys.
    pub(crate) fn answer<T: Serialize, D: fmt::Display>(
        &self,
        answer: &T,
        people: impl FnOnce(&T) -> D,
    ) -> anyhow::Result<()> {
        if self.json {
            self.out(json::write_plain(answer))
        } else {
            self.out(people(answer))
        }
    }

    /// Writes a result to stdout, with a final newline.
    pub(crate) fn out(&self, text: impl fmt::Display) -> anyhow::Result<()> {
        let mut text = text.to_string();
        if !text.ends_with('\n') {
            text.push('\n');
        }
        to_stdout(text.as_bytes())
    }

    /// Tells the user something that is no result.
    pub(crate) fn say(&self, text: impl fmt::Display) {
        // With stderr closed there is nobody to tell, which is no reason to stop.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// The one message of a failed command.
    pub(crate) fn failure(&self, error: &anyhow::Error) {
        self.say(failure::message(error));
    }

    /// A bar of `steps` steps on a terminal, nothing in pipes.
    pub(crate) fn progress(&self, steps: u64, what: &str) -> ProgressBar {
        if !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(steps).with_message(what.to_owned());
        let style = ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {pos}/{len} {elapsed}");
        bar.set_style(style.expect("the template is well-formed").progress_chars("=> "));
        bar.enable_steady_tick(Duration::from_millis(120));
        bar
    }
}

/// Writes to stdout; a reader that went away is [`ClosedPipe`].
pub(crate) fn to_stdout(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ClosedPipe.into()),
        other => other.context("standard output"),
    }
}

/// A table without frames: two spaces between columns, numbers to the right.
#[derive(Debug)]
pub(crate) struct Columns(Table);

impl Columns {
    /// An empty table with these headings; a heading that starts with `>` aligns its column to the right.
    pub(crate) fn new<const N: usize>(headings: [&str; N]) -> Self {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header(headings.map(|heading| heading.trim_start_matches('>')));
        for (index, heading) in headings.iter().enumerate() {
            let column = table.column_mut(index).expect("every heading makes a column");
            column.set_padding((0, 2));
            if heading.starts_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Self(table)
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.add_row(cells);
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for line in self.0.lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Lines of `name  value`, names aligned.
pub(crate) fn facts<'a>(facts: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let facts: Vec<(&str, String)> = facts.into_iter().collect();
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    facts
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_to_the_right() {
        let mut table = Columns::new(["gpu", ">memory"]);
        table.row(["h100".to_owned(), "80 GiB".to_owned()]);
        table.row(["l4".to_owned(), "9 GiB".to_owned()]);
        assert_eq!(table.to_string(), "gpu   memory\nh100  80 GiB\nl4     9 GiB\n");
        assert_eq!(
            facts([("a", "1".to_owned()), ("bcd", "2".to_owned())]),
            "a    1\nbcd  2\n"
        );
    }
}
