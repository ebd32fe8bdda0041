//! Dot plots: means with whiskers over categories, such as loss over orders.

use crate::chart::{self, Axis, Frame, Rule};
use crate::draw::{Anchor, Drawing, Face, Look, Path};
use crate::layout::{self, EDGE, LEADING, LEFT, PLOT_HEIGHT, RIGHT};
use crate::scale::Domain;
use crate::{draw, font, rules};

/// Means with error bars: one position per category, one marker per series and category.
///
/// Categories are on the x axis if their names fit; otherwise each has a row.
#[derive(Clone, Debug, PartialEq)]
pub struct DotPlot {
    /// The title; wrapped if long.
    pub title: String,
    /// Label of the category axis; empty for none.
    pub label: String,
    /// Names of the categories, left to right or top to bottom.
    pub categories: Vec<String>,
    /// The value axis.
    pub value: Axis,
    /// The series, next to each other in every category.
    pub series: Vec<Steps>,
    /// Colour index of each category, if colours encode categories and not series; otherwise empty.
    pub colors: Vec<usize>,
    /// Reference lines.
    pub rules: Vec<Rule>,
}

/// A series of a [`DotPlot`].
#[derive(Clone, Debug, PartialEq)]
pub struct Steps {
    /// Legend entry; empty for none.
    pub name: String,
    /// Colour index, as in [`crate::Line`].
    pub color: usize,
    /// One value per category; `None` is a gap.
    pub values: Vec<Option<Estimate>>,
}

/// A mean with an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Position of the marker.
    pub mean: f64,
    /// Lower end of the error bar.
    pub low: f64,
    /// Upper end of the error bar.
    pub high: f64,
}

impl Estimate {
    /// A mean ± one standard deviation.
    pub fn with_deviation(mean: f64, deviation: f64) -> Estimate {
        Estimate { mean, low: mean - deviation, high: mean + deviation }
    }

    /// A value without an error bar.
    pub fn exact(mean: f64) -> Estimate {
        Estimate { mean, low: mean, high: mean }
    }
}

/// Height of a row, if categories are rows.
const ROW: f64 = 26.0;
/// Half length of the caps of an error bar.
const CAP: f64 = 5.0;

impl DotPlot {
    pub(crate) fn in_columns(&self, width: f64) -> bool {
        // In an HTML report two figures share a row, so their columns are narrower than in the file.
        let column = 0.75 * layout::plot_width(width) / self.categories.len().max(1) as f64;
        self.categories.iter().all(|name| font::width(name, Face::TickX) + 3.0 <= column)
    }

    /// The means of all series and categories.
    pub(crate) fn means(&self) -> impl Iterator<Item = f64> {
        self.series.iter().flat_map(|steps| &steps.values).flatten().map(|estimate| estimate.mean)
    }

    pub(crate) fn height(&self, width: f64) -> f64 {
        let below = |label: &str| 24.0 + if label.is_empty() { 0.0 } else { LEADING } + 8.0;
        if self.in_columns(width) {
            layout::heading_height(&self.title, &self.value.label, width) + PLOT_HEIGHT + below(&self.label)
        } else {
            layout::heading_height(&self.title, &self.label, width) + self.rows_height() + below(&self.value.label)
        }
    }

    /// Height of the rows and of the labels of reference lines above them.
    fn rows_height(&self) -> f64 {
        ROW * self.categories.len() as f64 + if self.rules.is_empty() { 0.0 } else { LEADING }
    }

    pub(crate) fn draw(&self, drawing: &mut Drawing, top: f64) {
        drawing.open("");
        let ends = |e: &Estimate| [e.mean, e.low, e.high];
        let values = self.series.iter().flat_map(|s| &s.values).flatten().filter(|e| self.value.has_place(e.mean)).flat_map(ends);
        let values: Vec<f64> = values.collect();
        let rules = self.rules.iter().map(|rule| rule.y).filter(|_| !values.is_empty());
        let domain = Domain::around(self.value.scale, values.iter().copied().chain(rules), true);
        if self.in_columns(drawing.width) {
            self.draw_columns(drawing, top, domain);
        } else {
            self.draw_rows(drawing, top, domain);
        }
        drawing.close();
    }

