//! The supported model families, one row of [`ModelFamily::traits`] each.
//!
//! A row determines the keys that [`super::FamilyConfig`] reads and writes, and the blocks of `crate::architecture`.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::json::{JsonKeys, show};

/// A supported model family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelFamily {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: a sliding window in every layer, or none.
    Mistral,
    /// Qwen2 and Qwen2.5: biases of q, k and v.
    Qwen2,
    /// Qwen3: q and k norms.
    Qwen3,
    /// SmolLM3: layers without RoPE.
    SmolLm3,
    /// OLMo 2: q and k norms over all heads; norms after attention and MLP instead of before.
    Olmo2,
    /// Phi-3: q, k and v in one matrix, gate and up in another.
    Phi3,
    /// Gemma 2: norms before and after, norm weights stored as w − 1, GELU, scaled embedding, soft caps, windows in every other layer.
    Gemma2,
    /// Gemma 3, text only: as Gemma 2 with q and k norms instead of soft caps, and a second RoPE in layers with a window.
    Gemma3,
    /// GPT-NeoX and Pythia: LayerNorm, partial rotary embedding, parallel residual, an MLP without a gate, biases, q, k and v interleaved per head.
    GptNeoX,
    /// StableLM: LayerNorm and partial rotary embedding.
    StableLm,
}

/// The properties of a model family: one row of the table in [`ModelFamily::traits`].
pub(crate) struct FamilyTraits {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Class name in `architectures`.
    pub class: &'static str,
    /// Biases of the projections of attention.
    pub biases: BiasRule,
    /// Biases of the MLP.
    pub mlp_bias: MlpBias,
    /// Placement of the norms.
    pub norms: NormPlacement,
    /// Norm weights are stored as w − 1.
    pub plus_one: bool,
    /// The embedding is multiplied by √C.
    pub scaled_embedding: bool,
    pub names: TensorNames,
    /// The rows of the q, k and v tensor are [H, 3, d] instead of [3, H, d].
    pub interleaved: bool,
    /// LayerNorm with a bias instead of RMSNorm.
    pub layer_norm: bool,
    /// Attention and MLP of a parallel block share one norm.
    pub shared_parallel_norm: bool,
    /// The MLP multiplies an activated gate with a second projection.
    pub gated_mlp: bool,
    /// The slot of the variant string for q and k norms.
    pub qk_norm: Option<&'static str>,
    /// Layers with a sliding window.
    pub windows: WindowRule,
    /// The default c of `final_logit_softcapping`, if the family has the key.
    pub logit_cap: Option<Option<f64>>,
    /// The default c of `attn_logit_softcapping`, if the family has the key.
    pub score_cap: Option<f64>,
    /// Older keys of `partial_rotary_factor` and `rope_theta`.
    pub old_rotary_keys: Option<[&'static str; 2]>,
    /// Defaults of the class in Transformers for missing keys.
    pub defaults: ConfigDefaults,
}

/// Tensor names, without the suffixes `.weight` and `.bias`.
#[derive(Clone, Copy)]
pub(crate) struct TensorNames {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    /// Prefix of the layer index.
    pub layers: &'static str,
    /// Prefix of attention in a layer.
    pub attention: &'static str,
    /// In attention: q, k and v, or one tensor with all three.
    pub qkv: &'static [&'static str],
    pub output: &'static str,
    /// In a layer: gate and up, one tensor with both, or up alone.
    pub mlp_in: &'static [&'static str],
    pub mlp_out: &'static str,
}

const LLAMA_NAMES: TensorNames = TensorNames {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    layers: "model.layers",
    attention: "self_attn",
    qkv: &["q_proj", "k_proj", "v_proj"],
    output: "o_proj",
    mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
};

/// Norms before attention and MLP, after them, or both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormPlacement {
    Before,
    After,
    Both,
}

/// Biases of the projections of attention.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasRule {
    None,
    /// Of q, k and v.
    Qkv,
    /// Of all projections if `attention_bias` is set.
    Configured,
    /// Of q, k and v if `use_qkv_bias` is set.
    ConfiguredQkv,
}

/// Biases of the MLP.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MlpBias {
    None,
    /// If `mlp_bias` is set.
    Configured,
    Always,
}

