//! Text of a growing list of tokens: a letter of several bytes may span tokens, so text is held back until its
//! last letter is whole.
//!
//! The pieces together are the text of the whole list, for every decoder whose text of a list begins with its text
//! of a shorter one, apart from an unfinished letter at the end. Byte-fallback decoders spoil a whole run of bytes
//! for one that is wrong, so a run is held back to its end.

use tokenizers::Tokenizer;

/// Tokens that are held back at most while their text is whole: long runs of bytes are letters of a script without
/// tokens of its own, which readers want to see before the word ends.
const RUN_LIMIT: usize = 64;
/// Tokens that are held back at most: past the longest letter after a long run, bytes are no text and stay none.
const HELD_LIMIT: usize = RUN_LIMIT + 8;

/// The state of one stream.
#[derive(Debug, Default)]
pub(super) struct Detokenizer {
    tokens: Vec<u32>,
    /// Tokens before this one only give context.
    context: usize,
    /// The text of tokens before this one is out.
    read: usize,
    /// Whether the last token with a text is a byte: tokens without one do not end its run.
    in_run: bool,
}

impl Detokenizer {
    /// The text that a token completes, often empty inside a letter.
    pub(super) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, tokenizers::Error> {
        self.tokens.push(token);
        let word = tokenizer.id_to_token(token);
        if let Some(word) = word.filter(|word| !tokenizer.get_added_vocabulary().is_special_token(word)) {
            self.in_run = is_byte(&word);
        }
        let text = self.pending(tokenizer)?;
        if !self.is_ready(&text) {
            return Ok(String::new());
        }
        // Decoders treat the first text of a list as the beginning of a line, so the context always has some.
        if !text.is_empty() {
            self.context = self.read;
        }
        self.read = self.tokens.len();
        Ok(text)
    }

    /// What is still held back at the end.
    pub(super) fn finish(&self, tokenizer: &Tokenizer) -> Result<String, tokenizers::Error> {
        if self.read == self.tokens.len() {
            return Ok(String::new());
        }
        self.pending(tokenizer)
    }

    fn is_ready(&self, text: &str) -> bool {
        let held = self.tokens.len() - self.read;
        let whole = !text.ends_with(char::REPLACEMENT_CHARACTER);
        whole && (!self.in_run || held >= RUN_LIMIT) || held >= HELD_LIMIT
    }

    /// The text that is not out.
    fn pending(&self, tokenizer: &Tokenizer) -> Result<String, tokenizers::Error> {
        // Spaces between words depend on the token before, so both texts start at the same context.
        let out = tokenizer.decode(&self.tokens[self.context..self.read], true)?;
        let all = tokenizer.decode(&self.tokens[self.context..], true)?;
        Ok(all.get(out.len()..).unwrap_or_default().to_owned())
    }
}

