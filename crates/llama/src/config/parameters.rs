//! Every tensor of a model, in the order of a checkpoint.

use termwise_attention::{ExtraSpec, Init, Layer, Shape, Source, Variant};

use super::Config;
use crate::error::{Error, Result};

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its shape, row-major; the product fits into memory's addresses.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: ParamInit,
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

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamInit {
    /// Normal around zero with the configuration's `initializer_range`.
    Normal,
    /// The same number everywhere.
    Constant(f64),
    /// Uniform between −x and x.
    Uniform(f64),
}

impl Config {
    /// Every tensor of the model: embedding, layers from the first to the last, final norm, and the output projection unless it is tied.
    /// Additional inputs of the attention follow `self_attn.o_proj` of their layer.
    pub fn parameter_list(&self) -> Result<Vec<ParamSpec>> {
        let Config {
            vocab_size: v, hidden_size: c, intermediate_size: i, num_attention_heads: h, num_key_value_heads: g, head_dim: d, ..
        } = *self;
        let too_large = |what: &str| Error::TooLarge { what: what.into() };
        let queries = h.checked_mul(d).ok_or_else(|| too_large("`self_attn.q_proj.weight`"))?;
        let keys = g.checked_mul(d).ok_or_else(|| too_large("`self_attn.k_proj.weight`"))?;

        let mut list = List::default();
        list.add("model.embed_tokens.weight", &[v, c], ParamInit::Normal)?;
        for layer in 0..self.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            list.add(at("input_layernorm.weight"), &[c], ParamInit::Constant(1.0))?;
            list.add(at("self_attn.q_proj.weight"), &[queries, c], ParamInit::Normal)?;
            list.add(at("self_attn.k_proj.weight"), &[keys, c], ParamInit::Normal)?;
            list.add(at("self_attn.v_proj.weight"), &[keys, c], ParamInit::Normal)?;
            list.add(at("self_attn.o_proj.weight"), &[c, queries], ParamInit::Normal)?;
            for extra in self.attention_layer(layer, &self.heads(layer))?.extras() {
                list.add_extra(at("self_attn."), extra.clone(), c)?;
            }
            list.add(at("post_attention_layernorm.weight"), &[c], ParamInit::Constant(1.0))?;
            list.add(at("mlp.gate_proj.weight"), &[i, c], ParamInit::Normal)?;
            list.add(at("mlp.up_proj.weight"), &[i, c], ParamInit::Normal)?;
            list.add(at("mlp.down_proj.weight"), &[c, i], ParamInit::Normal)?;
        }
        list.add("model.norm.weight", &[c], ParamInit::Constant(1.0))?;
        if !self.tie_word_embeddings {
            list.add("lm_head.weight", &[v, c], ParamInit::Normal)?;
        }
        Ok(list.specs)
    }

    /// Number of values in all tensors of [`Config::parameter_list`].
    pub fn parameter_count(&self) -> Result<usize> {
        // The list has checked that the sum cannot overflow.
        Ok(self.parameter_list()?.iter().map(ParamSpec::len).sum())
    }

    /// The attention of a layer whose heads have these variants.
    pub fn attention_layer(&self, layer: usize, heads: &[Variant]) -> Result<Layer> {
        let sizes = Layer::new(self.num_attention_heads, self.num_key_value_heads, self.head_dim).rope(self.rope()?);
        sizes.heads(heads).map_err(|source| Error::Layer { layer, source })
    }

    /// Sizes of a layer's attention, for one token.
    pub(crate) fn shape(&self) -> Shape {
        Shape { batch: 1, time: 1, heads: self.num_attention_heads, kv_heads: self.num_key_value_heads, d: self.head_dim, e: self.head_dim }
    }
}

#[derive(Default)]
struct List {
    specs: Vec<ParamSpec>,
    /// Bytes of all tensors so far as float32: what one address space must hold.
    bytes: usize,
}

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], init: ParamInit) -> Result<()> {
        let name = name.into();
        let too_large = |what: String| Error::TooLarge { what };
        let len = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        let bytes = len.and_then(|len| len.checked_mul(size_of::<f32>())).ok_or_else(|| too_large(format!("`{name}`")))?;
        self.bytes =
            self.bytes.checked_add(bytes).filter(|&sum| sum <= isize::MAX as usize).ok_or_else(|| too_large("the model".into()))?;
        self.specs.push(ParamSpec { name, shape: shape.to_vec(), init });
        Ok(())
    }

    fn add_extra(&mut self, prefix: String, extra: ExtraSpec, hidden: usize) -> Result<()> {
        let name = format!("{prefix}{}", extra.name);
        match extra.source {
            Source::Projection { outputs, bias } => {
                self.add(format!("{name}.weight"), &[outputs, hidden], ParamInit::Normal)?;
                if bias { self.add(format!("{name}.bias"), &[outputs], ParamInit::Constant(0.0)) } else { Ok(()) }
            }
            Source::Parameter { shape, init } => self.add(
                name,
                &shape,
                match init {
                    Init::Constant(value) => ParamInit::Constant(value),
                    Init::Uniform(bound) => ParamInit::Uniform(bound),
                },
            ),
        }
    }
}
