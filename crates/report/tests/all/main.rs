//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

mod figure;
mod page;
mod result;
mod sample;
mod svg;
mod terminal;
