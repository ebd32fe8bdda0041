//! Text and tables in the terminal: lines fit its width, and control characters are removed.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::markup::{self, Piece};
use crate::table::{Cell, Table};

/// Properties of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Line width in characters.
    pub width: usize,
    /// Whether to use colours. The text is the same without them.
    pub color: bool,
    /// Whether to show collapsed sections.
    pub details: bool,
}

impl Default for Terminal {
    fn default() -> Terminal {
        Terminal { width: 100, color: false, details: false }
    }
}

/// The style of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Code,
    Bold,
    Dim,
    Good,
    Open,
    Bad,
}

impl Style {
    fn code(self) -> Option<&'static str> {
        match self {
            Style::Plain => None,
            Style::Code => Some("36"),
            Style::Bold => Some("1"),
            Style::Dim => Some("2"),
            Style::Good => Some("32"),
            Style::Open => Some("33"),
            Style::Bad => Some("31"),
        }
    }
}

/// Text between two spaces.
pub type Word = Vec<(Style, String)>;

/// The words of a string with markup.
pub fn words(text: &str) -> Vec<Word> {
    let mut words = vec![Word::new()];
    spans(text, Style::Plain, &mut words);
    words.retain(|word| !word.is_empty());
    words
}

/// The words of a string without markup.
pub fn plain_words(text: &str, style: Style) -> Vec<Word> {
    clean(text).split_whitespace().map(|word| vec![(style, word.to_owned())]).collect()
}

fn spans(text: &str, style: Style, words: &mut Vec<Word>) {
    for piece in markup::pieces(text) {
        match piece {
            Piece::Plain(text) => push(text, style, words),
            Piece::Code(text) => push(&format!("`{text}`"), Style::Code, words),
            Piece::Bold(text) => spans(text, Style::Bold, words),
            Piece::Link(text, address) => {
                spans(text, style, words);
                // An anchor or a relative path cannot be opened from a terminal.
                if address.starts_with("http") {
                    push(&format!(" ({address})"), style, words);
                }
            }
        }
    }
}

fn push(text: &str, style: Style, words: &mut Vec<Word>) {
    for (i, part) in clean(text).split(char::is_whitespace).enumerate() {
        if i > 0 {
            words.push(Word::new());
        }
        if let Some(word) = words.last_mut().filter(|_| !part.is_empty()) {
            word.push((style, part.to_owned()));
        }
    }
}

fn width_of(word: &Word) -> usize {
    word.iter().map(|(_, text)| text.width()).sum()
}

impl Terminal {
    /// Wraps words at this width. Longer words are broken.
    pub(crate) fn wrap(&self, words: &[Word], width: usize) -> Vec<String> {
        self.lines(words, width).iter().map(|line| self.paint(line)).collect()
    }

    fn lines(&self, words: &[Word], width: usize) -> Vec<Word> {
        let width = width.max(1);
        let (mut lines, mut line, mut used) = (Vec::new(), Word::new(), 0);
        for word in words {
            let needed = width_of(word);
            if used > 0 && used + 1 + needed > width {
                lines.push(std::mem::take(&mut line));
                used = 0;
            }
            if used > 0 {
                line.push((Style::Plain, " ".into()));
                used += 1;
            }
            for (style, text) in word {
                let mut part = String::new();
                for c in text.chars() {
                    let wide = c.width().unwrap_or(0);
                    if used + wide > width && used > 0 {
                        line.push((*style, std::mem::take(&mut part)));
                        lines.push(std::mem::take(&mut line));
                        used = 0;
                    }
                    part.push(c);
                    used += wide;
                }
                line.push((*style, part));
            }
        }
        if !line.is_empty() {
            lines.push(line);
        }
        lines
    }

    fn paint(&self, line: &Word) -> String {
        line.iter().map(|(style, text)| self.styled(text, *style)).collect()
    }

