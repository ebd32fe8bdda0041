//! The architecture of a model: its blocks, and the name, shape and range of each tensor in the flat parameter buffer.
//!
//! ```text
//! x = scale·embedding(ids)
//! for each block:  h = norm(x);  x += post_norm(output(attention(qkv(h), gates(h))))
//!                  h = norm(x);  x += post_norm(down(act(gate(h))·up(h))),  gate and up from gate_up(h)
//! logits = cap(lm_head(norm(x)))
//! ```
//!
//! This is the only definition of the tensors. The forward and backward passes and decoding read the blocks. Differences between model
//! families ([`crate::config::FamilyConfig`]) are fields: the placement of norms, an offset of norm weights, the activation, scales and caps.

use std::ops::Range;

use termwise_attention::{AuxKind, AuxSource, AuxTensor, Init, Layer, Rope, Variant};

use crate::config::{Config, NormPlacement};
use crate::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::params::{ParamEntry, ParamInit, ParamRole, ParamSpec};

/// The name of the output projection.
pub(crate) const LM_HEAD: &str = "lm_head.weight";

/// Tensors start at multiples of 64 bytes: a cache line, and the widest SIMD vector.
const ALIGNMENT: usize = 64 / size_of::<f32>();

/// The blocks of a model, with the ranges of their tensors in the flat parameter buffer.
#[derive(Debug)]
pub(crate) struct Architecture {
    pub widths: Widths,
    pub embedding: Range<usize>,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    pub activation: Activation,
    pub blocks: Vec<TransformerBlock>,
    /// The final norm, before the output projection.
    pub norm: NormLayer,
    /// The range of the embedding if the model ties both.
    pub lm_head: Range<usize>,
    /// c of the soft cap c·tanh(x/c) of logits.
    pub logit_cap: Option<f32>,
    /// Attention and MLP read the same residual: x += attention(norm(x)) + mlp(norm(x)).
    pub parallel: bool,
    /// H and d if rows of `qkv` are [H, 3, d] instead of [3, H, d].
    pub interleaved: Option<(usize, usize)>,
}

/// Dimensions, named as in [`crate::ops`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widths {
    pub c: usize,
    pub i: usize,
    pub v: usize,
    /// H·d
    pub queries: usize,
    /// G·d
    pub keys: usize,
}

impl Widths {
    /// Width of q, k and v of a position, side by side.
    pub fn qkv(&self) -> usize {
        self.queries + 2 * self.keys
    }

    /// Widths of q, k and v.
    pub fn packed(&self) -> [usize; 3] {
        [self.queries, self.keys, self.keys]
    }
}

/// One layer: attention and MLP with their norms.
#[derive(Debug)]
pub(crate) struct TransformerBlock {
    pub attention_norms: NormPair,
    /// Rows of q, then k, then v.
    pub qkv: LinearLayer,
    /// Projections from h to the gate logits of attention.
    pub gates: Vec<(AuxTensor, LinearLayer)>,
    /// Parameters of attention. The ranges ascend and are disjoint, as [`TransformerBlock::parameters_mut`] requires.
    pub parameters: Vec<(AuxTensor, Range<usize>)>,
    pub output: LinearLayer,
    pub mlp_norms: NormPair,
    /// Rows of gate, then up. Only up for an MLP without a gate.
    pub gate_up: LinearLayer,
    pub down: LinearLayer,
}

/// y = x Wᵀ + b
#[derive(Clone, Debug)]
pub(crate) struct LinearLayer {
    /// [outputs, inputs]
    pub weight: Range<usize>,
    /// [outputs]
    pub bias: Option<Range<usize>>,
    pub inputs: usize,
    pub outputs: usize,
}

/// The norms around attention or MLP.
#[derive(Debug)]
pub(crate) struct NormPair {
    /// The norm of the residual that the sublayer reads.
    pub before: Option<NormLayer>,
    /// The post-norm of the output, before it is added to the residual.
    pub after: Option<NormLayer>,
}

/// An RMSNorm, or a LayerNorm if it has a bias.
#[derive(Clone, Debug)]
pub(crate) struct NormLayer {
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
    /// Added to the weights: 1 for models that store w − 1, else 0.
    pub offset: f32,
    pub eps: f32,
}

