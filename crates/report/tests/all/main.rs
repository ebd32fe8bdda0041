//! All tests of the crate that do not need their own process, as one executable: shared code is compiled and linked once.

mod figure;
mod page;
mod result;
mod sample;
mod svg;
mod terminal;
