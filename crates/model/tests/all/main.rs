//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

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
