//! How fresh models start: Hugging Face's start of a Llama.
//!
//! Numbers are a function of (seed, name of the tensor, index): not of threads, of the platform or of other tensors, so that two
//! variants of one model start with the same values wherever they have the same tensors.

use crate::config::Config;
use crate::params::{ParamInit, Params};
use crate::rng::Rng;

/// Linear weights and the embedding normal with `initializer_range`, biases 0, norms 1, additional parameters as their parts say.
pub fn initialize(params: &mut Params, config: &Config, seed: u64) {
    let layout = params.layout().clone();
    for entry in layout.entries() {
        let rng = Rng::named(seed, &entry.spec.name);
        let values = &mut params.values_mut()[entry.range()];
        match entry.spec.init {
            ParamInit::Normal => rng.normal(values, config.initializer_range),
            ParamInit::Constant(value) => values.fill(value as f32),
            ParamInit::Uniform(bound) => rng.uniform(values, bound),
        }
    }
}
