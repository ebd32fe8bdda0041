//! Llama models whose attention is exchangeable: configuration, weights, and a float32 engine with explicit forward and backward passes.

pub mod config;
pub mod error;
pub mod generate;
pub mod init;
mod json;
mod kernels;
pub mod model;
pub mod ops;
pub mod params;
pub mod rng;
pub mod weights;

pub use config::Config;
pub use error::{Error, Result};
pub use model::{Batch, Engine, Loss, Model, Objective, Observed, Options, Session};
pub use params::{Layout, Params};
