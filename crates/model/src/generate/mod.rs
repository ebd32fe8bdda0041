//! Text generation: prompts in, text out, for many prompts in parallel.

pub mod error;
mod generator;
pub mod prompts;

pub use error::GenerateError;
pub use generator::{Completion, FailedCompletion, FinishReason, GenerationEvent, GenerationOptions, GenerationStats, TextGenerator};
