//! Commands, each with a file of its own: arguments, and a call of a library.

pub mod audit;
pub mod bench;
pub mod config;
pub mod convert;
pub mod cut;
pub mod data;
pub mod eval;
pub mod export;
pub mod frontier;
pub mod generate;
pub mod manual;
pub mod plan;
pub mod play;
pub mod reference;
pub mod report;
pub mod reproduce;
pub mod runs;
pub mod separation;
pub mod serve;
pub mod settings;
pub mod share;
pub mod show;
pub mod source;
pub mod spectrum;
pub mod sweep;
pub mod texts;
pub mod tokenizer;
pub mod torch;
pub mod train;
pub mod variants;
pub mod verify;

use crate::args::size;

/// Positions of a window where neither the user nor a run says.
const WINDOW: usize = 1024;
