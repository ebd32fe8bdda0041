//! Charts: two axes and the layers drawn between them.

use crate::draw::{Anchor, Drawing, Face, Look, Place};
use crate::labels::{self, Label, Rectangle};
use crate::layout::{self, LEADING, LEFT, PLOT_HEIGHT};
use crate::scale::{Domain, Scale, Unit};
use crate::{font, rules};

/// More labelled points than this need a taller plot.
const MANY_LABELS: usize = 16;
/// Room below the lowest point for its label, as a share of the range of the points, and below a reference line that is the lowest.
const LABEL_MARGIN: f64 = 0.08;
const RULE_MARGIN: f64 = 0.12;
/// Maximum number of ticks of the horizontal axis, and minimum distance between their labels.
const MAX_TICKS: usize = 8;
const TICK_GAP: f64 = 10.0;

/// A pair of axes with layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The title; wrapped if long.
    pub title: String,
    /// The horizontal axis, covering all values.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Drawn in order; later layers cover earlier ones.
    pub layers: Vec<Layer>,
}

/// An axis of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// The label; empty for none.
    pub label: String,
    /// Linear or logarithmic.
    pub scale: Scale,
    /// The unit of the values.
    pub unit: Unit,
    /// Positions of tick labels on a horizontal axis; empty for round values.
    pub ticks: Vec<f64>,
}

/// A layer of a chart.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Layer {
    /// A line.
    Line(Line),
    /// A labelled point.
    Mark(Mark),
    /// An area around a line, such as the range over seeds.
    Band(Band),
    /// Points that are not connected.
    Points(Points),
    /// A horizontal reference line.
    Rule(Rule),
    /// The individual runs whose mean a line shows.
    Runs(Runs),
}

/// Points connected in order. A point outside the domain of the axes is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Legend entry, shared by all layers of the figure with the same name; empty for none.
    pub name: String,
    /// Index of a colour. There are six; larger indices wrap around. Colour 0 is for the baseline.
    pub color: usize,
    /// Whether the line is dashed.
    pub dashed: bool,
    /// (x, y)
    pub points: Vec<(f64, f64)>,
}

/// A labelled point, such as the intersection of two lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// x coordinate.
    pub x: f64,
    /// y coordinate.
    pub y: f64,
    /// The label next to the point.
    pub label: String,
    /// Colour index, as in [`Line`].
    pub color: usize,
}

/// A translucent area from low to high, without a legend entry. A missing value is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Band {
    /// Name of its line.
    pub name: String,
    /// Colour index of its line.
    pub color: usize,
    /// (x, low, high)
    pub points: Vec<(f64, f64, f64)>,
}

/// Unconnected markers.
#[derive(Clone, Debug, PartialEq)]
pub struct Points {
    /// Legend entry; empty for none.
    pub name: String,
    /// Colour index, as in [`Line`]. Each colour has its own marker shape.
    pub color: usize,
    /// In any order.
    pub points: Vec<Point>,
}

/// A marker of [`Points`].
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// x coordinate.
    pub x: f64,
    /// y coordinate.
    pub y: f64,
    /// Ends of the error bar.
    pub interval: Option<(f64, f64)>,
    /// Shown as a tooltip, and next to the point if there is room; empty for none.
    pub name: String,
}

/// The individual runs behind a line, each drawn as a dot at its last point. Interactive reports can draw them completely and hide some.
#[derive(Clone, Debug, PartialEq)]
pub struct Runs {
    /// Name of the line.
    pub name: String,
    /// Colour index of the line.
    pub color: usize,
    /// The name of each run, such as `seed 1`, and its points.
    pub runs: Vec<(String, Vec<(f64, f64)>)>,
}

/// A horizontal reference line across the chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Position on the value axis.
    pub y: f64,
    /// The label; empty for none.
    pub label: String,
    /// Colour index, as in [`Line`].
    pub color: usize,
}

impl Axis {
    /// An axis.
    pub fn new(label: impl Into<String>, scale: Scale, unit: Unit) -> Axis {
        Axis { label: label.into(), scale, unit, ticks: Vec::new() }
    }

    /// Places tick labels at these values.
    pub fn at(self, ticks: impl Into<Vec<f64>>) -> Axis {
        Axis { ticks: ticks.into(), ..self }
    }

    pub(crate) fn has_place(&self, value: f64) -> bool {
        value.is_finite() && (self.scale != Scale::Log || value > 0.0)
    }
}

