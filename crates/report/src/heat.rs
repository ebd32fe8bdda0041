//! Heat maps.

use crate::scale::Unit;

/// A matrix of values as colours, with a colour bar.
///
/// Cells have their value as a tooltip, and as text if it fits.
#[derive(Clone, Debug, PartialEq)]
pub struct HeatMap {
    /// The title; wrapped if long.
    pub title: String,
    /// Column names, left to right.
    pub x: Names,
    /// Row names, top to bottom.
    pub y: Names,
    /// One row per row name, one value per column. `None`, or a value outside the domain of the scale, is struck through.
    pub values: Vec<Vec<Option<f64>>>,
    /// The colour map.
    pub shade: Shade,
    /// Values at the ends of the colour map; values outside are clamped. Set it to compare several maps or to hide
    /// negligible values. `None` uses the smallest and the largest value.
    pub range: Option<(f64, f64)>,
    /// The unit of the values.
    pub unit: Unit,
}

/// The row or column names of a [`HeatMap`]. As many are drawn as fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The label of the axis, such as `layer`.
    pub label: String,
    /// One name per row or column.
    pub names: Vec<String>,
}

/// A colour map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shade {
    /// Dark to light, linear.
    Linear,
    /// Dark to light, logarithmic; only for positive values.
    Log,
    /// Blue for negative, white for zero, orange for positive, symmetric about zero.
    Diverging,
}

impl Names {
    /// Names in order.
    pub fn new<N: Into<String>>(label: impl Into<String>, names: impl IntoIterator<Item = N>) -> Names {
        Names { label: label.into(), names: names.into_iter().map(Into::into).collect() }
    }

    /// The names 0, 1, 2, ….
    pub fn count(label: impl Into<String>, count: usize) -> Names {
        Names::new(label, (0..count).map(|i| i.to_string()))
    }

    /// The name at an index; the index itself if there is none.
    pub(crate) fn get(&self, i: usize) -> String {
        self.names.get(i).cloned().unwrap_or_else(|| i.to_string())
    }
}
