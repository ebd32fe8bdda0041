//! All integration tests that can share a process, as one binary: support code is compiled and linked once.

mod bf16;
mod chunk;
mod combinations;
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
mod recurrent;
mod recurrent_files;
mod ring;

#[path = "../support/mod.rs"]
mod support;
mod text;
