//! All parameters of a model in one flat buffer, found by name. Gradients and moments of optimizers have the same layout.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::config::{Config, ParamSpec};
use crate::error::{Error, Result};
use crate::ops::{Buffer, vector};

/// Parameters begin at multiples of 64 bytes, a cache line and the widest vector.
const ALIGNMENT: usize = 64 / size_of::<f32>();

/// The name of the embedding, which a tied model also finds as its output projection.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the output projection.
pub(crate) const HEAD: &str = "lm_head.weight";

/// Where each parameter lies in a flat buffer.
#[derive(Debug)]
pub struct Layout {
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    len: usize,
}

/// One parameter's place.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name, shape and start.
    pub spec: ParamSpec,
    /// First value in the buffer, a multiple of 16.
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
        let mut layout = Layout { entries: Vec::new(), by_name: HashMap::new(), len: 0 };
        for spec in config.parameter_list()? {
            layout.by_name.insert(spec.name.clone(), layout.entries.len());
            let entry = Entry { spec, offset: layout.len };
            layout.len = entry.range().end.next_multiple_of(ALIGNMENT);
            layout.entries.push(entry);
        }
        if let (true, Some(&embedding)) = (config.tie_word_embeddings, layout.by_name.get(EMBEDDING)) {
            layout.by_name.insert(HEAD.into(), embedding);
        }
        Ok(layout)
    }

    /// Every parameter once, in the order of a checkpoint.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The parameter of this name.
    pub fn find(&self, name: &str) -> Result<&Entry> {
        let index = self.by_name.get(name).ok_or_else(|| Error::NoTensor {
            name: name.into(),
            suggestion: termwise_attention::nearest(name, self.by_name.keys().map(String::as_str)).map(Into::into),
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
}

/// A value for every parameter: weights, gradients or moments. Values in the gaps between parameters are zero and stay so.
#[derive(Clone, Debug)]
pub struct Params {
    layout: Arc<Layout>,
    values: Buffer,
}

impl Params {
    /// Zeros.
    pub fn zeros(layout: Arc<Layout>) -> Params {
        // A list of parameters has been checked to fit into memory; where it does not after all, this is where it shows.
        Params { values: Buffer::zeros(layout.len()).unwrap_or_else(|error| panic!("{error}")), layout }
    }

    /// Zeros in the same layout: room for gradients.
    pub fn zeros_like(&self) -> Params {
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
        vector::zero(&mut self.values);
    }
}
