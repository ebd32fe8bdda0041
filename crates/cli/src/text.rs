//! Tables and paragraphs for a terminal, aligned by the width that characters have there.

use unicode_width::UnicodeWidthStr;

/// Columns that output is made for.
pub const WIDTH: usize = 110;

/// Where a column's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows of cells, two spaces between columns, each as wide as its widest cell.
pub struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(columns: impl Into<Vec<Align>>) -> Table {
        Table { columns: columns.into(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// One line for each row, without spaces at the end.
    pub fn lines(&self) -> Vec<String> {
        let width = |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let cell = |((text, width), align): ((&String, &usize), &Align)| pad(text, *width, *align);
        let line = |row: &Vec<String>| row.iter().zip(&widths).zip(&self.columns).map(cell).collect::<Vec<_>>().join("  ");
        self.rows.iter().map(|row| line(row).trim_end().to_string()).collect()
    }
}

/// Text with spaces up to a width.
pub fn pad(text: &str, width: usize, align: Align) -> String {
    let spaces = " ".repeat(width.saturating_sub(text.width()));
    match align {
        Align::Left => format!("{text}{spaces}"),
        Align::Right => format!("{spaces}{text}"),
    }
}

/// The words of a text in lines of at most that width, further lines indented. A word that is longer has a line of its own.
pub fn wrap(text: &str, indent: usize, width: usize) -> String {
    let mut out = String::new();
    let mut column = indent;
    for word in text.split_whitespace() {
        let needed = word.width() + 1;
        if out.is_empty() {
            column += word.width();
        } else if column + needed > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent + word.width();
        } else {
            out.push(' ');
            column += needed;
        }
        out.push_str(word);
    }
    out
}

/// 139,425
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Three significant digits for numbers that people compare: 1234, 123, 12.3, 1.23, 0.123.
pub fn three(x: f64) -> String {
    let digits = match x.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    };
    format!("{x:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_by_what_is_seen() {
        let mut table = Table::new([Align::Left, Align::Right, Align::Left]);
        table.row(["σ(W·h)", "1", "x"]);
        table.row(["ab", "100", ""]);
        assert_eq!(table.lines(), ["σ(W·h)    1  x", "ab      100"]);
    }

    #[test]
    fn words_are_kept_whole() {
        assert_eq!(wrap("one two  three", 2, 9), "one two\n  three");
        assert_eq!(wrap("unbreakable", 0, 4), "unbreakable");
        assert_eq!(wrap("", 4, 10), "");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 139_425, 1_234_567].map(thousands), ["0", "999", "1,000", "139,425", "1,234,567"]);
        assert_eq!([1234.5, 99.94, 1.234, 0.01].map(three), ["1234", "99.9", "1.23", "0.010"]);
    }
}