/// Layers with a sliding window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRule {
    None,
    /// All layers, if `sliding_window` is set.
    All,
    /// The layers of `layer_types`, if `use_sliding_window` is set.
    Configured,
    /// The layers of `layer_types`, by default all except every n-th.
    ExceptEvery(usize),
}

/// Defaults of missing keys.
pub(crate) struct ConfigDefaults {
    pub eps: f64,
    pub theta: f64,
    /// `rope_theta` of layers with a window, if they have their own.
    pub local_theta: Option<f64>,
    pub tie: bool,
    /// `attention_bias`
    pub bias: bool,
    /// `use_parallel_residual`, if the family has the key.
    pub parallel: Option<bool>,
    /// `partial_rotary_factor`, if the family has the key.
    pub rotary: Option<f64>,
    pub head_dim: Option<usize>,
    pub window: Option<usize>,
    pub activation: &'static str,
}

/// The defaults of Llama.
const DEFAULTS: ConfigDefaults = ConfigDefaults {
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

const LLAMA: FamilyTraits = FamilyTraits {
    model_type: "llama",
    class: "LlamaForCausalLM",
    biases: BiasRule::Configured,
    mlp_bias: MlpBias::None,
    norms: NormPlacement::Before,
    plus_one: false,
    scaled_embedding: false,
    names: LLAMA_NAMES,
    interleaved: false,
    layer_norm: false,
    shared_parallel_norm: false,
    gated_mlp: true,
    qk_norm: None,
    windows: WindowRule::None,
    logit_cap: None,
    score_cap: None,
    old_rotary_keys: None,
    defaults: DEFAULTS,
};

const GEMMA: FamilyTraits = FamilyTraits {
    norms: NormPlacement::Both,
    plus_one: true,
    scaled_embedding: true,
    logit_cap: Some(None),
    defaults: ConfigDefaults { tie: true, head_dim: Some(256), window: Some(4096), activation: "gelu_pytorch_tanh", ..DEFAULTS },
    ..LLAMA
};

impl ModelFamily {
    /// Every family.
    pub const ALL: [ModelFamily; 11] = [
        ModelFamily::Llama,
        ModelFamily::Mistral,
        ModelFamily::Qwen2,
        ModelFamily::Qwen3,
        ModelFamily::SmolLm3,
        ModelFamily::Olmo2,
        ModelFamily::Phi3,
        ModelFamily::Gemma2,
        ModelFamily::Gemma3,
        ModelFamily::GptNeoX,
        ModelFamily::StableLm,
    ];

    pub(crate) const fn traits(self) -> FamilyTraits {
        match self {
            ModelFamily::Llama => FamilyTraits { mlp_bias: MlpBias::Configured, ..LLAMA },
            ModelFamily::Mistral => FamilyTraits {
                model_type: "mistral",
                class: "MistralForCausalLM",
                biases: BiasRule::None,
                windows: WindowRule::All,
                defaults: ConfigDefaults { window: Some(4096), ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::Qwen2 => FamilyTraits {
                model_type: "qwen2",
                class: "Qwen2ForCausalLM",
                biases: BiasRule::Qkv,
                windows: WindowRule::Configured,
                defaults: ConfigDefaults { window: Some(4096), ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::Qwen3 => FamilyTraits {
                model_type: "qwen3",
                class: "Qwen3ForCausalLM",
                qk_norm: Some("qk_norm=rms"),
                windows: WindowRule::Configured,
                defaults: ConfigDefaults { window: Some(4096), head_dim: Some(128), ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::SmolLm3 => FamilyTraits {
                model_type: "smollm3",
                class: "SmolLM3ForCausalLM",
                mlp_bias: MlpBias::Configured,
                windows: WindowRule::Configured,
                defaults: ConfigDefaults { theta: 2e6, tie: true, ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::Olmo2 => FamilyTraits {
                model_type: "olmo2",
                class: "Olmo2ForCausalLM",
                norms: NormPlacement::After,
                qk_norm: Some("qk_norm=rms,all"),
                defaults: ConfigDefaults { eps: 1e-5, ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::Phi3 => FamilyTraits {
                model_type: "phi3",
                class: "Phi3ForCausalLM",
                biases: BiasRule::None,
                names: TensorNames { qkv: &["qkv_proj"], mlp_in: &["mlp.gate_up_proj"], ..LLAMA_NAMES },
                windows: WindowRule::All,
                defaults: ConfigDefaults { eps: 1e-5, rotary: Some(1.0), ..DEFAULTS },
                ..LLAMA
            },
            ModelFamily::Gemma2 => FamilyTraits {
                model_type: "gemma2",
                class: "Gemma2ForCausalLM",
                windows: WindowRule::ExceptEvery(2),
                logit_cap: Some(Some(30.0)),
                score_cap: Some(50.0),
                ..GEMMA
            },
            ModelFamily::Gemma3 => FamilyTraits {
                model_type: "gemma3_text",
                class: "Gemma3ForCausalLM",
                qk_norm: Some("qk_norm=rms"),
                windows: WindowRule::ExceptEvery(6),
                defaults: ConfigDefaults { theta: 1e6, local_theta: Some(1e4), ..GEMMA.defaults },
                ..GEMMA
            },
            ModelFamily::GptNeoX => FamilyTraits {
                model_type: "gpt_neox",
                class: "GPTNeoXForCausalLM",
                names: TensorNames {
                    embedding: "gpt_neox.embed_in",
                    final_norm: "gpt_neox.final_layer_norm",
                    layers: "gpt_neox.layers",
                    attention: "attention",
                    qkv: &["query_key_value"],
                    output: "dense",
                    mlp_in: &["mlp.dense_h_to_4h"],
                    mlp_out: "mlp.dense_4h_to_h",
                },
                mlp_bias: MlpBias::Always,
                interleaved: true,
                layer_norm: true,
                gated_mlp: false,
                old_rotary_keys: Some(["rotary_pct", "rotary_emb_base"]),
                defaults: ConfigDefaults {
                    eps: 1e-5,
                    bias: true,
                    parallel: Some(true),
                    rotary: Some(0.25),
                    activation: "gelu",
                    ..DEFAULTS
                },
                ..LLAMA
            },
            ModelFamily::StableLm => FamilyTraits {
                model_type: "stablelm",
                class: "StableLmForCausalLM",
                biases: BiasRule::ConfiguredQkv,
                layer_norm: true,
                shared_parallel_norm: true,
                defaults: ConfigDefaults { eps: 1e-5, parallel: Some(false), rotary: Some(0.25), ..DEFAULTS },
                ..LLAMA
            },
        }
    }

    /// Its name in a configuration.
    pub fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Reads the keys `model_type` and `architectures`, with or without the prefix of a changed attention.
    pub(super) fn read(keys: &mut JsonKeys) -> Result<ModelFamily> {
        let of = |name: &Value, of: fn(ModelFamily) -> &'static str| {
            let name = name.as_str()?;
            let plain = name.strip_prefix(OWN_TYPE).or(name.strip_prefix(OWN_CLASS)).unwrap_or(name);
            ModelFamily::ALL.into_iter().find(|kind| plain == of(*kind))
        };
        match (keys.value("model_type"), keys.value("architectures")) {
            (Some(model_type), _) => of(&model_type, ModelFamily::model_type).ok_or_else(|| unknown("model_type", &model_type)),
            (None, Some(architectures)) => match architectures.as_array().map(Vec::as_slice) {
                Some([class]) => of(class, |kind| kind.traits().class),
                _ => None,
            }
            .ok_or_else(|| unknown("architectures", &architectures)),
            (None, None) => Ok(ModelFamily::Llama),
        }
    }
}

/// Prefix of the `model_type` of a model whose attention is not that of its family. Other tools reject such a model instead of computing softmax
/// attention.
pub(super) const OWN_TYPE: &str = "termwise_";
/// Prefix of the class in `architectures`, for the same models.
pub(super) const OWN_CLASS: &str = "Termwise";

fn unknown(key: &str, found: &Value) -> Error {
    let advice = "supported model types: \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"smollm3\", \"olmo2\", \"phi3\", \"gemma2\", \
                  \"gemma3_text\", \"gpt_neox\" and \"stablelm\"";
    Error::Unsupported { key: key.into(), found: show(found), advice }
}
