//! The legend: one entry per series name.

use crate::chart::Layer;
use crate::draw::{self, Anchor, Drawing, Face, Look, Path};
use crate::figure::Panel;
use crate::font;
use crate::layout::{EDGE, LEADING};

/// Legend entries in rows.
pub struct Legend<'a> {
    entries: Vec<Entry<'a>>,
}

struct Entry<'a> {
    name: &'a str,
    color: usize,
    line: Option<Look>,
    marker: bool,
    x: f64,
    row: usize,
}

/// Width of a sample, and of a sample with the gap after it.
const SAMPLE: f64 = 24.0;
const INDENT: f64 = 32.0;

impl<'a> Legend<'a> {
    /// The legend of these panels, for a figure of this width.
    pub fn of(panels: &'a [Panel], width: f64) -> Legend<'a> {
        let mut legend = Legend { entries: Vec::new() };
        for panel in panels {
            match panel {
                Panel::Chart(chart) => {
                    for layer in &chart.layers {
                        match layer {
                            Layer::Line(line) => legend.add(&line.name, line.color, Some(line.look())),
                            Layer::Points(points) => legend.add(&points.name, points.color, None),
                            _ => {}
                        }
                    }
                }
                Panel::DotPlot(plot) => plot.series.iter().for_each(|steps| legend.add(&steps.name, steps.color, None)),
                Panel::HeatMap(_) => {}
            }
        }
        legend.arrange(width);
        legend
    }

    /// Adds an entry with a line sample, or a marker if there is no line.
    fn add(&mut self, name: &'a str, color: usize, line: Option<Look>) {
        let marker = line.is_none();
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.name == name) {
            entry.line = entry.line.or(line);
            entry.marker |= marker;
        } else if !name.is_empty() {
            self.entries.push(Entry { name, color, line, marker, x: 0.0, row: 0 });
        }
    }

    fn arrange(&mut self, available: f64) {
        let (mut x, mut row) = (EDGE, 0);
        for entry in &mut self.entries {
            let width = INDENT + font::width(entry.name, Face::Body);
            if x + width > available - EDGE / 2.0 && x > EDGE {
                (x, row) = (EDGE, row + 1);
            }
            (entry.x, entry.row) = (x, row);
            x += width + 18.0;
        }
    }

    pub fn height(&self) -> f64 {
        self.entries.last().map_or(0.0, |entry| LEADING * (entry.row + 1) as f64 + 8.0)
    }

    pub fn draw(&self, drawing: &mut Drawing, top: f64) {
        for Entry { name, color, line, marker, x, row } in &self.entries {
            let y = top + LEADING * *row as f64 + 10.0;
            if let Some(look) = line {
                drawing.path(*look, Path::segment((*x, y), (x + SAMPLE, y)), None);
            }
            if *marker {
                draw::marker(drawing, *color, (x + SAMPLE / 2.0, y), None);
            }
            let text = font::fit(name, Face::Body, drawing.width - EDGE - x - INDENT);
            drawing.text(Face::Body, Anchor::Start, (x + INDENT, y + 4.5), &text);
        }
    }
}
