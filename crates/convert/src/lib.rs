//! A trained model with constant memory, at a known price.
//!
//! ```text
//! text ─► calibrate   second moments, ranges, how each head looks back (atlas); the far states' projections and coefficients
//!      ─► errors      what each kind of memory does to each kv head's output, by the engine itself
//!      ─► sensitivity what a head's error does to the model's predictions: measured, one head at a time
//!      ─► allocate    one kind for each kv head within a budget
//!      ─► assemble    the model with its variants and tensors, which every other command understands
//!      ─► tune        if asked: the added tensors, or all weights, learn the original's predictions
//!      ─► meter       loss and KL to the original, by position ─► frontier
//!      ─► audit       whether a converted model is what its record says, and what each part of its memory does
//! ```
//!
//! Fitting and choosing never see the text that is evaluated.

pub mod allocate;
pub mod assemble;
pub mod atlas;
pub mod audit;
pub mod calibrate;
pub mod convert;
pub mod error;
pub mod errors;
pub mod fit;
pub mod frontier;
pub mod journal;
pub mod kinds;
pub mod linalg;
pub mod meter;
pub mod recall;
pub mod record;
pub mod rivals;
pub mod sensitivity;
mod text;
pub mod tune;

pub use error::Error;
pub use text::{Cutting, Named, Text, Texts};

/// How far the work is: pieces done, pieces in all, and what is being done.
pub type Tell<'a> = &'a mut dyn FnMut(u64, u64, &str);
