//! The weights that a decoder reads: float32 shared with a model, or bfloat16 of its own.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::Bf16Buffer;
use crate::model::Model;
use crate::model::architecture::Architecture;
use crate::model::layer::{Vectors, Weights};
use crate::params::{Entry, Layout};
use crate::weights::{Checkpoint, FloatType};

pub(super) struct Held {
    pub config: Config,
    layout: Arc<Layout>,
    values: Values,
}

enum Values {
    F32(Arc<Model>),
    /// Half the bytes to read for each token. Norms, biases and the parameters of attention stay in float32.
    Bf16 {
        matrices: Bf16Buffer,
        vectors: Vectors,
    },
}

impl Held {
    /// The weights of a model; the model itself is let go where they are copied.
    pub fn new(model: Arc<Model>, weights: FloatType) -> Result<Held> {
        let (config, layout) = (model.config.clone(), model.params.layout().clone());
        layout.check(&config)?;
        let values = match weights {
            FloatType::F32 => Values::F32(model),
            FloatType::Bf16 => narrow(&layout, |entry, out| {
                out.extend_from_slice(&model.params.values()[entry.range()]);
                Ok(())
            })?,
            other => return Err(refuse(other)),
        };
        Ok(Held { config, layout, values })
    }

    /// The weights of a folder, without a float32 copy of all of them on the way to bfloat16.
    pub fn read(folder: &Path, weights: FloatType) -> Result<Held> {
        if weights == FloatType::F32 {
            return Held::new(Arc::new(Model::read(folder)?), weights);
        }
        if weights != FloatType::Bf16 {
            return Err(refuse(weights));
        }
        let (config, file) = (Config::read(folder)?, Checkpoint::open(folder)?);
        file.check(&config.parameter_list()?)?;
        let layout = Arc::new(Layout::new(&config)?);
        let values = narrow(&layout, |entry, out| {
            out.resize(entry.spec.len(), 0.0);
            file.read_into(&entry.spec.name, &entry.spec.shape, out)
        })?;
        Ok(Held { config, layout, values })
    }

    pub fn architecture(&self) -> &Architecture {
        self.layout.architecture()
    }

    pub fn weights(&self) -> Weights<'_> {
        match &self.values {
            Values::F32(model) => Weights::F32(model.params.values()),
            Values::Bf16 { matrices, vectors } => Weights::Bf16 { matrices: matrices.values(), vectors },
        }
    }

    /// Sizes and a fingerprint of all weights: the same for the same model in the same type, on every machine.
    pub fn describe(&self) -> String {
        let Config { num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, vocab_size, .. } = &self.config;
        let (hash, kind) = match self.weights() {
            Weights::F32(values) => (fingerprint(values, |value| *value), ""),
            Weights::Bf16 { matrices, vectors } => {
                (fingerprint(matrices, |value| value.to_f32()).wrapping_add(fingerprint(vectors.values(), |value| *value)), " in bfloat16")
            }
        };
        format!(
            "{num_hidden_layers} layers, width {hidden_size}, {num_attention_heads} heads over {num_key_value_heads}, \
             vocabulary {vocab_size}, weights {hash:016x}{kind}"
        )
    }
}

/// All parameters, tensor by tensor: those that passes read as matrices in bfloat16, the others as they are.
fn narrow(layout: &Layout, mut read: impl FnMut(&Entry, &mut Vec<f32>) -> Result<()>) -> Result<Values> {
    let mut matrices = Bf16Buffer::zeros("the model", layout.len())?;
    let mut vectors = Vectors::default();
    let mut values = Vec::new();
    for entry in layout.entries() {
        values.clear();
        read(entry, &mut values)?;
        if layout.architecture().matrices().any(|matrix| matrix.contains(&entry.offset)) {
            matrices.set(entry.offset, &values);
            if let Some(place) = matrices.values()[entry.range()].iter().position(|value| !value.is_finite()) {
                let (name, index) = (entry.spec.name.clone(), crate::weights::unravel(place, &entry.spec.shape));
                return Err(Error::OutOfRange { name, index, value: values[place], dtype: FloatType::Bf16.name() });
            }
        } else {
            vectors.push(entry.offset, &values);
        }
    }
    Ok(Values::Bf16 { matrices, vectors })
}

fn refuse(weights: FloatType) -> Error {
    let advice = "a decoder reads float32 or bfloat16; choose one of these";
    Error::Unsupported { key: "weights".into(), found: weights.to_string(), advice }
}

fn fingerprint<T: Sync>(values: &[T], number: impl Fn(&T) -> f32 + Sync) -> u64 {
    let pieces = values.par_chunks(1 << 16).enumerate().map(|(piece, values)| {
        let mixed = |(i, value): (usize, &T)| {
            let mut z = (number(value).to_bits() as u64) ^ (((piece << 16) + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z ^ (z >> 27)
        };
        values.iter().enumerate().map(mixed).fold(0u64, u64::wrapping_add)
    });
    pieces.reduce(|| 0, u64::wrapping_add)
}
