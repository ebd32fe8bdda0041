//! Tables for pages, for other programs and for the terminal.

use crate::csv::{self, Csv};
use crate::markup;
use crate::number::{digits, thousands};
use crate::scale::Unit;
use crate::svg::escape;

/// Rows of cells under the names of columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// In one line or a few; may hold markup, see [`crate::Block::Text`].
    pub caption: String,
    /// Names of columns.
    pub columns: Vec<String>,
    /// Rows; one that is shorter than the columns ends in empty cells.
    pub rows: Vec<Vec<Cell>>,
}

/// What a table holds at one place.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cell {
    /// Nothing, shown as a dash.
    Empty,
    /// Words.
    Text(String),
    /// Words as they are typed, such as the name of a variant.
    Code(String),
    /// A whole number: 139,425.
    Count(u64),
    /// A number with so many digits after the point.
    Number(f64, usize),
    /// A number as [`Unit`] writes it.
    Amount(f64, Unit),
    /// A mean, its standard deviation and digits after the point: 1.583 ± 0.004.
    MeanSd(f64, f64, usize),
    /// Words that lead to another place: `#anchor`, a relative path or an address of the web.
    Link(String, String),
}

impl Cell {
    /// Words as they are.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell::Text(text.into())
    }

    /// Words as they are typed.
    pub fn code(text: impl Into<String>) -> Cell {
        Cell::Code(text.into())
    }

    /// A whole number.
    pub fn count(n: impl TryInto<u64>) -> Cell {
        n.try_into().map_or(Cell::Empty, Cell::Count)
    }

    /// A number with three significant digits: 1234, 12.3, 0.123.
    pub fn three(x: f64) -> Cell {
        Cell::Number(x, digits(x))
    }

    /// Bytes.
    pub fn bytes(n: impl TryInto<u64>) -> Cell {
        n.try_into().map_or(Cell::Empty, |n| Cell::Amount(n as f64, Unit::Bytes))
    }

    /// What may be absent.
    pub fn maybe<T>(value: Option<T>, cell: impl FnOnce(T) -> Cell) -> Cell {
        value.map_or(Cell::Empty, cell)
    }

    /// As it is shown where there is text alone.
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

/// In place of what is not there.
pub(crate) const NONE: &str = "–";

/// A number with that many digits after its point, with the sign that numbers have in print.
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

    /// Columns that have a name or a cell.
    pub(crate) fn width(&self) -> usize {
        self.rows.iter().map(Vec::len).max().unwrap_or(0).max(self.columns.len())
    }

    pub(crate) fn cell(&self, row: usize, column: usize) -> &Cell {
        self.rows.get(row).and_then(|row| row.get(column)).unwrap_or(&Cell::Empty)
    }

    pub(crate) fn column(&self, column: usize) -> &str {
        self.columns.get(column).map_or("", String::as_str)
    }

    /// Whether a column has numbers and nothing else: it ends where they end.
    pub(crate) fn is_numeric(&self, column: usize) -> bool {
        let mut cells = (0..self.rows.len()).map(|row| self.cell(row, column)).filter(|cell| **cell != Cell::Empty).peekable();
        cells.peek().is_some() && cells.all(Cell::is_number)
    }

    /// The table for a page.
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

    /// Every value with all its digits. A column with deviations becomes two, the second with `std` after its name.
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