impl Architecture {
    /// The architecture of a configuration, and its tensors in the order of the buffer.
    pub fn new(config: &Config) -> Result<(Architecture, Vec<ParamEntry>)> {
        let Config { vocab_size: v, hidden_size: c, intermediate_size: i, num_attention_heads: h, num_key_value_heads: g, .. } = *config;
        let width = |heads: usize| heads.checked_mul(config.head_dim).filter(|&n| n <= usize::MAX / 4);
        let too_large = |what: &str| Error::TooLarge { what: what.into() };
        let queries = width(h).ok_or_else(|| too_large("the query projection"))?;
        let keys = width(g).ok_or_else(|| too_large("the key projection"))?;
        let widths = Widths { c, i, v, queries, keys };
        i.checked_mul(2).ok_or_else(|| too_large("the MLP"))?;
        let traits = config.family.kind().traits();
        let names = traits.names;
        let bias = traits.layer_norm.then_some(0..0);
        let norm = NormLayer { weight: 0..0, bias, offset: if traits.plus_one { 1.0 } else { 0.0 }, eps: config.rms_norm_eps as f32 };
        // The name of the norm before the MLP is, in other families, the name of the post-norm of attention.
        let (attention_names, mlp_names) = match traits.norms {
            NormPlacement::Before => (["input_layernorm", ""], ["post_attention_layernorm", ""]),
            NormPlacement::After => (["", "post_attention_layernorm"], ["", "post_feedforward_layernorm"]),
            NormPlacement::Both => {
                (["input_layernorm", "post_attention_layernorm"], ["pre_feedforward_layernorm", "post_feedforward_layernorm"])
            }
        };

        let parallel = config.family.parallel();
        let shared_norm = parallel && traits.shared_parallel_norm;

        let mut tensors = ParamAllocator { entries: Vec::new(), end: 0, role: ParamRole::Embedding };
        let embedding = tensors.add(names.embedding.to_owned() + ".weight", &[v, c], ParamInit::Normal)?;
        let mut blocks = Vec::with_capacity(config.num_hidden_layers);
        for (layer, attention) in config.attention_layers(0)?.into_iter().enumerate() {
            let at = |name: &str| format!("{}.{layer}.{name}", names.layers);
            let in_attention = |name: &str| at(&format!("{}.{name}", names.attention));
            // Rows of each tensor: their sum if one tensor contains all.
            let rows = |own: &[usize], count: usize| if count == 1 { vec![own.iter().sum()] } else { own.to_vec() };
            let attention_norms = tensors.norms(at, attention_names, c, &norm)?;
            let parts: Vec<_> = names.qkv.iter().map(|name| in_attention(name)).zip(rows(&widths.packed(), names.qkv.len())).collect();
            tensors.role = ParamRole::Qkv;
            let qkv = tensors.linear(&parts, c, config.family.qkv_bias())?;
            tensors.role = ParamRole::AttentionOutput;
            let output = tensors.linear(&[(in_attention(names.output), c)], queries, config.family.output_bias())?;
            tensors.role = ParamRole::Auxiliary;
            let (mut gates, mut parameters) = (Vec::new(), Vec::new());
            for aux in attention.aux_specs() {
                let name = in_attention(aux.name);
                match &aux.source {
                    AuxSource::Projection { outputs, bias } => gates.push((aux.aux, tensors.linear(&[(name, *outputs)], c, *bias)?)),
                    AuxSource::Parameter { shape, init } => {
                        let init = match init {
                            Init::Constant(value) if is_qk_norm(aux.aux) => ParamInit::Constant(value - f64::from(norm.offset)),
                            Init::Constant(value) => ParamInit::Constant(*value),
                            Init::Uniform(bound) => ParamInit::Uniform(*bound),
                        };
                        parameters.push((aux.aux, tensors.add(name, shape, init)?));
                    }
                }
            }
            let mlp_norms = if shared_norm {
                NormPair { before: attention_norms.before.clone(), after: None }
            } else {
                tensors.norms(at, mlp_names, c, &norm)?
            };
            let wide = if traits.gated_mlp { vec![i, i] } else { vec![i] };
            let parts: Vec<_> = names.mlp_in.iter().map(|name| at(name)).zip(rows(&wide, names.mlp_in.len())).collect();
            tensors.role = ParamRole::Mlp;
            let gate_up = tensors.linear(&parts, c, config.family.mlp_bias())?;
            let down = tensors.linear(&[(at(names.mlp_out), c)], i, config.family.mlp_bias())?;
            blocks.push(TransformerBlock { attention_norms, qkv, gates, parameters, output, mlp_norms, gate_up, down });
        }
        let norm = tensors.norm(names.final_norm.into(), c, &norm)?;
        tensors.role = ParamRole::LmHead;
        let lm_head = if config.tie_word_embeddings { embedding.clone() } else { tensors.add(LM_HEAD, &[v, c], ParamInit::Normal)? };
        let embedding_scale = if traits.scaled_embedding { (c as f64).sqrt() as f32 } else { 1.0 };
        let (activation, logit_cap) = (config.family.activation(), config.family.logit_cap().map(|cap| cap as f32));
        let interleaved = traits.interleaved.then_some((h, config.head_dim));
        let architecture =
            Architecture { widths, embedding, embedding_scale, activation, blocks, norm, lm_head, logit_cap, parallel, interleaved };
        Ok((architecture, tensors.entries))
    }

