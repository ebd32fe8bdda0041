//! What all crates need, once.
//!
//! - [`rng`]: random numbers that are the same on every machine;
//! - [`files`]: files that appear whole or not at all, and reading that ends;
//! - [`provenance`]: which build made something;
//! - [`statistics`]: Student's distribution;
//! - [`test_skip`]: reports tests that cannot run;
//! - [`threads`]: pools of a stated size;
//! - [`nearest`]: the word that was probably meant.
#![forbid(unsafe_code)]

pub mod files;
mod near;
pub mod provenance;
pub mod rng;
pub mod statistics;
pub mod test_skip;
pub mod threads;

pub use near::nearest;
