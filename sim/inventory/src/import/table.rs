//! Lines of a pasted table: escape sequences removed, words cut at any white space.

/// One line that holds a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// From 1.
    pub(super) number: usize,
    pub(super) words: Vec<String>,
    /// Whether a line end follows, so that its last word is whole.
    pub(super) is_ended: bool,
}

/// Every line of the text that holds a word.
pub(super) fn lines(text: &str) -> impl Iterator<Item = Line> {
    text.split_inclusive('\n').enumerate().filter_map(|(index, raw)| {
        let plain = without_escapes(raw);
        let words: Vec<String> = plain.split_whitespace().map(str::to_owned).collect();
        (!words.is_empty()).then(|| Line {
            number: index + 1,
            words,
            is_ended: raw.ends_with('\n'),
        })
    })
}

/// The line without terminal control sequences (`ESC [ ... letter`) and other control characters.
fn without_escapes(line: &str) -> String {
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
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_colours_and_line_ends() {
        let text = "\t\u{1b}[4mGPU0\tCPU Affinity\u{1b}[0m\r\n\n X \u{7} NV12";
        let found: Vec<Line> = lines(text).collect();
        assert_eq!(found[0].words, ["GPU0", "CPU", "Affinity"]);
        assert_eq!((found[1].number, found[1].is_ended), (3, false));
        assert_eq!(found[1].words, ["X", "NV12"]);
    }
}
