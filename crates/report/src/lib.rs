//! Figures, tables and documents for results.
//!
//! A [`Figure`] consists of panels: a [`Chart`] of lines, bands, points and rules, a [`DotPlot`] of means over categories, or a [`HeatMap`]. It is
//! written as SVG, PNG, CSV and Vega-Lite. A [`Table`] is written as HTML, CSV, Markdown and text. A [`Document`] combines figures, tables and text. It
//! is rendered for a [`Terminal`], as Markdown, as one HTML file, or as a directory with separate files. A [`Documented`] result has a
//! document and a JSON form with its kind and version.
//!
//! Design:
//! - SVG and PNG are made from one list of shapes and one table of styles, so they show the same picture;
//! - SVG colours are CSS classes with a light and a dark form, chosen by `prefers-color-scheme`; heat maps have the same colours in both;
//! - the layout uses the widths of DejaVu Sans, a wide font; PNG files are rendered with it, SVG files with the reader's font;
//! - panels are stacked in a narrow column, so a figure is readable on a phone;
//! - only writing files can fail: a value outside the domain leaves a gap, and a panel without values shows a message;
//! - figures in HTML reports are interactive (tooltips, zoom, log axes, individual runs), with one script whose hash is in the content security policy;
//!   without JavaScript and in print they are static SVG;
//! - strings are escaped for terminals, HTML and Markdown;
//! - output is deterministic: equal inputs give equal bytes.
//!
//! ```
//! use termwise_report::{Axis, Band, Block, Cell, Chart, Figure, HeatMap, Layer, Line, Names, Document, Scale, Section, Shade, Table, Unit};
//!
//! let band = Band { name: "softmax".into(), color: 0, points: vec![(0.0, 5.3, 5.6), (100.0, 2.7, 2.9)] };
//! let line = Line { name: "softmax".into(), color: 0, dashed: false, points: vec![(0.0, 5.5), (100.0, 2.8)] };
//! let loss = Chart {
//!     title: "Held-out loss".into(),
//!     x: Axis::new("step", Scale::Linear, Unit::Number),
//!     y: Axis::new("nats per token", Scale::Linear, Unit::Number),
//!     layers: vec![Layer::Band(band), Layer::Line(line)],
//! };
//! let spectrum = HeatMap {
//!     title: "Share of each order".into(),
//!     x: Names::count("order", 3),
//!     y: Names::count("layer", 2),
//!     values: vec![vec![Some(0.5), Some(0.3), Some(0.2)], vec![Some(0.9), Some(0.1), None]],
//!     shade: Shade::Linear,
//!     range: None,
//!     unit: Unit::Percent,
//! };
//! println!("{}", spectrum.to_text(80));
//! let figure = Figure { title: "Softmax".into(), description: "Loss falls.".into(), panels: vec![loss.into(), spectrum.into()] };
//! assert!(figure.to_svg().starts_with("<svg ") && figure.to_png(2.0).starts_with(b"\x89PNG"));
//!
//! let mut table = Table::new("Mean ± standard deviation", ["variant", "loss"]);
//! table.rows.push(vec![Cell::code("taylor=0..4"), Cell::MeanSd(2.83, 0.01, 2)]);
//! let page = Document {
//!     title: "Results".into(),
//!     lead: vec![Block::Text("All numbers are from **this machine**.".into())],
//!     sections: vec![Section {
//!         heading: "Loss".into(),
//!         blocks: vec![
//!             Block::Figure { name: "loss".into(), figure, caption: "One seed.".into() },
//!             Block::Table { name: "loss".into(), table },
//!         ],
//!     }],
//! };
//! assert!(page.to_html().contains("2.83"));
//! ```
#![forbid(unsafe_code)]

mod chart;
mod colour;
mod csv;
mod data;
mod document;
mod dot_plot;
mod draw;
mod embed;
mod figure;
mod folder;
mod font;
mod heat;
mod heat_draw;
mod heat_text;
mod html;
mod labels;
mod layers;
mod layout;
mod legend;
mod markdown;
mod markup;
mod number;
mod pdf;
mod png;
mod result;
mod rules;
mod scale;
mod style;
mod svg;
mod table;
mod terminal;
mod text;
mod vega;

pub use chart::{Axis, Band, Chart, Layer, Line, Mark, Point, Points, Rule, Runs};
pub use colour::{SERIES, Theme, ramp};
pub use csv::Csv;
pub use document::{Block, Document, Section, Tone};
pub use dot_plot::{DotPlot, Estimate, Steps};
pub use embed::{ScriptedPage, base64, json_for_script};
pub use figure::{Figure, Panel};
pub use folder::Error;
pub use heat::{HeatMap, Names, Shade};
pub use html::{FIGURES, style_sheet};
pub use number::{counted, duration, nan, sig3, thousands};
pub use result::{Documented, kind_of, made_by, read, reads_again, survives_edits, to_json, write};
pub use scale::{Scale, Unit};
pub use table::{Cell, Table};
pub use terminal::BRIEF_LINES;
pub use text::Terminal;
