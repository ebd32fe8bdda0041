//! Commands with a file of their own.

pub mod bench;
pub mod cut;
pub mod data;
pub mod eval;
pub mod generate;
pub mod plan;
pub mod report;
pub mod reproduce;
pub mod separation;
pub mod settings;
pub mod source;
pub mod spectrum;
pub mod sweep;
pub mod terminal;
pub mod tokenizer;
pub mod train;

use crate::args::size;

/// How a command ended that could do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All is done, and every check holds.
    Well,
    /// Something failed or does not hold, and was said.
    Unwell,
    /// It was asked to stop, and the same command goes on from there.
    Stopped,
}

impl From<bool> for Ended {
    fn from(well: bool) -> Ended {
        if well { Ended::Well } else { Ended::Unwell }
    }
}
