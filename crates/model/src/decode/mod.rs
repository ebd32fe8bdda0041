//! Inference: decoding token by token, the memory of past tokens, and sampling.
//!
//! This module works on token ids. [`crate::generate`] adds tokenizers and prompts.

mod decoder;
mod memory;
mod options;
mod prefill;
mod sampler;
mod state_file;
mod step;
mod stop_strings;
mod truncate;
mod weights;

pub use decoder::{Decoder, RowError};
pub use memory::available as available_memory;
pub use options::{DecoderOptions, MemoryPolicy};
pub use sampler::{Sampler, SamplingOptions};
pub use state_file::SavedSequence;
pub use stop_strings::StopStrings;
pub use truncate::{truncate_attention, warnings};
