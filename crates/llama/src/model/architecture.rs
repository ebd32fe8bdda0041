//! What a model is made of, said once: from a configuration to the tensors, where they lie, and the blocks that passes walk through.
//!
//! ```text
//! x = scale·embedding(ids)
//! for each block:  h = norm(x);  x += after(output(attention(qkv(h), gates(h))))
//!                  h = norm(x);  x += after(down(act(gate(h))·up(h))),  gate and up from gate_up(h)
//! logits = cap(lm_head(norm(x)))
//! ```
//!
//! A tensor's name, shape and start stand here and nowhere else; training ([`super::forward()`], backward) and decoding read the blocks.
//! What a family of models has beyond a Llama or instead ([`crate::config::Family`]) becomes a field: a norm behind attention and MLP or none
//! before, weights of norms less one, another activation, a scale, a cap.

use std::ops::Range;

use termwise_attention::{Extra, Init, Layer, Rope, Source, Variant};

use crate::config::{Config, Kind, Norms};
use crate::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::params::{Entry, ParamInit, ParamRole, ParamSpec};

/// The name of the output projection.
pub(crate) const LM_HEAD: &str = "lm_head.weight";

/// Tensors begin at multiples of 64 bytes, a cache line and the widest vector.
const ALIGNMENT: usize = 64 / size_of::<f32>();

/// The blocks of a model, with the places of their tensors in the flat buffer of parameters.
#[derive(Debug)]
pub(crate) struct Architecture {
    pub widths: Widths,
    pub embedding: Range<usize>,
    /// What embeddings are multiplied by.
    pub embedding_scale: f32,
    pub activation: Activation,
    pub blocks: Vec<Block>,
    /// Before the output projection.
    pub norm: Norm,
    /// The embedding's own in a tied model.
    pub lm_head: Range<usize>,
    /// c of the soft cap of logits.
    pub logit_cap: Option<f32>,
    /// Attention and MLP read the same residual: x += attention(norm(x)) + mlp(norm(x)).
    pub parallel: bool,
    /// H and d if rows of `qkv` are [H, 3, d] instead of [3, H, d].
    pub interleaved: Option<(usize, usize)>,
}

/// Dimensions by the legend of [`crate::ops`].
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
    /// q, k and v of a position, which lie one after the other.
    pub fn qkv(&self) -> usize {
        self.queries + 2 * self.keys
    }

    /// Each of the three.
    pub fn packed(&self) -> [usize; 3] {
        [self.queries, self.keys, self.keys]
    }
}

/// One layer.
#[derive(Debug)]
pub(crate) struct Block {
    pub attention_norms: NormPair,
    /// Rows of q, then k, then v.
    pub qkv: Linear,
    /// Gate logits that attention asks for, projected from h.
    pub gates: Vec<(Extra, Linear)>,
    /// Parameters that attention asks for; ascending and apart, as [`Block::parameters_mut`] needs them.
    pub parameters: Vec<(Extra, Range<usize>)>,
    pub output: Linear,
    pub mlp_norms: NormPair,
    /// Rows of gate, then up; of up alone in an MLP without a gate.
    pub gate_up: Linear,
    pub down: Linear,
}

/// y = x Wᵀ + b
#[derive(Clone, Debug)]
pub(crate) struct Linear {
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
    /// Of the residual, on the way in.
    pub before: Option<Norm>,
    /// Of the result, before it is added to the residual.
    pub after: Option<Norm>,
}

/// An RMSNorm, or a LayerNorm if it has a bias.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
    /// What is added to the weights: 1 where they are kept less one.
    pub offset: f32,
    pub eps: f32,
}