    /// The ranges of all projections and of the embedding. Norms, biases and parameters of attention are not included.
    pub fn matrices(&self) -> impl Iterator<Item = &Range<usize>> {
        let linears = self.blocks.iter().flat_map(|block| {
            let gates = block.gates.iter().map(|(_, linear)| linear);
            [&block.qkv, &block.output, &block.gate_up, &block.down].into_iter().chain(gates)
        });
        [&self.embedding, &self.lm_head].into_iter().chain(linears.map(|linear| &linear.weight))
    }

    /// Whether the blocks have post-norms.
    pub fn has_post_norms(&self) -> bool {
        self.blocks.iter().any(|block| block.attention_norms.after.is_some())
    }

    /// Every kind of gate in the model, with its width.
    pub fn gates(&self) -> Vec<(AuxTensor, usize)> {
        let mut all: Vec<(AuxTensor, usize)> = self.blocks.iter().flat_map(TransformerBlock::gate_widths).collect();
        all.sort();
        all.dedup();
        all
    }
}

impl TransformerBlock {
    /// Every kind of gate of the block, with its width.
    pub fn gate_widths(&self) -> impl Iterator<Item = (AuxTensor, usize)> {
        self.gates.iter().map(|(aux, linear)| (*aux, linear.outputs))
    }

    /// The gradients of the parameters of attention, in the flat buffer of gradients.
    pub fn parameters_mut<'a>(&self, values: &'a mut [f32]) -> impl Iterator<Item = (AuxTensor, &'a mut [f32])> {
        let (mut rest, mut passed) = (values, 0);
        self.parameters.iter().map(move |(aux, range)| {
            let (found, after) = std::mem::take(&mut rest).split_at_mut(range.end - passed);
            let found = &mut found[range.start - passed..];
            (rest, passed) = (after, range.end);
            (*aux, found)
        })
    }
}

impl Config {
    /// Every tensor of the model: embedding, layers in order, final norm, and the output projection unless it is tied to the embedding.
    /// Auxiliary tensors of attention follow the output projection of their layer.
    pub fn parameter_list(&self) -> Result<Vec<ParamSpec>> {
        Ok(Architecture::new(self)?.1.into_iter().map(|entry| entry.spec).collect())
    }

    /// The number of parameters of the model.
    pub fn parameter_count(&self) -> Result<usize> {
        // `parameter_list` fails if the sum would overflow.
        Ok(self.parameter_list()?.iter().map(ParamSpec::len).sum())
    }

    /// The attention of a layer with these variants of its heads.
    pub fn attention_layer(&self, layer: usize, heads: &[Variant]) -> Result<Layer> {
        self.attention(layer, heads, self.rope(layer, 0)?)
    }

    /// The attention of every layer, with rotary tables for this many positions. Layers with the same rotary embedding share a table, and layers
    /// that also have the same heads share a plan.
    pub fn attention_layers(&self, positions: usize) -> Result<Vec<Layer>> {
        let mut ropes: Vec<Rope> = Vec::new();
        let mut layers: Vec<Layer> = Vec::with_capacity(self.num_hidden_layers);
        for layer in 0..self.num_hidden_layers {
            let (heads, rope) = (self.heads(layer), self.rope(layer, positions)?);
            let known = ropes.iter().position(|known| *known == rope).unwrap_or_else(|| {
                ropes.push(rope.with_table(positions));
                ropes.len() - 1
            });
            let same = layers.iter().find(|other| other.heads() == heads && other.rope() == Some(&ropes[known]));
            layers.push(match same {
                Some(same) => same.clone(),
                None => self.attention(layer, &heads, ropes[known].clone())?,
            });
        }
        Ok(layers)
    }

