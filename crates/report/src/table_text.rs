//! Tables for the terminal.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::markup;
use crate::table::Table;

impl Table {
    /// Aligned columns with two spaces between them, numbers at the right; no line ends in spaces. Control characters are left out.
    pub fn to_text(&self) -> String {
        let columns: Vec<Vec<String>> = (0..self.width())
            .map(|column| {
                let cells = (0..self.rows.len()).map(|row| clean(&self.cell(row, column).shown()));
                std::iter::once(clean(self.column(column))).chain(cells).collect()
            })
            .collect();
        let widths: Vec<usize> = columns.iter().map(|cells| cells.iter().map(|cell| cell.width()).max().unwrap_or(0)).collect();
        let mut out = String::new();
        if !self.caption.is_empty() {
            out += &format!("{}\n\n", clean(&markup::plain(&self.caption)));
        }
        for row in 0..=self.rows.len() {
            let mut line = String::new();
            for (i, (cells, width)) in columns.iter().zip(&widths).enumerate() {
                let gap = if i == 0 { "" } else { "  " };
                let room = " ".repeat(width - cells[row].width());
                line += &if self.is_numeric(i) { format!("{gap}{room}{}", cells[row]) } else { format!("{gap}{}{room}", cells[row]) };
            }
            out += line.trim_end();
            out.push('\n');
            if row == 0 {
                let rules: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
                out += &format!("{}\n", rules.join("  "));
            }
        }
        out
    }
}

/// Without characters that a terminal would act on.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c == '\n' || c == '\t' { ' ' } else { c }).filter(|c| c.width().is_some()).collect()
}
