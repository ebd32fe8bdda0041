//! Writing XML: elements that end, text that is escaped.

use std::fmt::{Display, Write};

/// A document in the making.
#[derive(Default)]
pub struct Svg {
    out: String,
    open: Vec<&'static str>,
}

/// Attributes of an element.
pub type Attributes<'a> = &'a [(&'static str, &'a dyn Display)];

impl Svg {
    /// An element without content.
    pub fn element(&mut self, name: &'static str, attributes: Attributes) {
        self.start(name, attributes);
        self.out.push_str("/>\n");
    }

    /// An element with text alone.
    pub fn text(&mut self, name: &'static str, attributes: Attributes, text: &str) {
        self.start(name, attributes);
        self.out.push('>');
        self.out.push_str(&escape(text));
        self.out.push_str("</");
        self.out.push_str(name);
        self.out.push_str(">\n");
    }

    /// Begins an element; what follows is in it until [`Svg::close`].
    pub fn open(&mut self, name: &'static str, attributes: Attributes) {
        self.start(name, attributes);
        self.out.push_str(">\n");
        self.open.push(name);
    }

    /// Ends the element that was begun last.
    pub fn close(&mut self) {
        if let Some(name) = self.open.pop() {
            self.out.push_str("</");
            self.out.push_str(name);
            self.out.push_str(">\n");
        }
    }

    /// The text, with everything ended.
    pub fn finish(mut self) -> String {
        while !self.open.is_empty() {
            self.close();
        }
        self.out
    }

    fn start(&mut self, name: &str, attributes: Attributes) {
        self.out.push('<');
        self.out.push_str(name);
        for (key, value) in attributes {
            // Writing to a string cannot fail.
            let _ = write!(self.out, " {key}=\"{}\"", escape(&value.to_string()));
        }
    }
}

/// A coordinate: a hundredth of a pixel is finer than anything seen.
pub struct Px(pub f64);

impl Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Adding zero turns −0 into 0.
        write!(f, "{}", (self.0 * 100.0).round() / 100.0 + 0.0)
    }
}

/// Text for content and attributes; characters that XML cannot hold become U+FFFD.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\t' | '\n' | '\r' => out.push(' '),
            c if c.is_control() || ['\u{fffe}', '\u{ffff}'].contains(&c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
