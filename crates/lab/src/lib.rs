//! What attentions and models are and cost, before anything is trained: every command is a function from options to a structure that can
//! be printed for people or written as JSON.
//!
//! - [`variants`]: presets and parts, what they cost and which are equal;
//! - [`verify`]: the identities of the algebra on random cases, and comparison with reference files;
//! - [`bench`]: speed of attention, matrix products and training steps beside what the machine can do;
//! - [`plan`]: what a model will cost before anything is run;
//! - [`export`]: a variant as a PyTorch module in one file;
//! - [`parts`]: a variant as plain data.

pub mod bench;
pub mod error;
pub mod export;
pub mod layer;
pub mod parts;
pub mod plan;
pub mod variants;
pub mod verify;

pub use error::Error;