impl Point {
    /// A point without a label or error bar.
    pub fn new(x: f64, y: f64) -> Point {
        Point { x, y, interval: None, name: String::new() }
    }

    /// Adds an error bar.
    pub fn within(mut self, low: f64, high: f64) -> Point {
        self.interval = Some((low, high));
        self
    }

    /// Adds a label.
    pub fn named(mut self, name: impl Into<String>) -> Point {
        self.name = name.into();
        self
    }
}

/// Position of the plot area in the figure.
pub struct Frame {
    /// Width and height of the plot area.
    pub width: f64,
    pub tall: f64,
    pub x: Domain,
    pub y: Domain,
    pub bottom: f64,
}

impl Frame {
    pub fn place(&self, x: f64, y: f64) -> Option<(f64, f64)> {
        Some((LEFT + self.x.place(x)? * self.width, self.height(y)?))
    }

    pub fn height(&self, y: f64) -> Option<f64> {
        Some(self.bottom - self.y.place(y)? * self.tall)
    }

    /// Like `place`, but clamped to the plot area.
    pub fn clipped(&self, y: f64) -> f64 {
        let low = if y > 0.0 { 1.0 } else { 0.0 };
        self.bottom - self.y.place(y).unwrap_or(low).clamp(0.0, 1.0) * self.tall
    }
}

impl Chart {
    pub(crate) fn height(&self, width: f64) -> f64 {
        let below = 24.0 + if self.x.label.is_empty() { 0.0 } else { LEADING } + 8.0;
        layout::heading_height(&self.title, &self.y.label, width) + self.tall() + below
    }

    /// Number of points with labels.
    fn named(&self) -> usize {
        let named = self.layers.iter().map(|layer| match layer {
            Layer::Points(points) => points.points.iter().filter(|point| !point.name.is_empty()).count(),
            _ => 0,
        });
        named.sum()
    }

    /// Height of the plot area: larger if many points have labels.
    fn tall(&self) -> f64 {
        if self.named() > MANY_LABELS { 1.7 * PLOT_HEIGHT } else { PLOT_HEIGHT }
    }

    /// A value below the lowest point or reference line, so a label below it is inside the plot.
    fn below_the_lowest(&self, places: &[(f64, f64)], rules: &[&Rule]) -> Option<f64> {
        let points = || places.iter().map(|place| place.1);
        let heights = || points().chain(rules.iter().map(|rule| rule.y));
        let (low, high) = (heights().fold(f64::INFINITY, f64::min), heights().fold(f64::NEG_INFINITY, f64::max));
        let margin = match points().all(|y| y > low) {
            true => RULE_MARGIN,
            false if self.named() > 0 => LABEL_MARGIN,
            false => return None,
        };
        let value = low - margin * (high - low);
        let keeps_zero = low < 0.0 || value >= 0.0;
        (self.y.scale == Scale::Linear && value.is_finite() && keeps_zero).then_some(value)
    }

    pub(crate) fn draw(&self, drawing: &mut Drawing, top: f64) {
        drawing.open("");
        layout::heading(drawing, top, &self.title, &self.y.label);
        let (plot_top, width) =
            (top + layout::heading_height(&self.title, &self.y.label, drawing.width), layout::plot_width(drawing.width));
        let tall = self.tall();
        let bottom = plot_top + tall;
        let mut places: Vec<(f64, f64)> = self.layers.iter().flat_map(Layer::places).collect();
        places.retain(|&(x, y)| self.x.has_place(x) && self.y.has_place(y));
        let rules: Vec<&Rule> =
            self.layers.iter().filter_map(|layer| if let Layer::Rule(rule) = layer { Some(rule) } else { None }).collect();
        // Lines reach the ends of the axis; markers keep a margin.
        let apart = self.layers.iter().any(|layer| matches!(layer, Layer::Points(_)));
        let x = Domain::around(self.x.scale, places.iter().map(|place| place.0), apart);
        let heights =
            places.iter().map(|place| place.1).chain(rules.iter().map(|rule| rule.y)).chain(self.below_the_lowest(&places, &rules));
        let y = x.and_then(|_| Domain::around(self.y.scale, heights, true));
        if let (Some(x), Some(y)) = (x, y) {
            let frame = Frame { width, tall, x, y, bottom };
            self.draw_axes(drawing, &frame);
            for layer in &self.layers {
                layer.draw(drawing, self, &frame);
            }
            let mut taken: Vec<Place> = self.layers.iter().flat_map(|layer| layer.trace(&frame)).collect();
            let across = rules.iter().filter_map(|rule| frame.height(rule.y));
            taken.extend(across.flat_map(|y| rules::trace(&[(LEFT, y), (LEFT + width, y)])));
            let labels = self.draw_labels(drawing, &frame, &taken);
            taken.extend(labels);
            rules::draw_labels(drawing, &frame, &rules, taken);
        } else {
            layout::nothing(drawing, LEFT + width / 2.0, plot_top + tall / 2.0);
        }
        drawing.segment(Look::Axis, (LEFT, bottom), (LEFT + width, bottom));
        layout::caption(drawing, LEFT + width / 2.0, bottom + 40.0, &self.x.label);
        drawing.close();
    }

