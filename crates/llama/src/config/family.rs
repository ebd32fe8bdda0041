//! Families of models: how a configuration names one, and what its members compute beyond a plain Llama, or instead of it.
//!
//! A family is a row of [`Kind::traits`]; from it follow the keys that are read and written here, and the blocks of [`crate::model`]'s
//! architecture. What a family does inside attention (windows, caps, norms of q and k, layers without RoPE) becomes the variant of each
//! layer, in whose place any other can stand. The keys that say so are kept in [`super::Config::other`] and written back as they were.

use serde_json::{Value, json};
use termwise_attention::{RopeScaling, Variant};

use super::read::conflict;
use super::{AttentionMap, bad_value};
use crate::error::{Error, Result};
use crate::json::{Keys, show};
use crate::ops::activation::Activation;

/// A family of models that can be computed here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: a window in every layer, or none.
    Mistral,
    /// Qwen2, Qwen2.5: q, k and v have a bias, the output has none.
    Qwen2,
    /// Qwen3: norms of q and k.
    Qwen3,
    /// SmolLM3: layers without RoPE.
    SmolLm3,
    /// OLMo 2: norms of q and k over all heads; norms after attention and MLP instead of before.
    Olmo2,
    /// Phi-3: q, k and v in one matrix, gate and up in another.
    Phi3,
    /// Gemma 2: norms before and after, (1 + w) norms, GELU, scaled embedding, soft caps, windows in every other layer.
    Gemma2,
    /// Gemma 3, text: as Gemma 2 with norms of q and k instead of soft caps, and another RoPE in layers with a window.
    Gemma3,
    /// GPT-NeoX and Pythia: LayerNorm, partial rotary embedding, parallel residual, an MLP without a gate, biases, q, k and v interleaved per head.
    GptNeoX,
    /// StableLM: LayerNorm and partial rotary embedding.
    StableLm,
}

/// What all members of a family have in common.
pub(crate) struct Traits {
    model_type: &'static str,
    class: &'static str,
    biases: Biases,
    pub norms: Norms,
    /// Norms multiply by 1 + w.
    pub plus_one: bool,
    /// The embedding is multiplied by √C.
    pub scaled_embedding: bool,
    pub names: Names,
    /// Rows of the q, k and v tensor are [heads, (q, k, v), d] instead of [(q, k, v), heads, d].
    pub interleaved: bool,
    /// LayerNorm with a bias instead of RMSNorm.
    pub layer_norm: bool,
    /// The MLP multiplies an activated gate with a second projection.
    pub gated_mlp: bool,
    /// The word of the variant for norms of q and k.
    qk_norm: Option<&'static str>,
    windows: Windows,
    /// What Hugging Face's class has where a file leaves it out.
    pub defaults: Defaults,
}

/// Tensor names, without `.weight` and `.bias`.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    /// Prefix of a layer's number.
    pub layers: &'static str,
    /// Prefix of attention within a layer.
    pub attention: &'static str,
    /// Within attention: q, k and v, or one tensor with all three.
    pub qkv: &'static [&'static str],
    pub output: &'static str,
    /// Within a layer: gate and up, or one tensor with both, or up alone.
    pub mlp_in: &'static [&'static str],
    pub mlp_out: &'static str,
}

const LLAMA_NAMES: Names = Names {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    layers: "model.layers",
    attention: "self_attn",
    qkv: &["q_proj", "k_proj", "v_proj"],
    output: "o_proj",
    mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
};

/// Where norms stand: before attention and MLP, behind them, or both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Norms {
    Before,
    After,
    Both,
}

/// Biases of attention's projections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Biases {
    None,
    /// Of q, k and v.
    Inputs,
    /// Of all four where `attention_bias` says so.
    Asked,
    /// Of q, k and v where `use_qkv_bias` says so.
    AskedInputs,
}

/// Which layers have a window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Windows {
    None,
    /// All, where there is one.
    All,
    /// Those of `layer_types` where `use_sliding_window` says so.
    Asked,
    /// Those of `layer_types`, or all but every n-th.
    But(usize),
}

