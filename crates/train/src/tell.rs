//! Words for the user, on standard error.
//!
//! A terminal may be closed and a disk may be full while a training goes on for days: what cannot be written is dropped, and nothing ends
//! because of it (`eprintln!` would panic). Messages repeat what files, hubs and users gave, so control characters are written as escapes,
//! which no terminal obeys, and what is too long to be read is shortened.

use std::io::Write;

/// Longest word that is written whole, and what is kept of a longer one at its beginning and its end.
const WORD: (usize, usize, usize) = (1000, 120, 40);
/// Longest message that is written whole, and what is kept of a longer one.
const MESSAGE: (usize, usize, usize) = (8000, 4000, 1000);

/// Writes a message and ends its line.
pub fn tell(text: &str) {
    draw(&(readable(text) + "\n"));
}

/// Writes exactly this, for lines that move.
pub fn draw(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// A message with control characters escaped and everything that is too long shortened.
pub fn readable(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(MESSAGE.0));
    // Words and the white space behind them, which stays as it is.
    for piece in text.split_inclusive([' ', '\n']) {
        let word = piece.trim_end_matches([' ', '\n']);
        out += &shortened(&escaped(word), WORD);
        out += &piece[word.len()..];
    }
    shortened(&out, MESSAGE)
}

fn escaped(text: &str) -> String {
    // Besides control characters those that turn the direction of what follows.
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
    format!("{first}… ({} characters left out) …{last}", count - head - tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        assert_eq!(readable("soft\x1b]0;pwned\x07max\r\x7f\u{9b}2J"), "soft\\u{1b}]0;pwned\\u{7}max\\r\\u{7f}\\u{9b}2J");
        assert_eq!(readable("\u{202e}gnp.exe"), "\\u{202e}gnp.exe");
        assert_eq!(readable("två ord,\n  på två rader\n"), "två ord,\n  på två rader\n");
    }

    #[test]
    fn long_input_is_shortened_and_what_stands_around_it_is_not() {
        let text = format!("`{}` is no part, nor is `{}`; see the list", "x".repeat(100_000), "ü".repeat(100_000));
        let short = readable(&text);
        assert!(short.len() < 1000, "{} bytes", short.len());
        assert!(short.contains("is no part, nor is `ü") && short.ends_with("ü`; see the list"), "{short}");
        assert!(short.contains("(99842 characters left out)"), "{short}");
        assert!(readable(&"word ".repeat(50_000)).len() < 6000);
    }
}
