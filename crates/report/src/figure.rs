//! Figures: panels in a column with one legend.

use crate::chart::{Axis, Chart};
use crate::colour::Theme;
use crate::dot_plot::DotPlot;
use crate::draw::{Anchor, Drawing, Face};
use crate::font;
use crate::heat::{HeatMap, Shade};
use crate::layout::{COLUMN, COLUMN_POINTS, EDGE, LEADING, WIDTH};
use crate::legend::Legend;
use crate::scale::Scale;
use crate::{pdf, png, style, svg};

/// Panels under one title with a shared legend.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The title; wrapped if long.
    pub title: String,
    /// Alternative text for screen readers.
    pub description: String,
    /// From top to bottom.
    pub panels: Vec<Panel>,
}

/// One panel of a figure; made with `into()`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Panel {
    /// Lines, bands and points over two axes.
    Chart(Chart),
    /// Means with whiskers over categories.
    DotPlot(DotPlot),
    /// A heat map.
    HeatMap(HeatMap),
}

impl From<Chart> for Panel {
    fn from(chart: Chart) -> Panel {
        Panel::Chart(chart)
    }
}

impl From<DotPlot> for Panel {
    fn from(plot: DotPlot) -> Panel {
        Panel::DotPlot(plot)
    }
}

impl From<HeatMap> for Panel {
    fn from(map: HeatMap) -> Panel {
        Panel::HeatMap(map)
    }
}

impl Panel {
    fn height(&self, width: f64) -> f64 {
        match self {
            Panel::Chart(chart) => chart.height(width),
            Panel::DotPlot(plot) => plot.height(width),
            Panel::HeatMap(map) => map.height(width),
        }
    }

    /// The same panel on a log scale, if an interactive report shows it as static SVG and its values are nonnegative and span at least a factor of ten.
    fn in_log(&self) -> Option<Panel> {
        match self {
            Panel::DotPlot(plot) if !plot.in_columns(WIDTH) && plot.value.scale == Scale::Linear && far_apart(plot.means()) => {
                Some(DotPlot { value: Axis { scale: Scale::Log, ..plot.value.clone() }, ..plot.clone() }.into())
            }
            Panel::HeatMap(map) if map.shade == Shade::Linear && far_apart(map.values.iter().flatten().flatten().copied()) => {
                let range = map.range.filter(|(low, _)| *low > 0.0);
                Some(HeatMap { shade: Shade::Log, range, ..map.clone() }.into())
            }
            _ => None,
        }
    }

    fn draw(&self, drawing: &mut Drawing, top: f64) {
        match self {
            Panel::Chart(chart) => chart.draw(drawing, top),
            Panel::DotPlot(plot) => plot.draw(drawing, top),
            Panel::HeatMap(map) => map.draw(drawing, top),
        }
    }
}

/// Whether a log scale is useful: no value is negative, and the largest is at least ten times the smallest.
fn far_apart(values: impl Iterator<Item = f64>) -> bool {
    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let positive = values.iter().copied().filter(|value| *value > 0.0);
    let least = positive.clone().fold(f64::INFINITY, f64::min);
    values.iter().all(|value| *value >= 0.0) && positive.fold(0.0, f64::max) >= 10.0 * least
}

impl Figure {
    /// The figure with dot plots and heat maps on a log scale, for the log switch of an interactive report; `None` if a log scale is not useful.
    pub(crate) fn in_log(&self) -> Option<Figure> {
        let panels: Vec<Option<Panel>> = self.panels.iter().map(Panel::in_log).collect();
        let any = panels.iter().any(Option::is_some);
        let panels = panels.into_iter().zip(&self.panels).map(|(log, panel)| log.unwrap_or_else(|| panel.clone())).collect();
        any.then(|| Figure { panels, ..self.clone() })
    }

    /// The panels that are charts.
    pub fn charts(&self) -> impl Iterator<Item = &Chart> {
        self.panels.iter().filter_map(|panel| match panel {
            Panel::Chart(chart) => Some(chart),
            _ => None,
        })
    }

    /// The figure as a standalone SVG document that follows the reader's light or dark preference.
    pub fn to_svg(&self) -> String {
        svg::document(&self.drawing(WIDTH), (&self.title, &self.description), None, Some(&style::sheet(&Theme::ALL)))
    }

    /// The figure as SVG for an HTML page that includes [`style::sheet`].
    pub(crate) fn to_inline_svg(&self) -> String {
        svg::document(&self.drawing(WIDTH), (&self.title, &self.description), None, None)
    }

    /// The figure as SVG for one column of a paper: 240 pt (3.33 in) wide, light, without a title.
    pub fn to_column_svg(&self) -> String {
        let names = (self.title.as_str(), self.description.as_str());
        svg::document(&self.untitled().drawing(COLUMN), names, Some(COLUMN_POINTS), Some(&style::sheet(&[Theme::Light])))
    }

    /// The figure as a PDF page for one column of a paper, as [`Figure::to_column_svg`].
    pub fn to_column_pdf(&self) -> Vec<u8> {
        pdf::encode(&self.untitled().drawing(COLUMN), COLUMN_POINTS)
    }

    /// Without a title: the caption of a paper has it. The title of a single panel becomes the name of its values.
    fn untitled(&self) -> Figure {
        let mut figure = Figure { title: String::new(), ..self.clone() };
        if let [panel] = &mut figure.panels[..] {
            let (title, label) = match panel {
                Panel::Chart(chart) => (&mut chart.title, &mut chart.y.label),
                Panel::DotPlot(plot) => (&mut plot.title, &mut plot.value.label),
                // The name of its colours.
                Panel::HeatMap(_) => return figure,
            };
            let title = std::mem::take(title);
            if label.is_empty() {
                *label = title;
            }
        }
        figure
    }

    /// The figure as a PNG file on white, with `scale` pixels per SVG pixel. The font is embedded in the program.
    pub fn to_png(&self, scale: f64) -> Vec<u8> {
        self.to_png_in(Theme::Light, scale)
    }

    /// The figure as a PNG file in a theme. `scale` is clamped to 0.1 to 8, and the larger side to 16,384 pixels.
    pub fn to_png_in(&self, theme: Theme, scale: f64) -> Vec<u8> {
        png::encode(&self.drawing(WIDTH), theme, scale)
    }

    fn drawing(&self, width: f64) -> Drawing {
        let titles = font::wrap(&self.title, Face::Title, width - 2.0 * EDGE);
        let legend = Legend::of(&self.panels, width);
        let top = if titles.is_empty() { EDGE / 3.0 } else { EDGE + LEADING * titles.len() as f64 + 6.0 };
        let panels = self.panels.iter().map(|panel| panel.height(width)).sum::<f64>();
        let mut drawing = Drawing::new(width, top + legend.height() + panels + EDGE / 2.0);
        for (i, line) in titles.iter().enumerate() {
            drawing.text(Face::Title, Anchor::Start, (EDGE, EDGE + 14.0 + LEADING * i as f64), line);
        }
        legend.draw(&mut drawing, top);
        let mut y = top + legend.height();
        for panel in &self.panels {
            panel.draw(&mut drawing, y);
            y += panel.height(width);
        }
        drawing
    }
}
