//! The weights of a decoder: float32 shared with a model, or a bfloat16 copy.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::architecture::Architecture;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::params::{ParamEntry, ParamLayout};
use crate::passes::weight_view::{VectorParams, WeightView};
use crate::weights::{Checkpoint, FloatType};
use termwise_kernels::bf16::Bf16Buffer;

/// A configuration and its weights.
pub(super) struct DecoderWeights {
    pub config: Config,
    layout: Arc<ParamLayout>,
    values: StoredWeights,
}

enum StoredWeights {
    F32(Arc<Model>),
    /// Halves the bytes that are read per token. Norms, biases and the parameters of attention stay in float32.
    Bf16 {
        matrices: Bf16Buffer,
        vectors: VectorParams,
    },
}

impl DecoderWeights {
    /// The weights of a model. Float32 weights are shared, bfloat16 weights are copied.
    pub fn new(model: Arc<Model>, weights: FloatType) -> Result<DecoderWeights> {
        let (config, layout) = (model.config.clone(), model.params.layout().clone());
        layout.check(&config)?;
        let values = match weights {
            FloatType::F32 => StoredWeights::F32(model),
            FloatType::Bf16 => to_bf16(&layout, |entry, out| {
                out.extend_from_slice(&model.params.values()[entry.range()]);
                Ok(())
            })?,
            other => return Err(refuse(other)),
        };
        Ok(DecoderWeights { config, layout, values })
    }

    /// Reads the weights of a directory. For bfloat16, tensors are converted one by one, without a float32 copy of the model.
    pub fn read(folder: &Path, weights: FloatType) -> Result<DecoderWeights> {
        if weights == FloatType::F32 {
            return DecoderWeights::new(Arc::new(Model::read(folder)?), weights);
        }
        if weights != FloatType::Bf16 {
            return Err(refuse(weights));
        }
        let (config, file) = (Config::read(folder)?, Checkpoint::open(folder)?);
        file.check(&config.parameter_list()?)?;
        let layout = Arc::new(ParamLayout::new(&config)?);
        let values = to_bf16(&layout, |entry, out| {
            out.resize(entry.spec.len(), 0.0);
            file.read_into(&entry.spec.name, &entry.spec.shape, out)
        })?;
        Ok(DecoderWeights { config, layout, values })
    }

    pub fn architecture(&self) -> &Architecture {
        self.layout.architecture()
    }

    pub fn weights(&self) -> WeightView<'_> {
        match &self.values {
            StoredWeights::F32(model) => WeightView::F32(model.params.values()),
            StoredWeights::Bf16 { matrices, vectors } => WeightView::Bf16 { matrices: matrices.values(), vectors },
        }
    }

    /// The sizes and a fingerprint of all weights, which depends on their values and type alone.
    pub fn describe(&self) -> String {
        let Config { num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, vocab_size, .. } = &self.config;
        let (hash, kind) = match self.weights() {
            WeightView::F32(values) => (fingerprint(values, |value| *value), ""),
            WeightView::Bf16 { matrices, vectors } => {
                (fingerprint(matrices, |value| value.to_f32()).wrapping_add(fingerprint(vectors.values(), |value| *value)), " in bfloat16")
            }
        };
        format!(
            "{num_hidden_layers} layers, width {hidden_size}, {num_attention_heads} heads over {num_key_value_heads}, \
             vocabulary {vocab_size}, weights {hash:016x}{kind}"
        )
    }
}

/// Converts all parameters, tensor by tensor: matrices to bfloat16, others unchanged.
fn to_bf16(layout: &ParamLayout, mut read: impl FnMut(&ParamEntry, &mut Vec<f32>) -> Result<()>) -> Result<StoredWeights> {
    let mut matrices = Bf16Buffer::zeros(layout.len()).map_err(|_| Error::TooLarge { what: "the model".into() })?;
    let mut vectors = VectorParams::default();
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
    Ok(StoredWeights::Bf16 { matrices, vectors })
}

fn refuse(weights: FloatType) -> Error {
    let advice = "a decoder supports float32 and bfloat16 weights; use one of these";
    Error::Unsupported { key: "weights".into(), found: weights.to_string(), advice }
}

fn fingerprint<T: Sync>(values: &[T], number: impl Fn(&T) -> f32 + Sync) -> u64 {
    let chunks = values.par_chunks(1 << 16).enumerate().map(|(chunk, values)| {
        let mixed = |(i, value): (usize, &T)| {
            let mut z = (number(value).to_bits() as u64) ^ (((chunk << 16) + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z ^ (z >> 27)
        };
        values.iter().enumerate().map(mixed).fold(0u64, u64::wrapping_add)
    });
    chunks.reduce(|| 0, u64::wrapping_add)
}
