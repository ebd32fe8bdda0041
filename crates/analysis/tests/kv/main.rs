//! Tests of the crate, one program.

mod audit;
mod convert;
mod support;