pub(crate) struct Defaults {
    pub eps: f64,
    pub theta: f64,
    /// Of layers with a window, where these have a RoPE of their own.
    pub local_theta: Option<f64>,
    pub tie: bool,
    /// `attention_bias`
    bias: bool,
    /// `use_parallel_residual`, if the family knows it.
    parallel: Option<bool>,
    /// `partial_rotary_factor`, if the family knows it.
    pub rotary: Option<f64>,
    pub head_dim: Option<usize>,
    window: Option<usize>,
    activation: &'static str,
}

/// A Llama's.
const DEFAULTS: Defaults = Defaults {
    eps: 1e-6,
    theta: 10_000.0,
    local_theta: None,
    tie: false,
    bias: false,
    parallel: None,
    rotary: None,
    head_dim: None,
    window: None,
    activation: "silu",
};

const LLAMA: Traits = Traits {
    model_type: "llama",
    class: "LlamaForCausalLM",
    biases: Biases::Asked,
    norms: Norms::Before,
    plus_one: false,
    scaled_embedding: false,
    names: LLAMA_NAMES,
    interleaved: false,
    layer_norm: false,
    gated_mlp: true,
    qk_norm: None,
    windows: Windows::None,
    defaults: DEFAULTS,
};

const GEMMA: Traits = Traits {
    norms: Norms::Both,
    plus_one: true,
    scaled_embedding: true,
    defaults: Defaults { tie: true, head_dim: Some(256), window: Some(4096), activation: "gelu_pytorch_tanh", ..DEFAULTS },
    ..LLAMA
};

impl Kind {
    /// Every family.
    pub const ALL: [Kind; 11] = [
        Kind::Llama,
        Kind::Mistral,
        Kind::Qwen2,
        Kind::Qwen3,
        Kind::SmolLm3,
        Kind::Olmo2,
        Kind::Phi3,
        Kind::Gemma2,
        Kind::Gemma3,
        Kind::GptNeoX,
        Kind::StableLm,
    ];

    pub(crate) const fn traits(self) -> Traits {
        match self {
            Kind::Llama => LLAMA,
            Kind::Mistral => Traits {
                model_type: "mistral",
                class: "MistralForCausalLM",
                biases: Biases::None,
                windows: Windows::All,
                defaults: Defaults { window: Some(4096), ..DEFAULTS },
                ..LLAMA
            },
            Kind::Qwen2 => Traits {
                model_type: "qwen2",
                class: "Qwen2ForCausalLM",
                biases: Biases::Inputs,
                windows: Windows::Asked,
                defaults: Defaults { window: Some(4096), ..DEFAULTS },
                ..LLAMA
            },
            Kind::Qwen3 => Traits {
                model_type: "qwen3",
                class: "Qwen3ForCausalLM",
                qk_norm: Some("qk_norm=rms"),
                windows: Windows::Asked,
                defaults: Defaults { window: Some(4096), head_dim: Some(128), ..DEFAULTS },
                ..LLAMA
            },
            Kind::SmolLm3 => Traits {
                model_type: "smollm3",
                class: "SmolLM3ForCausalLM",
                windows: Windows::Asked,
                defaults: Defaults { theta: 2e6, tie: true, ..DEFAULTS },
                ..LLAMA
            },
            Kind::Olmo2 => Traits {
                model_type: "olmo2",
                class: "Olmo2ForCausalLM",
                norms: Norms::After,
                qk_norm: Some("qk_norm=rms,all"),
                defaults: Defaults { eps: 1e-5, ..DEFAULTS },
                ..LLAMA
            },
            Kind::Phi3 => Traits {
                model_type: "phi3",
                class: "Phi3ForCausalLM",
                biases: Biases::None,
                names: Names { qkv: &["qkv_proj"], mlp_in: &["mlp.gate_up_proj"], ..LLAMA_NAMES },
                windows: Windows::All,
                defaults: Defaults { eps: 1e-5, rotary: Some(1.0), ..DEFAULTS },
                ..LLAMA
            },
            Kind::Gemma2 => Traits { model_type: "gemma2", class: "Gemma2ForCausalLM", windows: Windows::But(2), ..GEMMA },
            Kind::Gemma3 => Traits {
                model_type: "gemma3_text",
                class: "Gemma3ForCausalLM",
                qk_norm: Some("qk_norm=rms"),
                windows: Windows::But(6),
                defaults: Defaults { theta: 1e6, local_theta: Some(1e4), ..GEMMA.defaults },
                ..GEMMA
            },
            Kind::GptNeoX => Traits {
                model_type: "gpt_neox",
                class: "GPTNeoXForCausalLM",
                names: Names {
                    embedding: "gpt_neox.embed_in",
                    final_norm: "gpt_neox.final_layer_norm",
                    layers: "gpt_neox.layers",
                    attention: "attention",
                    qkv: &["query_key_value"],
                    output: "dense",
                    mlp_in: &["mlp.dense_h_to_4h"],
                    mlp_out: "mlp.dense_4h_to_h",
                },
                interleaved: true,
                layer_norm: true,
                gated_mlp: false,
                defaults: Defaults { eps: 1e-5, bias: true, parallel: Some(true), rotary: Some(0.25), activation: "gelu", ..DEFAULTS },
                ..LLAMA
            },
            Kind::StableLm => Traits {
                model_type: "stablelm",
                class: "StableLmForCausalLM",
                biases: Biases::AskedInputs,
                layer_norm: true,
                defaults: Defaults { eps: 1e-5, parallel: Some(false), rotary: Some(0.25), ..DEFAULTS },
                ..LLAMA
            },
        }
    }

