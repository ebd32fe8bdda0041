//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

mod batches;
mod left_out;
mod parquet;
mod sources;
#[path = "../support/mod.rs"]
mod support;
mod text;
mod tokenizer;
