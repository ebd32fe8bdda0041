//! Documents: texts, figures and tables, rendered for a terminal, as Markdown and as one HTML file that needs nothing else.

use termwise_base::provenance::Provenance;

use crate::figure::Figure;
use crate::table::Table;

/// What a result says to people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// Its name, at the top and in the window's bar.
    pub title: String,
    /// What comes before the table of contents.
    pub lead: Vec<Block>,
    /// With headings, listed in the table of contents.
    pub sections: Vec<Section>,
}

/// A part of a [`Document`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// In one line.
    pub heading: String,
    /// From top to bottom.
    pub blocks: Vec<Block>,
}

/// Something in a document. Texts may hold `` `code` ``, `**bold**` and `[words](address)`; all else is taken as it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Block {
    /// A paragraph.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
    /// Names and a text for each.
    Facts(Vec<(String, String)>),
    /// A figure; several in a row stand beside each other where there is room. A terminal shows heat maps alone.
    Figure {
        /// Of its files and its anchor: short, such as `loss-by-order`.
        name: String,
        /// The picture.
        figure: Figure,
        /// A text below it; empty for none.
        caption: String,
    },
    /// A table.
    Table {
        /// Of its file and its anchor.
        name: String,
        /// The table.
        table: Table,
    },
    /// A statement and what became of it.
    Badge {
        /// Whether that is good.
        tone: Tone,
        /// What became of it, in a word or a few.
        label: String,
        /// The statement, a text.
        text: String,
    },
    /// Lines as they are typed.
    Code(String),
    /// What a page folds away and text shows.
    Fold {
        /// In one line, on pages alone.
        summary: String,
        /// From top to bottom.
        blocks: Vec<Block>,
    },
    /// What is seen only when it is asked for.
    Details {
        /// In one line.
        summary: String,
        /// From top to bottom.
        blocks: Vec<Block>,
    },
}

/// What a [`Block::Badge`] looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be, or as it was said.
    Good,
    /// Neither.
    Open,
    /// The opposite.
    Bad,
}

impl Tone {
    /// Told apart by more than colour.
    pub(crate) fn sign(self) -> char {
        match self {
            Tone::Good => '✓',
            Tone::Open => '○',
            Tone::Bad => '✗',
        }
    }
}

impl Document {
    /// Whether there is a figure anywhere.
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

    /// With a line at its end that says which build made it, and how.
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

    /// A table with the name of its file.
    pub fn table(name: impl Into<String>, table: Table) -> Block {
        Block::Table { name: name.into(), table }
    }

    /// A figure without a caption.
    pub fn figure(name: impl Into<String>, figure: Figure) -> Block {
        Block::Figure { name: name.into(), figure, caption: String::new() }
    }

    /// A statement and what became of it.
    pub fn badge(tone: Tone, label: impl Into<String>, text: impl Into<String>) -> Block {
        Block::Badge { tone, label: label.into(), text: text.into() }
    }
}

impl Section {
    /// A heading and what stands below it.
    pub fn new(heading: impl Into<String>, blocks: Vec<Block>) -> Section {
        Section { heading: heading.into(), blocks }
    }
}
