//! Heat maps in the terminal.

use unicode_width::UnicodeWidthStr;

use crate::heat::HeatMap;
use crate::heat_draw::Shades;
use crate::text::clean;

/// From the smallest to the largest value.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// A missing value.
const GAP: char = '·';

impl HeatMap {
    /// Rows of numbers if they fit into a line of this many characters, otherwise rows of blocks ▁ to █. Blocks are split into several parts
    /// if necessary. Column names are above the values, for blocks every fifth name.
    pub fn to_text(&self, width: usize) -> String {
        let mut out = String::new();
        if !self.title.is_empty() {
            out += &format!("{}\n\n", clean(&self.title));
        }
        let Some(shades) = Shades::of(self) else { return out + "no values to show\n" };
        let (rows, columns) = self.size();
        let names: Vec<String> = (0..rows).map(|row| clean(&self.y.get(row))).collect();
        let corner = clean(&match (self.y.label.as_str(), self.x.label.as_str()) {
            ("", "") => String::new(),
            (y, x) => format!("{y} \\ {x}"),
        });
        let left = names.iter().map(|name| name.width()).chain([corner.width()]).max().unwrap_or(0);
        let room = width.saturating_sub(left + 2).max(8);
        match self.numbers(rows, columns, room) {
            Some(cells) => {
                out += &row_of(&corner, left, &cells[0]);
                for (name, cells) in names.iter().zip(&cells[1..]) {
                    out += &row_of(name, left, cells);
                }
            }
            None => self.blocks(&mut out, &names, (&corner, left), room, &shades),
        }
        out
    }

    /// Column names and values, all of the same width; `None` if they do not fit.
    fn numbers(&self, rows: usize, columns: usize, room: usize) -> Option<Vec<String>> {
        let mut lines: Vec<Vec<String>> = vec![(0..columns).map(|column| clean(&self.x.get(column))).collect()];
        let shown = |row, column| self.value(row, column).map_or(GAP.to_string(), |value| self.unit.brief(value));
        lines.extend((0..rows).map(|row| (0..columns).map(|column| shown(row, column)).collect()));
        let widest = lines.iter().flatten().map(|cell| cell.width()).max().unwrap_or(0);
        let padded = |cell: &String| format!("{}{cell}", " ".repeat(widest - cell.width()));
        (columns * (widest + 2) <= room + 2)
            .then(|| lines.iter().map(|line| line.iter().map(padded).collect::<Vec<_>>().join("  ")).collect())
    }

    fn blocks(&self, out: &mut String, names: &[String], (corner, left): (&str, usize), room: usize, shades: &Shades) {
        let columns = self.size().1;
        for start in (0..columns).step_by(room) {
            let part = start..columns.min(start + room);
            *out += &row_of(corner, left, &self.ruler(part.clone()));
            for (row, name) in names.iter().enumerate() {
                let block = |column| match self.value(row, column).and_then(|value| shades.share(value)) {
                    Some(share) => BLOCKS[((share * BLOCKS.len() as f64) as usize).min(BLOCKS.len() - 1)],
                    None => GAP,
                };
                *out += &row_of(name, left, &part.clone().map(block).collect::<String>());
            }
            out.push('\n');
        }
        let (low, high) = shades.ends();
        let scale = if self.shade == crate::Shade::Log { ", log scale" } else { "" };
        *out += &format!("▁ {} to █ {}{scale}; {GAP} none\n", self.unit.format(low), self.unit.format(high));
    }

    /// Column names above their columns, without overlap.
    fn ruler(&self, part: std::ops::Range<usize>) -> String {
        let (mut line, mut free) = (String::new(), 0);
        for (place, column) in part.clone().enumerate().filter(|(_, column)| column % 5 == 0) {
            let name = clean(&self.x.get(column));
            if place >= free && place + name.width() <= part.len().max(name.width() + usize::from(place > 0)) {
                line += &" ".repeat(place - line.width());
                line += &name;
                free = place + name.width() + 1;
            }
        }
        line
    }
}

fn row_of(name: &str, left: usize, cells: &str) -> String {
    let line = format!("{}{name}  {cells}", " ".repeat(left - name.width()));
    format!("{}\n", line.trim_end())
}