    fn draw_axes(&self, drawing: &mut Drawing, frame: &Frame) {
        value_axis(drawing, &self.y, frame);
        for (tick, text) in self.x_ticks(frame) {
            let Some(x) = frame.x.place(tick).map(|share| LEFT + share * frame.width) else { continue };
            drawing.segment(Look::Axis, (x, frame.bottom), (x, frame.bottom + 5.0));
            drawing.text(Face::TickX, Anchor::Middle, (x, frame.bottom + 20.0), &text);
        }
    }

    /// Tick labels of the horizontal axis: as many as fit next to each other.
    fn x_ticks(&self, frame: &Frame) -> Vec<(f64, String)> {
        let labelled = |ticks: Vec<f64>| {
            let texts = self.x.unit.ticks(&ticks);
            ticks.into_iter().zip(texts).collect::<Vec<(f64, String)>>()
        };
        let fits = |ticks: &[(f64, String)]| {
            let end = |(tick, text): &(f64, String), side: f64| {
                Some(frame.x.place(*tick)? * frame.width + side * font::width(text, Face::TickX) / 2.0)
            };
            ticks.windows(2).all(|pair| end(&pair[0], 1.0).zip(end(&pair[1], -1.0)).is_none_or(|(left, right)| left + TICK_GAP <= right))
        };
        if !self.x.ticks.is_empty() {
            return labelled(self.x.ticks.clone());
        }
        let mut choices = (2..=MAX_TICKS).rev().map(|most| labelled(frame.x.ticks(most)));
        choices.clone().find(|ticks| fits(ticks)).or_else(|| choices.next_back()).unwrap_or_default()
    }

    /// Labels of marks and points, above all layers and without overlap. Returns sampled positions of the labels.
    fn draw_labels(&self, drawing: &mut Drawing, frame: &Frame, lines: &[Place]) -> Vec<Place> {
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
        let rows = |needed: &bool| if *needed { labels::FAR } else { labels::NEAR };
        let sizes: Vec<(f64, f64, f64, usize)> =
            named.iter().map(|(color, name, (x, y), needed)| (*x, *y, font::width(name, Face::Mark(*color)), rows(needed))).collect();
        let plot = Rectangle { left: LEFT, right: LEFT + frame.width, top: frame.bottom - frame.tall - 8.0, bottom: frame.bottom };
        let mut taken = Vec::new();
        for (((color, name, _, needed), (label, free)), size) in named.iter().zip(labels::place(&sizes, lines, plot)).zip(&sizes) {
            let Label { x, y, leftwards } = label;
            if !name.is_empty() && (*needed || free) {
                drawing.text(Face::Mark(*color), if leftwards { Anchor::End } else { Anchor::Start }, (x, y), name);
                let Rectangle { left, right, top, bottom } = label.room(size.2);
                taken.extend([top, (top + bottom) / 2.0, bottom].into_iter().flat_map(|y| rules::trace(&[(left, y), (right, y)])));
            }
        }
        taken
    }
}

/// Grid lines and tick labels of the vertical axis.
pub fn value_axis(drawing: &mut Drawing, axis: &Axis, frame: &Frame) {
    let ticks = frame.y.ticks(7);
    for (tick, text) in ticks.iter().zip(axis.unit.ticks(&ticks)) {
        let Some(y) = frame.height(*tick) else { continue };
        drawing.segment(Look::Grid, (LEFT, y), (LEFT + frame.width, y));
        drawing.text(Face::TickY, Anchor::End, (LEFT - 8.0, y + 4.5), &text);
    }
}
