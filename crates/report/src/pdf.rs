//! Rendering of drawings as PDF: one page of vector shapes, for papers. Text is drawn as outlines, so the page needs no font.

use std::fmt::Write;

use ttf_parser::OutlineBuilder;

use crate::colour::{Rgb, Theme};
use crate::draw::{Drawing, Face, Item, Look, Path, Step};
use crate::font;
use crate::style::HALO;
use crate::svg::Px;

/// A page of this width in points, on white.
pub fn encode(drawing: &Drawing, width: f64) -> Vec<u8> {
    let scale = width / drawing.width;
    let height = drawing.height * scale;
    let mut page = Page::default();
    // y grows downwards in drawings and upwards in PDF. Round joins.
    page.line(format_args!("{scale:.6} 0 0 {:.6} 0 {} cm 1 j", -scale, Px(height)));
    for item in &drawing.items {
        match item {
            Item::Shape { look, path, .. } => page.shape(*look, path),
            Item::Text { face, anchor, place: (x, y), text } => {
                page.text(*face, (x - anchor.share() * font::width(text, *face), *y), text);
            }
            Item::Open(_) | Item::Close => {}
        }
    }
    let alphas: String = page.alphas.iter().enumerate().map(|(i, alpha)| format!("/A{i}<</ca {}>>", Px(*alpha))).collect();
    let size = format!("[0 0 {} {}]", Px(width), Px(height));
    file(&[
        "<</Type/Catalog/Pages 2 0 R>>".into(),
        "<</Type/Pages/Kids[3 0 R]/Count 1>>".into(),
        format!("<</Type/Page/Parent 2 0 R/MediaBox{size}/Contents 4 0 R/Resources<</ExtGState<<{alphas}>>>>>>"),
        format!("<</Length {}>>\nstream\n{}endstream", page.out.len(), page.out),
    ])
}

/// Numbered objects with their table of offsets.
fn file(objects: &[String]) -> Vec<u8> {
    let mut out = String::from("%PDF-1.4\n");
    let mut table = format!("xref\n0 {}\n0000000000 65535 f \n", objects.len() + 1);
    for (i, object) in objects.iter().enumerate() {
        table += &format!("{:010} 00000 n \n", out.len());
        out += &format!("{} 0 obj\n{object}\nendobj\n", i + 1);
    }
    let start = out.len();
    out += &format!("{table}trailer\n<</Size {}/Root 1 0 R>>\nstartxref\n{start}\n%%EOF\n", objects.len() + 1);
    out.into_bytes()
}

/// The operators of a page.
#[derive(Default)]
struct Page {
    out: String,
    /// Opacities in use.
    alphas: Vec<f64>,
}

impl Page {
    fn line(&mut self, operators: std::fmt::Arguments) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.out, "{operators}");
    }

    fn color(&mut self, rgb: Rgb, operator: &str) {
        let [r, g, b] = rgb.map(|c| f64::from(c) / 255.0);
        self.line(format_args!("{r:.3} {g:.3} {b:.3} {operator}"));
    }

    fn alpha(&mut self, alpha: f64) {
        let known = self.alphas.iter().position(|other| *other == alpha);
        let index = known.unwrap_or_else(|| {
            self.alphas.push(alpha);
            self.alphas.len() - 1
        });
        self.line(format_args!("/A{index} gs"));
    }

    fn shape(&mut self, look: Look, path: &Path) {
        let style = look.paint(Theme::Light.colours());
        let outline = outline(path);
        if let Some(fill) = style.fill {
            self.color(fill, "rg");
            self.alpha(style.opacity);
            self.line(format_args!("{outline}f"));
        }
        if let Some(stroke) = style.stroke {
            let dash = style.dash.map_or("[]".into(), |(on, off)| format!("[{on} {off}]"));
            self.color(stroke, "RG");
            self.line(format_args!("{} w {} J {dash} 0 d", style.width, i32::from(style.round)));
            self.line(format_args!("{outline}S"));
        }
    }

    fn text(&mut self, face: Face, place: (f64, f64), text: &str) {
        let mut glyphs = Glyphs::default();
        font::outline(text, face, place, &mut glyphs);
        let (outline, colours) = (glyphs.out, Theme::Light.colours());
        if face.has_halo() {
            self.color(colours.background, "RG");
            self.line(format_args!("{HALO} w [] 0 d"));
            self.line(format_args!("{outline}S"));
        }
        self.color(face.color(colours), "rg");
        self.alpha(1.0);
        self.line(format_args!("{outline}f"));
    }
}

fn outline(path: &Path) -> String {
    let (mut out, mut pen) = (String::new(), (0.0, 0.0));
    for step in &path.0 {
        let ((x, y), operator) = match *step {
            Step::Move(place) => (place, 'm'),
            Step::Line(place) => (place, 'l'),
            // A line without a length, which round caps make visible.
            Step::Dot => (pen, 'l'),
            Step::Close => {
                out += "h ";
                continue;
            }
        };
        pen = (x, y);
        // Writing to a string cannot fail.
        let _ = write!(out, "{} {} {operator} ", Px(x), Px(y));
    }
    out
}

/// Converts font outlines to path operators.
#[derive(Default)]
struct Glyphs {
    out: String,
    at: (f32, f32),
}

impl Glyphs {
    fn push(&mut self, points: &[(f32, f32)], operator: char) {
        for (x, y) in points {
            let _ = write!(self.out, "{} {} ", Px(f64::from(*x)), Px(f64::from(*y)));
        }
        self.out.push(operator);
        self.out.push(' ');
        self.at = points.last().copied().unwrap_or(self.at);
    }
}

impl OutlineBuilder for Glyphs {
    fn move_to(&mut self, x: f32, y: f32) {
        self.push(&[(x, y)], 'm');
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.push(&[(x, y)], 'l');
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        // PDF has cubic curves only.
        let third = |a: f32, b: f32| a + 2.0 / 3.0 * (b - a);
        let (from_x, from_y) = self.at;
        self.push(&[(third(from_x, x1), third(from_y, y1)), (third(x, x1), third(y, y1)), (x, y)], 'c');
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.push(&[(x1, y1), (x2, y2), (x, y)], 'c');
    }

    fn close(&mut self) {
        self.push(&[], 'h');
    }
}