    fn draw_columns(&self, drawing: &mut Drawing, top: f64, domain: Option<Domain>) {
        layout::heading(drawing, top, &self.title, &self.value.label);
        let bottom = top + layout::heading_height(&self.title, &self.value.label, drawing.width) + PLOT_HEIGHT;
        let width = layout::plot_width(drawing.width);
        let column = width / self.categories.len().max(1) as f64;
        if let Some(y) = domain {
            let frame = Frame { width, tall: PLOT_HEIGHT, x: y, y, bottom };
            chart::value_axis(drawing, &self.value, &frame);
            self.rules.iter().for_each(|rule| rule.draw(drawing, &frame));
            let mut taken = Vec::new();
            self.each(column, |steps, color, name, place, estimate| {
                let x = LEFT + place;
                let Some(y) = frame.height(estimate.mean) else { return };
                let (low, high) = (frame.clipped(estimate.low), frame.clipped(estimate.high));
                let title = self.title_of(steps, name, estimate);
                draw::marker(drawing, color, (x, y), Some(&title));
                taken.extend([(x, y), (x - CAP, y), (x + CAP, y), (x, low), (x, high), (x, (y + low) / 2.0), (x, (y + high) / 2.0)]);
                if estimate.low < estimate.high {
                    let caps = [((x - CAP, low), (x + CAP, low)), ((x - CAP, high), (x + CAP, high)), ((x, low), (x, high))];
                    drawing.path(Look::Whisker(color), Path::segments(&caps), None);
                }
            });
            let across = self.rules.iter().filter_map(|rule| frame.height(rule.y));
            taken.extend(across.flat_map(|y| rules::trace(&[(LEFT, y), (LEFT + width, y)])));
            rules::draw_labels(drawing, &frame, &self.rules.iter().collect::<Vec<_>>(), taken);
        } else {
            layout::nothing(drawing, LEFT + width / 2.0, bottom - PLOT_HEIGHT / 2.0);
        }
        drawing.segment(Look::Axis, (LEFT, bottom), (LEFT + width, bottom));
        for (i, name) in self.categories.iter().enumerate() {
            let x = LEFT + (i as f64 + 0.5) * column;
            drawing.text(Face::TickX, Anchor::Middle, (x, bottom + 20.0), name);
        }
        layout::caption(drawing, LEFT + width / 2.0, bottom + 40.0, &self.label);
    }

    fn draw_rows(&self, drawing: &mut Drawing, top: f64, domain: Option<Domain>) {
        layout::heading(drawing, top, &self.title, &self.label);
        let start = top + layout::heading_height(&self.title, &self.label, drawing.width);
        let bottom = start + self.rows_height();
        let first = bottom - ROW * self.categories.len() as f64;
        let left = layout::left_of(&self.categories);
        let width = drawing.width - RIGHT - left;
        for (i, name) in self.categories.iter().enumerate() {
            layout::row_name(drawing, left, first + (i as f64 + 0.5) * ROW, name);
        }
        if let Some(domain) = domain {
            let place = |value: f64| domain.place(value).map(|share| left + share * width);
            let clipped = |value: f64| left + domain.place(value).unwrap_or(0.0).clamp(0.0, 1.0) * width;
            let ticks = domain.ticks((width / 60.0) as usize);
            for (tick, text) in ticks.iter().zip(self.value.unit.ticks(&ticks)) {
                let Some(x) = place(*tick) else { continue };
                drawing.segment(Look::Grid, (x, first), (x, bottom));
                drawing.text(Face::TickX, Anchor::Middle, (x, bottom + 20.0), &text);
            }
            for rule in &self.rules {
                let Some(x) = place(rule.y) else { continue };
                drawing.path(Look::Rule(rule.color), Path::segment((x, first - 4.0), (x, bottom)), Some(&rule.label));
                let half = font::width(&rule.label, Face::Mark(rule.color)) / 2.0;
                let middle = x.min(drawing.width - EDGE / 2.0 - half).max(EDGE + half);
                drawing.text(Face::Mark(rule.color), Anchor::Middle, (middle, first - 8.0), &rule.label);
            }
            self.each(ROW, |steps, color, name, offset, estimate| {
                let y = first + offset;
                let Some(x) = place(estimate.mean) else { return };
                let (low, high) = (clipped(estimate.low), clipped(estimate.high));
                let title = self.title_of(steps, name, estimate);
                draw::marker(drawing, color, (x, y), Some(&title));
                if estimate.low < estimate.high {
                    let caps = [((low, y - CAP), (low, y + CAP)), ((high, y - CAP), (high, y + CAP)), ((low, y), (high, y))];
                    drawing.path(Look::Whisker(color), Path::segments(&caps), None);
                }
            });
        } else {
            layout::nothing(drawing, left + width / 2.0, (first + bottom) / 2.0);
        }
        drawing.segment(Look::Axis, (left, bottom), (left + width, bottom));
        layout::caption(drawing, left + width / 2.0, bottom + 40.0, &self.value.label);
    }

    /// The colour of a series in a category.
    pub(crate) fn color(&self, steps: &Steps, category: usize) -> usize {
        self.colors.get(category).copied().unwrap_or(steps.color)
    }

    /// Calls the function with every series, its colour, category, position along the category axis and value.
    fn each(&self, room: f64, mut draw: impl FnMut(&Steps, usize, &str, f64, &Estimate)) {
        let apart = (room / (self.series.len() + 1) as f64).min(14.0);
        for (i, name) in self.categories.iter().enumerate() {
            for (s, steps) in self.series.iter().enumerate() {
                let offset = (s as f64 - (self.series.len() as f64 - 1.0) / 2.0) * apart;
                if let Some(Some(estimate)) = steps.values.get(i) {
                    draw(steps, self.color(steps, i), name, (i as f64 + 0.5) * room + offset, estimate);
                }
            }
        }
    }

    fn title_of(&self, steps: &Steps, category: &str, estimate: &Estimate) -> String {
        let unit = self.value.unit;
        let between = if steps.name.is_empty() { "" } else { ", " };
        let mut text = format!("{}{between}{category}: {}", steps.name, unit.exact(estimate.mean));
        if estimate.low < estimate.high {
            text += &format!(" ({} to {})", unit.exact(estimate.low), unit.exact(estimate.high));
        }
        text
    }
}
