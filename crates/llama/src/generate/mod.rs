//! Writing text: a model token by token, what it remembers, and how tokens are chosen.
//!
//! Nothing here knows of tokenizers: tokens go in and come out, and [`Stops`] works on what others make of them.

mod buffers;
mod cut;
mod decoder;
mod file;
mod memory;
mod random;
mod run;
mod sampler;
mod stop;

pub use cut::{cut, warnings};
pub use decoder::{Decoder, DecoderOptions, Remember};
pub use file::Saved;
pub use memory::available as available_memory;
pub use random::Random;
pub use sampler::{Sampler, Sampling};
pub use stop::Stops;
