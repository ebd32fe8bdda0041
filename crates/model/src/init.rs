//! Random initialization of parameters, with the distributions of Hugging Face Transformers.
//!
//! Each value is a function of the seed, the name of the tensor and the index, and does not depend on threads, the platform or other tensors.
//! Two variants of a model therefore start with the same values in the tensors that they share.

use crate::config::Config;
use crate::params::{ParamInit, Params};
use crate::rng::IndexedRng;

/// Initializes projections and the embedding from a normal distribution with `initializer_range`, biases to 0, norms to 1, and auxiliary parameters of attention by their parts.
pub fn initialize(params: &mut Params, config: &Config, seed: u64) {
    let layout = params.layout().clone();
    for entry in layout.entries() {
        let rng = IndexedRng::named(seed, &entry.spec.name);
        let values = &mut params.values_mut()[entry.range()];
        match entry.spec.init {
            ParamInit::Normal => rng.normal(values, config.initializer_range),
            ParamInit::Constant(value) => values.fill(value as f32),
            ParamInit::Uniform(bound) => rng.uniform(values, bound),
        }
    }
}
