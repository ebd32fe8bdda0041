//! A drawing: shapes and text with styles, before they are written to a file format.
//!
//! SVG and PNG are made from the same list and therefore show the same picture.

use crate::colour::Rgb;

/// Shapes and text; later ones cover earlier ones.
pub struct Drawing {
    pub width: f64,
    pub height: f64,
    pub items: Vec<Item>,
}

/// A position in pixels from the top left corner.
pub type Place = (f64, f64);

pub enum Item {
    /// A group, with or without a class.
    Open(&'static str),
    Close,
    Shape {
        look: Look,
        path: Path,
        title: Option<String>,
    },
    Text {
        face: Face,
        anchor: Anchor,
        place: Place,
        text: String,
    },
}

/// Horizontal alignment of text relative to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    /// The share of the text's width to the left of its position.
    pub fn share(self) -> f64 {
        match self {
            Anchor::Start => 0.0,
            Anchor::Middle => 0.5,
            Anchor::End => 1.0,
        }
    }
}

/// The style of a shape. Integers are colour indices of series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Grid,
    Axis,
    Line { color: usize, dashed: bool },
    Band(usize),
    Drop(usize),
    Dot(usize),
    Whisker(usize),
    Rule(usize),
    Cell(Rgb),
    Blank,
}

/// The style of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    Title,
    Heading,
    Body,
    Quiet,
    TickX,
    TickY,
    Mark(usize),
    /// A value in a heat map cell, black or white.
    Cell {
        white: bool,
    },
}

impl Face {
    /// Font size in pixels, and whether it is bold.
    pub fn font(self) -> (f64, bool) {
        match self {
            Face::Title => (16.0, true),
            Face::Heading => (14.0, true),
            Face::Body | Face::Quiet | Face::TickX | Face::TickY => (13.0, false),
            Face::Mark(_) => (12.0, true),
            Face::Cell { .. } => (10.0, false),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    Move(Place),
    Line(Place),
    /// A dot at the current point, visible if nothing is connected to it.
    Dot,
    Close,
}

/// A path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Path(pub Vec<Step>);

impl Path {
    pub fn segment(from: Place, to: Place) -> Path {
        Path::segments(&[(from, to)])
    }

    pub fn segments(segments: &[(Place, Place)]) -> Path {
        Path(segments.iter().flat_map(|&(from, to)| [Step::Move(from), Step::Line(to)]).collect())
    }

    /// A closed polygon; empty if there are no corners.
    pub fn polygon(corners: &[Place]) -> Path {
        let mut steps = Vec::with_capacity(corners.len() + 1);
        for (i, &corner) in corners.iter().enumerate() {
            steps.push(if i == 0 { Step::Move(corner) } else { Step::Line(corner) });
        }
        if !steps.is_empty() {
            steps.push(Step::Close);
        }
        Path(steps)
    }

    pub fn rectangle((x, y): Place, width: f64, height: f64) -> Path {
        Path::polygon(&[(x, y), (x + width, y), (x + width, y + height), (x, y + height)])
    }

    /// A circle as a polygon with enough corners for its size.
    pub fn circle((x, y): Place, radius: f64) -> Path {
        const CORNERS: usize = 24;
        let corner = |i: usize| {
            let (sin, cos) = (i as f64 * std::f64::consts::TAU / CORNERS as f64).sin_cos();
            (x + radius * cos, y + radius * sin)
        };
        Path::polygon(&(0..CORNERS).map(corner).collect::<Vec<_>>())
    }
}

impl Drawing {
    pub fn new(width: f64, height: f64) -> Drawing {
        Drawing { width, height, items: Vec::new() }
    }

    pub fn open(&mut self, class: &'static str) {
        self.items.push(Item::Open(class));
    }

    pub fn close(&mut self) {
        self.items.push(Item::Close);
    }

    /// Adds a shape with a tooltip.
    pub fn path(&mut self, look: Look, path: Path, title: Option<&str>) {
        let title = title.filter(|title| !title.is_empty()).map(String::from);
        self.items.push(Item::Shape { look, path, title });
    }

    pub fn segment(&mut self, look: Look, from: Place, to: Place) {
        self.path(look, Path::segment(from, to), None);
    }

    pub fn text(&mut self, face: Face, anchor: Anchor, place: Place, text: &str) {
        if !text.is_empty() {
            self.items.push(Item::Text { face, anchor, place, text: text.into() });
        }
    }
}

/// The marker of a series. Each colour has its own shape, so series are distinguishable without colour; the steps of the ramp share a star.
pub fn marker(drawing: &mut Drawing, color: usize, (x, y): Place, title: Option<&str>) {
    let polygon = |corners: &[Place]| Path::polygon(&corners.iter().map(|(a, b)| (x + a, y + b)).collect::<Vec<_>>());
    let star = |i: usize| {
        let (sin, cos) = (i as f64 * std::f64::consts::PI / 5.0).sin_cos();
        let radius = if i.is_multiple_of(2) { 7.0 } else { 3.2 };
        (radius * sin, -radius * cos)
    };
    let path = match crate::colour::index(color) {
        0 => Path::circle((x, y), 4.5),
        1 => polygon(&[(-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)]),
        2 => polygon(&[(0.0, -5.6), (5.2, 3.9), (-5.2, 3.9)]),
        3 => polygon(&[(0.0, -5.9), (5.9, 0.0), (0.0, 5.9), (-5.9, 0.0)]),
        4 => polygon(&[(0.0, 5.6), (5.2, -3.9), (-5.2, -3.9)]),
        6 => polygon(&[(-5.2, -3.0), (0.0, -5.9), (5.2, -3.0), (5.2, 3.0), (0.0, 5.9), (-5.2, 3.0)]),
        7 => polygon(&[(-5.6, 0.0), (3.9, -5.2), (3.9, 5.2)]),
        8 => polygon(&[(5.6, 0.0), (-3.9, 5.2), (-3.9, -5.2)]),
        crate::colour::SERIES.. => polygon(&(0..10).map(star).collect::<Vec<_>>()),
        _ => {
            let (a, b) = (1.9, 5.4);
            polygon(&[(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)])
        }
    };
    drawing.path(Look::Dot(color), path, title);
}
