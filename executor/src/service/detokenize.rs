//! Text of a growing list of tokens: a letter of several bytes may span tokens, so text is held back until its
//! last letter is whole.

use tokenizers::Tokenizer;

/// The state of one stream.
#[derive(Debug, Default)]
pub(super) struct Detokenizer {
    tokens: Vec<u32>,
    /// Tokens before this one only give context.
    context: usize,
    /// The text of tokens before this one is out.
    read: usize,
}

impl Detokenizer {
    /// The text that a token completes, often empty inside a letter.
    pub(super) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, tokenizers::Error> {
        self.tokens.push(token);
        let (text, whole) = self.pending(tokenizer)?;
        if !whole {
            return Ok(String::new());
        }
        self.context = self.read;
        self.read = self.tokens.len();
        Ok(text)
    }

    /// What is still held back at the end.
    pub(super) fn finish(&self, tokenizer: &Tokenizer) -> Result<String, tokenizers::Error> {
        if self.read == self.tokens.len() {
            return Ok(String::new());
        }
        Ok(self.pending(tokenizer)?.0)
    }

    /// The text that is not out, and whether its last letter is whole.
    fn pending(&self, tokenizer: &Tokenizer) -> Result<(String, bool), tokenizers::Error> {
        // Spaces between words depend on the token before, so both texts start at the same context.
        let out = tokenizer.decode(&self.tokens[self.context..self.read], true)?;
        let all = tokenizer.decode(&self.tokens[self.context..], true)?;
        let text = all.get(out.len()..).unwrap_or_default().to_owned();
        let whole = !text.ends_with(char::REPLACEMENT_CHARACTER);
        Ok((text, whole))
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use super::*;

    /// A byte-level tokenizer whose vocabulary is the 256 bytes.
    fn bytes_tokenizer() -> Tokenizer {
        let mut letters: Vec<(u8, char)> = Vec::new();
        let mut next = 256;
        for byte in 0..=255_u8 {
            let shown = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let letter = if shown {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap()
            };
            letters.push((byte, letter));
        }
        let vocab: serde_json::Map<String, serde_json::Value> = letters
            .iter()
            .map(|(byte, letter)| (letter.to_string(), (*byte).into()))
            .collect();
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []
            }
        });
        Tokenizer::from_str(&file.to_string()).unwrap()
    }

    #[test]
    fn letters_are_never_split() {
        let tokenizer = bytes_tokenizer();
        let text = "a é 漢字 🦀!";
        let mut detokenizer = Detokenizer::default();
        let mut pieces = Vec::new();
        for byte in text.bytes() {
            pieces.push(detokenizer.push(&tokenizer, u32::from(byte)).unwrap());
        }
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces.len(), text.len());
        assert_eq!(
            pieces.iter().filter(|piece| !piece.is_empty()).count(),
            text.chars().count()
        );
        assert_eq!(detokenizer.finish(&tokenizer).unwrap(), "");
    }

    #[test]
    fn a_broken_letter_comes_out_at_the_end() {
        let tokenizer = bytes_tokenizer();
        let mut detokenizer = Detokenizer::default();
        let crab = "🦀".as_bytes();
        assert_eq!(detokenizer.push(&tokenizer, u32::from(b'x')).unwrap(), "x");
        assert_eq!(detokenizer.push(&tokenizer, u32::from(crab[0])).unwrap(), "");
        assert_eq!(detokenizer.finish(&tokenizer).unwrap(), "\u{fffd}");
    }
}