    /// Its name in a configuration.
    pub fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Takes the keys that name a family, with or without the prefix of another attention.
    pub(super) fn read(keys: &mut Keys) -> Result<Kind> {
        let of = |name: &Value, of: fn(Kind) -> &'static str| {
            let name = name.as_str()?;
            let plain = name.strip_prefix(OWN_TYPE).or(name.strip_prefix(OWN_CLASS)).unwrap_or(name);
            Kind::ALL.into_iter().find(|kind| plain == of(*kind))
        };
        match (keys.value("model_type"), keys.value("architectures")) {
            (Some(model_type), _) => of(&model_type, Kind::model_type).ok_or_else(|| unknown("model_type", &model_type)),
            (None, Some(architectures)) => match architectures.as_array().map(Vec::as_slice) {
                Some([class]) => of(class, |kind| kind.traits().class),
                _ => None,
            }
            .ok_or_else(|| unknown("architectures", &architectures)),
            (None, None) => Ok(Kind::Llama),
        }
    }
}

/// Before the `model_type` of a model whose attention is not that of its family. Readers that do not know termwise refuse it; under the family's name they would
/// compute softmax without a warning.
const OWN_TYPE: &str = "termwise_";
/// The same for the class in `architectures`.
const OWN_CLASS: &str = "Termwise";

fn unknown(key: &str, found: &Value) -> Error {
    let advice = "supported model types: \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"smollm3\", \"olmo2\", \"phi3\", \"gemma2\", \
                  \"gemma3_text\", \"gpt_neox\" and \"stablelm\"";
    Error::Unsupported { key: key.into(), found: show(found), advice }
}

/// The family of a model, and what its configuration chooses within it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Family {
    kind: Kind,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    /// Attention and MLP read the same residual.
    parallel: bool,
    activation: Activation,
    logit_cap: Option<f64>,
    /// Of layers with a window, where these have a RoPE of their own.
    local_rope: Option<LocalRope>,
    attention: AttentionMap,
}

/// Another RoPE for some layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalRope {
    pub theta: f64,
    pub scaling: Option<RopeScaling>,
    /// Whether each layer has it.
    pub layers: Vec<bool>,
}

impl Family {
    /// Which family.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The attention that the family's own keys describe.
    pub fn attention(&self) -> &AttentionMap {
        &self.attention
    }

    /// Whether the projections to q, k and v have a bias.
    pub(crate) fn qkv_bias(&self) -> bool {
        self.qkv_bias
    }

