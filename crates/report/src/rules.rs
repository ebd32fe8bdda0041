//! Reference lines and the placement of their labels.

use crate::chart::{Frame, Rule};
use crate::draw::{Anchor, Drawing, Face, Look, Path, Place};
use crate::font;
use crate::layout::LEFT;

/// Sampling distance along a line: less than a character.
const SAMPLE_DISTANCE: f64 = 4.0;
/// Distance of a label from its line, and its height.
const GAP: f64 = 6.0;
const HEIGHT: f64 = 12.0;

/// Sampled positions along a polyline.
pub fn trace(points: &[Place]) -> Vec<Place> {
    let mut places = points.to_vec();
    for pair in points.windows(2) {
        let ((x, y), (to_x, to_y)) = (pair[0], pair[1]);
        let parts = ((to_x - x).hypot(to_y - y) / SAMPLE_DISTANCE).ceil().min(1000.0) as usize;
        places.extend((1..parts).map(|i| i as f64 / parts as f64).map(|t| (x + t * (to_x - x), y + t * (to_y - y))));
    }
    places
}

impl Rule {
    pub(crate) fn draw(&self, drawing: &mut Drawing, frame: &Frame) {
        if let Some(y) = frame.height(self.y) {
            drawing.path(Look::Rule(self.color), Path::segment((LEFT, y), (LEFT + frame.width, y)), Some(&self.label));
        }
    }
}

/// Labels of rules, each above or below its line at the position that covers the fewest of the taken places, which include the rules.
pub fn draw_labels(drawing: &mut Drawing, frame: &Frame, rules: &[&Rule], mut taken: Vec<Place>) {
    for rule in rules {
        let Some(y) = frame.height(rule.y) else { continue };
        let face = Face::Mark(rule.color);
        let text = font::fit(&rule.label, face, frame.width);
        let width = font::width(&text, face);
        let covered = |&(x, base): &Place| {
            let inside = |place: &&Place| place.0 > x - 4.0 && place.0 < x + width + 4.0 && place.1 > base - HEIGHT && place.1 < base + 4.0;
            let outside = base > frame.bottom - 3.0 || base - HEIGHT < frame.bottom - frame.tall - 12.0;
            taken.iter().filter(inside).count() + if outside { 1_000_000 } else { 0 }
        };
        // From right to left: most lines are flat at the right end.
        let starts = (0..=8).map(|i| LEFT + (frame.width - width) * (1.0 - f64::from(i) / 8.0));
        let places = starts.flat_map(|x| [(x, y - GAP), (x, y + GAP + HEIGHT - 2.0)]);
        // The first of equal candidates.
        let Some((x, base)) = places.min_by_key(covered) else { continue };
        drawing.text(face, Anchor::Start, (x, base), &text);
        taken.extend(trace(&[(x, base), (x + width, base)]));
        taken.extend(trace(&[(x, base - HEIGHT), (x + width, base - HEIGHT)]));
    }
}
