//! One file per command: arguments, one call of a library, one result.

pub mod bench;
pub mod completions;
pub mod config;
pub mod data;
pub mod demo;
pub mod eval;
pub mod export;
pub mod generate;
pub mod kv;
pub mod plan;
pub mod reference;
pub mod report;
pub mod reproduce;
pub mod runs;
pub mod separation;
pub mod serve;
pub mod settings;
pub mod share;
pub mod show;
pub mod spectrum;
pub mod sweep;
pub mod tokenizer;
pub mod train;
pub mod truncate;
pub mod variants;
pub mod verify;

use crate::args::size;
