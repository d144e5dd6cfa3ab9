//! Python writes `Infinity`, `-Infinity` and `NaN` into JSON; JSON has no such words.
//!
//! They become texts, so that the file can be read and a field that needs a number still refuses them.

use std::borrow::Cow;

const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// The same text with bare non-finite words in quotes; line and column of everything before one stay.
pub(crate) fn quote_non_finite(text: &str) -> Cow<'_, str> {
    if !WORDS.iter().any(|word| text.contains(word)) {
        return Cow::Borrowed(text);
    }
    let mut quoted = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(position) = rest.find(['"', 'I', 'N', '-']) {
        quoted.push_str(&rest[..position]);
        rest = &rest[position..];
        let taken = if rest.starts_with('"') {
            string_length(rest)
        } else if let Some(word) = WORDS.iter().find(|word| rest.starts_with(**word)) {
            quoted.push('"');
            quoted.push_str(word);
            quoted.push('"');
            rest = &rest[word.len()..];
            continue;
        } else {
            1
        };
        quoted.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    quoted.push_str(rest);
    Cow::Owned(quoted)
}

/// Length of the JSON string that `text` starts with, both quotes included; all of it where it never ends.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (position, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return position + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_words_are_quoted() {
        let check = |text: &str, expected: &str| assert_eq!(quote_non_finite(text), expected);
        check(r#"{"a": [0.0, Infinity]}"#, r#"{"a": [0.0, "Infinity"]}"#);
        check(r#"[-Infinity,NaN, -1]"#, r#"["-Infinity","NaN", -1]"#);
        check(
            r#"["NaN", "a \" Infinity", NaN]"#,
            r#"["NaN", "a \" Infinity", "NaN"]"#,
        );
        check(r#"{"Infinity": 1}"#, r#"{"Infinity": 1}"#);
        check(r#"["never closed NaN"#, r#"["never closed NaN"#);
        check("[\"\u{e9}\\\\\", NaN]", "[\"\u{e9}\\\\\", \"NaN\"]");
    }
}
