//! The embedded font, DejaVu Sans. SVG uses the reader's font, but the layout is computed with this one, which is wide.

use std::sync::LazyLock;

use ttf_parser::{Face as Font, GlyphId, OutlineBuilder};

use crate::draw::Face;

static REGULAR: LazyLock<Option<Font<'static>>> = LazyLock::new(|| Font::parse(dejavu::sans::regular(), 0).ok());
static BOLD: LazyLock<Option<Font<'static>>> = LazyLock::new(|| Font::parse(dejavu::sans::bold(), 0).ok());

/// Width of an unknown character, as a fraction of the font size.
const CHARACTER: f64 = 0.6;

fn font(bold: bool) -> Option<&'static Font<'static>> {
    if bold { BOLD.as_ref() } else { REGULAR.as_ref() }
}

/// The glyph of a character; that of U+FFFD if the font has none.
fn glyph(font: &Font, c: char) -> Option<GlyphId> {
    font.glyph_index(c).or_else(|| font.glyph_index('\u{fffd}'))
}

fn advance(c: char, size: f64, bold: bool) -> f64 {
    let known = font(bold).and_then(|font| Some((font.glyph_hor_advance(glyph(font, c)?)?, font.units_per_em())));
    known.map_or(CHARACTER, |(advance, em)| f64::from(advance) / f64::from(em)) * size
}

/// Width of a string in pixels.
pub fn width(text: &str, face: Face) -> f64 {
    let (size, bold) = face.font();
    text.chars().map(|c| advance(c, size, bold)).sum()
}

/// Emits the outlines of a string starting at a position, in pixels right and down.
pub fn outline(text: &str, face: Face, (mut x, y): (f64, f64), builder: &mut dyn OutlineBuilder) {
    let (size, bold) = face.font();
    let Some(font) = font(bold) else { return };
    let scale = size / f64::from(font.units_per_em());
    for c in text.chars() {
        if let Some(glyph) = glyph(font, c) {
            font.outline_glyph(glyph, &mut Placed { builder, x, y, scale });
        }
        x += advance(c, size, bold);
    }
}

/// Translates and flips glyph outlines, whose y axis points up.
struct Placed<'a> {
    builder: &'a mut dyn OutlineBuilder,
    x: f64,
    y: f64,
    scale: f64,
}

impl Placed<'_> {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        ((self.x + f64::from(x) * self.scale) as f32, (self.y - f64::from(y) * self.scale) as f32)
    }
}

impl OutlineBuilder for Placed<'_> {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.builder.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.builder.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.builder.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.builder.curve_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.builder.close();
    }
}

/// The string, truncated to at most this many pixels.
pub fn fit(text: &str, face: Face, room: f64) -> String {
    if width(text, face) <= room {
        return text.into();
    }
    let (size, bold) = face.font();
    let mut left = room - advance('…', size, bold);
    let kept: String = text
        .chars()
        .take_while(|&c| {
            left -= advance(c, size, bold);
            left >= 0.0
        })
        .collect();
    format!("{}…", kept.trim_end())
}

/// The string, wrapped at this many pixels. Longer words are broken.
pub fn wrap(text: &str, face: Face, room: f64) -> Vec<String> {
    let (size, bold) = face.font();
    let mut lines: Vec<(String, f64)> = Vec::new();
    for word in text.split_whitespace() {
        let whole = width(word, face);
        match lines.last_mut() {
            Some((line, used)) if *used + advance(' ', size, bold) + whole <= room => {
                line.push(' ');
                line.push_str(word);
                *used += advance(' ', size, bold) + whole;
            }
            _ => {
                lines.push((String::new(), 0.0));
                for c in word.chars() {
                    let more = advance(c, size, bold);
                    if lines.last().is_some_and(|(line, used)| !line.is_empty() && used + more > room) {
                        lines.push((String::new(), 0.0));
                    }
                    if let Some((line, used)) = lines.last_mut() {
                        line.push(c);
                        *used += more;
                    }
                }
            }
        }
    }
    lines.into_iter().map(|(line, _)| line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_used_in_the_project_has_a_glyph() {
        let texts = "AZaz09 äéß ΑΩαω Σρμσλτ µ−×±≤≥⌊⌋⌈⌉⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉√·→∞≈…–∑∂‖✓✗○";
        for bold in [false, true] {
            let font = font(bold).expect("the font can be read");
            for c in texts.chars().filter(|c| *c != ' ') {
                let glyph = font.glyph_index(c).unwrap_or_else(|| panic!("{c} {bold}"));
                assert!(font.glyph_bounding_box(glyph).is_some(), "{c} {bold}");
            }
        }
    }

    #[test]
    fn wrapped_and_truncated_strings_fit() {
        let text = "a long text of many words and one_word_that_is_very_long_indeed_and_does_not_fit";
        let lines = wrap(text, Face::Body, 120.0);
        assert!(lines.iter().all(|line| !line.is_empty() && width(line, Face::Body) <= 120.0), "{lines:?}");
        assert_eq!(lines.concat().replace(' ', ""), text.replace(' ', ""));
        let short = fit(text, Face::Body, 120.0);
        assert!(short.ends_with('…') && width(&short, Face::Body) <= 120.0 && text.starts_with(short.trim_end_matches('…')));
        assert_eq!((fit("ab", Face::Body, 120.0), fit("ab", Face::Body, -5.0)), ("ab".into(), "…".into()));
        assert!(wrap(" ", Face::Body, 10.0).is_empty() && wrap("ab", Face::Body, 0.0) == ["a", "b"]);
        assert!(width("Wide", Face::Title) > width("Wide", Face::Body));
    }
}
