//! All tests of the crate that do not need their own process, as one executable: shared code is compiled and linked once.

#[path = "../common/mod.rs"]
mod common;
mod config;
mod failures;
mod families;
mod generate;
mod golden;
mod memory;
mod model;
mod stories;
mod weights;
