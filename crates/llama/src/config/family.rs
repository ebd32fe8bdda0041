//! Families of models: how a configuration names one, and what its members compute beyond a plain Llama, or instead of it.
//!
//! A family is added here (the keys that it reads and writes, and the questions that [`crate::model`]'s architecture asks of it) and where its
//! answers change the blocks.

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::json::{Keys, show};

/// A family of models that can be computed here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Llama, and Mistral without a sliding window, which computes the same.
    #[default]
    Llama,
}

const KNOWN: &str = "only models of the Llama family can be read (\"llama\", or \"mistral\" without a sliding window)";

impl Family {
    fn of_type(model_type: &str) -> Option<Family> {
        match model_type {
            "llama" | "mistral" => Some(Family::Llama),
            _ => None,
        }
    }

    fn of_class(class: &str) -> Option<Family> {
        Family::of_type(&class.strip_suffix("ForCausalLM")?.to_lowercase())
    }

    /// Takes the keys that name a kind of model and refuses every kind that computes something else.
    pub(super) fn read(keys: &mut Keys) -> Result<Family> {
        let refuse = |key: &str, found: &Value, advice| Err(Error::Unsupported { key: key.into(), found: show(found), advice });
        let architectures = keys.value("architectures");
        let family = match (keys.value("model_type"), architectures) {
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
        for key in ["attention_bias", "mlp_bias"] {
            if keys.bool(key)? == Some(true) {
                return refuse(key, &Value::Bool(true), "the projections of these models have no bias; use a model without");
            }
        }
        match keys.value("hidden_act") {
            Some(act) if act != "silu" => return refuse("hidden_act", &act, "the MLP is computed with \"silu\" only; use a model with it"),
            _ => {}
        }
        if let Some(window) = keys.peek("sliding_window")
            && keys.peek("use_sliding_window") != Some(&Value::Bool(false))
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
        let names = match self {
            Family::Llama => ("llama", "LlamaForCausalLM"),
        };
        vec![
            ("architectures", json!([names.1])),
            ("model_type", json!(names.0)),
            ("hidden_act", json!("silu")),
            ("attention_bias", json!(false)),
            ("mlp_bias", json!(false)),
        ]
    }
}