    fn attention(&self, layer: usize, heads: &[Variant], rope: Rope) -> Result<Layer> {
        let sizes = Layer::new(self.num_attention_heads, self.num_key_value_heads, self.head_dim).rope(rope);
        sizes.heads(heads).map_err(|source| Error::Layer { layer, source })
    }
}

/// Whether this is the weight of a q or k norm. Like all norms, some families store it as w − 1.
pub(crate) fn is_qk_norm(aux: AuxTensor) -> bool {
    matches!(aux.kind, AuxKind::QNorm | AuxKind::KNorm)
}

/// Allocates ranges of the flat buffer to tensors.
struct ParamAllocator {
    entries: Vec<ParamEntry>,
    /// Length of the buffer so far, including gaps.
    end: usize,
    /// Role of the tensors that are added next.
    role: ParamRole,
}

impl ParamAllocator {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], init: ParamInit) -> Result<Range<usize>> {
        self.end = self.end.next_multiple_of(ALIGNMENT);
        self.append(name.into(), shape, init)
    }

    /// Adds a tensor directly after the previous one.
    fn append(&mut self, name: String, shape: &[usize], init: ParamInit) -> Result<Range<usize>> {
        let len = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n)).filter(|&len| len <= MAX_VALUES);
        let len = len.ok_or_else(|| Error::TooLarge { what: format!("`{name}`") })?;
        // Both are at most MAX_VALUES, so the sum cannot overflow.
        if self.end + len > MAX_VALUES {
            return Err(Error::TooLarge { what: "the model".into() });
        }
        let role = self.role;
        self.entries.push(ParamEntry { spec: ParamSpec { name, shape: shape.to_vec(), init, role }, offset: self.end });
        self.end += len;
        Ok(self.end - len..self.end)
    }

    /// Adds a norm with the offset, eps and bias of `kind`.
    fn norm(&mut self, name: String, width: usize, kind: &NormLayer) -> Result<NormLayer> {
        let start = ParamInit::Constant(1.0 - f64::from(kind.offset));
        self.role = ParamRole::Norm;
        let weight = self.add(format!("{name}.weight"), &[width], start)?;
        let bias = kind.bias.is_some().then(|| self.add(name + ".bias", &[width], ParamInit::Constant(0.0))).transpose()?;
        Ok(NormLayer { weight, bias, ..*kind })
    }

    /// Adds the norms before and after a sublayer. An empty name means no norm.
    fn norms(&mut self, at: impl Fn(&str) -> String, [before, after]: [&str; 2], width: usize, kind: &NormLayer) -> Result<NormPair> {
        let mut named = |name: &str| (!name.is_empty()).then(|| self.norm(at(name), width, kind)).transpose();
        Ok(NormPair { before: named(before)?, after: named(after)? })
    }

    /// Adds tensors whose rows, and biases, are contiguous, so one product computes them all.
    fn linear(&mut self, parts: &[(String, usize)], inputs: usize, bias: bool) -> Result<LinearLayer> {
        let weight = self.joined(parts, ".weight", &[inputs], ParamInit::Normal)?;
        let bias = bias.then(|| self.joined(parts, ".bias", &[], ParamInit::Constant(0.0))).transpose()?;
        Ok(LinearLayer { weight, bias, inputs, outputs: parts.iter().map(|(_, rows)| rows).sum() })
    }

    fn joined(&mut self, parts: &[(String, usize)], suffix: &str, row: &[usize], init: ParamInit) -> Result<Range<usize>> {
        let start = self.end.next_multiple_of(ALIGNMENT);
        self.end = start;
        for (name, rows) in parts {
            self.append(format!("{name}{suffix}"), &[&[*rows], row].concat(), init)?;
        }
        Ok(start..self.end)
    }
}

/// The largest number of float32 values in the address space, with room for alignment.
const MAX_VALUES: usize = isize::MAX as usize / size_of::<f32>() - ALIGNMENT;
