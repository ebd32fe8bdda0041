//! Rendering of drawings as PNG.

use tiny_skia::{Color, FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, Stroke, StrokeDash, Transform};
use ttf_parser::OutlineBuilder;

use crate::colour::{Colours, Rgb, Theme};
use crate::draw::{Anchor, Drawing, Face, Item, Look, Path, Place, Step};
use crate::font;
use crate::style::HALO;

/// Maximum side length in pixels.
const MAX_SIDE: f64 = 16_384.0;

/// The PNG file; empty only if its pixels cannot be allocated.
pub fn encode(drawing: &Drawing, theme: Theme, scale: f64) -> Vec<u8> {
    let scale = if scale.is_finite() { scale.clamp(0.1, 8.0) } else { 1.0 };
    let scale = scale.min(MAX_SIDE / drawing.width.max(drawing.height).max(1.0));
    let side = |length: f64| ((length * scale).ceil() as u32).max(1);
    let Some(pixels) = Pixmap::new(side(drawing.width), side(drawing.height)) else { return Vec::new() };
    let mut canvas = Canvas { pixels, colours: theme.colours(), transform: Transform::from_scale(scale as f32, scale as f32) };
    canvas.pixels.fill(color(canvas.colours.background, 1.0));
    for item in &drawing.items {
        match item {
            Item::Shape { look, path, .. } => canvas.shape(*look, path),
            Item::Text { face, anchor, place, text } => canvas.text(*face, *anchor, *place, text),
            Item::Open(_) | Item::Close => {}
        }
    }
    canvas.pixels.encode_png().unwrap_or_default()
}

struct Canvas {
    pixels: Pixmap,
    colours: &'static Colours,
    transform: Transform,
}

fn color([r, g, b]: Rgb, opacity: f64) -> Color {
    Color::from_rgba8(r, g, b, (opacity * 255.0).round() as u8)
}

fn paint(rgb: Rgb, opacity: f64, smooth: bool) -> Paint<'static> {
    let mut paint = Paint { anti_alias: smooth, ..Paint::default() };
    paint.set_color(color(rgb, opacity));
    paint
}

impl Canvas {
    fn shape(&mut self, look: Look, path: &Path) {
        let style = look.paint(self.colours);
        let mut builder = PathBuilder::new();
        for step in &path.0 {
            match *step {
                Step::Move((x, y)) => builder.move_to(x as f32, y as f32),
                Step::Line((x, y)) => builder.line_to(x as f32, y as f32),
                Step::Dot => {
                    // Not exactly zero: a line of length zero has no caps.
                    if let Some(pen) = builder.last_point() {
                        builder.line_to(pen.x + 0.01, pen.y);
                    }
                }
                Step::Close => builder.close(),
            }
        }
        let Some(path) = builder.finish() else { return };
        if let Some(fill) = style.fill {
            let paint = paint(fill, style.opacity, !style.crisp);
            self.pixels.fill_path(&path, &paint, FillRule::Winding, self.transform, None);
        }
        if let Some(stroke) = style.stroke {
            let line = Stroke {
                width: style.width as f32,
                line_cap: if style.round { LineCap::Round } else { LineCap::Butt },
                line_join: if style.round { LineJoin::Round } else { LineJoin::Miter },
                dash: style.dash.and_then(|(on, off)| StrokeDash::new(vec![on as f32, off as f32], 0.0)),
                ..Stroke::default()
            };
            self.pixels.stroke_path(&path, &paint(stroke, 1.0, true), &line, self.transform, None);
        }
    }

    fn text(&mut self, face: Face, anchor: Anchor, (x, y): Place, text: &str) {
        let mut glyphs = Glyphs(PathBuilder::new());
        font::outline(text, face, (x - anchor.share() * font::width(text, face), y), &mut glyphs);
        let Some(path) = glyphs.0.finish() else { return };
        if face.has_halo() {
            let line = Stroke { width: HALO as f32, line_join: LineJoin::Round, ..Stroke::default() };
            self.pixels.stroke_path(&path, &paint(self.colours.background, 1.0, true), &line, self.transform, None);
        }
        let paint = paint(face.color(self.colours), 1.0, true);
        self.pixels.fill_path(&path, &paint, FillRule::Winding, self.transform, None);
    }
}

/// Converts font outlines to paths.
struct Glyphs(PathBuilder);

impl OutlineBuilder for Glyphs {
    fn move_to(&mut self, x: f32, y: f32) {
        self.0.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.0.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.0.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.0.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.0.close();
    }
}
