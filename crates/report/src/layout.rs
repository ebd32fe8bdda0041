//! Dimensions shared by all panels, and their headings.

use crate::draw::{Anchor, Drawing, Face};
use crate::font;

/// Width of a figure in a report. A narrow phone shows it at three quarters of its size.
pub const WIDTH: f64 = 480.0;
/// Width of a figure for one column of a paper, and the points of that column: text of 13 pixels has 7.8 points.
pub const COLUMN: f64 = 400.0;
pub const COLUMN_POINTS: f64 = 240.0;
pub const LEFT: f64 = 66.0;
pub const RIGHT: f64 = 22.0;
pub const EDGE: f64 = 18.0;
pub const PLOT_HEIGHT: f64 = 200.0;
/// Line height.
pub const LEADING: f64 = 20.0;
/// Maximum width of row names.
const MAX_LEFT: f64 = 210.0;

/// Width of the plot area in a figure of this width.
pub fn plot_width(width: f64) -> f64 {
    width - LEFT - RIGHT
}

/// Height of the title and label above a plot.
pub fn heading_height(title: &str, label: &str, width: f64) -> f64 {
    14.0 + LEADING * (titles(title, width).len() + usize::from(!label.is_empty())) as f64
}

/// The title and, below it, the label of the y axis.
pub fn heading(drawing: &mut Drawing, top: f64, title: &str, label: &str) {
    let mut y = top + LEADING;
    for line in titles(title, drawing.width) {
        drawing.text(Face::Heading, Anchor::Start, (EDGE, y), &line);
        y += LEADING;
    }
    if !label.is_empty() {
        drawing.text(Face::Quiet, Anchor::Start, (EDGE, y), &font::fit(label, Face::Quiet, drawing.width - 2.0 * EDGE));
    }
}

fn titles(title: &str, width: f64) -> Vec<String> {
    font::wrap(title, Face::Heading, width - 2.0 * EDGE)
}

/// The label below a horizontal axis, centred.
pub fn caption(drawing: &mut Drawing, middle: f64, y: f64, label: &str) {
    if !label.is_empty() {
        let text = font::fit(label, Face::Quiet, 2.0 * (middle - EDGE).min(drawing.width - EDGE - middle));
        drawing.text(Face::Quiet, Anchor::Middle, (middle, y), &text);
    }
}

/// Left edge of a plot with these row names.
pub fn left_of(names: &[String]) -> f64 {
    let widest = names.iter().map(|name| font::width(name, Face::Quiet)).fold(0.0, f64::max);
    (EDGE + widest + 10.0).clamp(LEFT, MAX_LEFT)
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
