//! All tests of the crate that do not need their own process, as one executable: shared code is compiled and linked once.

mod checkpoint;
mod common;
mod eval;
mod kill;
mod nonfinite;
mod ranks;
mod replace;
mod run;
mod settings;
