//! The family-specific part of a configuration.
//!
//! Properties of a family inside attention (windows, caps, q and k norms, layers without RoPE) become the variant of each layer, which any other
//! variant can replace. Their keys are kept in [`Config::other`] and written back unchanged.

use serde_json::{Value, json};
use termwise_attention::{RopeScaling, Variant};

use super::family::{BiasRule, FamilyTraits, MlpBias, ModelFamily, OWN_CLASS, OWN_TYPE};
use super::read::conflict;
use super::rope::RopeBase;
use super::{AttentionMap, Config, bad_value, layer_patterns};
use crate::error::{Error, Result};
use crate::json::{JsonKeys, show};
use crate::ops::activation::Activation;

/// The family of a model, and the family-specific settings of its configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FamilyConfig {
    kind: ModelFamily,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    /// Whether attention and MLP read the same residual.
    parallel: bool,
    activation: Activation,
    logit_cap: Option<f64>,
    /// The RoPE of layers with a window, if it differs.
    local_rope: Option<LocalRope>,
    attention: AttentionMap,
}

/// The RoPE of layers with a window.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalRope {
    pub theta: f64,
    pub scaling: Option<RopeScaling>,
    /// Whether each layer uses it.
    pub layers: Vec<bool>,
}

impl FamilyConfig {
    /// The family.
    pub fn kind(&self) -> ModelFamily {
        self.kind
    }

    /// The attention of the family, without `attention_variant`.
    pub fn attention(&self) -> &AttentionMap {
        &self.attention
    }

    /// Whether the q, k and v projections have biases.
    pub(crate) fn qkv_bias(&self) -> bool {
        self.qkv_bias
    }

    /// Whether the output projection of attention has a bias.
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

    /// c of the soft cap c·tanh(x/c) of logits.
    pub(crate) fn logit_cap(&self) -> Option<f64> {
        self.logit_cap
    }

    pub(crate) fn local_rope(&self) -> Option<&LocalRope> {
        self.local_rope.as_ref()
    }

    /// Reads the family-specific keys of a configuration with these sizes. Fails if a key requires a computation that is not supported.
    pub(super) fn read(kind: ModelFamily, keys: &mut JsonKeys, sizes: &Config, local: Option<RopeBase>) -> Result<FamilyConfig> {
        let Config { num_hidden_layers: layers, head_dim, rms_norm_eps: eps, .. } = *sizes;
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
            matches!(traits.biases, BiasRule::Qkv | BiasRule::Configured),
            "the projections of this family have no bias; remove the key or use the family of the weights",
        )?;
        let qkv_bias = flag(
            "use_qkv_bias",
            false,
            traits.biases == BiasRule::ConfiguredQkv,
            "this family does not have the key; remove it or use the family of the weights",
        )?;
        let parallel = flag(
            "use_parallel_residual",
            traits.defaults.parallel.unwrap_or(false),
            traits.defaults.parallel.is_some(),
            "this family has no parallel residual; remove the key or use the family of the weights",
        )?;
        flag("qk_layernorm", false, false, "a LayerNorm of q and k is not supported; use a model without it")?;
        let mlp_bias = flag(
            "mlp_bias",
            false,
            traits.mlp_bias == MlpBias::Configured,
            "the MLP of this family has no bias; remove the key or use the family of the weights",
        )?;
        let mlp_bias = mlp_bias || traits.mlp_bias == MlpBias::Always;
        let activation = read_activation(keys, &traits)?;
        if let Some(found) = keys.peek("use_bidirectional_attention").filter(|found| **found != Value::Bool(false)) {
            let advice = "only causal attention is supported; use a model that generates from left to right";
            return Err(refuse("use_bidirectional_attention", found, advice));
        }
        if let Some(found) = keys.peek("quantization_config") {
            let advice = "weights must be float32, float16 or bfloat16; use a checkpoint that is not quantized";
            return Err(refuse("quantization_config", found, advice));
        }
        let ropes = layer_patterns::ropes(kind, keys, layers)?;
        let windows = layer_patterns::windows(kind, keys, &ropes)?;
        let positive = |key: &str, otherwise: Option<f64>| match keys.peek(key) {
            Some(value) => match value.as_f64() {
                Some(number) if number > 0.0 => Ok(Some(number)),
                Some(number) => Err(bad_value(key, number, "it must be a positive number")),
                None => Err(Error::KeyType { key: key.into(), expected: "a number", found: show(value) }),
            },
            None if keys.is_null(key) => Ok(None),
            None => Ok(otherwise),
        };
        // A key of another family is checked but has no effect.
        let logit_cap = positive("final_logit_softcapping", traits.logit_cap.flatten())?.filter(|_| traits.logit_cap.is_some());
        let score_cap = positive("attn_logit_softcapping", traits.score_cap)?.filter(|_| traits.score_cap.is_some());
        let scalar = positive("query_pre_attn_scalar", Some(256.0))?.filter(|_| traits.scaled_embedding);
        let scale = scalar.filter(|&scalar| scalar != head_dim as f64);
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
        let qkv_bias = traits.biases == BiasRule::Qkv || attention_bias || qkv_bias;
        Ok(FamilyConfig { kind, qkv_bias, output_bias: attention_bias, mlp_bias, parallel, activation, logit_cap, local_rope, attention })
    }

    /// The family-specific keys of `config.json`. With `own_attention`, the names have a prefix that other tools reject.
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
            BiasRule::Configured => keys.push(("attention_bias", json!(self.output_bias))),
            BiasRule::ConfiguredQkv => keys.push(("use_qkv_bias", json!(self.qkv_bias))),
            BiasRule::None | BiasRule::Qkv => {}
        }
        if traits.defaults.parallel.is_some() {
            keys.push(("use_parallel_residual", json!(self.parallel)));
        }
        if traits.mlp_bias == MlpBias::Configured {
            keys.push(("mlp_bias", json!(self.mlp_bias)));
        }
        keys
    }
}

fn read_activation(keys: &mut JsonKeys, traits: &FamilyTraits) -> Result<Activation> {
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
