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