    /// Whether the projection from attention's output has a bias.
    pub(crate) fn output_bias(&self) -> bool {
        self.output_bias
    }

    pub(crate) fn mlp_bias(&self) -> bool {
        self.mlp_bias
    }

    /// Whether attention and MLP read the same residual.
    pub(crate) fn parallel(&self) -> bool {
        self.parallel
    }

    pub(crate) fn activation(&self) -> Activation {
        self.activation
    }

    /// c of the soft cap of logits.
    pub(crate) fn logit_cap(&self) -> Option<f64> {
        self.logit_cap
    }

    pub(crate) fn local_rope(&self) -> Option<&LocalRope> {
        self.local_rope.as_ref()
    }

    /// What a configuration of this many layers, heads of this dimension and norms with this eps chooses; refused where it computes
    /// something else.
    pub(super) fn read(
        kind: Kind,
        keys: &mut Keys,
        (layers, head_dim, eps): (usize, usize, f64),
        local: Option<(f64, Option<RopeScaling>)>,
    ) -> Result<Family> {
        let traits = kind.traits();
        let refuse = |key: &str, found: &Value, advice| Error::Unsupported { key: key.into(), found: show(found), advice };
        let mut flag = |key: &str, default: bool, possible: bool, advice| match possible {
            true => Ok(keys.bool(key)?.unwrap_or(default)),
            false if keys.peek(key) == Some(&Value::Bool(true)) => Err(refuse(key, &Value::Bool(true), advice)),
            false => Ok(false),
        };
        let attention_bias = flag(
            "attention_bias",
            traits.defaults.bias,
            matches!(traits.biases, Biases::Inputs | Biases::Asked),
            "the projections of this family have no bias; leave the key out, or use the family that the weights belong to",
        )?;
        let qkv_bias = flag(
            "use_qkv_bias",
            false,
            traits.biases == Biases::AskedInputs,
            "this family has no such key; leave it out, or use the family that the weights belong to",
        )?;
        let parallel = flag(
            "use_parallel_residual",
            traits.defaults.parallel.unwrap_or(false),
            traits.defaults.parallel.is_some(),
            "this family adds attention and MLP one after the other; leave the key out, or use the family that the weights belong to",
        )?;
        flag("qk_layernorm", false, false, "a LayerNorm of q and k is not supported; use a model without it")?;
        let mlp_bias = flag(
            "mlp_bias",
            false,
            matches!(kind, Kind::Llama | Kind::SmolLm3),
            "the MLP of this family has no bias; leave the key out, or use the family that the weights belong to",
        )?;
        let mlp_bias = mlp_bias || kind == Kind::GptNeoX;
        let activation = read_activation(keys, &traits)?;
        if let Some(found) = keys.peek("use_bidirectional_attention").filter(|found| **found != Value::Bool(false)) {
            let advice = "every position sees earlier ones alone here; use a model that writes from left to right";
            return Err(refuse("use_bidirectional_attention", found, advice));
        }
        if let Some(found) = keys.peek("quantization_config") {
            let advice = "weights are read as float32, float16 or bfloat16; use a checkpoint that is not quantised";
            return Err(refuse("quantization_config", found, advice));
        }
        let ropes = ropes(kind, keys, layers)?;
        let windows = windows(kind, keys, &ropes)?;
        let positive = |key: &str, otherwise: Option<f64>| match keys.peek(key) {
            Some(value) => match value.as_f64() {
                Some(number) if number > 0.0 => Ok(Some(number)),
                Some(number) => Err(bad_value(key, number, "it must be a positive number")),
                None => Err(Error::KeyType { key: key.into(), expected: "a number", found: show(value) }),
            },
            None if keys.is_null(key) => Ok(None),
            None => Ok(otherwise),
        };
        let gemma = traits.scaled_embedding;
        let only = |kind_has: bool, given: Option<f64>| given.filter(|_| kind_has);
        let logit_cap = only(gemma, positive("final_logit_softcapping", (kind == Kind::Gemma2).then_some(30.0))?);
        // Gemma 3 has the key, and no cap of scores.
        let score_cap = only(kind == Kind::Gemma2, positive("attn_logit_softcapping", Some(50.0))?);
        let scale = only(gemma, positive("query_pre_attn_scalar", Some(256.0))?).filter(|&scalar| scalar != head_dim as f64);
        let variant = |(rope, window): (&bool, &Option<usize>)| -> Result<Variant> {
            let mut text = String::from("softmax");
            let words = [
                scale.map(|scalar| format!("scale={}", 1.0 / scalar.sqrt())),
                (!rope).then(|| "rope=off".into()),
                traits.qk_norm.map(|word| format!("{word},eps={eps}")),
                window.map(|window| format!("window={window}")),
                score_cap.map(|cap| format!("cap={cap}")),
            ];
            words.into_iter().flatten().for_each(|word| text += &format!(" {word}"));
            text.parse().map_err(|source| Error::AttentionEntry { place: format!("attention of {}", traits.model_type), source })
        };
        let attention = ropes.iter().zip(&windows).map(variant).collect::<Result<Vec<_>>>()?.into();
        let local_rope = local.map(|(theta, scaling)| LocalRope { theta, scaling, layers: windows.iter().map(Option::is_some).collect() });
        let qkv_bias = traits.biases == Biases::Inputs || attention_bias || qkv_bias;
        Ok(Family { kind, qkv_bias, output_bias: attention_bias, mlp_bias, parallel, activation, logit_cap, local_rope, attention })
    }

