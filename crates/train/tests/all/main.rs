//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

mod checkpoint;
mod common;
mod eval;
mod kill;
mod nonfinite;
mod ranks;
mod replace;
mod run;
mod settings;
