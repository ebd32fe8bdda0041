//! Streaming detokenization: only complete characters are returned.

use crate::{Result, Tokenizer};

/// Number of preceding tokens that are decoded together with new ones, since text may depend on them.
const CONTEXT: usize = 4;
/// Incomplete characters: replacement characters at the end that are withheld.
const MAX_INCOMPLETE: usize = 3;
/// Maximum number of tokens in a window, in case it never decodes to a complete character.
const MAX_WINDOW: usize = 64;

/// Decodes one stream of tokens.
///
/// A token can be part of a character, and some tokenizers write a space before a token only if another token precedes it. Therefore a
/// window of tokens is decoded together, and only the new part of its text is returned.
pub struct Text<'t> {
    tokenizer: &'t Tokenizer,
    window: Vec<u32>,
    /// Bytes of the window's text that were already returned.
    given: usize,
}

impl<'t> Text<'t> {
    /// A stream after these tokens, whose own text is not returned.
    pub fn after(tokenizer: &'t Tokenizer, before: &[u32]) -> Result<Text<'t>> {
        let mut text = Text { tokenizer, window: Vec::with_capacity(2 * MAX_WINDOW), given: 0 };
        let before = before.iter().copied().filter(|&token| (token as usize) < tokenizer.vocabulary());
        text.window.extend(before);
        text.window.drain(..text.window.len().saturating_sub(CONTEXT));
        text.given = whole(&text.decode()?);
        Ok(text)
    }

    /// The text that this token completes; may be empty.
    pub fn push(&mut self, token: u32) -> Result<String> {
        // A model's vocabulary may be padded beyond that of its tokenizer; those tokens have no text.
        if token as usize >= self.tokenizer.vocabulary() {
            return Ok(String::new());
        }
        self.window.push(token);
        let text = self.decode()?;
        let end = whole(&text);
        let new = text.get(self.given..end).unwrap_or_default().to_owned();
        self.given = self.given.max(end);
        if end == text.len() || self.window.len() > MAX_WINDOW {
            self.window.drain(..self.window.len().saturating_sub(CONTEXT));
            self.given = whole(&self.decode()?);
        }
        Ok(new)
    }

    /// The withheld text.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.decode()?;
        let rest = text.get(self.given..).unwrap_or_default().to_owned();
        self.given = text.len();
        Ok(rest)
    }

    fn decode(&self) -> Result<String> {
        self.tokenizer.decode(&self.window, true)
    }
}

/// Length of a string without the replacement characters at its end that further tokens may complete.
fn whole(text: &str) -> usize {
    let mut end = text.len();
    for _ in 0..MAX_INCOMPLETE {
        match text[..end].strip_suffix('\u{fffd}') {
            Some(rest) => end = rest.len(),
            None => break,
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(tokens: &[u32], before: &[u32]) -> (Vec<String>, String) {
        let tokenizer = Tokenizer::bytes();
        let mut text = Text::after(&tokenizer, before).expect("text");
        let pieces = tokens.iter().map(|&token| text.push(token).expect("text")).collect();
        (pieces, text.finish().expect("text"))
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn only_complete_characters_are_returned() {
        let (given, rest) = pieces(&bytes("aé€😀z"), &bytes("before"));
        assert_eq!(given, ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn invalid_bytes_are_replaced_and_nothing_is_lost() {
        let tokens = [&[0xff, 0x41, 0xe2, 0x82][..], &bytes("b😀")].concat();
        let (given, rest) = pieces(&tokens, &[]);
        let all = given.concat() + &rest;
        assert_eq!(all, "\u{fffd}A\u{fffd}b😀");
        let (given, rest) = pieces(&[0xe2, 0x82], &[]);
        assert_eq!((given.concat(), rest), (String::new(), "\u{fffd}".into()));
        // Many bytes that never become text, then text.
        let tokens = [vec![0xff; 300], bytes("end")].concat();
        let (given, rest) = pieces(&tokens, &[]);
        let all = given.concat() + &rest;
        assert!(all.ends_with("end") && all.matches('\u{fffd}').count() > 250, "{}", all.len());
    }

    #[test]
    fn end_tokens_and_tokens_beyond_the_vocabulary_have_no_text() {
        let (given, rest) = pieces(&[65, 256, 300, 66], &[256]);
        assert_eq!((given.concat(), rest.as_str()), ("AB".to_string(), ""));
    }
}
