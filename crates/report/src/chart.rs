//! Charts: two axes and what is drawn between them.

use crate::draw::{Anchor, Drawing, Face, Look};
use crate::labels::{self, Label, Rectangle};
use crate::layout::{self, LEADING, LEFT, PLOT_HEIGHT, PLOT_WIDTH};
use crate::scale::{Domain, Scale, Unit};
use crate::{font, rules};

/// One pair of axes and what is drawn between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// In one line or a few.
    pub title: String,
    /// From left to right; as wide as the values.
    pub x: Axis,
    /// From bottom to top.
    pub y: Axis,
    /// Later ones above earlier ones.
    pub layers: Vec<Layer>,
}

/// What a direction means.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Empty where title and unit say it.
    pub label: String,
    /// How values are spread.
    pub scale: Scale,
    /// What values are.
    pub unit: Unit,
}

/// Something drawn in a chart.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Layer {
    /// A series.
    Line(Line),
    /// A point with a name.
    Mark(Mark),
    /// What lies around a line, such as the seeds of a mean.
    Band(Band),
    /// A series whose points are not joined.
    Points(Points),
    /// A height to compare with.
    Rule(Rule),
    /// What a line is the mean of.
    Runs(Runs),
}

/// Points joined in their order. A point that has no place on the axes is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// In the legend, once for all charts with the same name; empty for none.
    pub name: String,
    /// One of six, counted from 0, which is for what others are compared with; further numbers begin anew.
    pub color: usize,
    /// Whether it has gaps, as the second of two ways to the same end.
    pub dashed: bool,
    /// (x, y)
    pub points: Vec<(f64, f64)>,
}

/// A point worth a name, such as where two lines meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// Its place.
    pub x: f64,
    /// Its place.
    pub y: f64,
    /// Written beside it.
    pub label: String,
    /// That of a [`Line`].
    pub color: usize,
}

/// An area from low to high, translucent and without an entry in the legend. A place that lacks a value is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Band {
    /// That of its line.
    pub name: String,
    /// That of its line.
    pub color: usize,
    /// (x, low, high)
    pub points: Vec<(f64, f64, f64)>,
}

/// Markers in a colour and a shape of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct Points {
    /// In the legend; empty for none.
    pub name: String,
    /// As in [`Line`]; each colour has a shape of its own.
    pub color: usize,
    /// In any order.
    pub points: Vec<Point>,
}

/// One of [`Points`].
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Its place.
    pub x: f64,
    /// Its place.
    pub y: f64,
    /// Ends of a whisker.
    pub interval: Option<(f64, f64)>,
    /// Written beside it where there is room, and shown when it is pointed at; empty for none.
    pub name: String,
}

/// The single runs behind a line: a dot at the end of each; pages draw them whole where they are asked to, and leave some out.
#[derive(Clone, Debug, PartialEq)]
pub struct Runs {
    /// That of its line.
    pub name: String,
    /// That of its line.
    pub color: usize,
    /// What each is called, such as `seed 1`, and its points.
    pub runs: Vec<(String, Vec<(f64, f64)>)>,
}

/// A horizontal line from one end of the chart to the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Its height, on the axis of values.
    pub y: f64,
    /// Written on it; empty for none.
    pub label: String,
    /// As in [`Line`].
    pub color: usize,
}

impl Axis {
    /// An axis.
    pub fn new(label: impl Into<String>, scale: Scale, unit: Unit) -> Axis {
        Axis { label: label.into(), scale, unit }
    }

    pub(crate) fn has_place(&self, value: f64) -> bool {
        value.is_finite() && (self.scale != Scale::Log || value > 0.0)
    }
}

impl Point {
    /// Without name or whisker.
    pub fn new(x: f64, y: f64) -> Point {
        Point { x, y, interval: None, name: String::new() }
    }

    /// With a whisker.
    pub fn within(mut self, low: f64, high: f64) -> Point {
        self.interval = Some((low, high));
        self
    }

    /// With a name.
    pub fn named(mut self, name: impl Into<String>) -> Point {
        self.name = name.into();
        self
    }
}

/// The plot's place in the figure.
pub struct Frame {
    pub x: Domain,
    pub y: Domain,
    pub bottom: f64,
}

impl Frame {
    pub fn place(&self, x: f64, y: f64) -> Option<(f64, f64)> {
        Some((LEFT + self.x.place(x)? * PLOT_WIDTH, self.height(y)?))
    }

    pub fn height(&self, y: f64) -> Option<f64> {
        Some(self.bottom - self.y.place(y)? * PLOT_HEIGHT)
    }

    /// The same within the plot: where something begins that is cut off by an end of the axis.
    pub fn clipped(&self, y: f64) -> f64 {
        let low = if y > 0.0 { 1.0 } else { 0.0 };
        self.bottom - self.y.place(y).unwrap_or(low).clamp(0.0, 1.0) * PLOT_HEIGHT
    }
}