/// Whether a word stands for one byte, as `<0xE6>` does.
fn is_byte(word: &str) -> bool {
    word.len() == 6 && word.starts_with("<0x") && word.ends_with('>')
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use proptest::prelude::*;

    use super::*;

    /// A byte-level tokenizer whose vocabulary is the 256 bytes, a word, and halves of letters.
    fn byte_level() -> Tokenizer {
        let mut next = 256;
        let letters: Vec<char> = (0..=255_u8)
            .map(|byte| {
                if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
                    return char::from(byte);
                }
                next += 1;
                char::from_u32(next - 1).unwrap()
            })
            .collect();
        let spell = |bytes: &[u8]| bytes.iter().map(|byte| letters[usize::from(*byte)]).collect();
        let crab = "🦀".as_bytes();
        let mut words: Vec<String> = (0..=255).map(|byte| spell(&[byte])).collect();
        words.extend([&crab[..2], &crab[2..], &crab[1..3], b" word", b"\xc3\xa9\xc3"].map(spell));
        let vocab: serde_json::Map<String, serde_json::Value> = words
            .into_iter()
            .zip(0..)
            .map(|(word, id)| (word, id.into()))
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

    /// A tokenizer of the SentencePiece kind: bytes where a letter has no token, spaces inside words.
    fn byte_fallback() -> Tokenizer {
        Tokenizer::from_str(include_str!("../../tests/data/tokenizer.json")).unwrap()
    }

    /// Every piece, that of the end last.
    fn pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> = tokens
            .iter()
            .map(|token| detokenizer.push(tokenizer, *token).unwrap())
            .collect();
        pieces.push(detokenizer.finish(tokenizer).unwrap());
        pieces
    }

    #[test]
    fn letters_are_never_split() {
        let text = "a é 漢字 🦀!";
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        let pieces = pieces(&byte_level(), &tokens);
        assert_eq!(pieces.concat(), text);
        let said = pieces.iter().filter(|piece| !piece.is_empty()).count();
        assert_eq!(said, text.chars().count());
        assert_eq!(pieces.last().unwrap(), "");
    }

    #[test]
    fn a_broken_letter_comes_out_at_the_end() {
        let crab = "🦀".as_bytes();
        let tokens = [u32::from(b'x'), u32::from(crab[0])];
        assert_eq!(pieces(&byte_level(), &tokens), ["x", "", "\u{fffd}"]);
    }

    #[test]
    fn a_run_of_bytes_comes_out_at_its_end() {
        let tokenizer = byte_fallback();
        let id = |word: &str| tokenizer.token_to_id(word).unwrap();
        let crab = ["<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"].map(id);
        let tokens = [&[id("▁hello")], &crab[..], &[id("▁world")]].concat();
        assert_eq!(
            pieces(&tokenizer, &tokens),
            ["hello", "", "", "", "", "🦀 world", ""]
        );
        // A special token and an id without a word have no text and end no run: the letter is whole after them.
        let tokens = [&crab[..2], &[id("</s>"), 5000], &crab[2..], &[id("▁world")]].concat();
        assert_eq!(
            pieces(&tokenizer, &tokens),
            ["", "", "", "", "", "", "🦀 world", ""]
        );
        // The space after a special token is inside the line.
        let tokens = [id("▁hello"), id("</s>"), id("▁world")];
        assert_eq!(pieces(&tokenizer, &tokens), ["hello", "", " world", ""]);
    }

    #[test]
    fn a_long_run_is_not_held_back_for_ever() {
        let tokenizer = byte_fallback();
        let letter = ["<0xE0>", "<0xBD>", "<0x80>"].map(|word| tokenizer.token_to_id(word).unwrap());
        let found = pieces(&tokenizer, &letter.repeat(50));
        assert_eq!(found.concat(), "ཀ".repeat(50));
        assert!(found.iter().filter(|piece| !piece.is_empty()).count() > 2);
        // Bytes that never become a letter come out too, and cost no more than the limit allows.
        let found = pieces(&tokenizer, &[letter[0]].repeat(500));
        assert_eq!(found.concat(), "\u{fffd}".repeat(500));
    }

    proptest! {
        #[test]
        fn pieces_are_the_whole_byte_level(tokens in prop::collection::vec(0_u32..264, 0..48)) {
            let tokenizer = byte_level();
            let whole = tokenizer.decode(&tokens, true).unwrap();
            prop_assert_eq!(pieces(&tokenizer, &tokens).concat(), whole);
        }

        /// Ids past the vocabulary are what a model with a padded head may give: they have no text.
        #[test]
        fn pieces_are_the_whole_byte_fallback(tokens in prop::collection::vec(
            // Bytes of letters as often as anything else, so that letters come whole, cut and wrong.
            prop_oneof![0_u32..290, Just(3 + 0xe6), Just(3 + 0xbc), Just(3 + 0xa2), 259_u32..281], 0..48
        )) {
            let tokenizer = byte_fallback();
            let whole = tokenizer.decode(&tokens, true).unwrap();
            prop_assert_eq!(pieces(&tokenizer, &tokens).concat(), whole);
        }
    }
}
