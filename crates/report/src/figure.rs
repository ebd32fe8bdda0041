//! Figures: charts below each other with one legend.

use std::fmt::Write;

use crate::labels::{self, Label, Rectangle};
use crate::scale::{Domain, Scale, Unit};
use crate::style;
use crate::svg::{Px, Svg};

/// Charts under a title, with one legend for all.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// In one line or a few.
    pub title: String,
    /// What is to be seen, for those who cannot see it.
    pub description: String,
    /// From top to bottom.
    pub charts: Vec<Chart>,
}

/// One pair of axes and what is drawn between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// In one line.
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
}

/// Points joined in their order. A point that has no place on the axes is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// In the legend, once for all charts with the same name.
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

/// A telephone shows this many at three quarters of their size.
const WIDTH: f64 = 520.0;
const LEFT: f64 = 68.0;
const RIGHT: f64 = 22.0;
const EDGE: f64 = 18.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - RIGHT;
const PLOT_HEIGHT: f64 = 200.0;
/// Of a line of text.
const LEADING: f64 = 20.0;
/// Of a character, as a share of the font's size: a guess on the wide side, since no font is measured.
const CHARACTER: f64 = 0.56;

impl Figure {
    /// The figure as an SVG document of its own or for a page.
    pub fn to_svg(&self) -> String {
        let titles = wrap(&self.title, 16.0, WIDTH - 2.0 * EDGE);
        let legend = Legend::of(&self.charts);
        let top = EDGE + LEADING * titles.len() as f64 + 6.0;
        let height = top + legend.height() + self.charts.iter().map(Chart::height).sum::<f64>() + EDGE / 2.0;
        let mut svg = Svg::default();
        svg.open(
            "svg",
            &[
                ("xmlns", &"http://www.w3.org/2000/svg"),
                ("width", &Px(WIDTH)),
                ("height", &Px(height)),
                ("viewBox", &format!("0 0 {} {}", Px(WIDTH), Px(height))),
                ("role", &"img"),
            ],
        );
        svg.text("title", &[], &self.title);
        svg.text("desc", &[], &self.description);
        svg.text("style", &[], &style::sheet());
        svg.element("rect", &[("class", &"background"), ("width", &Px(WIDTH)), ("height", &Px(height))]);
        for (i, line) in titles.iter().enumerate() {
            let y = EDGE + 14.0 + LEADING * i as f64;
            svg.text("text", &[("class", &"title"), ("x", &Px(EDGE)), ("y", &Px(y))], line);
        }
        legend.draw(&mut svg, top);
        let mut y = top + legend.height();
        for chart in &self.charts {
            chart.draw(&mut svg, y);
            y += chart.height();
        }
        svg.finish()
    }
}

/// Samples and names of all lines, in rows.
struct Legend<'a> {
    /// A line, its distance from the left, its row.
    entries: Vec<(&'a Line, f64, usize)>,
}

impl<'a> Legend<'a> {
    fn of(charts: &'a [Chart]) -> Legend<'a> {
        let mut entries: Vec<(&Line, f64, usize)> = Vec::new();
        let (mut x, mut row) = (EDGE, 0);
        for layer in charts.iter().flat_map(|chart| &chart.layers) {
            let Layer::Line(line) = layer else { continue };
            if entries.iter().any(|(other, ..)| other.name == line.name) {
                continue;
            }
            let width = 32.0 + width(&line.name, 13.0) + 16.0;
            if x + width > WIDTH && x > EDGE {
                (x, row) = (EDGE, row + 1);
            }
            entries.push((line, x, row));
            x += width;
        }
        Legend { entries }
    }

    fn height(&self) -> f64 {
        self.entries.last().map_or(0.0, |(.., row)| LEADING * (row + 1) as f64 + 8.0)
    }

    fn draw(&self, svg: &mut Svg, top: f64) {
        for (line, x, row) in &self.entries {
            let y = top + LEADING * *row as f64 + 10.0;
            let path = format!("M{} {}h24", Px(*x), Px(y));
            svg.element("path", &[("class", &line.class()), ("d", &path)]);
            svg.text("text", &[("x", &Px(x + 32.0)), ("y", &Px(y + 4.5))], &line.name);
        }
    }
}

impl Chart {
    fn height(&self) -> f64 {
        let heading = 34.0 + if self.y.label.is_empty() { 0.0 } else { LEADING };
        heading + PLOT_HEIGHT + 24.0 + if self.x.label.is_empty() { 0.0 } else { LEADING } + 8.0
    }

