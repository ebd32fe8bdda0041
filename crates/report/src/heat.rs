//! Heat maps: values as colours, in rows and columns.

use crate::scale::Unit;

/// Values as colours, with a bar that says which is which.
///
/// Cells say their value when they are pointed at, and show it where it fits.
#[derive(Clone, Debug, PartialEq)]
pub struct HeatMap {
    /// In one line or a few.
    pub title: String,
    /// Columns, from left to right.
    pub x: Names,
    /// Rows, from top to bottom.
    pub y: Names,
    /// Rows of values, a value for each column; `None`, or a value without a place on the scale, is struck through.
    pub values: Vec<Vec<Option<f64>>>,
    /// How values become colours.
    pub shade: Shade,
    /// Values at the ends of the colours, for maps that are to be compared or that hold what is too small to matter; values beyond have the
    /// colour of the end. `None` for the least and the greatest value.
    pub range: Option<(f64, f64)>,
    /// What values are.
    pub unit: Unit,
}

/// The names along one side of a [`HeatMap`]; as many of them are written as there is room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// What they are names of, such as `layer`.
    pub label: String,
    /// One for each row or column.
    pub names: Vec<String>,
}

/// How values become colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shade {
    /// From dark to light by differences.
    Linear,
    /// From dark to light by ratios; zero and below have no place.
    Log,
    /// Blue below zero, white at it, orange above, equally far on both sides.
    Diverging,
}

impl Names {
    /// Names in their order.
    pub fn new<N: Into<String>>(label: impl Into<String>, names: impl IntoIterator<Item = N>) -> Names {
        Names { label: label.into(), names: names.into_iter().map(Into::into).collect() }
    }

    /// 0, 1, 2 and so on.
    pub fn count(label: impl Into<String>, count: usize) -> Names {
        Names::new(label, (0..count).map(|i| i.to_string()))
    }

    /// That of a row or column; its number where it has none.
    pub(crate) fn get(&self, i: usize) -> String {
        self.names.get(i).cloned().unwrap_or_else(|| i.to_string())
    }
}
