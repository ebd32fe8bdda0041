//! The parameters of a model in one flat buffer, found by name. Gradients and optimizer moments have the same layout.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::architecture::{Architecture, LM_HEAD};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ops::{self, Buffer, chunks};

/// A parameter tensor of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// Its initialization.
    pub init: ParamInit,
    /// Its role in the model.
    pub role: ParamRole,
}

impl ParamSpec {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no values. Never true in a valid model.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The role of a parameter in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ParamRole {
    /// The token embedding, in a tied model also the output projection.
    Embedding,
    /// Projections to q, k and v.
    Qkv,
    /// The output projection of attention.
    AttentionOutput,
    /// Gates and other auxiliary inputs of attention.
    Auxiliary,
    /// The MLP.
    Mlp,
    /// A norm.
    Norm,
    /// The output projection.
    LmHead,
}

/// The initialization of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ParamInit {
    /// Normal with mean zero and the standard deviation `initializer_range` of the configuration.
    Normal,
    /// A constant.
    Constant(f64),
    /// Uniform in [−x, x].
    Uniform(f64),
}

/// The range of each parameter in the flat buffer.
#[derive(Debug)]
pub struct ParamLayout {
    entries: Vec<ParamEntry>,
    by_name: HashMap<String, usize>,
    len: usize,
    architecture: Architecture,
}

/// A parameter and its offset in the flat buffer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ParamEntry {
    /// Name, shape and initialization.
    pub spec: ParamSpec,
    /// Offset of the first value: a multiple of 16, or directly after a parameter that is part of the same matrix product.
    pub offset: usize,
}

impl ParamEntry {
    /// Its range in the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.spec.len()
    }

    /// Whether it is a matrix (a projection or the embedding) and not a norm, a bias or another vector.
    pub fn is_matrix(&self) -> bool {
        self.spec.shape.iter().filter(|&&n| n > 1).count() >= 2
    }
}

impl ParamLayout {
    /// The parameters of this configuration, in the order of a checkpoint. In a tied model `lm_head.weight` is the embedding.
    pub fn new(config: &Config) -> Result<ParamLayout> {
        let (architecture, entries) = Architecture::new(config)?;
        let mut by_name: HashMap<_, _> = entries.iter().enumerate().map(|(index, entry)| (entry.spec.name.clone(), index)).collect();
        if config.tie_word_embeddings {
            // The embedding is the first tensor.
            by_name.insert(LM_HEAD.into(), 0);
        }
        let len = entries.last().map_or(0, |entry| entry.range().end.next_multiple_of(16));
        Ok(ParamLayout { entries, by_name, len, architecture })
    }

    /// Every parameter once, in the order of the buffer.
    pub fn entries(&self) -> &[ParamEntry] {
        &self.entries
    }

    /// The parameter of this name.
    pub fn find(&self, name: &str) -> Result<&ParamEntry> {
        let index = self.by_name.get(name).ok_or_else(|| Error::NoTensor {
            name: name.into(),
            suggestion: termwise_base::nearest(name, self.by_name.keys().map(String::as_str)).map(Into::into),
        })?;
        Ok(&self.entries[*index])
    }

    /// Length of the flat buffer, including gaps.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Checks that this is the layout of a configuration.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        let (list, found) = (config.parameter_list()?, self.entries.len());
        if let Some((spec, entry)) = list.iter().zip(&self.entries).find(|(spec, entry)| **spec != entry.spec) {
            let own = &self.find(&spec.name)?.spec.shape;
            if *own != spec.shape {
                let (name, expected) = (spec.name.clone(), spec.shape.clone());
                return Err(Error::TensorShape { name, expected, found: own.clone(), more: 0 });
            }
            return Err(Error::UnexpectedTensors { count: 1, names: vec![entry.spec.name.clone()] });
        }
        if list.len() == found { Ok(()) } else { Err(Error::BatchLength { what: "tensors", expected: list.len(), found }) }
    }

    pub(crate) fn architecture(&self) -> &Architecture {
        &self.architecture
    }
}

/// A value per parameter: weights, gradients or optimizer moments. The gaps between parameters are always zero.
#[derive(Clone, Debug)]
pub struct Params {
    layout: Arc<ParamLayout>,
    values: Buffer,
    /// Changes with every mutable access. Equal only for equal values.
    version: u64,
}

/// A number that was not returned before.
fn next_version() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

impl Params {
    /// All zeros. Fails if the allocation fails.
    pub fn zeros(layout: Arc<ParamLayout>) -> Result<Params> {
        Ok(Params { values: ops::zeros("a value for every parameter", layout.len(), 1)?, layout, version: next_version() })
    }

    /// All zeros in the same layout, e.g. for gradients.
    pub fn zeros_like(&self) -> Result<Params> {
        Params::zeros(self.layout.clone())
    }

    /// The range of each parameter.
    pub fn layout(&self) -> &Arc<ParamLayout> {
        &self.layout
    }

    /// The values of one parameter.
    pub fn get(&self, name: &str) -> Result<&[f32]> {
        Ok(&self.values[self.layout.find(name)?.range()])
    }

    /// The mutable values of one parameter.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut [f32]> {
        let range = self.layout.find(name)?.range();
        Ok(&mut self.values_mut()[range])
    }

    /// Every parameter and its values, in the order of the buffer.
    pub fn iter(&self) -> impl Iterator<Item = (&ParamEntry, &[f32])> {
        self.layout.entries.iter().map(|entry| (entry, &self.values[entry.range()]))
    }

    /// The flat buffer.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The mutable flat buffer. The gaps must stay zero.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.version = next_version();
        &mut self.values
    }

    /// A number that identifies the values: it changes with every mutable access. Copies have the same.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Sets every value to zero.
    pub fn set_zero(&mut self) {
        chunks::zero(self.values_mut());
    }
}
