//! Tables for HTML, CSV and the terminal.

use crate::csv::{self, Csv};
use crate::markup;
use crate::number::{digits, thousands};
use crate::scale::Unit;
use crate::svg::escape;

/// Rows of cells under column names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The caption; may contain markup, see [`crate::Block::Text`].
    pub caption: String,
    /// Names of columns.
    pub columns: Vec<String>,
    /// Rows. Missing cells at the end of a row are empty.
    pub rows: Vec<Vec<Cell>>,
}

/// A table cell.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cell {
    /// Empty, shown as a dash.
    Empty,
    /// Text.
    Text(String),
    /// Code, such as a variant string.
    Code(String),
    /// An integer: 139,425.
    Count(u64),
    /// A number with this many decimals.
    Number(f64, usize),
    /// A number formatted by [`Unit`].
    Amount(f64, Unit),
    /// A mean, its standard deviation and the number of decimals: 1.583 ± 0.004.
    MeanSd(f64, f64, usize),
    /// A link: its text and an `#anchor`, a relative path or a web address.
    Link(String, String),
}

impl Cell {
    /// A text cell.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell::Text(text.into())
    }

    /// A code cell.
    pub fn code(text: impl Into<String>) -> Cell {
        Cell::Code(text.into())
    }

    /// An integer cell.
    pub fn count(n: impl TryInto<u64>) -> Cell {
        n.try_into().map_or(Cell::Empty, Cell::Count)
    }

    /// A number with three significant digits: 1234, 12.3, 0.123.
    pub fn sig3(x: f64) -> Cell {
        Cell::Number(x, digits(x))
    }

    /// A number of bytes.
    pub fn bytes(n: impl TryInto<u64>) -> Cell {
        n.try_into().map_or(Cell::Empty, |n| Cell::Amount(n as f64, Unit::Bytes))
    }

    /// An optional value; empty for `None`.
    pub fn maybe<T>(value: Option<T>, cell: impl FnOnce(T) -> Cell) -> Cell {
        value.map_or(Cell::Empty, cell)
    }

    /// The cell as plain text.
    pub(crate) fn shown(&self) -> String {
        match self {
            Cell::Empty => NONE.into(),
            Cell::Text(text) | Cell::Code(text) | Cell::Link(text, _) => text.clone(),
            Cell::Count(n) => thousands(*n),
            Cell::Number(value, digits) => decimal(*value, *digits),
            Cell::Amount(value, unit) if value.is_finite() => unit.format(*value),
            Cell::Amount(..) => NONE.into(),
            Cell::MeanSd(mean, _, _) if !mean.is_finite() => NONE.into(),
            Cell::MeanSd(mean, deviation, digits) if !deviation.is_finite() => decimal(*mean, *digits),
            Cell::MeanSd(mean, deviation, digits) => format!("{} ± {}", decimal(*mean, *digits), decimal(*deviation, *digits)),
        }
    }

    fn is_number(&self) -> bool {
        matches!(self, Cell::Count(_) | Cell::Number(..) | Cell::Amount(..) | Cell::MeanSd(..))
    }
}

/// Shown in an empty cell.
pub(crate) const NONE: &str = "–";

/// A number with this many decimals and a typographic minus sign.
fn decimal(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return NONE.into();
    }
    let text = format!("{value:.*}", digits.min(17));
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| c == '0' || c == '.') => rest.into(),
        Some(rest) => format!("−{rest}"),
        None => text,
    }
}

impl Table {
    /// A table without rows.
    pub fn new<N: Into<String>>(caption: impl Into<String>, columns: impl IntoIterator<Item = N>) -> Table {
        Table { caption: caption.into(), columns: columns.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Number of columns, named or not.
    pub(crate) fn width(&self) -> usize {
        self.rows.iter().map(Vec::len).max().unwrap_or(0).max(self.columns.len())
    }

    pub(crate) fn cell(&self, row: usize, column: usize) -> &Cell {
        self.rows.get(row).and_then(|row| row.get(column)).unwrap_or(&Cell::Empty)
    }

    pub(crate) fn column(&self, column: usize) -> &str {
        self.columns.get(column).map_or("", String::as_str)
    }

    /// Whether a column contains only numbers and is right-aligned.
    pub(crate) fn is_numeric(&self, column: usize) -> bool {
        let mut cells = (0..self.rows.len()).map(|row| self.cell(row, column)).filter(|cell| **cell != Cell::Empty).peekable();
        cells.peek().is_some() && cells.all(Cell::is_number)
    }

    /// The table as HTML.
    pub fn to_html(&self) -> String {
        let class = |column| if self.is_numeric(column) { " class=\"number\"" } else { "" };
        let mut out = String::from("<table>");
        if !self.caption.is_empty() {
            out += &format!("<caption><span>{}</span></caption>", markup::html(&self.caption));
        }
        out += "<thead><tr>";
        for column in 0..self.width() {
            out += &format!("<th scope=\"col\"{}>{}</th>", class(column), escape(self.column(column)));
        }
        out += "</tr></thead><tbody>\n";
        for row in 0..self.rows.len() {
            out += "<tr>";
            for column in 0..self.width() {
                let cell = self.cell(row, column);
                let shown = escape(&cell.shown());
                let text = match cell {
                    Cell::Code(_) => format!("<code>{shown}</code>"),
                    Cell::Link(_, address) => markup::link(&shown, address),
                    Cell::MeanSd(..) => match shown.split_once(" ± ") {
                        Some((mean, deviation)) => format!("{mean} <span class=\"deviation\">± {deviation}</span>"),
                        None => shown,
                    },
                    _ => shown,
                };
                out += &format!("<td{}>{text}</td>", class(column));
            }
            out += "</tr>\n";
        }
        out + "</tbody></table>"
    }

    /// Every value at full precision. A column with standard deviations becomes two; the second has `std` after its name.
    pub fn to_csv(&self) -> String {
        let has_sd = |column: usize| (0..self.rows.len()).any(|row| matches!(self.cell(row, column), Cell::MeanSd(..)));
        let mut csv = Csv::default();
        let mut fields = Vec::new();
        for column in 0..self.width() {
            fields.push(self.column(column).to_string());
            if has_sd(column) {
                fields.push(format!("{} std", self.column(column)).trim().into());
            }
        }
        csv.line(&fields);
        for row in 0..self.rows.len() {
            let mut fields = Vec::new();
            for column in 0..self.width() {
                let cell = self.cell(row, column);
                fields.push(match cell {
                    Cell::Empty => String::new(),
                    Cell::Text(text) | Cell::Code(text) | Cell::Link(text, _) => text.clone(),
                    Cell::Count(n) => n.to_string(),
                    Cell::Number(value, _) | Cell::Amount(value, _) | Cell::MeanSd(value, ..) => csv::number(*value),
                });
                if has_sd(column) {
                    fields.push(if let Cell::MeanSd(_, deviation, _) = cell { csv::number(*deviation) } else { String::new() });
                }
            }
            csv.line(&fields);
        }
        csv.finish()
    }
}
