//! XML writing with escaping, and rendering of drawings as SVG.

use std::fmt::{Display, Write};

use crate::colour;
use crate::draw::{Anchor, Drawing, Item, Look, Path, Step};

/// A drawing with its title and description, with or without a width in points and an inline style sheet.
pub fn document(drawing: &Drawing, (title, description): (&str, &str), points: Option<f64>, sheet: Option<&str>) -> String {
    let mut svg = Svg::default();
    let (width, height) = (Px(drawing.width), Px(drawing.height));
    let size = |side: f64| points.map_or(Px(side).to_string(), |points| format!("{}pt", Px(side * points / drawing.width)));
    let (shown_width, shown_height) = (size(drawing.width), size(drawing.height));
    let view = format!("0 0 {width} {height}");
    let mut attributes: Vec<(&'static str, &dyn Display)> = vec![("class", &"termwise")];
    if sheet.is_some() {
        attributes.push(("xmlns", &"http://www.w3.org/2000/svg"));
    }
    attributes.extend([("width", &shown_width as &dyn Display), ("height", &shown_height), ("viewBox", &view), ("role", &"img")]);
    svg.open("svg", &attributes);
    svg.text("title", &[], title);
    svg.text("desc", &[], description);
    if let Some(sheet) = sheet {
        svg.text("style", &[], sheet);
    }
    svg.element("rect", &[("class", &"background"), ("width", &width), ("height", &height)]);
    for item in &drawing.items {
        svg.item(item);
    }
    svg.finish()
}

impl Svg {
    fn item(&mut self, item: &Item) {
        match item {
            Item::Open("") => self.open("g", &[]),
            Item::Open(class) => self.open("g", &[("class", class)]),
            Item::Close => self.close(),
            Item::Shape { look, path, title } => {
                let (class, d) = (look.class(), outline(path));
                let color;
                let mut attributes: Vec<(&'static str, &dyn Display)> = Vec::new();
                if let Look::Cell(rgb) = look {
                    color = colour::code(*rgb);
                    attributes.push(("fill", &color));
                } else {
                    attributes.push(("class", &class));
                }
                attributes.push(("d", &d));
                match title {
                    None => self.element("path", &attributes),
                    Some(title) => {
                        self.open("path", &attributes);
                        self.text("title", &[], title);
                        self.close();
                    }
                }
            }
            Item::Text { face, anchor, place: (x, y), text } => {
                let (class, x, y) = (face.class(), Px(*x), Px(*y));
                let mut attributes: Vec<(&'static str, &dyn Display)> = Vec::new();
                if !class.is_empty() {
                    attributes.push(("class", &class));
                }
                attributes.extend([("x", &x as &dyn Display), ("y", &y)]);
                match anchor {
                    Anchor::Start => {}
                    Anchor::Middle => attributes.push(("text-anchor", &"middle")),
                    Anchor::End => attributes.push(("text-anchor", &"end")),
                }
                self.text("text", &attributes, text);
            }
        }
    }
}

fn outline(path: &Path) -> String {
    let mut d = String::new();
    for step in &path.0 {
        // Writing to a string cannot fail.
        let _ = match step {
            Step::Move((x, y)) => write!(d, "M{} {}", Px(*x), Px(*y)),
            Step::Line((x, y)) => write!(d, "L{} {}", Px(*x), Px(*y)),
            Step::Dot => write!(d, "h0"),
            Step::Close => write!(d, "z"),
        };
    }
    d
}

/// An XML writer.
#[derive(Default)]
struct Svg {
    out: String,
    open: Vec<&'static str>,
}

/// Attributes of an element.
type Attributes<'a> = &'a [(&'static str, &'a dyn Display)];

impl Svg {
    /// An element without content.
    fn element(&mut self, name: &'static str, attributes: Attributes) {
        self.start(name, attributes);
        self.out.push_str("/>\n");
    }

    /// An element with text content.
    fn text(&mut self, name: &'static str, attributes: Attributes, text: &str) {
        self.start(name, attributes);
        self.out.push('>');
        self.out.push_str(&escape(text));
        self.out.push_str("</");
        self.out.push_str(name);
        self.out.push_str(">\n");
    }

    /// Opens an element; following elements are nested in it until [`Svg::close`].
    fn open(&mut self, name: &'static str, attributes: Attributes) {
        self.start(name, attributes);
        self.out.push_str(">\n");
        self.open.push(name);
    }

    /// Closes the innermost open element.
    fn close(&mut self) {
        if let Some(name) = self.open.pop() {
            self.out.push_str("</");
            self.out.push_str(name);
            self.out.push_str(">\n");
        }
    }

    /// The XML, with all elements closed.
    fn finish(mut self) -> String {
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

/// A coordinate, rounded to a hundredth of a pixel.
pub struct Px(pub f64);

impl Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Adding zero turns −0 into 0.
        write!(f, "{}", (self.0 * 100.0).round() / 100.0 + 0.0)
    }
}

/// Escapes text for content and attributes. Characters that XML does not allow become U+FFFD.
pub fn escape(text: &str) -> String {
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
