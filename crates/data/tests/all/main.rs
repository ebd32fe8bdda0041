//! All tests of the crate that do not need their own process, as one executable: shared code is compiled and linked once.

mod batches;
mod left_out;
mod parquet;
mod sources;
#[path = "../support/mod.rs"]
mod support;
mod text;
mod tokenizer;
