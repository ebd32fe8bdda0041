//! Writing a configuration to JSON.

use serde_json::{Map, Value, json};

use super::{Config, rope};

/// Name of the Python module next to `config.json`, and of its file without the extension.
pub(super) const LOADER_MODULE: &str = "modeling_termwise";
/// The attention implementation that Transformers knows after `import termwise.hf`.
pub(super) const LOADER_NAME: &str = "termwise";

/// Whether a head has another attention than its family.
pub(super) fn has_own_attention(config: &Config) -> bool {
    config.attention_json() != config.family.attention().to_json(config.num_hidden_layers, config.num_attention_heads)
}

pub(super) fn to_map(config: &Config) -> Map<String, Value> {
    let mut map = config.other.clone();
    let own_attention = has_own_attention(config);
    let eos = match config.eos_token_id.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    };
    let entries = [
        ("vocab_size", json!(config.vocab_size)),
        ("hidden_size", json!(config.hidden_size)),
        ("intermediate_size", json!(config.intermediate_size)),
        ("num_hidden_layers", json!(config.num_hidden_layers)),
        ("num_attention_heads", json!(config.num_attention_heads)),
        ("num_key_value_heads", json!(config.num_key_value_heads)),
        ("head_dim", json!(config.head_dim)),
        (if config.family.kind().traits().layer_norm { "layer_norm_eps" } else { "rms_norm_eps" }, json!(config.rms_norm_eps)),
        ("rope_theta", json!(config.rope_theta)),
        ("rope_scaling", config.rope_scaling.as_ref().map_or(Value::Null, rope::to_json)),
        ("tie_word_embeddings", json!(config.tie_word_embeddings)),
        ("max_position_embeddings", json!(config.max_position_embeddings)),
        ("bos_token_id", json!(config.bos_token_id)),
        ("eos_token_id", eos),
        ("initializer_range", json!(config.initializer_range)),
    ];
    map.extend(entries.into_iter().chain(config.family.write(own_attention)).map(|(key, value)| (key.to_owned(), value)));
    if let Some(dtype) = &config.torch_dtype {
        map.insert("torch_dtype".into(), json!(dtype));
    }
    if let Some(local) = config.family.local_rope() {
        // Older tools read one key for the second base, newer tools a pair of objects.
        map.insert("rope_local_base_freq".into(), json!(local.theta));
        let full = rope::parameters(config.rope_theta, config.rope_scaling.as_ref());
        let sliding = rope::parameters(local.theta, local.scaling.as_ref());
        map.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": sliding}));
    }
    let factor = config.partial_rotary_factor;
    if let Some(default) = config.family.kind().traits().defaults.rotary {
        // Older tools read separate keys, newer tools an object.
        match config.family.kind().traits().old_rotary_keys {
            Some([factor_key, theta_key]) => {
                map.insert(factor_key.into(), json!(factor));
                map.insert(theta_key.into(), json!(config.rope_theta));
            }
            None => _ = map.insert("partial_rotary_factor".into(), json!(factor)),
        }
        if default != 1.0 || factor != 1.0 {
            let mut parameters = rope::parameters(config.rope_theta, config.rope_scaling.as_ref());
            parameters["partial_rotary_factor"] = json!(factor);
            map.insert("rope_parameters".into(), parameters);
        }
    }
    if own_attention {
        map.insert("attention_variant".into(), config.attention_json());
        // Classes that ignore `model_type` and `auto_map` still fail on an unknown attention implementation.
        map.insert("attn_implementation".into(), json!(LOADER_NAME));
        let class = &map["architectures"][0].as_str().unwrap_or_default().to_owned();
        let config_class = class.replace("ForCausalLM", "Config").replace("Gemma3Config", "Gemma3TextConfig");
        let place = |class: &str| format!("{LOADER_MODULE}.{class}");
        map.insert("auto_map".into(), json!({"AutoConfig": place(&config_class), "AutoModelForCausalLM": place(class)}));
    }
    map
}
