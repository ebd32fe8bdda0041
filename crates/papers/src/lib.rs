//! Two papers on what softmax attention can do and linear attention cannot.
//!
//! - [`separation`]: a theorem about what softmax attention can tell apart and linear attention cannot;
//! - [`reproduce`]: the experiments of both papers, run and decided;
//! - [`play`]: a page on which one takes the terms of softmax away.

pub mod play;
pub mod reproduce;
pub mod separation;

pub use termwise_lab::Error;
