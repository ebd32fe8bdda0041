//! All parameters of a model in one flat buffer, found by name. Gradients and moments of optimizers have the same layout.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::architecture::{Architecture, LM_HEAD};
use crate::ops::{self, Buffer, pieces};

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its shape, row-major; the product fits into memory's addresses.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: ParamInit,
    /// Where the model uses it.
    pub role: ParamRole,
}

impl ParamSpec {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none; never so in a valid model.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a model uses a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ParamRole {
    /// The token embedding, in a tied model also the output projection.
    Embedding,
    /// Projections to q, k and v.
    Qkv,
    /// The projection from attention's output.
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

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ParamInit {
    /// Normal around zero with the configuration's `initializer_range`.
    Normal,
    /// The same number everywhere.
    Constant(f64),
    /// Uniform between −x and x.
    Uniform(f64),
}

/// Where each parameter lies in a flat buffer.
#[derive(Debug)]
pub struct Layout {
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    len: usize,
    architecture: Architecture,
}

/// One parameter's place.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name, shape and start.
    pub spec: ParamSpec,
    /// First value in the buffer: a multiple of 16, or directly after the parameter that it is multiplied together with.
    pub offset: usize,
}

impl Entry {
    /// Its values in the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.spec.len()
    }

    /// Whether it is a matrix (a projection or the embedding), as against a norm, a bias or a vector of constants.
    pub fn is_matrix(&self) -> bool {
        self.spec.shape.iter().filter(|&&n| n > 1).count() >= 2
    }
}

impl Layout {
    /// The parameters of this configuration, in the order of a checkpoint. In a tied model `lm_head.weight` is the embedding.
    pub fn new(config: &Config) -> Result<Layout> {
        let (architecture, entries) = Architecture::new(config)?;
        let mut by_name: HashMap<_, _> = entries.iter().enumerate().map(|(index, entry)| (entry.spec.name.clone(), index)).collect();
        if config.tie_word_embeddings {
            // The embedding is the first tensor.
            by_name.insert(LM_HEAD.into(), 0);
        }
        let len = entries.last().map_or(0, |entry| entry.range().end.next_multiple_of(16));
        Ok(Layout { entries, by_name, len, architecture })
    }

    /// Every parameter once, in the order of a checkpoint and of the buffer.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The parameter of this name.
    pub fn find(&self, name: &str) -> Result<&Entry> {
        let index = self.by_name.get(name).ok_or_else(|| Error::NoTensor {
            name: name.into(),
            suggestion: termwise_base::nearest(name, self.by_name.keys().map(String::as_str)).map(Into::into),
        })?;
        Ok(&self.entries[*index])
    }

    /// Length of the flat buffer, gaps included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no parameter at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Checks that these are the parameters of a configuration, which may have been changed since.
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

/// A value for every parameter: weights, gradients or moments. Values in the gaps between parameters are zero and stay so.
#[derive(Clone, Debug)]
pub struct Params {
    layout: Arc<Layout>,
    values: Buffer,
}

impl Params {
    /// Zeros; an error where the system has no memory for them.
    pub fn zeros(layout: Arc<Layout>) -> Result<Params> {
        Ok(Params { values: ops::zeros("a value for every parameter", layout.len(), 1)?, layout })
    }

    /// Zeros in the same layout: room for gradients.
    pub fn zeros_like(&self) -> Result<Params> {
        Params::zeros(self.layout.clone())
    }

    /// Where each parameter lies.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The values of one parameter.
    pub fn get(&self, name: &str) -> Result<&[f32]> {
        Ok(&self.values[self.layout.find(name)?.range()])
    }

    /// The values of one parameter, to be changed.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut [f32]> {
        let range = self.layout.find(name)?.range();
        Ok(&mut self.values[range])
    }

    /// Every parameter and its values, in the order of a checkpoint.
    pub fn iter(&self) -> impl Iterator<Item = (&Entry, &[f32])> {
        self.layout.entries.iter().map(|entry| (entry, &self.values[entry.range()]))
    }

    /// The flat buffer.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The flat buffer, to be changed. Values in the gaps must stay zero.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Sets every value to zero.
    pub fn set_zero(&mut self) {
        pieces::zero(&mut self.values);
    }
}
