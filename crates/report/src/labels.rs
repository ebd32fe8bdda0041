//! Placement of point labels without overlap.

/// Radius of a point.
pub const DOT: f64 = 4.5;
/// Distance between a point and its label.
const GAP: f64 = 7.0;
/// Height of a label above its baseline, and distance between rows of labels.
const ASCENT: f64 = 10.0;
const ROW: f64 = 15.0;
/// Maximum distance of a label from its point, in rows.
const ROWS: usize = 8;

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
    fn room(&self, width: f64) -> Rectangle {
        let left = if self.leftwards { self.x - width } else { self.x };
        Rectangle { left, right: left + width, top: self.y - ASCENT, bottom: self.y + 3.0 }
    }
}

/// Places a label for each point (x, y, label width) inside the plot, without covering points and earlier labels if there is room. Also returns whether there was room.
///
/// The first choice is above left. At the intersection of a rising and a flat line, this area is empty, as is the area below right.
pub fn place(points: &[(f64, f64, f64)], plot: Rectangle) -> Vec<(Label, bool)> {
    let dots = points.iter().map(|&(x, y, _)| Rectangle { left: x - DOT, right: x + DOT, top: y - DOT, bottom: y + DOT });
    let mut taken: Vec<Rectangle> = dots.collect();
    let mut labels = Vec::with_capacity(points.len());
    for &(x, y, width) in points {
        let above = |row: usize, leftwards: bool| {
            let x = if leftwards { x - GAP } else { x + GAP };
            Label { x, y: y - GAP - ROW * row as f64, leftwards }
        };
        let below = Label { x: x + GAP, y: y + GAP + ASCENT, leftwards: false };
        let near = [above(0, true), below];
        let mut choices = near.into_iter().chain((0..ROWS).flat_map(|row| [above(row, true), above(row, false)]));
        let free = |label: &Label| {
            let room = label.room(width);
            plot.holds(&room) && taken.iter().all(|other| !other.meets(&room))
        };
        let found = choices.find(free);
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
        let labels = place(&crowded, PLOT);
        let rooms: Vec<Rectangle> = labels.iter().zip(&crowded).map(|((label, _), point)| label.room(point.2)).collect();
        for (i, room) in rooms.iter().enumerate() {
            assert!(PLOT.holds(room), "{room:?}");
            assert!(rooms[..i].iter().all(|other| !other.meets(room)), "{rooms:?}");
        }
        assert!(labels[0].0.leftwards && labels[0].0.y == 278.0 && !labels[4].0.leftwards && labels.iter().all(|label| label.1));
    }

    #[test]
    fn a_label_without_room_is_still_drawn() {
        let labels = place(&vec![(300.0, 200.0, 400.0); 40], PLOT);
        assert!(labels.len() == 40 && labels.iter().all(|label| label.0.x.is_finite()) && !labels[39].1);
    }
}
