//! Documents: text, figures and tables, rendered for a terminal, as Markdown and as a self-contained HTML file.

use termwise_base::provenance::Provenance;

use crate::figure::Figure;
use crate::table::Table;

/// A result in readable form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// The title, also of the browser window.
    pub title: String,
    /// Blocks before the table of contents.
    pub lead: Vec<Block>,
    /// Sections, listed in the table of contents.
    pub sections: Vec<Section>,
}

/// A section of a [`Document`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// The heading, one line.
    pub heading: String,
    /// The content in order.
    pub blocks: Vec<Block>,
}

/// A block of a document. Text may contain `` `code` ``, `**bold**` and `[words](address)`; everything else is literal.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Block {
    /// A paragraph.
    Text(String),
    /// A list of paragraphs.
    List(Vec<String>),
    /// A definition list: terms and descriptions.
    Facts(Vec<(String, String)>),
    /// A figure. Consecutive figures are laid out side by side if there is room. A terminal shows only heat maps.
    Figure {
        /// Name of its files and its anchor: short, such as `loss-by-order`.
        name: String,
        /// The figure.
        figure: Figure,
        /// The caption; empty for none.
        caption: String,
    },
    /// A table.
    Table {
        /// Name of its file and its anchor.
        name: String,
        /// The table.
        table: Table,
    },
    /// A statement with a verdict.
    Badge {
        /// Colour of the verdict.
        tone: Tone,
        /// The verdict, a few words.
        label: String,
        /// The statement, with markup.
        text: String,
    },
    /// A code block.
    Code(String),
    /// A section collapsed in the HTML report and shown in text formats.
    Fold {
        /// The summary line, only in HTML.
        summary: String,
        /// The content in order.
        blocks: Vec<Block>,
    },
    /// A section collapsed in every format unless details are requested.
    Details {
        /// The summary line.
        summary: String,
        /// The content in order.
        blocks: Vec<Block>,
    },
}

/// The colour of a [`Block::Badge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As expected or as claimed.
    Good,
    /// Undecided.
    Open,
    /// The opposite of the expectation.
    Bad,
}

impl Tone {
    /// A symbol, so that verdicts are distinguishable without colour.
    pub(crate) fn sign(self) -> char {
        match self {
            Tone::Good => '✓',
            Tone::Open => '○',
            Tone::Bad => '✗',
        }
    }
}

impl Document {
    /// Whether the document contains a figure.
    pub(crate) fn has_figures(&self) -> bool {
        fn any(blocks: &[Block]) -> bool {
            blocks.iter().any(|block| match block {
                Block::Figure { .. } => true,
                Block::Details { blocks, .. } | Block::Fold { blocks, .. } => any(blocks),
                _ => false,
            })
        }
        any(&self.lead) || self.sections.iter().any(|section| any(&section.blocks))
    }

    /// Appends a line with the build and the command.
    #[must_use]
    pub fn made_by(mut self, made_by: &Provenance) -> Document {
        let Provenance { build, instructions, processor, command } = made_by;
        let processor = if processor.is_empty() { "an unknown processor" } else { processor };
        let block = Block::Text(format!("Made by termwise {build}, {instructions} on {processor}: `{command}`"));
        self.sections.last_mut().map_or(&mut self.lead, |section| &mut section.blocks).push(block);
        self
    }
}

impl Block {
    /// A paragraph.
    pub fn text(text: impl Into<String>) -> Block {
        Block::Text(text.into())
    }

    /// A table with its file name.
    pub fn table(name: impl Into<String>, table: Table) -> Block {
        Block::Table { name: name.into(), table }
    }

    /// A figure without a caption.
    pub fn figure(name: impl Into<String>, figure: Figure) -> Block {
        Block::Figure { name: name.into(), figure, caption: String::new() }
    }

    /// A statement with a verdict.
    pub fn badge(tone: Tone, label: impl Into<String>, text: impl Into<String>) -> Block {
        Block::Badge { tone, label: label.into(), text: text.into() }
    }
}

impl Section {
    /// A section with this heading and content.
    pub fn new(heading: impl Into<String>, blocks: Vec<Block>) -> Section {
        Section { heading: heading.into(), blocks }
    }
}
