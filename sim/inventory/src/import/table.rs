//! The one reader of pasted tables: escape sequences, task labels and quotation marks of mails removed,
//! words cut at any white space, cells at bars, columns found by their headings.

use std::borrow::Cow;

/// Words of one line that are looked at; no table has more columns.
const WORDS_LIMIT: usize = 1024;

/// One line that holds a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line<'a> {
    /// From 1.
    pub(super) number: usize,
    /// The line without its end.
    pub(super) text: Cow<'a, str>,
    /// Whether a line end follows, so that its last word is whole.
    pub(super) is_ended: bool,
}

impl Line<'_> {
    /// Its words.
    pub(super) fn words(&self) -> Vec<&str> {
        self.text.split_whitespace().take(WORDS_LIMIT).collect()
    }

    /// Its first word.
    pub(super) fn first(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or_default()
    }

    /// What stands between bars, trimmed; nothing where the line has none in front.
    pub(super) fn cells(&self) -> Vec<&str> {
        let Some(inner) = self.text.trim().strip_prefix('|') else {
            return Vec::new();
        };
        let inner = inner.strip_suffix('|').unwrap_or(inner);
        inner.split('|').take(WORDS_LIMIT).map(str::trim).collect()
    }

    /// Columns of leading white space, tabs to the next multiple of eight.
    pub(super) fn indent(&self) -> usize {
        let mut columns = 0;
        for letter in self.text.chars() {
            match letter {
                '\t' => columns = (columns / 8 + 1) * 8,
                _ if letter.is_whitespace() => columns += 1,
                _ => break,
            }
        }
        columns
    }

    /// Key and value at the first colon, both trimmed.
    pub(super) fn pair(&self) -> Option<(&str, &str)> {
        let (key, value) = self.text.split_once(':')?;
        Some((key.trim(), value.trim()))
    }
}

/// Every line of the text that holds a word. Where lines carry labels of tasks (`0: `), those of the first
/// label alone, the label removed.
pub(super) fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let own = labelled(text);
    text.split_inclusive('\n')
        .enumerate()
        .filter_map(move |(index, raw)| {
            let is_ended = raw.ends_with('\n');
            let mut plain = without_escapes(raw.trim_end_matches(['\n', '\r']));
            if let Some(own) = own
                && let Some((label, rest)) = label(&plain)
            {
                if label != own {
                    return None;
                }
                plain = Cow::Owned(rest.to_owned());
            }
            (!plain.trim().is_empty()).then_some(Line {
                number: index + 1,
                text: plain,
                is_ended,
            })
        })
}

/// The whole text as `lines` sees it, with as many lines as before; borrowed where that changes nothing.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    let is_plain = |letter: char| !letter.is_control() || letter == '\n' || letter == '\r' || letter == '\t';
    if text.chars().all(is_plain) && labelled(text).is_none() {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut number = 1;
    for line in lines(text) {
        while number < line.number {
            plain.push('\n');
            number += 1;
        }
        plain.push_str(&line.text);
    }
    plain.push('\n');
    Cow::Owned(plain)
}

/// A task label in front of a line, as `srun -l` (`0: `) and `mpirun --tag-output` (`[1,0]<stdout>:`) write.
fn label(line: &str) -> Option<(&str, &str)> {
    let start = line.trim_start();
    if let Some(tagged) = start.strip_prefix('[') {
        let (label, rest) = tagged.split_once("]<stdout>:")?;
        return Some((label, rest));
    }
    let digits = start.bytes().take_while(u8::is_ascii_digit).count();
    let rest = start[digits..]
        .strip_prefix(':')
        .filter(|_| (1..=6).contains(&digits))?;
    (rest.is_empty() || rest.starts_with([' ', '\t'])).then_some((&start[..digits], rest))
}

/// The first label of a text whose first lines are all labelled.
fn labelled(text: &str) -> Option<&str> {
    let mut filled = text.lines().filter(|line| !line.trim().is_empty()).take(3);
    let first = label(filled.next()?)?.0;
    filled.all(|line| label(line).is_some()).then_some(first)
}

/// The first line of another task than the one that is read.
pub(super) fn foreign_label(text: &str) -> Option<(usize, &str)> {
    let own = labelled(text)?;
    text.lines().enumerate().find_map(|(index, line)| {
        let (label, _) = label(line)?;
        (label != own).then_some((index + 1, label))
    })
}

