//! Reproduction of two papers on the expressiveness of softmax attention.
//!
//! - [`reproduce`]: the experiments of both papers and the verdicts on their claims;
//! - [`separation`]: the softmax/linear separation theorem;
//! - [`saved`]: saved results of all commands, and reports of runs;
//! - [`demo`]: an interactive demo of removing Taylor terms;
//! - [`serve`]: a live view of training runs.
#![forbid(unsafe_code)]

pub mod demo;
pub mod reproduce;
pub mod saved;
pub mod separation;
pub mod serve;

pub use termwise_analysis::Error;
