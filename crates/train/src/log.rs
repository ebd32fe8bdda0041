//! Messages on standard error.
//!
//! A message that cannot be written is dropped: a closed terminal or a full disk must not stop a training run (`eprintln!` would panic).
//! Messages contain strings from files, hubs and users. Control characters are therefore escaped,
//! and strings that are too long are shortened.

use std::io::Write;

/// Maximum length of a word, and the lengths kept at the beginning and end of a longer one.
const WORD: (usize, usize, usize) = (1000, 120, 40);
/// Maximum length of a message, and the lengths kept of a longer one.
const MESSAGE: (usize, usize, usize) = (8000, 4000, 1000);

/// Prints a message and a newline.
pub fn print_line(text: &str) {
    draw(&(readable(text) + "\n"));
}

/// Prints without a newline, for progress lines.
pub fn draw(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Escapes control characters and shortens long words and messages.
pub fn readable(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(MESSAGE.0));
    // Words with the white space after them, which is kept.
    for piece in text.split_inclusive([' ', '\n']) {
        let word = piece.trim_end_matches([' ', '\n']);
        out += &shortened(&escaped(word), WORD);
        out += &piece[word.len()..];
    }
    shortened(&out, MESSAGE)
}

fn escaped(text: &str) -> String {
    // Also characters that change the text direction.
    let bad = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if bad(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

fn shortened(text: &str, (longest, head, tail): (usize, usize, usize)) -> String {
    let count = text.chars().count();
    if count <= longest {
        return text.to_owned();
    }
    let (first, last): (String, String) = (text.chars().take(head).collect(), text.chars().skip(count - tail).collect());
    format!("{first}… ({} characters omitted) …{last}", count - head - tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(readable("soft\x1b]0;pwned\x07max\r\x7f\u{9b}2J"), "soft\\u{1b}]0;pwned\\u{7}max\\r\\u{7f}\\u{9b}2J");
        assert_eq!(readable("\u{202e}gnp.exe"), "\\u{202e}gnp.exe");
        assert_eq!(readable("två ord,\n  på två rader\n"), "två ord,\n  på två rader\n");
    }

    #[test]
    fn long_words_are_shortened_and_the_rest_is_kept() {
        let text = format!("`{}` is not a part, nor is `{}`; see the list", "x".repeat(100_000), "ü".repeat(100_000));
        let short = readable(&text);
        assert!(short.len() < 1000, "{} bytes", short.len());
        assert!(short.contains("is not a part, nor is `ü") && short.ends_with("ü`; see the list"), "{short}");
        assert!(short.contains("(99842 characters omitted)"), "{short}");
        assert!(readable(&"word ".repeat(50_000)).len() < 6000);
    }
}
