//! Figures: panels below each other with one legend.

use crate::chart::Chart;
use crate::colour::Theme;
use crate::draw::{Anchor, Drawing, Face};
use crate::font;
use crate::heat::HeatMap;
use crate::ladder::Ladder;
use crate::layout::{EDGE, LEADING, WIDTH};
use crate::legend::Legend;
use crate::{png, style, svg};

/// Panels under a title, with one legend for all.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// In one line or a few.
    pub title: String,
    /// What is to be seen, for those who cannot see it.
    pub description: String,
    /// From top to bottom.
    pub panels: Vec<Panel>,
}

/// One picture of a figure; made from what it holds with `into()`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Panel {
    /// Lines, bands and points over two axes.
    Chart(Chart),
    /// Means with whiskers over categories.
    Ladder(Ladder),
    /// Values as colours, in rows and columns.
    HeatMap(HeatMap),
}

impl From<Chart> for Panel {
    fn from(chart: Chart) -> Panel {
        Panel::Chart(chart)
    }
}

impl From<Ladder> for Panel {
    fn from(ladder: Ladder) -> Panel {
        Panel::Ladder(ladder)
    }
}

impl From<HeatMap> for Panel {
    fn from(map: HeatMap) -> Panel {
        Panel::HeatMap(map)
    }
}

impl Panel {
    fn height(&self) -> f64 {
        match self {
            Panel::Chart(chart) => chart.height(),
            Panel::Ladder(ladder) => ladder.height(),
            Panel::HeatMap(map) => map.height(),
        }
    }

    fn draw(&self, drawing: &mut Drawing, top: f64) {
        match self {
            Panel::Chart(chart) => chart.draw(drawing, top),
            Panel::Ladder(ladder) => ladder.draw(drawing, top),
            Panel::HeatMap(map) => map.draw(drawing, top),
        }
    }
}

impl Figure {
    /// The charts among the panels.
    pub fn charts(&self) -> impl Iterator<Item = &Chart> {
        self.panels.iter().filter_map(|panel| match panel {
            Panel::Chart(chart) => Some(chart),
            _ => None,
        })
    }

    /// The figure as an SVG document of its own, light or dark as its reader prefers.
    pub fn to_svg(&self) -> String {
        svg::document(&self.drawing(), &self.title, &self.description, Some(&style::sheet()))
    }

    /// The figure for a page that has [`style::sheet`] once for all.
    pub(crate) fn to_inline_svg(&self) -> String {
        svg::document(&self.drawing(), &self.title, &self.description, None)
    }

    /// The same picture on white as a PNG file, `scale` pixels for each of the SVG; its font is part of the program.
    pub fn to_png(&self, scale: f64) -> Vec<u8> {
        self.to_png_in(Theme::Light, scale)
    }

    /// The same in either theme. Scales are kept within what a picture can be: 0.1 to 8, and no side beyond 16,384 pixels.
    pub fn to_png_in(&self, theme: Theme, scale: f64) -> Vec<u8> {
        png::encode(&self.drawing(), theme, scale)
    }

    fn drawing(&self) -> Drawing {
        let titles = font::wrap(&self.title, Face::Title, WIDTH - 2.0 * EDGE);
        let legend = Legend::of(&self.panels);
        let top = EDGE + LEADING * titles.len() as f64 + 6.0;
        let height = top + legend.height() + self.panels.iter().map(Panel::height).sum::<f64>() + EDGE / 2.0;
        let mut drawing = Drawing::new(WIDTH, height);
        for (i, line) in titles.iter().enumerate() {
            drawing.text(Face::Title, Anchor::Start, (EDGE, EDGE + 14.0 + LEADING * i as f64), line);
        }
        legend.draw(&mut drawing, top);
        let mut y = top + legend.height();
        for panel in &self.panels {
            panel.draw(&mut drawing, y);
            y += panel.height();
        }
        drawing
    }
}
