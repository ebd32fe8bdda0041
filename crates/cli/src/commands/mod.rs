//! Commands whose work is in `termwise_train`.

pub mod data;
pub mod eval;
pub mod settings;
pub mod source;
pub mod sweep;
pub mod tokenizer;
pub mod train;

use crate::args::size;
