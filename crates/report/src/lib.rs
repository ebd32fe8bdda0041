//! Results as pictures: figures of charts, written as SVG.
//!
//! Notable choices:
//! - colours are CSS classes with a light and a dark form, chosen by `prefers-color-scheme`; no fonts are embedded or measured;
//! - charts stand below each other in a narrow column, so that a figure can be read on a telephone;
//! - nothing can fail: a value that has no place on an axis leaves a gap, a chart without values says so;
//! - the same figure gives the same bytes.
//!
//! ```
//! use termwise_report::{Axis, Chart, Figure, Layer, Line, Scale, Unit};
//!
//! let line = Line { name: "KV cache".into(), color: 0, dashed: false, points: vec![(1.0, 512.0), (1e6, 512e6)] };
//! let chart = Chart {
//!     title: "Memory".into(),
//!     x: Axis { label: "context, tokens".into(), scale: Scale::Log, unit: Unit::Number },
//!     y: Axis { label: String::new(), scale: Scale::Log, unit: Unit::Bytes },
//!     layers: vec![Layer::Line(line)],
//! };
//! let figure = Figure { title: "A cache grows".into(), description: "A straight line.".into(), charts: vec![chart] };
//! assert!(figure.to_svg().starts_with("<svg "));
//! ```

mod figure;
mod labels;
mod scale;
mod style;
mod svg;

pub use figure::{Axis, Chart, Figure, Layer, Line, Mark};
pub use scale::{Scale, Unit};
