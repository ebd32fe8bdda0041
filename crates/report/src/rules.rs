//! Heights to compare with, and where their names are written.

use crate::chart::{Frame, Rule};
use crate::draw::{Anchor, Drawing, Face, Look, Path, Place};
use crate::font;
use crate::layout::{LEFT, PLOT_HEIGHT, PLOT_WIDTH};

/// Between places that stand for a line: less than a letter.
const FINE: f64 = 4.0;
/// Of a name: from its line to its base, and its height.
const GAP: f64 = 6.0;
const HEIGHT: f64 = 12.0;

/// Places along a line through these.
pub fn trace(points: &[Place]) -> Vec<Place> {
    let mut places = points.to_vec();
    for pair in points.windows(2) {
        let ((x, y), (to_x, to_y)) = (pair[0], pair[1]);
        let parts = ((to_x - x).hypot(to_y - y) / FINE).ceil().min(1000.0) as usize;
        places.extend((1..parts).map(|i| i as f64 / parts as f64).map(|t| (x + t * (to_x - x), y + t * (to_y - y))));
    }
    places
}

impl Rule {
    pub(crate) fn draw(&self, drawing: &mut Drawing, frame: &Frame) {
        if let Some(y) = frame.height(self.y) {
            drawing.path(Look::Rule(self.color), Path::segment((LEFT, y), (LEFT + PLOT_WIDTH, y)), Some(&self.label));
        }
    }
}

/// Names of rules, each above or below its line where it covers least of what is drawn.
pub fn draw_labels(drawing: &mut Drawing, frame: &Frame, rules: &[&Rule], mut taken: Vec<Place>) {
    for y in rules.iter().filter_map(|rule| frame.height(rule.y)) {
        taken.extend(trace(&[(LEFT, y), (LEFT + PLOT_WIDTH, y)]));
    }
    for rule in rules {
        let Some(y) = frame.height(rule.y) else { continue };
        let face = Face::Mark(rule.color);
        let text = font::fit(&rule.label, face, PLOT_WIDTH);
        let width = font::width(&text, face);
        let covered = |&(x, base): &Place| {
            let inside = |place: &&Place| place.0 > x - 4.0 && place.0 < x + width + 4.0 && place.1 > base - HEIGHT && place.1 < base + 4.0;
            let outside = base > frame.bottom - 3.0 || base - HEIGHT < frame.bottom - PLOT_HEIGHT - 12.0;
            taken.iter().filter(inside).count() + if outside { 1_000_000 } else { 0 }
        };
        // From the right, where most lines have come to rest, to the left.
        let starts = (0..=8).map(|i| LEFT + (PLOT_WIDTH - width) * (1.0 - f64::from(i) / 8.0));
        let places = starts.flat_map(|x| [(x, y - GAP), (x, y + GAP + HEIGHT - 2.0)]);
        // The first of equals.
        let Some((x, base)) = places.min_by_key(covered) else { continue };
        drawing.text(face, Anchor::Start, (x, base), &text);
        taken.extend(trace(&[(x, base), (x + width, base)]));
        taken.extend(trace(&[(x, base - HEIGHT), (x + width, base - HEIGHT)]));
    }
}
