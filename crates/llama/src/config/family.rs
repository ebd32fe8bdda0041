//! Families of models: how a configuration names one, and what its members compute beyond a plain Llama, or instead of it.
//!
//! A family is added here (the keys that it reads and writes, and the questions that [`crate::model`]'s architecture asks of it) and where its
//! answers change the blocks.

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::json::{Keys, show};

/// A family of models that can be computed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Llama, and Mistral without a sliding window, which computes the same.
    Llama {
        /// Whether all four projections of attention have a bias.
        attention_bias: bool,
    },
    /// Qwen2, Qwen2.5: q, k and v have a bias, the output has none. Without a sliding window.
    Qwen2,
}

/// A Llama without biases.
impl Default for Family {
    fn default() -> Family {
        Family::Llama { attention_bias: false }
    }
}

const KNOWN: &str = "models of the families \"llama\", \"qwen2\" and \"mistral\", the latter two without a sliding window, can be read";

impl Family {
    fn of_type(model_type: &str) -> Option<Family> {
        match model_type {
            "llama" | "mistral" => Some(Family::default()),
            "qwen2" => Some(Family::Qwen2),
            _ => None,
        }
    }

    fn of_class(class: &str) -> Option<Family> {
        Family::of_type(&class.strip_suffix("ForCausalLM")?.to_lowercase())
    }

    /// Whether the projections to q, k and v have a bias.
    pub(crate) fn qkv_bias(self) -> bool {
        self != Family::default()
    }

    /// Whether the projection from attention's output has a bias.
    pub(crate) fn output_bias(self) -> bool {
        self == Family::Llama { attention_bias: true }
    }

    /// Takes the keys that name a kind of model and refuses every kind that computes something else.
    pub(super) fn read(keys: &mut Keys) -> Result<Family> {
        let refuse = |key: &str, found: &Value, advice| Err(Error::Unsupported { key: key.into(), found: show(found), advice });
        let architectures = keys.value("architectures");
        let mut family = match (keys.value("model_type"), architectures) {
            (Some(model_type), _) => match model_type.as_str().and_then(Family::of_type) {
                Some(family) => family,
                None => return refuse("model_type", &model_type, KNOWN),
            },
            (None, Some(architectures)) => {
                let mut classes = architectures.as_array().into_iter().flatten().map(|class| class.as_str().and_then(Family::of_class));
                match (classes.next().flatten(), classes.next()) {
                    (Some(family), None) => family,
                    _ => return refuse("architectures", &architectures, KNOWN),
                }
            }
            (None, None) => Family::default(),
        };
        if let Family::Llama { attention_bias } = &mut family {
            *attention_bias = keys.bool("attention_bias")?.unwrap_or(false);
        }
        if keys.bool("mlp_bias")? == Some(true) {
            return refuse("mlp_bias", &Value::Bool(true), "the MLP has no bias here; use a model without");
        }
        match keys.value("hidden_act") {
            Some(act) if act != "silu" => return refuse("hidden_act", &act, "the MLP is computed with \"silu\" only; use a model with it"),
            _ => {}
        }
        let window_used = match (family, keys.peek("use_sliding_window")) {
            // Qwen2 asks for it, and then has it only in the layers that are said to, or else from one of them on.
            (Family::Qwen2, used) => {
                let number = |key: &str, otherwise: u64| keys.peek(key).and_then(Value::as_u64).unwrap_or(otherwise);
                let later = keys.peek("layer_types").is_none() && number("max_window_layers", 28) < number("num_hidden_layers", 0);
                used == Some(&Value::Bool(true)) && later
            }
            (_, used) => used != Some(&Value::Bool(false)),
        };
        if let Some(window) = keys.peek("sliding_window")
            && window_used
        {
            return refuse("sliding_window", window, "every position sees all earlier ones here; use a model without a window");
        }
        if let Some(types) = keys.peek("layer_types")
            && !types.as_array().is_some_and(|types| types.iter().all(|kind| kind == "full_attention"))
        {
            return refuse("layer_types", types, "every layer must be \"full_attention\"; use a model without other kinds");
        }
        if let Some(factor) = keys.peek("partial_rotary_factor")
            && factor.as_f64() != Some(1.0)
        {
            return refuse("partial_rotary_factor", factor, "RoPE turns whole heads here, which is factor 1; use a model with it");
        }
        if let Some(quantization) = keys.peek("quantization_config") {
            let advice = "weights are read as float32, float16 or bfloat16; use a checkpoint that is not quantised";
            return refuse("quantization_config", quantization, advice);
        }
        Ok(family)
    }

    /// The keys by which other tools know a configuration of this family.
    pub(super) fn write(self) -> Vec<(&'static str, Value)> {
        let (model_type, class, own) = match self {
            Family::Llama { attention_bias } => {
                ("llama", "LlamaForCausalLM", vec![("attention_bias", json!(attention_bias)), ("mlp_bias", json!(false))])
            }
            Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM", Vec::new()),
        };
        let names = [("architectures", json!([class])), ("model_type", json!(model_type)), ("hidden_act", json!("silu"))];
        names.into_iter().chain(own).collect()
    }
}
