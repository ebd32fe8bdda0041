//! Writing text: a model token by token, what it remembers, and how tokens are chosen.
//!
//! Nothing here knows of tokenizers: tokens go in and come out, and [`Stops`] works on what others make of them.

mod cut;
mod decoder;
mod file;
mod held;
mod memory;
mod run;
mod sampler;
mod stop;

pub use cut::{cut, warnings};
pub use decoder::{Decoder, DecoderOptions, MemoryPolicy, RowError};
pub use file::Saved;
pub use memory::available as available_memory;
pub use sampler::{Sampler, Sampling};
pub use stop::Stops;