    /// A string in a colour.
    pub(crate) fn styled(&self, text: &str, style: Style) -> String {
        match style.code().filter(|_| self.color && !text.trim().is_empty()) {
            Some(code) => format!("\x1b[{code}m{text}\x1b[0m"),
            None => text.to_owned(),
        }
    }

    /// Wrapped text with markup. The first line has a prefix, the others are indented by its width.
    pub fn text(&self, mark: &str, text: &str) -> String {
        self.hang(mark, &words(text))
    }

    pub(crate) fn hang(&self, mark: &str, words: &[Word]) -> String {
        let indent = console_width(mark);
        let lines = self.wrap(words, self.width.saturating_sub(indent).max(8));
        let mut out = mark.trim_end().to_owned();
        for (i, line) in lines.iter().enumerate() {
            out += &if i == 0 { mark[mark.trim_end().len()..].to_owned() } else { format!("\n{}", " ".repeat(indent)) };
            out += line;
        }
        out + "\n"
    }

    /// Columns separated by two spaces, numbers right-aligned, without trailing spaces. Cells that are too wide are wrapped within their
    /// column. If that does not fit, the remaining columns follow below, with the first column repeated.
    pub fn table(&self, table: &Table) -> String {
        let mut out = String::new();
        if !table.caption.is_empty() {
            out += &format!("{}\n\n", self.wrap(&words(&table.caption), self.width).join("\n"));
        }
        // An unnamed column without any content is omitted.
        let shown = |column: &Column| column.widths[0] > 0;
        let columns: Vec<Column> = (0..table.width()).map(|column| Column::new(table, column)).filter(shown).collect();
        let widths = fit(&columns, self.width);
        for (i, shown) in parts(&widths, self.width).iter().enumerate() {
            if i > 0 {
                out.push('\n');
            }
            self.part(&columns, &widths, shown, &mut out);
        }
        out
    }

    fn part(&self, columns: &[Column], widths: &[usize], shown: &[usize], out: &mut String) {
        let rows = columns.first().map_or(0, |column| column.cells.len());
        for row in 0..rows {
            let cells: Vec<Vec<Word>> = shown.iter().map(|&i| self.lines(&columns[i].cells[row], widths[i])).collect();
            let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
            for line in 0..height {
                let mut text = String::new();
                let mut owed = 0;
                for (cell, &i) in cells.iter().zip(shown) {
                    // Column names are aligned at the bottom, cells at the top.
                    let at = if row == 0 { (line + cell.len()).checked_sub(height) } else { Some(line) };
                    let empty = Word::new();
                    let content = at.and_then(|at| cell.get(at)).unwrap_or(&empty);
                    let room = widths[i].saturating_sub(width_of(content));
                    let (before, after) = if columns[i].numeric { (room, 0) } else { (0, room) };
                    if !content.is_empty() {
                        text += &" ".repeat(owed + before);
                        text += &self.paint(content);
                        owed = after + GAP;
                    } else {
                        owed += before + after + GAP;
                    }
                }
                *out += &text;
                out.push('\n');
            }
            if row == 0 {
                let rules: Vec<String> = shown.iter().map(|&i| "─".repeat(widths[i])).collect();
                *out += &format!("{}\n", self.styled(&rules.join("  "), Style::Dim));
            }
        }
    }
}

/// Display width without escape sequences.
fn console_width(text: &str) -> usize {
    let mut inside = false;
    let seen = |c: &char| {
        let was = inside;
        inside = if inside { *c != 'm' } else { *c == '\x1b' };
        !was && !inside
    };
    text.chars().filter(seen).map(|c| c.width().unwrap_or(0)).sum()
}

/// Spaces between columns.
const GAP: usize = 2;
/// A text column is not made narrower than this for other columns.
const MIN_TEXT_WIDTH: usize = 14;

/// A column as words, with its name first.
struct Column {
    cells: Vec<Vec<Word>>,
    numeric: bool,
    /// Width with its name on one line, and with its name wrapped at every word.
    widths: [usize; 2],
    /// Length of the longest word.
    word: usize,
}

