//! What the command line does, as a library: every command is a function from options to a structure that can be printed
//! for people or written as JSON.
//!
//! - [`variants`]: presets and parts, what they cost and which are equal;
//! - [`verify`]: the identities of the algebra on random cases, and comparison with reference files;
//! - [`bench`]: speed of attention, matrix products and training steps beside what the machine can do;
//! - [`plan`]: what a model will cost before anything is run;
//! - [`spectrum`]: the terms of the exponential series inside a model, and how many of them its heads need;
//! - [`cut`]: what cutting exp to a finite order costs and saves;
//! - [`separation`]: a theorem about what softmax attention can tell apart and linear attention cannot;
//! - [`reproduce`]: the experiments of two papers, run and decided.

pub mod bench;
pub mod cut;
pub mod error;
pub mod layer;
pub mod made_by;
pub mod plan;
pub mod reproduce;
pub mod rng;
pub mod separation;
pub mod spectrum;
pub mod threads;
pub mod variants;
pub mod verify;

pub use error::Error;
pub use made_by::MadeBy;
