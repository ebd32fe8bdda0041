//! The parts of a layer and of a model as plain data for the PyTorch engine, which does not parse variants.

use serde_json::{Value, json};
use termwise_analysis::parts::Parts;
use termwise_attention::{Layer, Variant};
use termwise_model::config::ModelFamily;
use termwise_model::{Config, ParamLayout};

/// The parts of a model around attention, its sizes, and every tensor with its shape and whether it is a matrix. The positions of norms and fused projections
/// follow from the names of the tensors.
pub fn of_config(config: &Config) -> termwise_model::Result<Value> {
    let layout = ParamLayout::new(config)?;
    if matches!(config.family.kind(), ModelFamily::GptNeoX | ModelFamily::StableLm) {
        let advice = "the PyTorch engine has no LayerNorm and no parallel residual; use the native engine";
        let found = format!("\"{}\"", config.family.kind().model_type());
        return Err(termwise_model::Error::Unsupported { key: "model_type".into(), found, advice });
    }
    let tensors: Vec<Value> = layout.entries().iter().map(|entry| json!([entry.spec.name, entry.spec.shape, entry.is_matrix()])).collect();
    let has = |name: &str| layout.find(&format!("model.layers.0.{name}.weight")).is_ok();
    let (attention_norms, mlp_norms) = match (has("input_layernorm"), has("post_feedforward_layernorm")) {
        (true, true) => (["input_layernorm", "post_attention_layernorm"], ["pre_feedforward_layernorm", "post_feedforward_layernorm"]),
        (false, true) => (["", "post_attention_layernorm"], ["", "post_feedforward_layernorm"]),
        (_, false) => (["input_layernorm", ""], ["post_attention_layernorm", ""]),
    };
    let gemma = matches!(config.family.kind(), ModelFamily::Gemma2 | ModelFamily::Gemma3);
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap_or_default();
    let activation = [&written["hidden_activation"], &written["hidden_act"]].into_iter().find_map(Value::as_str);
    // Gemma 2 has the cap by default.
    let usual = (config.family.kind() == ModelFamily::Gemma2).then_some(30.0);
    let logit_cap = written.get("final_logit_softcapping").map_or(usual, Value::as_f64).filter(|_| gemma);
    Ok(json!({
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "attention_norms": attention_norms,
        "mlp_norms": mlp_norms,
        "norm_offset": if gemma { 1.0 } else { 0.0 },
        "norm_eps": config.rms_norm_eps,
        "activation": activation.unwrap_or("silu"),
        "fused": has("self_attn.qkv_proj"),
        "embedding_scale": if gemma { (config.hidden_size as f64).sqrt() as f32 } else { 1.0 },
        "logit_cap": logit_cap,
        "tensors": tensors,
    }))
}

/// Rotary frequencies, the distinct variants, and the index of the variant of each head.
pub fn of_layer(layer: &Layer) -> Value {
    let (mut variants, mut of_head): (Vec<&Variant>, Vec<usize>) = (Vec::new(), Vec::new());
    for variant in layer.heads() {
        let known = variants.iter().position(|other| *other == variant).unwrap_or_else(|| {
            variants.push(variant);
            variants.len() - 1
        });
        of_head.push(known);
    }
    let d = layer.head_dim();
    let rope = layer.rope().map(|rope| {
        // The factor of q and k is the cosine of the angle 0.
        let half = rope.frequencies().len();
        let (mut cos, mut sin) = (vec![0.0f64; half], vec![0.0; half]);
        rope.angles(0, &mut cos, &mut sin);
        json!({ "frequencies": rope.frequencies(), "factor": cos.first().copied().unwrap_or(1.0) })
    });
    json!({
        "rope": rope,
        "variants": variants.iter().map(|variant| Parts::new(variant).at_dim(variant, d)).collect::<Vec<_>>(),
        "of_head": of_head,
    })
}