impl Architecture {
    /// The architecture of a configuration and its tensors, in the order of a checkpoint and of the buffer.
    pub fn new(config: &Config) -> Result<(Architecture, Vec<Entry>)> {
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
        let norm = Norm { weight: 0..0, bias, offset: if traits.plus_one { 1.0 } else { 0.0 }, eps: config.rms_norm_eps as f32 };
        // Behind attention a norm has the name that others give to the one before the MLP.
        let (attention_names, mlp_names) = match traits.norms {
            Norms::Before => (["input_layernorm", ""], ["post_attention_layernorm", ""]),
            Norms::After => (["", "post_attention_layernorm"], ["", "post_feedforward_layernorm"]),
            Norms::Both => (["input_layernorm", "post_attention_layernorm"], ["pre_feedforward_layernorm", "post_feedforward_layernorm"]),
        };

        let parallel = config.family.parallel();
        // StableLM's parallel form has one norm for attention and MLP, GPT-NeoX one for each.
        let shared_norm = parallel && config.family.kind() == Kind::StableLm;

        let mut tensors = Tensors { entries: Vec::new(), end: 0, role: ParamRole::Embedding };
        let embedding = tensors.add(names.embedding.to_owned() + ".weight", &[v, c], ParamInit::Normal)?;
        let mut blocks = Vec::with_capacity(config.num_hidden_layers);
        for (layer, attention) in config.attention_layers(0)?.into_iter().enumerate() {
            let at = |name: &str| format!("{}.{layer}.{name}", names.layers);
            let in_attention = |name: &str| at(&format!("{}.{name}", names.attention));
            // One tensor has the rows of all, several have their own.
            let rows = |own: &[usize], count: usize| if count == 1 { vec![own.iter().sum()] } else { own.to_vec() };
            let attention_norms = tensors.norms(at, attention_names, c, &norm)?;
            let parts: Vec<_> = names.qkv.iter().map(|name| in_attention(name)).zip(rows(&widths.packed(), names.qkv.len())).collect();
            tensors.role = ParamRole::Qkv;
            let qkv = tensors.linear(&parts, c, config.family.qkv_bias())?;
            tensors.role = ParamRole::AttentionOutput;
            let output = tensors.linear(&[(in_attention(names.output), c)], queries, config.family.output_bias())?;
            tensors.role = ParamRole::Auxiliary;
            let (mut gates, mut parameters) = (Vec::new(), Vec::new());
            for extra in attention.extras() {
                let name = in_attention(extra.name);
                match &extra.source {
                    Source::Projection { outputs, bias } => gates.push((extra.extra, tensors.linear(&[(name, *outputs)], c, *bias)?)),
                    Source::Parameter { shape, init } => {
                        let init = match init {
                            Init::Constant(value) if is_qk_norm(extra.extra) => ParamInit::Constant(value - f64::from(norm.offset)),
                            Init::Constant(value) => ParamInit::Constant(*value),
                            Init::Uniform(bound) => ParamInit::Uniform(*bound),
                        };
                        parameters.push((extra.extra, tensors.add(name, shape, init)?));
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
            blocks.push(Block { attention_norms, qkv, gates, parameters, output, mlp_norms, gate_up, down });
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

    /// What is multiplied or looked up, as against norms, biases and the parameters of attention.
    pub fn matrices(&self) -> impl Iterator<Item = &Range<usize>> {
        let linears = self.blocks.iter().flat_map(|block| {
            let gates = block.gates.iter().map(|(_, linear)| linear);
            [&block.qkv, &block.output, &block.gate_up, &block.down].into_iter().chain(gates)
        });
        [&self.embedding, &self.lm_head].into_iter().chain(linears.map(|linear| &linear.weight))
    }

    /// Whether attention and MLP have norms behind them; all blocks are alike in it.
    pub fn has_after_norms(&self) -> bool {
        self.blocks.iter().any(|block| block.attention_norms.after.is_some())
    }

    /// Every kind of gate that some block has, with its width.
    pub fn gates(&self) -> Vec<(Extra, usize)> {
        let mut all: Vec<(Extra, usize)> = self.blocks.iter().flat_map(Block::gate_widths).collect();
        all.sort();
        all.dedup();
        all
    }
}

impl Block {
    /// Each kind of gate with its width.
    pub fn gate_widths(&self) -> impl Iterator<Item = (Extra, usize)> {
        self.gates.iter().map(|(extra, linear)| (*extra, linear.outputs))
    }

    /// The parameters of attention in a buffer of gradients.
    pub fn parameters_mut<'a>(&self, values: &'a mut [f32]) -> impl Iterator<Item = (Extra, &'a mut [f32])> {
        let (mut rest, mut passed) = (values, 0);
        self.parameters.iter().map(move |(extra, range)| {
            let (found, after) = std::mem::take(&mut rest).split_at_mut(range.end - passed);
            let found = &mut found[range.start - passed..];
            (rest, passed) = (after, range.end);
            (*extra, found)
        })
    }
}

impl Config {
    /// Every tensor of the model: embedding, layers from the first to the last, final norm, and the output projection unless it is tied.
    /// Additional inputs of the attention follow `self_attn.o_proj` of their layer.
    pub fn parameter_list(&self) -> Result<Vec<ParamSpec>> {
        Ok(Architecture::new(self)?.1.into_iter().map(|entry| entry.spec).collect())
    }

    /// Number of values in all tensors of [`Config::parameter_list`].
    pub fn parameter_count(&self) -> Result<usize> {
        // The list has checked that the sum cannot overflow.
        Ok(self.parameter_list()?.iter().map(ParamSpec::len).sum())
    }

    /// The attention of a layer whose heads have these variants.
    pub fn attention_layer(&self, layer: usize, heads: &[Variant]) -> Result<Layer> {
        self.attention(layer, heads, self.rope(layer, 0)?)
    }

    /// The attention of every layer, for texts of that many positions. Layers share tables of angles where they rotate alike, and a plan where
    /// they have the same heads, too.
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

/// Whether these are the weights of a norm of q or k, which some families keep less one, as those of all norms.
pub(crate) fn is_qk_norm(extra: Extra) -> bool {
    matches!(extra, Extra::QNorm | Extra::KNorm)
}

/// The tensors so far.
struct Tensors {
    entries: Vec<Entry>,
    /// Values so far, gaps included.
    end: usize,
    /// Of the tensors that are added next.
    role: ParamRole,
}

impl Tensors {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], init: ParamInit) -> Result<Range<usize>> {
        self.end = self.end.next_multiple_of(ALIGNMENT);
        self.append(name.into(), shape, init)
    }

    /// Directly after the tensor before.
    fn append(&mut self, name: String, shape: &[usize], init: ParamInit) -> Result<Range<usize>> {
        let len = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n)).filter(|&len| len <= LARGEST);
        let len = len.ok_or_else(|| Error::TooLarge { what: format!("`{name}`") })?;
        // Both are at most LARGEST, so the sum cannot overflow.
        if self.end + len > LARGEST {
            return Err(Error::TooLarge { what: "the model".into() });
        }
        let role = self.role;
        self.entries.push(Entry { spec: ParamSpec { name, shape: shape.to_vec(), init, role }, offset: self.end });
        self.end += len;
        Ok(self.end - len..self.end)
    }

    /// One like `kind`.
    fn norm(&mut self, name: String, width: usize, kind: &Norm) -> Result<Norm> {
        let start = ParamInit::Constant(1.0 - f64::from(kind.offset));
        self.role = ParamRole::Norm;
        let weight = self.add(format!("{name}.weight"), &[width], start)?;
        let bias = kind.bias.is_some().then(|| self.add(name + ".bias", &[width], ParamInit::Constant(0.0))).transpose()?;
        Ok(Norm { weight, bias, ..*kind })
    }

    /// Those before and after, where they have a name.
    fn norms(&mut self, at: impl Fn(&str) -> String, [before, after]: [&str; 2], width: usize, kind: &Norm) -> Result<NormPair> {
        let mut named = |name: &str| (!name.is_empty()).then(|| self.norm(at(name), width, kind)).transpose();
        Ok(NormPair { before: named(before)?, after: named(after)? })
    }

    /// One product of several tensors, whose rows, and biases, lie one after the other without gaps.
    fn linear(&mut self, parts: &[(String, usize)], inputs: usize, bias: bool) -> Result<Linear> {
        let weight = self.joined(parts, ".weight", &[inputs], ParamInit::Normal)?;
        let bias = bias.then(|| self.joined(parts, ".bias", &[], ParamInit::Constant(0.0))).transpose()?;
        Ok(Linear { weight, bias, inputs, outputs: parts.iter().map(|(_, rows)| rows).sum() })
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

/// Values that one address space can hold, with room to round up.
const LARGEST: usize = isize::MAX as usize / size_of::<f32>() - ALIGNMENT;
