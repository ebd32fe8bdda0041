//! Utilities shared by all crates.
//!
//! - [`rng`]: random numbers, reproducible across machines;
//! - [`files`]: atomic writes, bounded reads and file locks;
//! - [`provenance`]: the build, machine and command of a result;
//! - [`statistics`]: Student's t distribution and Holm's correction;
//! - [`test_skip`]: reports tests that cannot run;
//! - [`threads`]: thread pools of a given size;
//! - [`nearest`]: suggestions for misspelled names.
#![forbid(unsafe_code)]

pub mod files;
mod near;
pub mod provenance;
pub mod rng;
pub mod statistics;
pub mod test_skip;
pub mod threads;

pub use near::nearest;