impl Column {
    fn new(table: &Table, column: usize) -> Column {
        let of = |cell: &Cell| match cell {
            Cell::Code(text) => plain_words(text, Style::Code),
            Cell::Empty => plain_words(&cell.shown(), Style::Dim),
            _ => plain_words(&cell.shown(), Style::Plain),
        };
        let name = plain_words(table.column(column), Style::Bold);
        let line = |words: &[Word]| words.iter().map(width_of).sum::<usize>() + words.len().saturating_sub(1);
        let cells: Vec<Vec<Word>> = (0..table.rows.len()).map(|row| of(table.cell(row, column))).collect();
        let widest = cells.iter().map(|cell| line(cell)).max().unwrap_or(0);
        let longest = |words: &[Word]| words.iter().map(width_of).max().unwrap_or(0);
        let widths = [widest.max(line(&name)), widest.max(longest(&name))];
        let word = cells.iter().map(|cell| longest(cell)).max().unwrap_or(0).max(longest(&name));
        Column { cells: std::iter::once(name).chain(cells).collect(), numeric: table.is_numeric(column), widths, word }
    }
}

/// Column widths that fit, if possible.
fn fit(columns: &[Column], width: usize) -> Vec<usize> {
    let gaps = GAP * columns.len().saturating_sub(1);
    let total = |widths: &[usize]| widths.iter().sum::<usize>() + gaps;
    let mut widths: Vec<usize> = columns.iter().map(|column| column.widths[0]).collect();
    // Column names are wrapped before words in cells are.
    while total(&widths) > width {
        let Some(wide) = (0..columns.len()).filter(|&i| widths[i] > columns[i].widths[1]).max_by_key(|&i| widths[i] - columns[i].widths[1])
        else {
            break;
        };
        widths[wide] -= 1;
    }
    // Then cells are wrapped, between words first.
    for whole in [true, false] {
        let least = |i: usize| if whole { columns[i].word.max(MIN_TEXT_WIDTH) } else { MIN_TEXT_WIDTH };
        while total(&widths) > width {
            let wide = (0..columns.len()).filter(|&i| !columns[i].numeric && widths[i] > least(i)).max_by_key(|&i| widths[i]);
            let Some(wide) = wide else { break };
            widths[wide] -= 1;
        }
    }
    if total(&widths) > width {
        // Columns will be stacked, and each of them has to fit next to the first.
        widths[0] = widths[0].min(width / 2);
        let room = width.saturating_sub(widths[0] + GAP);
        widths[1..].iter_mut().for_each(|w| *w = (*w).min(room));
    }
    widths.iter_mut().for_each(|w| *w = (*w).max(1));
    widths
}

/// Groups of columns that fit side by side, each starting with the first column.
fn parts(widths: &[usize], width: usize) -> Vec<Vec<usize>> {
    let mut parts = vec![vec![0]];
    let mut used = widths.first().copied().unwrap_or(0);
    for (i, &wide) in widths.iter().enumerate().skip(1) {
        if used + GAP + wide > width && parts.last().is_some_and(|part| part.len() > 1) {
            parts.push(vec![0]);
            used = widths[0];
        }
        parts.last_mut().expect("there is one from the beginning").push(i);
        used += GAP + wide;
    }
    if widths.is_empty() { Vec::new() } else { parts }
}

impl Table {
    /// The table as plain text, see [`Terminal`].
    pub fn to_text(&self, width: usize) -> String {
        Terminal { width, ..Terminal::default() }.table(self)
    }
}

/// Removes control characters and characters that change the text direction.
pub fn clean(text: &str) -> String {
    let acts = |c: char| c.width().is_none() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if matches!(c, '\n' | '\t' | '\r') { ' ' } else { c }).filter(|&c| !acts(c)).collect()
}
