//! Drawing of heat maps.

use crate::colour::{self, Rgb};
use crate::draw::{Anchor, Drawing, Face, Look, Path};
use crate::font;
use crate::heat::{HeatMap, Names, Shade};
use crate::layout::{self, LEADING, RIGHT};
use crate::scale::{Domain, Scale};

/// Total height shared by the rows, and bounds of a row's height.
const ROWS: f64 = 360.0;
const ROW: (f64, f64) = (7.0, 26.0);
/// Minimum size of cells that are drawn with a gap.
const GAPPED: f64 = 10.0;
/// Minimum height of a cell with a number.
const MIN_LABELLED_HEIGHT: f64 = 14.0;
/// Height of the colour bar, and its number of steps.
const BAR: f64 = 10.0;
const STEPS: usize = 60;

/// Maps values to colours.
pub struct Shades {
    shade: Shade,
    domain: Domain,
}

impl Shades {
    /// For the values of this map; `None` if no value is in the domain of the scale.
    pub fn of(map: &HeatMap) -> Option<Shades> {
        let scale = if map.shade == Shade::Log { Scale::Log } else { Scale::Linear };
        let held = map.values.iter().flatten().flatten().copied().filter(|value| value.is_finite());
        let range =
            map.range.filter(|(low, high)| low < high && low.is_finite() && high.is_finite() && (scale != Scale::Log || *low > 0.0));
        let values: Vec<f64> = match range {
            Some((low, high)) if held.clone().next().is_some() => vec![low, high],
            _ => held.collect(),
        };
        let domain = match (map.shade, range) {
            (Shade::Diverging, _) => {
                let most = values.iter().map(|value| value.abs()).reduce(f64::max)?;
                let most = if most > 0.0 { most.min(f64::MAX / 4.0) } else { 1.0 };
                Domain::between(scale, -most, most)
            }
            (_, Some((low, high))) if !values.is_empty() => Domain::between(scale, low, high),
            _ => Domain::around(scale, values.into_iter(), false)?,
        };
        Some(Shades { shade: map.shade, domain })
    }

    /// Position along the colour bar, 0 to 1.
    pub fn share(&self, value: f64) -> Option<f64> {
        self.domain.place(value).filter(|_| value.is_finite()).map(|share| share.clamp(0.0, 1.0))
    }

    /// The smallest and largest values of the colour map.
    pub fn ends(&self) -> (f64, f64) {
        self.domain.ends()
    }

    fn color(&self, share: f64) -> Rgb {
        if self.shade == Shade::Diverging { colour::diverging(2.0 * share - 1.0) } else { colour::sequential(share) }
    }
}

impl HeatMap {
    /// Number of rows and columns, including unnamed ones.
    pub(crate) fn size(&self) -> (usize, usize) {
        let columns = self.values.iter().map(Vec::len).max().unwrap_or(0);
        (self.values.len().max(self.y.names.len()), columns.max(self.x.names.len()))
    }

    fn row_height(&self) -> f64 {
        (ROWS / self.size().0.max(1) as f64).clamp(ROW.0, ROW.1)
    }

    fn plot_height(&self) -> f64 {
        if Shades::of(self).is_some() { self.row_height() * self.size().0 as f64 } else { 60.0 }
    }

    pub(crate) fn height(&self, width: f64) -> f64 {
        let names = 24.0 + if self.x.label.is_empty() { 0.0 } else { LEADING };
        let bar = if Shades::of(self).is_some() { 10.0 + BAR + 26.0 } else { 0.0 };
        layout::heading_height(&self.title, &self.y.label, width) + self.plot_height() + names + bar + 8.0
    }

    /// The value at a position, if any.
    pub(crate) fn value(&self, row: usize, column: usize) -> Option<f64> {
        self.values.get(row)?.get(column).copied().flatten().filter(|value| value.is_finite())
    }

