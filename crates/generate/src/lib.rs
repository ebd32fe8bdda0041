//! Text with a model: prompts in, text out as it is written, many at once.

pub mod error;
pub mod prompts;
mod writing;

pub use error::{Error, Result};
pub use writing::{Failed, Finish, Piece, Plan, Took, Writing, Written};
