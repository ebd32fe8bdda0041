//! Placement of point labels without overlap.

use crate::draw::Place;

/// Radius of a point.
pub const DOT: f64 = 4.5;
/// Distance between a point and its label.
const GAP: f64 = 7.0;
/// Height of a label above its baseline, and distance between rows of labels.
const ASCENT: f64 = 10.0;
const ROW: f64 = 15.0;
/// Maximum distance in rows of a label from its mark, which has a line to the axis.
pub const FAR: usize = 8;
/// Maximum distance of a label from its point: farther away it could belong to another point.
pub const NEAR: usize = 1;

/// A rectangle; y grows downwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rectangle {
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
}

impl Rectangle {
    fn meets(&self, other: &Rectangle) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    pub fn covers(&self, (x, y): Place) -> bool {
        (self.left..=self.right).contains(&x) && (self.top..=self.bottom).contains(&y)
    }

    fn holds(&self, other: &Rectangle) -> bool {
        self.left <= other.left && self.right >= other.right && self.top <= other.top && self.bottom >= other.bottom
    }
}

/// The position of a label.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Label {
    /// Its right end if it is right-aligned, otherwise its left end.
    pub x: f64,
    /// Its baseline.
    pub y: f64,
    /// Whether it is right-aligned.
    pub leftwards: bool,
}

impl Label {
    /// The area of the label with this width.
    pub fn room(&self, width: f64) -> Rectangle {
        let left = if self.leftwards { self.x - width } else { self.x };
        Rectangle { left, right: left + width, top: self.y - ASCENT, bottom: self.y + 3.0 }
    }
}

/// Places a label for each point (x, y, label width, rows) inside the plot, without covering points and earlier labels if there is room, and without covering the
/// sampled positions of lines if there is room for that as well. Also returns whether there was room.
///
/// The first choice is above left. At the intersection of a rising and a flat line, this area is empty, as is the area below right.
pub fn place(points: &[(f64, f64, f64, usize)], lines: &[Place], plot: Rectangle) -> Vec<(Label, bool)> {
    let dots = points.iter().map(|&(x, y, ..)| Rectangle { left: x - DOT, right: x + DOT, top: y - DOT, bottom: y + DOT });
    let mut taken: Vec<Rectangle> = dots.collect();
    let mut labels = Vec::with_capacity(points.len());
    for &(x, y, width, rows) in points {
        let above = |row: usize, leftwards: bool| {
            let x = if leftwards { x - GAP } else { x + GAP };
            Label { x, y: y - GAP - ROW * row as f64, leftwards }
        };
        let below = Label { x: x + GAP, y: y + GAP + ASCENT, leftwards: false };
        let beside = |leftwards: bool| Label { y: y + ASCENT / 2.0 - 1.0, ..above(0, leftwards) };
        let centered = |y: f64| Label { x: x + width / 2.0, y, leftwards: true };
        let near = [
            above(0, true),
            below,
            beside(false),
            beside(true),
            above(0, false),
            Label { x: x - GAP, leftwards: true, ..below },
            centered(y - GAP),
            centered(y + GAP + ASCENT),
        ];
        let choices = || near.into_iter().chain((1..rows).flat_map(|row| [above(row, true), above(row, false)]));
        let free = |label: &Label| {
            let room = label.room(width);
            plot.holds(&room) && taken.iter().all(|other| !other.meets(&room))
        };
        let clear = |label: &Label| free(label) && !lines.iter().any(|place| label.room(width).covers(*place));
        let found = choices().find(clear).or_else(|| choices().find(free));
        let label = found.unwrap_or(above(0, x > (plot.left + plot.right) / 2.0));
        if found.is_some() && width > 0.0 {
            taken.push(label.room(width));
        }
        labels.push((label, found.is_some()));
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLOT: Rectangle = Rectangle { left: 68.0, right: 498.0, top: 100.0, bottom: 300.0 };

    #[test]
    fn labels_are_inside_the_plot_and_do_not_overlap() {
        let crowded = [(110.0, 285.0, 34.0), (125.0, 280.0, 40.0), (140.0, 278.0, 40.0), (160.0, 270.0, 47.0), (70.0, 110.0, 30.0)];
        let crowded = crowded.map(|(x, y, width)| (x, y, width, FAR));
        let labels = place(&crowded, &[], PLOT);
        let rooms: Vec<Rectangle> = labels.iter().zip(&crowded).map(|((label, _), point)| label.room(point.2)).collect();
        for (i, room) in rooms.iter().enumerate() {
            assert!(PLOT.holds(room), "{room:?}");
            assert!(rooms[..i].iter().all(|other| !other.meets(room)), "{rooms:?}");
        }
        assert!(labels[0].0.leftwards && labels[0].0.y == 278.0 && !labels[4].0.leftwards && labels.iter().all(|label| label.1));
    }

    #[test]
    fn labels_avoid_lines_if_there_is_room() {
        let line: Vec<Place> = (0..100).map(|i| (f64::from(i) * 5.0, 190.0)).collect();
        let (label, free) = place(&[(300.0, 200.0, 40.0, NEAR)], &line, PLOT)[0];
        assert!(free && !line.iter().any(|place| label.room(40.0).covers(*place)), "{label:?}");
        let everywhere: Vec<Place> = (0..50_000).map(|i| (f64::from(i % 250) * 2.0, f64::from(i / 250) * 2.0)).collect();
        assert!(place(&[(300.0, 200.0, 40.0, NEAR)], &everywhere, PLOT)[0].1, "a line does not keep a label from being drawn");
    }

    #[test]
    fn labels_of_points_are_next_to_them() {
        let (x, y) = (300.0, 200.0);
        for (label, free) in place(&vec![(x, y, 40.0, NEAR); 40], &[], PLOT) {
            let room = label.room(40.0);
            assert!(!free || room.left < x + 10.0 && room.right > x - 10.0 && room.top < y + 10.0 && room.bottom > y - 10.0, "{room:?}");
        }
    }

    #[test]
    fn a_label_without_room_is_still_drawn() {
        let labels = place(&vec![(300.0, 200.0, 400.0, FAR); 40], &[], PLOT);
        assert!(labels.len() == 40 && labels.iter().all(|label| label.0.x.is_finite()) && !labels[39].1);
    }
}
