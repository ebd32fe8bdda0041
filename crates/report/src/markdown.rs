//! Documents and tables as Markdown.

use crate::document::{Block, Document};
use crate::html::{Asset, Renderer};
use crate::markup;
use crate::table::{Cell, Table};

impl Document {
    /// The document as Markdown with its figures as images from `figures/`. Collapsed sections and the link targets of table cells
    /// are omitted.
    pub fn to_markdown(&self) -> String {
        markdown(self, &Renderer::render(self, true).1)
    }

    /// The document as Markdown without figures: text, verdicts and tables.
    pub fn to_markdown_without_figures(&self) -> String {
        markdown(self, &[])
    }
}

/// [`Document::to_markdown`] with the names of the written files.
pub fn markdown(page: &Document, assets: &[Asset]) -> String {
    let mut out = format!("# {}\n", markup::markdown(&page.title));
    blocks(&page.lead, assets, &mut out);
    for section in page.sections.iter().filter(|section| section.blocks.iter().any(|block| !matches!(block, Block::Details { .. }))) {
        out += &format!("\n## {}\n", markup::markdown(&section.heading));
        blocks(&section.blocks, assets, &mut out);
    }
    out
}

fn blocks(list: &[Block], assets: &[Asset], out: &mut String) {
    let mut in_list = false;
    for block in list {
        // Consecutive badges form one list.
        let badge = matches!(block, Block::Badge { .. });
        let file = |figure| {
            assets.iter().find_map(|asset| match asset {
                Asset::Figure(name, other) if std::ptr::eq(*other, figure) => Some(name),
                _ => None,
            })
        };
        let missing = matches!(block, Block::Figure { figure, .. } if file(figure).is_none());
        let silent = badge && in_list || missing || matches!(block, Block::Details { .. } | Block::Fold { .. });
        if !silent {
            out.push('\n');
        }
        in_list = badge;
        match block {
            Block::Text(text) => *out += &format!("{}\n", markup::markdown(text)),
            Block::List(items) => items.iter().for_each(|item| *out += &format!("- {}\n", markup::markdown(item))),
            Block::Facts(facts) => {
                for (name, text) in facts {
                    *out += &format!("- {}: {}\n", one_line(&markup::escape_markdown(name)), markup::markdown(text));
                }
            }
            Block::Badge { label, text, .. } => {
                let end = if text.is_empty() { "" } else { ": " };
                *out += &format!("- *{}*{end}{}\n", markup::escape_markdown(label), markup::markdown(text));
            }
            Block::Table { table, .. } => *out += &table.to_markdown(),
            Block::Code(text) => *out += &format!("```text\n{}\n```\n", text.trim_end()),
            Block::Figure { figure, caption, .. } => {
                let Some(file) = file(figure) else { continue };
                *out += &format!("![{}](figures/{file}.png)\n", markup::markdown(&figure.title).replace(']', "\\]"));
                if !caption.is_empty() {
                    *out += &format!("\n{}\n", markup::markdown(caption));
                }
            }
            Block::Fold { blocks: inner, .. } => blocks(inner, assets, out),
            Block::Details { .. } => {}
        }
    }
}

impl Table {
    /// The table with its caption above it, numbers right-aligned.
    pub fn to_markdown(&self) -> String {
        let mut out = String::new();
        if !self.caption.is_empty() {
            out += &format!("{}\n\n", markup::markdown(&self.caption));
        }
        let mut line = |cells: Vec<String>| out += &format!("| {} |\n", cells.join(" | "));
        line((0..self.width()).map(|column| cell(&markup::escape_markdown(self.column(column)))).collect());
        line((0..self.width()).map(|column| if self.is_numeric(column) { "--:" } else { "---" }.to_owned()).collect());
        for row in 0..self.rows.len() {
            let shown = |column| match self.cell(row, column) {
                Cell::Code(text) if !text.contains('`') => format!("`{text}`"),
                other => markup::escape_markdown(&other.shown()),
            };
            line((0..self.width()).map(|column| cell(&shown(column))).collect());
        }
        out
    }
}

/// Escapes characters that would end a cell.
fn cell(text: &str) -> String {
    one_line(text).replace('|', "\\|")
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Figure, Section};

    #[test]
    fn table_cells_are_escaped() {
        let mut table = Table::new("by *order*", ["variant", "loss"]);
        table.rows.push(vec![Cell::code("a|b"), Cell::MeanSd(1.0, 0.25, 2)]);
        table.rows.push(vec![Cell::text("<x>\n[y]"), Cell::Empty]);
        let expected = "by \\*order\\*\n\n| variant | loss |\n| --- | --: |\n| `a\\|b` | 1.00 ± 0.25 |\n| \\<x> \\[y] | – |\n";
        assert_eq!(table.to_markdown(), expected);
    }

    #[test]
    fn markdown_links_to_the_written_files() {
        let figure = |title: &str| Block::Figure {
            name: "loss".into(),
            figure: Figure { title: title.into(), description: String::new(), panels: Vec::new() },
            caption: String::new(),
        };
        let verdict = |claim: &str| Block::badge(crate::Tone::Open, "inconclusive", claim);
        let hidden = Block::Details { summary: "more".into(), blocks: vec![Block::Code("hidden".into())] };
        let page = Document {
            title: "Seen".into(),
            lead: vec![Block::Text("**all** `a*b` [c](d)".into()), verdict("one"), verdict("two"), hidden.clone()],
            sections: vec![
                Section { heading: "First".into(), blocks: vec![figure("A"), figure("B"), hidden.clone()] },
                Section { heading: "Hidden".into(), blocks: vec![hidden] },
            ],
        };
        let expected = "# Seen\n\n**all** `a*b` [c](d)\n\n- *inconclusive*: one\n- *inconclusive*: two\n\n## First\n\n\
            ![A](figures/loss.png)\n\n![B](figures/loss-2.png)\n";
        assert_eq!(page.to_markdown(), expected);
        let without = "# Seen\n\n**all** `a*b` [c](d)\n\n- *inconclusive*: one\n- *inconclusive*: two\n\n## First\n";
        assert_eq!(page.to_markdown_without_figures(), without);
    }
}