    pub(crate) fn draw(&self, drawing: &mut Drawing, top: f64) {
        drawing.open("");
        layout::heading(drawing, top, &self.title, &self.y.label);
        let start = top + layout::heading_height(&self.title, &self.y.label, drawing.width);
        let (rows, columns) = self.size();
        let names: Vec<String> = (0..rows).map(|i| self.y.get(i)).collect();
        let left = layout::left_of(&names);
        let width = drawing.width - RIGHT - left;
        let bottom = start + self.plot_height();
        if let Some(shades) = Shades::of(self) {
            let cell = (width / columns.max(1) as f64, self.row_height());
            self.draw_cells(drawing, (left, start), cell, &shades);
            let every = spacing(rows, 15.0 / cell.1);
            for (i, name) in names.iter().enumerate().step_by(every) {
                layout::row_name(drawing, left, start + (i as f64 + 0.5) * cell.1, name);
            }
            let every = spacing(columns, self.widest(columns) / cell.0);
            for i in (0..columns).step_by(every) {
                let name = font::fit(&self.x.get(i), Face::TickX, width / 2.0);
                drawing.text(Face::TickX, Anchor::Middle, (left + (i as f64 + 0.5) * cell.0, bottom + 18.0), &name);
            }
            let y = bottom + 34.0 + if self.x.label.is_empty() { 0.0 } else { LEADING };
            self.draw_bar(drawing, (left, y), width, &shades);
        } else {
            layout::nothing(drawing, left + width / 2.0, (start + bottom) / 2.0);
        }
        layout::caption(drawing, left + width / 2.0, bottom + 38.0, &self.x.label);
        drawing.close();
    }

    fn widest(&self, columns: usize) -> f64 {
        (0..columns).map(|i| font::width(&self.x.get(i), Face::TickX)).fold(0.0, f64::max) + 8.0
    }

    fn draw_cells(&self, drawing: &mut Drawing, (left, top): (f64, f64), (width, height): (f64, f64), shades: &Shades) {
        let (rows, columns) = self.size();
        let gap = if width.min(height) >= GAPPED { 0.5 } else { 0.0 };
        let mut texts = Vec::new();
        let mut widest = 0f64;
        drawing.open("cells");
        for row in 0..rows {
            for column in 0..columns {
                let (x, y) = (left + column as f64 * width, top + row as f64 * height);
                let value = self.value(row, column);
                let title =
                    format!("{}, {}: {}", named(&self.y, row), named(&self.x, column), value.map_or("none".into(), |v| self.unit.exact(v)));
                let Some((value, share)) = value.and_then(|value| Some((value, shades.share(value)?))) else {
                    let stroke = Path::segment((x + 1.0, y + height - 1.0), (x + width - 1.0, y + 1.0));
                    drawing.path(Look::Blank, stroke, Some(&title));
                    continue;
                };
                let color = shades.color(share);
                let path = Path::rectangle((x + gap, y + gap), width - 2.0 * gap, height - 2.0 * gap);
                drawing.path(Look::Cell(color), path, Some(&title));
                let text = self.unit.brief(value);
                let face = Face::Cell { white: colour::is_dark(color) };
                widest = widest.max(font::width(&text, face));
                texts.push((face, (x + width / 2.0, y + height / 2.0 + 3.6), text));
            }
        }
        drawing.close();
        if widest + 4.0 <= width && height >= MIN_LABELLED_HEIGHT {
            for (face, place, text) in texts {
                drawing.text(face, Anchor::Middle, place, &text);
            }
        }
    }

    /// The colour bar with tick labels.
    fn draw_bar(&self, drawing: &mut Drawing, (left, top): (f64, f64), width: f64, shades: &Shades) {
        drawing.open("cells");
        let step = width / STEPS as f64;
        for i in 0..STEPS {
            let color = shades.color(i as f64 / (STEPS - 1) as f64);
            drawing.path(Look::Cell(color), Path::rectangle((left + i as f64 * step, top), step, BAR), None);
        }
        drawing.close();
        let ticks = shades.domain.ticks((width / 62.0) as usize);
        for (tick, text) in ticks.iter().zip(self.unit.ticks(&ticks)) {
            let Some(x) = shades.domain.place(*tick).map(|share| left + share * width) else { continue };
            drawing.segment(Look::Axis, (x, top + BAR), (x, top + BAR + 4.0));
            drawing.text(Face::TickX, Anchor::Middle, (x, top + BAR + 18.0), &text);
        }
    }
}

/// `layer 3`
fn named(names: &Names, i: usize) -> String {
    let name = names.get(i);
    if names.label.is_empty() { name } else { format!("{} {name}", names.label) }
}

/// Draw every n-th name only, if each needs the width `needed`: n is a round number.
fn spacing(count: usize, needed: f64) -> usize {
    let round = (0..).flat_map(|power| [1, 2, 5].map(|m| m * 10usize.pow(power)));
    round.take(12).find(|&every| every as f64 >= needed).unwrap_or(count).max(1)
}
