//! Documents in the terminal.

use unicode_width::UnicodeWidthStr;

use crate::document::{Block, Document, Tone};
use crate::figure::Panel;
use crate::text::{Style, Terminal, clean, plain_words, words};

impl Document {
    /// The document in lines that fit the terminal, except for code. Charts are omitted.
    pub fn to_terminal(&self, terminal: &Terminal) -> String {
        let mut out = String::new();
        if !self.title.is_empty() {
            terminal.heading(&self.title, '═', &mut out);
        }
        terminal.blocks(&self.lead, &mut out);
        for section in &self.sections {
            let mut blocks = String::new();
            terminal.blocks(&section.blocks, &mut blocks);
            // A section that contains only charts is omitted.
            if !blocks.is_empty() {
                out += if out.is_empty() { "" } else { "\n" };
                terminal.heading(&section.heading, '─', &mut out);
                out += &blocks;
            }
        }
        out
    }
}

/// Maximum number of lines that a command prints unless details are requested.
pub const BRIEF_LINES: usize = 25;

impl Document {
    /// The beginning of the document in at most [`BRIEF_LINES`] lines, cut between two blocks if possible, and the number of lines left out. One
    /// line is kept free for a note. A table is not cut off its caption: its first rows stay if they fit, otherwise both are left out.
    pub fn to_terminal_brief(&self, terminal: &Terminal) -> (String, usize) {
        let whole = self.to_terminal(terminal);
        let lines: Vec<&str> = whole.lines().collect();
        if lines.len() < BRIEF_LINES {
            return (whole, 0);
        }
        let most = &lines[..BRIEF_LINES - 1];
        // Lines of the table below an empty line that fit, without its head; none if there is no table.
        let rows = |gap: usize| {
            let mut below = lines[gap + 1..].iter().take_while(|line| !line.trim().is_empty());
            let rule = below.position(|line| line.contains("─  ─"))?;
            Some(most.len().saturating_sub(gap + rule + 2))
        };
        let gaps = (BRIEF_LINES / 2 + 1..most.len()).rev().filter(|&line| most[line].trim().is_empty());
        let end = gaps.map(|gap| (gap, rows(gap))).find(|(_, rows)| *rows != Some(0));
        let mut kept = match end {
            Some((gap, None)) => &most[..gap],
            _ => most,
        };
        // A heading is cut off with its caption if at most the head of its table fits. A longer beginning of a table stays.
        if let Some(rule) = kept.iter().rposition(|line| line.contains('─') && !line.contains(' '))
            && kept.len() - rule <= HEAD_LINES
            && !kept[rule..].iter().any(|line| line.trim().is_empty())
            && let Some(end) = kept[..rule].iter().rposition(|line| line.trim().is_empty())
        {
            kept = &kept[..end];
        }
        (kept.join("\n") + "\n", lines.len() - kept.len())
    }
}

/// Lines of the underline of a heading and of the head of a table.
const HEAD_LINES: usize = 4;

impl Terminal {
    fn heading(&self, text: &str, rule: char, out: &mut String) {
        let words: Vec<_> = words(text).into_iter().map(|word| word.into_iter().map(|(_, text)| (Style::Bold, text)).collect()).collect();
        let lines = self.wrap(&words, self.width);
        let plain = Terminal { color: false, ..*self }.wrap(&words, self.width);
        let width = plain.iter().map(|line| line.width()).max().unwrap_or(0);
        *out += &format!("{}\n{}\n", lines.join("\n"), self.styled(&rule.to_string().repeat(width), Style::Dim));
    }

    /// An empty line before each block except the first, and none between badges.
    fn blocks(&self, blocks: &[Block], out: &mut String) {
        let mut before = None;
        for block in blocks {
            let shown = self.block(block);
            if shown.is_empty() {
                continue;
            }
            let close = |block: &Block| matches!(block, Block::Badge { .. } | Block::Details { .. });
            if before.is_some_and(|before| !(close(before) && close(block))) {
                out.push('\n');
            }
            *out += &shown;
            before = Some(block);
        }
    }

    fn block(&self, block: &Block) -> String {
        match block {
            Block::Text(text) => self.hang("", &words(text)),
            Block::List(items) => items.iter().map(|item| self.hang("· ", &words(item))).collect(),
            Block::Facts(facts) => {
                let names: Vec<String> = facts.iter().map(|(name, _)| clean(name)).collect();
                let most = names.iter().map(|name| name.width()).max().unwrap_or(0).min(self.width / 3);
                let fact = |(name, (_, text)): (&String, &(String, String))| match most.checked_sub(name.width()) {
                    Some(room) => self.hang(&format!("{}{}", self.styled(name, Style::Bold), " ".repeat(room + 2)), &words(text)),
                    None => self.hang("", &plain_words(name, Style::Bold)) + &self.hang(&" ".repeat(most + 2), &words(text)),
                };
                names.iter().zip(facts).map(fact).collect()
            }
            Block::Table { table, .. } => self.table(table),
            Block::Badge { tone, label, text } => {
                let style = match tone {
                    Tone::Good => Style::Good,
                    Tone::Open => Style::Open,
                    Tone::Bad => Style::Bad,
                };
                let sign = self.styled(&tone.sign().to_string(), style);
                let mut all = plain_words(label, style);
                if let (Some(last), false) = (all.last_mut(), text.is_empty()) {
                    last.push((style, ":".into()));
                }
                all.extend(words(text));
                self.hang(&format!("{sign} "), &all)
            }
            Block::Code(text) => text.lines().map(|line| format!("{}\n", format!("  {}", clean(line)).trim_end())).collect(),
            Block::Figure { figure, .. } => {
                let maps = figure.panels.iter().filter_map(|panel| match panel {
                    Panel::HeatMap(map) => Some(map.to_text(self.width)),
                    _ => None,
                });
                maps.collect::<Vec<_>>().join("\n")
            }
            Block::Fold { blocks, .. } => {
                let mut out = String::new();
                self.blocks(blocks, &mut out);
                out
            }
            Block::Details { summary, blocks } => {
                let mut out = match self.details {
                    true => self.hang("▾ ", &words(summary)),
                    false => self.hang("▸ ", &words(&format!("{summary} (print it with `--details`)"))),
                };
                if self.details {
                    out.push('\n');
                    self.blocks(blocks, &mut out);
                }
                out
            }
        }
    }
}
