//! What all crates need, once.
//!
//! - [`rng`]: random numbers that are the same on every machine;
//! - [`files`]: files that appear whole or not at all;
//! - [`threads`]: pools of a stated size;
//! - [`nearest`]: the word that was probably meant.

pub mod files;
mod near;
pub mod rng;
pub mod threads;

pub use near::nearest;