    /// The keys by which other tools know a configuration of this family, or know that they do not: where the attention is another one.
    pub(super) fn write(&self, own_attention: bool) -> Vec<(&'static str, Value)> {
        let traits = self.kind.traits();
        let (class, model_type) = match own_attention {
            true => (format!("{OWN_CLASS}{}", traits.class), format!("{OWN_TYPE}{}", traits.model_type)),
            false => (traits.class.to_owned(), traits.model_type.to_owned()),
        };
        let activation = match self.activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::Gelu => "gelu",
        };
        let act_key = if traits.scaled_embedding { "hidden_activation" } else { "hidden_act" };
        let mut keys = vec![("architectures", json!([class])), ("model_type", json!(model_type)), (act_key, json!(activation))];
        match traits.biases {
            Biases::Asked => keys.push(("attention_bias", json!(self.output_bias))),
            Biases::AskedInputs => keys.push(("use_qkv_bias", json!(self.qkv_bias))),
            Biases::None | Biases::Inputs => {}
        }
        if traits.defaults.parallel.is_some() {
            keys.push(("use_parallel_residual", json!(self.parallel)));
        }
        if matches!(self.kind, Kind::Llama | Kind::SmolLm3) {
            keys.push(("mlp_bias", json!(self.mlp_bias)));
        }
        keys
    }
}

fn read_activation(keys: &mut Keys, traits: &Traits) -> Result<Activation> {
    let (old, new) = (keys.text("hidden_act")?, keys.text("hidden_activation")?);
    let (key, name) = match (old, new) {
        (Some(old), Some(new)) if old != new => return Err(conflict("hidden_act", old, "hidden_activation", new)),
        (_, Some(new)) => ("hidden_activation", new),
        (old, None) => ("hidden_act", old.unwrap_or(traits.defaults.activation.into())),
    };
    match name.as_str() {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        _ => {
            let advice = "supported activations: \"silu\", \"gelu\" and \"gelu_pytorch_tanh\"";
            Err(Error::Unsupported { key: key.into(), found: format!("\"{name}\""), advice })
        }
    }
}

/// Whether each layer rotates q and k.
fn ropes(kind: Kind, keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    if kind != Kind::SmolLm3 {
        return Ok(vec![true; layers]);
    }
    let Some(list) = keys.peek("no_rope_layers") else {
        let interval = peek_size(keys, "no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|n| !n.is_multiple_of(interval)).collect());
    };
    let flag = |value: &Value| value.as_bool().or(value.as_u64().map(|n| n != 0));
    let flags: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(flag).collect());
    let wrong = || Error::KeyType { key: "no_rope_layers".into(), expected: "a list of 1 (with RoPE) and 0 (without)", found: show(list) };
    let mut flags = flags.ok_or_else(wrong)?;
    if flags.len() < layers {
        return Err(conflict("no_rope_layers", show(list), "num_hidden_layers", layers));
    }
    flags.truncate(layers);
    Ok(flags)
}

