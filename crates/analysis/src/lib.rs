//! Analysis of attention variants and trained models. Every command is a function from options to a result that can be printed or written
//! as JSON.
//!
//! | module | content |
//! |---|---|
//! | [`variants`], [`parts`] | presets and parts: cost, equivalences, a variant as plain data |
//! | [`evaluate`] | the loss of a model on text |
//! | [`generate`] | text generated with a model by name |
//! | [`spectrum`] | the Taylor terms inside a trained model, and the order that each head needs |
//! | [`truncate`] | truncation of exp to a finite order: loss and memory |
//! | [`look`] | one row of one attention head, with all terms and with the first terms only |
//! | [`kv`] | bounded KV memory: convert, frontier, audit, atlas |
//! | [`request`] | models and texts by name, and callbacks of long computations |
//! | [`plan`] | cost of a model before training |
//! | [`export`] | a variant as a standalone PyTorch module |
//! | [`verify`] | a smoke check of this build: every engine against the reference |
//! | [`bench`] | speed of attention, matrix products and training steps |
#![forbid(unsafe_code)]

pub mod bench;
pub mod error;
pub mod evaluate;
pub mod export;
pub mod generate;
pub mod kv;
pub mod layer;
pub mod look;
pub mod parts;
mod plain_config;
pub mod plan;
pub mod request;
pub mod spectrum;
pub mod truncate;
pub mod variants;
pub mod verify;

pub use error::Error;
