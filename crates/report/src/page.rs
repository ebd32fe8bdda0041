//! Pages: texts, figures and tables in one HTML file that needs nothing else.

use crate::figure::Figure;
use crate::table::Table;

/// A report in one HTML file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Its name, at the top and in the window's bar.
    pub title: String,
    /// What comes before the table of contents.
    pub lead: Vec<Block>,
    /// With headings, listed in the table of contents.
    pub sections: Vec<Section>,
}

/// A part of a [`Page`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// In one line.
    pub heading: String,
    /// From top to bottom.
    pub blocks: Vec<Block>,
}

/// Something on a page. Texts may hold `` `code` ``, `**bold**` and `[words](address)`; all else is taken as it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Block {
    /// A paragraph.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
    /// A figure; several in a row stand beside each other where there is room.
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
    /// A claim and what became of it.
    Verdict {
        /// What became of it.
        verdict: Verdict,
        /// A text.
        claim: String,
    },
    /// Lines as they are typed.
    Code(String),
    /// What is seen only when it is asked for.
    Details {
        /// In one line.
        summary: String,
        /// From top to bottom.
        blocks: Vec<Block>,
    },
}

/// What became of a published claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was seen here too.
    Reproduced,
    /// Differences are smaller than what seeds make.
    NotVisible,
    /// The opposite was seen.
    Contradicted,
}