/// The line without terminal control sequences (`ESC [ ... letter`), other control characters, and the
/// marks of quoted mail in front.
fn without_escapes(line: &str) -> Cow<'_, str> {
    let line = line.strip_prefix("> ").unwrap_or(line);
    if !line.chars().any(|letter| letter.is_control() && letter != '\t') {
        return Cow::Borrowed(line);
    }
    let mut plain = String::with_capacity(line.len());
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' {
            if letters.next_if_eq(&'[').is_some() {
                // Parameters run up to the letter that ends the sequence.
                while letters.next_if(|letter| !('@'..='~').contains(letter)).is_some() {}
                letters.next();
            }
        } else if letter.is_whitespace() || !letter.is_control() {
            plain.push(letter);
        }
    }
    Cow::Owned(plain)
}

/// Headings of a table whose cells are single words, with the columns where they start.
#[derive(Debug, Clone)]
pub(super) struct Columns {
    headings: Vec<(String, usize)>,
}

impl Columns {
    /// The headings of a line.
    pub(super) fn of(line: &Line) -> Self {
        let headings = placed(&line.text).map(|(word, column)| (word.to_owned(), column));
        Self {
            headings: headings.collect(),
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.headings.len()
    }

    /// The position of a heading.
    pub(super) fn position(&self, heading: &str) -> Option<usize> {
        self.headings.iter().position(|(own, _)| own == heading)
    }

    /// The cells of a row: in order where there is a word for each heading; else by the column where each
    /// word starts, `None` where two words claim one column.
    pub(super) fn cells<'a>(&self, line: &'a Line) -> Option<Vec<Option<&'a str>>> {
        let words: Vec<(&str, usize)> = placed(&line.text).collect();
        if words.len() == self.headings.len() {
            return Some(words.into_iter().map(|(word, _)| Some(word)).collect());
        }
        let mut cells = vec![None; self.headings.len()];
        for (word, column) in words {
            let below = self.headings.iter().rposition(|(_, start)| *start <= column)?;
            if cells[below].replace(word).is_some() {
                return None;
            }
        }
        Some(cells)
    }
}

/// Words with the column that each starts in.
fn placed(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let mut column = 0;
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(|letter: char| !letter.is_whitespace())?;
        column += rest[..start].chars().count();
        rest = &rest[start..];
        let length = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        let own = column;
        column += word.chars().count();
        rest = after;
        Some((word, own))
    })
    .take(WORDS_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_colours_and_line_ends() {
        let text = "\t\u{1b}[4mGPU0\tCPU Affinity\u{1b}[0m\r\n\n X \u{7} NV12";
        let found: Vec<Line> = lines(text).collect();
        assert_eq!(found[0].words(), ["GPU0", "CPU", "Affinity"]);
        assert_eq!((found[1].number, found[1].is_ended), (3, false));
        assert_eq!(found[1].words(), ["X", "NV12"]);
    }

    #[test]
    fn labels_of_tasks_go_and_other_tasks_are_named() {
        let text = "0: GPU 0: a\n0: \n0: GPU 1: b\n1: GPU 0: c\n";
        let found: Vec<String> = lines(text).map(|line| line.text.trim().to_owned()).collect();
        assert_eq!(found, ["GPU 0: a", "GPU 1: b"]);
        assert_eq!(foreign_label(text), Some((4, "1")));
        assert_eq!(lines("[1,0]<stdout>:x\n").next().unwrap().text, "x");
    }

    #[test]
    fn cells_stand_under_their_headings() {
        let header = "NODELIST  GRES   CPUS";
        let head = lines(header).next().unwrap();
        let columns = Columns::of(&head);
        let cells = |text: &str| {
            let line = lines(text).next().unwrap();
            columns.cells(&line).map(|cells| {
                cells
                    .into_iter()
                    .map(|cell| cell.map(str::to_owned))
                    .collect::<Vec<_>>()
            })
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            cells("a1 gpu:2 8"),
            Some(vec![some("a1"), some("gpu:2"), some("8")])
        );
        assert_eq!(
            cells("a1               8"),
            Some(vec![some("a1"), None, some("8")])
        );
        assert_eq!(cells("a1 b2"), None);
    }
}
