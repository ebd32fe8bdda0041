//! Dimensions shared by all panels, and their headings.

use crate::draw::{Anchor, Drawing, Face};
use crate::font;

/// A narrow phone shows this width at three quarters of its size.
pub const WIDTH: f64 = 480.0;
pub const LEFT: f64 = 66.0;
pub const RIGHT: f64 = 22.0;
pub const EDGE: f64 = 18.0;
pub const PLOT_WIDTH: f64 = WIDTH - LEFT - RIGHT;
pub const PLOT_HEIGHT: f64 = 200.0;
/// Line height.
pub const LEADING: f64 = 20.0;
/// Maximum width of row names.
const MOST_LEFT: f64 = 210.0;

/// Height of the title and label above a plot.
pub fn heading_height(title: &str, label: &str) -> f64 {
    14.0 + LEADING * (titles(title).len() + usize::from(!label.is_empty())) as f64
}

/// The title and, below it, the label of the y axis.
pub fn heading(drawing: &mut Drawing, top: f64, title: &str, label: &str) {
    let mut y = top + LEADING;
    for line in titles(title) {
        drawing.text(Face::Heading, Anchor::Start, (EDGE, y), &line);
        y += LEADING;
    }
    if !label.is_empty() {
        drawing.text(Face::Quiet, Anchor::Start, (EDGE, y), &font::fit(label, Face::Quiet, WIDTH - 2.0 * EDGE));
    }
}

fn titles(title: &str) -> Vec<String> {
    font::wrap(title, Face::Heading, WIDTH - 2.0 * EDGE)
}

/// The label below a horizontal axis, centred.
pub fn caption(drawing: &mut Drawing, middle: f64, y: f64, label: &str) {
    if !label.is_empty() {
        let text = font::fit(label, Face::Quiet, 2.0 * (middle - EDGE).min(WIDTH - EDGE - middle));
        drawing.text(Face::Quiet, Anchor::Middle, (middle, y), &text);
    }
}

/// Left edge of a plot with these row names.
pub fn left_of(names: &[String]) -> f64 {
    let widest = names.iter().map(|name| font::width(name, Face::Quiet)).fold(0.0, f64::max);
    (EDGE + widest + 10.0).clamp(LEFT, MOST_LEFT)
}

/// A row name, vertically centred at `y`.
pub fn row_name(drawing: &mut Drawing, left: f64, y: f64, name: &str) {
    let text = font::fit(name, Face::Quiet, left - 8.0 - EDGE / 2.0);
    drawing.text(Face::TickY, Anchor::End, (left - 8.0, y + 4.5), &text);
}

/// The message in place of an empty plot.
pub fn nothing(drawing: &mut Drawing, x: f64, y: f64) {
    drawing.text(Face::Quiet, Anchor::Middle, (x, y), "no values to show");
}
