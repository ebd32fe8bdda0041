//! Looking inside models.
//!
//! - [`spectrum`]: the terms of the exponential series inside a model, and how many of them its heads need;
//! - [`cut`]: what cutting exp to a finite order costs and saves;
//! - [`look`]: one row of one head, with all its terms and with the first of them.

pub mod cut;
pub mod look;
pub mod spectrum;

pub use termwise_lab::Error;
