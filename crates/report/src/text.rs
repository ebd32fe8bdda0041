//! Words and tables for the terminal: nothing is wider than it, and nothing in a text can act on it.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::markup::{self, Piece};
use crate::table::{Cell, Table};

/// What a terminal shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Characters of a line.
    pub width: usize,
    /// Whether to colour. Without the colours the text is the same.
    pub color: bool,
    /// Whether to show what documents fold away.
    pub details: bool,
}

impl Default for Terminal {
    fn default() -> Terminal {
        Terminal { width: 100, color: false, details: false }
    }
}

/// What a word looks like.
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

/// Letters between two spaces.
pub type Word = Vec<(Style, String)>;

/// The words of a text with markup.
pub fn words(text: &str) -> Vec<Word> {
    let mut words = vec![Word::new()];
    spans(text, Style::Plain, &mut words);
    words.retain(|word| !word.is_empty());
    words
}

/// The words of a text without.
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
                // A place on the page or beside it is no place here.
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
    /// Words in lines of at most that width; a word that is longer is broken.
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

    /// Text in a colour.
    pub(crate) fn styled(&self, text: &str, style: Style) -> String {
        match style.code().filter(|_| self.color && !text.trim().is_empty()) {
            Some(code) => format!("\x1b[{code}m{text}\x1b[0m"),
            None => text.to_owned(),
        }
    }

    /// A text with markup in lines, the first behind a mark and the others under it.
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

    /// Columns with two spaces between them, numbers at the right; no line ends in spaces. What is too wide is broken into lines within its
    /// column; where even that does not fit, further columns stand below, beside the first one again.
    pub fn table(&self, table: &Table) -> String {
        let mut out = String::new();
        if !table.caption.is_empty() {
            out += &format!("{}\n\n", self.wrap(&words(&table.caption), self.width).join("\n"));
        }
        // A column of remarks without a name and without any remark is none.
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
                    // Names of columns stand at the bottom, cells at the top.
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

/// Characters without colours.
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
/// A column of words is not made narrower for the sake of others.
const NARROW: usize = 14;

/// A column as words, the name first.
struct Column {
    cells: Vec<Vec<Word>>,
    numeric: bool,
    /// With its name in one line, and with its name in as many as it has words.
    widths: [usize; 2],
    /// The longest word.
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

/// Widths of columns that fit where they can.
fn fit(columns: &[Column], width: usize) -> Vec<usize> {
    let gaps = GAP * columns.len().saturating_sub(1);
    let total = |widths: &[usize]| widths.iter().sum::<usize>() + gaps;
    let mut widths: Vec<usize> = columns.iter().map(|column| column.widths[0]).collect();
    // Names of columns take several lines before words in cells do.
    while total(&widths) > width {
        let Some(wide) = (0..columns.len()).filter(|&i| widths[i] > columns[i].widths[1]).max_by_key(|&i| widths[i] - columns[i].widths[1])
        else {
            break;
        };
        widths[wide] -= 1;
    }
    // Then words do, whole ones first.
    for whole in [true, false] {
        let least = |i: usize| if whole { columns[i].word.max(NARROW) } else { NARROW };
        while total(&widths) > width {
            let wide = (0..columns.len()).filter(|&i| !columns[i].numeric && widths[i] > least(i)).max_by_key(|&i| widths[i]);
            let Some(wide) = wide else { break };
            widths[wide] -= 1;
        }
    }
    if total(&widths) > width {
        // Columns will stand below each other, and any of them has to fit beside the first.
        widths[0] = widths[0].min(width / 2);
        let room = width.saturating_sub(widths[0] + GAP);
        widths[1..].iter_mut().for_each(|w| *w = (*w).min(room));
    }
    widths.iter_mut().for_each(|w| *w = (*w).max(1));
    widths
}

/// Columns that stand beside each other, the first one every time.
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
    /// The table without colours, see [`Terminal`].
    pub fn to_text(&self, width: usize) -> String {
        Terminal { width, ..Terminal::default() }.table(self)
    }
}

/// Without characters that a terminal would act on, or that show letters in another order than they stand.
pub fn clean(text: &str) -> String {
    let acts = |c: char| c.width().is_none() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if matches!(c, '\n' | '\t' | '\r') { ' ' } else { c }).filter(|&c| !acts(c)).collect()
}
