//! Where the names of points are written, so that none covers another.

/// Radius of a point.
pub const DOT: f64 = 4.5;
/// Between a point and its name.
const GAP: f64 = 7.0;
/// Of a name above its base line, and of a row of names.
const ASCENT: f64 = 10.0;
const ROW: f64 = 15.0;
/// Rows that a name may lie away from its point.
const ROWS: usize = 8;

/// A part of the picture; y grows downwards.
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

/// A place for a name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Label {
    /// Its end where it goes leftwards, else its start.
    pub x: f64,
    /// Its base line.
    pub y: f64,
    /// Whether it ends at x.
    pub leftwards: bool,
}

impl Label {
    fn room(&self, width: f64) -> Rectangle {
        let left = if self.leftwards { self.x - width } else { self.x };
        Rectangle { left, right: left + width, top: self.y - ASCENT, bottom: self.y + 3.0 }
    }
}

/// A name for each point (x, y, width of its name), within the plot and apart from points and earlier names where there is room; and whether there is.
///
/// The first choice is above and left: where a rising line crosses a flat one, nothing is drawn there, nor below and right.
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
    fn names_lie_inside_and_apart() {
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
    fn a_name_without_room_is_still_written() {
        let labels = place(&vec![(300.0, 200.0, 400.0); 40], PLOT);
        assert!(labels.len() == 40 && labels.iter().all(|label| label.0.x.is_finite()) && !labels[39].1);
    }
}
