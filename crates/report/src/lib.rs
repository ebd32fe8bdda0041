//! Results as documents, pictures and tables.
//!
//! A [`Figure`] has panels: a [`Chart`] of lines, bands, points and rules, a [`DotPlot`] of means over categories, a [`HeatMap`]. It is
//! written as SVG, PNG, CSV and Vega-Lite. A [`Table`] is written as HTML, CSV, Markdown and text, a heat map as text as well. A [`Document`] puts them
//! together, for a [`Terminal`], as Markdown, as one HTML file, or as a folder with each of them beside it. A [`Documented`] result has a
//! document, and JSON that says what it is.
//!
//! Notable choices:
//! - one list of shapes and texts becomes both SVG and PNG, with one table of looks for both, so that they show the same;
//! - colours of SVG are CSS classes with a light and a dark form, chosen by `prefers-color-scheme`; heat maps have the same colours in both;
//! - SVG names fonts that its reader may have; widths are those of DejaVu Sans, which is wide, and which PNG is written in;
//! - panels stand below each other in a narrow column, so that a figure can be read on a telephone;
//! - nothing can fail but writing to a folder: a value that has no place leaves a gap, a panel without values says so;
//! - on a page figures answer, with one script that the page's policy names by its hash: values under the pointer, zoom, log axes, single runs;
//!   without scripts and on paper they are the SVG;
//! - nothing in a text can act on a terminal, a browser or Markdown;
//! - the same figure, table or document gives the same bytes.
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
//!     title: "What was seen".into(),
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
pub use number::{counted, duration, nan, thousands, three};
pub use result::{Documented, kind_of, made_by, read, reads_again, survives_edits, tagged_schema, to_json, write};
pub use scale::{Scale, Unit};
pub use table::{Cell, Table};
pub use terminal::BRIEF_LINES;
pub use text::Terminal;