    fn draw(&self, svg: &mut Svg, top: f64) {
        svg.open("g", &[]);
        svg.text("text", &[("class", &"chart"), ("x", &Px(EDGE)), ("y", &Px(top + 20.0))], &self.title);
        let mut plot_top = top + 34.0;
        if !self.y.label.is_empty() {
            svg.text("text", &[("class", &"quiet"), ("x", &Px(EDGE)), ("y", &Px(top + 20.0 + LEADING))], &self.y.label);
            plot_top += LEADING;
        }
        let bottom = plot_top + PLOT_HEIGHT;
        let mut places: Vec<(f64, f64)> = self.layers.iter().flat_map(Layer::places).collect();
        places.retain(|&(x, y)| self.x.has_place(x) && self.y.has_place(y));
        let x = Domain::around(self.x.scale, places.iter().map(|place| place.0), false);
        let y = Domain::around(self.y.scale, places.iter().map(|place| place.1), true);
        if let (Some(x), Some(y)) = (x, y) {
            let frame = Frame { x, y, bottom };
            self.draw_axes(svg, &frame);
            for layer in &self.layers {
                layer.draw(svg, &frame);
            }
            self.draw_labels(svg, &frame);
        } else {
            let (x, y) = (LEFT + PLOT_WIDTH / 2.0, plot_top + PLOT_HEIGHT / 2.0);
            svg.text("text", &[("class", &"quiet"), ("x", &Px(x)), ("y", &Px(y)), ("text-anchor", &"middle")], "no values to show");
        }
        let path = format!("M{} {}h{}", Px(LEFT), Px(bottom), Px(PLOT_WIDTH));
        svg.element("path", &[("class", &"axis"), ("d", &path)]);
        if !self.x.label.is_empty() {
            let place: [(&'static str, &dyn std::fmt::Display); 4] =
                [("class", &"quiet"), ("x", &Px(LEFT + PLOT_WIDTH / 2.0)), ("y", &Px(bottom + 40.0)), ("text-anchor", &"middle")];
            svg.text("text", &place, &self.x.label);
        }
        svg.close();
    }

    fn draw_axes(&self, svg: &mut Svg, frame: &Frame) {
        for tick in frame.y.ticks(7) {
            let Some((x, y)) = frame.y.place(tick).map(|share| (LEFT, frame.bottom - share * PLOT_HEIGHT)) else { continue };
            svg.element("path", &[("class", &"grid"), ("d", &format!("M{} {}h{}", Px(x), Px(y), Px(PLOT_WIDTH)))]);
            let place: [(&'static str, &dyn std::fmt::Display); 4] =
                [("class", &"quiet y"), ("x", &Px(x - 8.0)), ("y", &Px(y + 4.5)), ("text-anchor", &"end")];
            svg.text("text", &place, &self.y.unit.format(tick));
        }
        for tick in frame.x.ticks(8) {
            let Some(x) = frame.x.place(tick).map(|share| LEFT + share * PLOT_WIDTH) else { continue };
            svg.element("path", &[("class", &"axis"), ("d", &format!("M{} {}v5", Px(x), Px(frame.bottom)))]);
            let place: [(&'static str, &dyn std::fmt::Display); 4] =
                [("class", &"quiet x"), ("x", &Px(x)), ("y", &Px(frame.bottom + 20.0)), ("text-anchor", &"middle")];
            svg.text("text", &place, &self.x.unit.format(tick));
        }
    }
}

impl Chart {
    /// Names of marks, above everything else and beside each other.
    fn draw_labels(&self, svg: &mut Svg, frame: &Frame) {
        let marks = self.layers.iter().filter_map(|layer| match layer {
            Layer::Mark(mark) => Some((mark, frame.place(mark.x, mark.y)?)),
            Layer::Line(_) => None,
        });
        let marks: Vec<(&Mark, (f64, f64))> = marks.collect();
        let points: Vec<(f64, f64, f64)> = marks.iter().map(|(mark, (x, y))| (*x, *y, width(&mark.label, 12.0))).collect();
        let plot = Rectangle { left: LEFT, right: LEFT + PLOT_WIDTH, top: frame.bottom - PLOT_HEIGHT, bottom: frame.bottom };
        for ((mark, _), label) in marks.iter().zip(labels::place(&points, plot)) {
            mark.draw_label(svg, &label);
        }
    }
}

impl Axis {
    fn has_place(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }
}

/// The plot's place in the figure.
struct Frame {
    x: Domain,
    y: Domain,
    bottom: f64,
}

impl Frame {
    fn place(&self, x: f64, y: f64) -> Option<(f64, f64)> {
        Some((LEFT + self.x.place(x)? * PLOT_WIDTH, self.bottom - self.y.place(y)? * PLOT_HEIGHT))
    }
}

impl Layer {
    /// What the axes have to hold.
    fn places(&self) -> Vec<(f64, f64)> {
        match self {
            Layer::Line(line) => line.points.clone(),
            Layer::Mark(mark) => vec![(mark.x, mark.y)],
        }
    }

    fn draw(&self, svg: &mut Svg, frame: &Frame) {
        match self {
            Layer::Line(line) => line.draw(svg, frame),
            Layer::Mark(mark) => mark.draw(svg, frame),
        }
    }
}

impl Line {
    fn class(&self) -> String {
        format!("line {}{}", style::class(self.color), if self.dashed { " dashed" } else { "" })
    }

    fn draw(&self, svg: &mut Svg, frame: &Frame) {
        let mut path = String::new();
        let mut drawing = false;
        for &(x, y) in &self.points {
            let Some((x, y)) = frame.place(x, y) else {
                drawing = false;
                continue;
            };
            // Writing to a string cannot fail.
            let _ = write!(path, "{}{} {}", if drawing { 'L' } else { 'M' }, Px(x), Px(y));
            if !drawing {
                // So that a point without neighbours is seen: its round ends are a dot.
                path.push_str("h0");
            }
            drawing = true;
        }
        svg.open("path", &[("class", &self.class()), ("d", &path)]);
        svg.text("title", &[], &self.name);
        svg.close();
    }
}

impl Mark {
    /// The point and a line down to the axis.
    fn draw(&self, svg: &mut Svg, frame: &Frame) {
        let Some((x, y)) = frame.place(self.x, self.y) else { return };
        let class = style::class(self.color);
        let drop = format!("M{} {}V{}", Px(x), Px(y), Px(frame.bottom));
        svg.element("path", &[("class", &format!("drop {class}")), ("d", &drop)]);
        svg.element("circle", &[("class", &format!("dot {class}")), ("cx", &Px(x)), ("cy", &Px(y)), ("r", &Px(labels::DOT))]);
    }

    fn draw_label(&self, svg: &mut Svg, label: &Label) {
        let place: [(&'static str, &dyn std::fmt::Display); 4] = [
            ("class", &format!("mark halo {}", style::class(self.color))),
            ("x", &Px(label.x)),
            ("y", &Px(label.y)),
            ("text-anchor", &if label.leftwards { "end" } else { "start" }),
        ];
        svg.text("text", &place, &self.label);
    }
}

/// Pixels that a text takes at most or so.
fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHARACTER
}

/// A text in lines of that many pixels; a word that is longer is broken.
fn wrap(text: &str, size: f64, room: f64) -> Vec<String> {
    let most = (room / (size * CHARACTER)) as usize;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        for (i, piece) in letters.chunks(most.max(1)).enumerate() {
            match lines.last_mut() {
                Some(line) if i == 0 && line.chars().count() + 1 + piece.len() <= most => {
                    line.push(' ');
                    line.extend(piece);
                }
                _ => lines.push(piece.iter().collect()),
            }
        }
    }
    lines
}
