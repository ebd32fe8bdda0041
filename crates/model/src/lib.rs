//! Transformer language models on the CPU with exchangeable attention: configuration, weights, and explicit forward and backward passes in
//! float32 or with bfloat16 products.
//!
//! | module | content |
//! |---|---|
//! | [`config`] | `config.json` of Hugging Face model families, the attention of each head |
//! | [`weights`], [`params`] | safetensors files, the flat parameter buffer |
//! | `architecture` | the blocks of a model and the ranges of their tensors |
//! | `passes` | [`Session`]: the forward pass and the backward pass |
//! | [`ops`] | the operations outside attention |
//! | [`decode`] | [`decode::Decoder`] and [`decode::Sampler`]: token ids in, token ids out |
//! | [`generate`] | prompts in, text out |
#![forbid(unsafe_code)]

/// Builder methods of an options struct: each sets the field of the same name.
macro_rules! setters {
    ($options:ident { $($field:ident: $type:ty),* $(,)? }) => {
        impl $options {
            $(
                #[doc = concat!("Sets `", stringify!($field), "`.")]
                #[must_use]
                pub fn $field(self, $field: $type) -> $options {
                    $options { $field, ..self }
                }
            )*
        }
    };
}

mod architecture;
pub mod config;
pub mod decode;
pub mod error;
pub mod generate;
pub mod init;
mod json;
mod model;
pub mod ops;
pub mod params;
mod passes;
pub mod rng;
pub mod weights;

pub use config::Config;
pub use error::{Error, Result};
pub use generate::GenerateError;
pub use model::Model;
pub use ops::products::Precision;
pub use params::{ParamLayout, Params};
pub use passes::{
    AttentionEngine, Batch, Loss, NonpositiveDenominator, Objective, ObservedAttention, Session, SessionOptions, Stage, StageTiming,
};