impl Chart {
    pub(crate) fn height(&self) -> f64 {
        let below = 24.0 + if self.x.label.is_empty() { 0.0 } else { LEADING } + 8.0;
        layout::heading_height(&self.title, &self.y.label) + PLOT_HEIGHT + below
    }

    pub(crate) fn draw(&self, drawing: &mut Drawing, top: f64) {
        drawing.open("");
        layout::heading(drawing, top, &self.title, &self.y.label);
        let plot_top = top + layout::heading_height(&self.title, &self.y.label);
        let bottom = plot_top + PLOT_HEIGHT;
        let mut places: Vec<(f64, f64)> = self.layers.iter().flat_map(Layer::places).collect();
        places.retain(|&(x, y)| self.x.has_place(x) && self.y.has_place(y));
        let rules: Vec<&Rule> =
            self.layers.iter().filter_map(|layer| if let Layer::Rule(rule) = layer { Some(rule) } else { None }).collect();
        // Lines reach the ends; markers keep away from them.
        let apart = self.layers.iter().any(|layer| matches!(layer, Layer::Points(_)));
        let x = Domain::around(self.x.scale, places.iter().map(|place| place.0), apart);
        let y =
            x.and_then(|_| Domain::around(self.y.scale, places.iter().map(|place| place.1).chain(rules.iter().map(|rule| rule.y)), true));
        if let (Some(x), Some(y)) = (x, y) {
            let frame = Frame { x, y, bottom };
            self.draw_axes(drawing, &frame);
            for layer in &self.layers {
                layer.draw(drawing, self, &frame);
            }
            self.draw_labels(drawing, &frame);
            let taken = self.layers.iter().flat_map(|layer| layer.trace(&frame)).collect();
            rules::draw_labels(drawing, &frame, &rules, taken);
        } else {
            layout::nothing(drawing, LEFT + PLOT_WIDTH / 2.0, plot_top + PLOT_HEIGHT / 2.0);
        }
        drawing.segment(Look::Axis, (LEFT, bottom), (LEFT + PLOT_WIDTH, bottom));
        layout::caption(drawing, LEFT + PLOT_WIDTH / 2.0, bottom + 40.0, &self.x.label);
        drawing.close();
    }

    fn draw_axes(&self, drawing: &mut Drawing, frame: &Frame) {
        value_axis(drawing, &self.y, &frame.y, frame.bottom);
        let ticks = frame.x.ticks(8);
        let texts = self.x.unit.ticks(&ticks);
        for (tick, text) in ticks.iter().zip(texts) {
            let Some(x) = frame.x.place(*tick).map(|share| LEFT + share * PLOT_WIDTH) else { continue };
            drawing.segment(Look::Axis, (x, frame.bottom), (x, frame.bottom + 5.0));
            drawing.text(Face::TickX, Anchor::Middle, (x, frame.bottom + 20.0), &text);
        }
    }

    /// Names of marks and points, above everything else and beside each other.
    fn draw_labels(&self, drawing: &mut Drawing, frame: &Frame) {
        let mut named: Vec<(usize, &str, (f64, f64), bool)> = Vec::new();
        for layer in &self.layers {
            match layer {
                Layer::Mark(mark) => {
                    named.extend(frame.place(mark.x, mark.y).map(|place| (mark.color, mark.label.as_str(), place, true)));
                }
                Layer::Points(points) => named.extend(points.points.iter().filter_map(|point| {
                    let place = frame.place(point.x, point.y)?;
                    Some((points.color, point.name.as_str(), place, false))
                })),
                _ => {}
            }
        }
        let sizes: Vec<(f64, f64, f64)> =
            named.iter().map(|(color, name, (x, y), _)| (*x, *y, font::width(name, Face::Mark(*color)))).collect();
        let plot = Rectangle { left: LEFT, right: LEFT + PLOT_WIDTH, top: frame.bottom - PLOT_HEIGHT - 8.0, bottom: frame.bottom };
        for ((color, name, _, needed), (label, free)) in named.iter().zip(labels::place(&sizes, plot)) {
            let Label { x, y, leftwards } = label;
            if !name.is_empty() && (*needed || free) {
                drawing.text(Face::Mark(*color), if leftwards { Anchor::End } else { Anchor::Start }, (x, y), name);
            }
        }
    }
}

/// Grid lines and numbers at the left.
pub fn value_axis(drawing: &mut Drawing, axis: &Axis, domain: &Domain, bottom: f64) {
    let ticks = domain.ticks(7);
    for (tick, text) in ticks.iter().zip(axis.unit.ticks(&ticks)) {
        let Some(y) = domain.place(*tick).map(|share| bottom - share * PLOT_HEIGHT) else { continue };
        drawing.segment(Look::Grid, (LEFT, y), (LEFT + PLOT_WIDTH, y));
        drawing.text(Face::TickY, Anchor::End, (LEFT - 8.0, y + 4.5), &text);
    }
}
