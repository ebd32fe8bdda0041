//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

mod chunk;
mod documents;
mod edges;
mod expected;
mod far;
mod fused;
mod gradients;
mod identities;
mod inputs;
mod modules;
mod operations;
mod pool;
mod recurrent;
mod recurrent_files;
#[path = "../support/mod.rs"]
mod support;
mod text;