/// The window of each layer.
fn windows(kind: Kind, keys: &Keys, ropes: &[bool]) -> Result<Vec<Option<usize>>> {
    let (traits, layers) = (kind.traits(), ropes.len());
    let asked = match keys.peek("use_sliding_window") {
        None => None,
        Some(Value::Bool(asked)) => Some(*asked),
        Some(other) => return Err(Error::KeyType { key: "use_sliding_window".into(), expected: "true or false", found: show(other) }),
    };
    let given = peek_size(keys, "sliding_window")?;
    let window = if given.is_none() && !keys.is_null("sliding_window") { traits.defaults.window } else { given };
    let window = match (traits.windows, asked) {
        (Windows::None, Some(false)) => None,
        (Windows::None, _) if window.is_some() => {
            let (key, found) = ("sliding_window".into(), show(&json!(window)));
            return Err(Error::Unsupported { key, found, advice: "this family has no window; use the family that the weights belong to" });
        }
        (Windows::Asked, asked) => window.filter(|_| asked == Some(true)),
        (_, Some(false)) if given.is_some() => return Err(conflict("use_sliding_window", false, "sliding_window", show(&json!(given)))),
        _ => window,
    };
    let types = match keys.peek("layer_types") {
        None => None,
        Some(list) => {
            let sliding = |kind: &Value| match kind.as_str() {
                Some("sliding_attention") => Some(true),
                Some("full_attention") => Some(false),
                _ => None,
            };
            let types: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(sliding).collect());
            let advice = "layers can be \"full_attention\" or \"sliding_attention\"; use a model without other kinds";
            let types = types.ok_or_else(|| Error::Unsupported { key: "layer_types".into(), found: show(list), advice })?;
            if types.len() != layers {
                return Err(conflict("layer_types", format!("{} layers", types.len()), "num_hidden_layers", layers));
            }
            Some((show(list), types))
        }
    };
    let expected: Vec<bool> = match traits.windows {
        Windows::None => vec![false; layers],
        Windows::All => vec![window.is_some(); layers],
        Windows::Asked if kind == Kind::SmolLm3 => ropes.iter().map(|rope| window.is_some() && !rope).collect(),
        Windows::Asked => {
            let first = peek_number(keys, "max_window_layers")?.unwrap_or(28);
            (0..layers).map(|layer| window.is_some() && layer >= first).collect()
        }
        Windows::But(n) => {
            let n = peek_size(keys, "sliding_window_pattern")?.filter(|_| kind == Kind::Gemma3).unwrap_or(n);
            (1..=layers).map(|layer| !layer.is_multiple_of(n)).collect()
        }
    };
    let sliding = match types {
        None => expected,
        Some((text, types)) => {
            // Here the window alone decides.
            if matches!(traits.windows, Windows::None | Windows::All) && types != expected {
                return Err(conflict("layer_types", text, "sliding_window", show(&json!(window))));
            }
            if window.is_none() && types.contains(&true) && asked == Some(false) {
                return Err(conflict("layer_types", text, "use_sliding_window", false));
            }
            types
        }
    };
    if window.is_none() && sliding.contains(&true) {
        let types = keys.peek("layer_types").map_or("a window in some layers".into(), show);
        return Err(conflict("layer_types", types, "sliding_window", "none that is used"));
    }
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

fn peek_number(keys: &Keys, key: &str) -> Result<Option<usize>> {
    let Some(value) = keys.peek(key) else { return Ok(None) };
    let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
    number.map(Some).ok_or_else(|| Error::KeyType { key: key.into(), expected: "a whole number", found: show(value) })
}

fn peek_size(keys: &Keys, key: &str) -> Result<Option<usize>> {
    match peek_number(keys, key)? {
        Some(0) => Err(bad_value(key, 0, "it must be at least 1")),
        size => Ok(size),
    }
}
