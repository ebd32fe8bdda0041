//! Inline markup: `` `code` ``, `**bold**` and `[words](address)`; everything else is literal.

use crate::svg::escape;

/// A span of text with one style.
pub enum Piece<'a> {
    Plain(&'a str),
    Code(&'a str),
    Bold(&'a str),
    Link(&'a str, &'a str),
}

/// Converts markup to HTML.
pub fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for piece in pieces(text) {
        match piece {
            Piece::Plain(text) => out += &escape(text),
            Piece::Code(text) => out += &format!("<code>{}</code>", escape(text)),
            Piece::Bold(text) => out += &format!("<strong>{}</strong>", html(text)),
            Piece::Link(words, address) => out += &link(&html(words), address),
        }
    }
    out
}

/// Converts markup to Markdown.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for piece in pieces(text) {
        match piece {
            Piece::Plain(text) => out += &escape_markdown(text),
            Piece::Code(text) => out += &format!("`{text}`"),
            Piece::Bold(text) => out += &format!("**{}**", markdown(text)),
            Piece::Link(words, address) if leads(address) => out += &format!("[{}]({address})", markdown(words)),
            Piece::Link(words, _) => out += &markdown(words),
        }
    }
    out
}

/// Escapes Markdown's special characters.
pub fn escape_markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '\\' | '`' | '*' | '[' | '<') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// Removes markup.
pub fn plain(text: &str) -> String {
    let words = |piece| match piece {
        Piece::Plain(text) | Piece::Code(text) => text.to_string(),
        Piece::Bold(text) | Piece::Link(text, _) => plain(text),
    };
    pieces(text).into_iter().map(words).collect()
}

/// A link, or only its text if the address is not allowed.
pub fn link(words: &str, address: &str) -> String {
    if leads(address) { format!("<a href=\"{}\">{words}</a>", escape(address)) } else { words.into() }
}

/// Whether an address is a fragment, a relative path or a web address.
fn leads(address: &str) -> bool {
    let scheme = address.find(':').filter(|end| address.find(['/', '?', '#']).is_none_or(|other| *end < other));
    let web = |end: usize| ["http", "https", "mailto"].contains(&address[..end].to_ascii_lowercase().as_str());
    // Browsers ignore some of these characters before a scheme.
    !address.is_empty() && !address.contains(|c: char| c.is_control() || c.is_whitespace()) && scheme.is_none_or(web)
}

pub fn pieces(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let (mut start, mut at) = (0, 0);
    while let Some(found) = text[at..].find(['`', '*', '[']) {
        at += found;
        if let Some((piece, end)) = piece(&text[at..]) {
            if start < at {
                pieces.push(Piece::Plain(&text[start..at]));
            }
            pieces.push(piece);
            at += end;
            start = at;
        } else {
            // The three delimiters are one byte long.
            at += 1;
        }
    }
    if start < text.len() {
        pieces.push(Piece::Plain(&text[start..]));
    }
    pieces
}

/// The span at the start of a string, and its length.
fn piece(text: &str) -> Option<(Piece<'_>, usize)> {
    if let Some(rest) = text.strip_prefix('`') {
        let end = rest.find('`').filter(|&end| end > 0)?;
        return Some((Piece::Code(&rest[..end]), end + 2));
    }
    if let Some(rest) = text.strip_prefix("**") {
        let end = rest.find("**").filter(|&end| end > 0)?;
        return Some((Piece::Bold(&rest[..end]), end + 4));
    }
    let rest = text.strip_prefix('[')?;
    let middle = rest.find("](").filter(|&middle| middle > 0 && !rest[..middle].contains('['))?;
    let end = rest[middle + 2..].find(')')?;
    Some((Piece::Link(&rest[..middle], &rest[middle + 2..middle + 2 + end]), middle + end + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_rendered_and_everything_else_is_escaped() {
        assert_eq!(html("a `b<c` **d & e** [f](#g)"), "a <code>b&lt;c</code> <strong>d &amp; e</strong> <a href=\"#g\">f</a>");
        assert_eq!(html("[`taylor`](figures/a.svg?b=1&c)"), "<a href=\"figures/a.svg?b=1&amp;c\"><code>taylor</code></a>");
        assert_eq!(html("2 * 3 ** 4, `open, [x] (y), []()"), "2 * 3 ** 4, `open, [x] (y), []()");
        assert_eq!(html("**Σ `x`** `**`"), "<strong>Σ <code>x</code></strong> <code>**</code>");
        assert_eq!(html("<script>\"&"), "&lt;script&gt;&quot;&amp;");
        assert_eq!(plain("a `b<c` **d & e** [f](#g)"), "a b<c d & e f");
    }

    #[test]
    fn links_to_other_schemes_are_dropped() {
        for bad in ["javascript:alert(1)", "JaVaScRiPt:1", "data:text/html,x", "java\tscript:1", " javascript:1", "vbscript:x", ""] {
            assert!(!leads(bad) && !link("w", bad).contains("href"), "{bad}");
        }
        for good in ["#a", "figures/a.svg", "https://example.org/a:b", "a/b:c", "mailto:a@b.c", "?q=a:b"] {
            assert!(leads(good), "{good}");
        }
        assert_eq!(link("w", "a\"onclick=\"x"), "<a href=\"a&quot;onclick=&quot;x\">w</a>");
    }
}
