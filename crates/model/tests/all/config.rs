//! Valid and invalid configurations.

use proptest::prelude::*;
use serde_json::{Value, json};
use termwise_attention::{RopeScaling, Variant};
use termwise_model::Config;
use termwise_model::config::{AttentionMap, ModelFamily};
use termwise_model::params::ParamInit;

fn small() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    })
}

/// The small configuration with these keys changed.
fn with(changes: Value) -> Value {
    let mut config = small();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn read(value: &Value) -> Config {
    Config::from_json_str(&value.to_string(), "config.json").unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn refused(changes: Value, words: &[&str]) {
    let text = with(changes).to_string();
    let error = Config::from_json_str(&text, "my/config.json").expect_err(&text).to_string();
    assert!(error.starts_with("my/config.json: "), "{error}");
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
}

fn variant(text: &str) -> Variant {
    text.parse().unwrap()
}

#[test]
fn defaults_match_hugging_face() {
    let mut value = small();
    for key in
        ["num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "bos_token_id", "eos_token_id", "torch_dtype"]
    {
        value.as_object_mut().unwrap().remove(key);
    }
    let config = read(&value);
    assert_eq!((config.num_key_value_heads, config.head_dim), (8, 4));
    assert_eq!((config.rms_norm_eps, config.rope_theta, config.initializer_range), (1e-6, 10000.0, 0.02));
    assert_eq!((config.max_position_embeddings, config.tie_word_embeddings), (2048, false));
    assert_eq!((config.bos_token_id, config.eos_token_id.len(), config.torch_dtype.as_deref()), (None, 0, None));
    assert_eq!(config.uniform_attention(), Some(&variant("softmax")));
}

#[test]
fn explicit_values_are_read() {
    let config = read(&with(json!({"head_dim": 6, "eos_token_id": [2, 5], "tie_word_embeddings": true, "initializer_range": 0.1})));
    assert_eq!((config.head_dim, config.eos_token_id.as_slice(), config.initializer_range), (6, &[2, 5][..], 0.1));
    assert_eq!((config.bos_token_id, config.torch_dtype.as_deref(), config.tie_word_embeddings), (Some(1), Some("float32"), true));
    assert_eq!(read(&with(json!({"torch_dtype": null, "dtype": "bfloat16"}))).torch_dtype.as_deref(), Some("bfloat16"));
    read(&with(json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": null})));
    read(&with(json!({"sliding_window": 4096, "use_sliding_window": false, "partial_rotary_factor": 1.0, "attention_bias": false})));
}

#[test]
fn rope_is_read_in_old_and_new_format() {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
    let mut keys = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    keys["original_max_position_embeddings"] = json!(8192);
    let mut newer = keys.clone();
    newer["rope_theta"] = json!(500000.0);
    for changes in [json!({"rope_theta": 500000.0, "rope_scaling": keys}), json!({"rope_theta": null, "rope_parameters": newer})] {
        let config = read(&with(changes));
        assert_eq!((config.rope_theta, config.rope_scaling.clone()), (500000.0, Some(llama3.clone())));
        assert_eq!(config.rope(0, 9).unwrap(), termwise_attention::Rope::new(4, 500000.0, Some(&llama3)).unwrap());
    }
    for key in ["type", "rope_type"] {
        assert_eq!(
            read(&with(json!({"rope_scaling": {key: "linear", "factor": 2}}))).rope_scaling,
            Some(RopeScaling::Linear { factor: 2.0 })
        );
        assert_eq!(read(&with(json!({"rope_scaling": {key: "default"}}))).rope_scaling, None);
    }
    assert_eq!(read(&with(json!({"rope_theta": null, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}))).rope_theta, 7.0);
    assert_eq!(read(&with(json!({"rope_scaling": null}))).rope_scaling, None);
}

#[test]
fn invalid_rope_is_rejected() {
    refused(json!({"rope_scaling": {"rope_type": "ntk", "factor": 2}}), &["rope_scaling.rope_type", "\"ntk\"", "linear", "llama3", "yarn"]);
    refused(json!({"rope_scaling": {"rope_type": "yarn"}}), &["rope_scaling.factor", "missing"]);
    refused(json!({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1}}), &["beta_fast", "1", "beta_slow", "larger"]);
    refused(
        json!({"original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}}),
        &["original_max_position_embeddings", "8", "rope_scaling.original_max_position_embeddings", "16"],
    );
    refused(json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}), &["rope_scaling.long_factor", "missing"]);
    refused(json!({"rope_scaling": {"factor": 2}}), &["rope_scaling.rope_type", "missing"]);
    refused(json!({"rope_scaling": {"rope_type": "linear"}}), &["rope_scaling.factor", "missing"]);
    refused(json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}), &["rope_scaling.factor", "0", "positive"]);
    refused(json!({"rope_scaling": {"rope_type": "linear", "factr": 2}}), &["rope_scaling", "`factr`", "did you mean `factor`"]);
    refused(json!({"rope_scaling": {"rope_type": "linear", "type": "llama3"}}), &["rope_scaling.rope_type", "linear", "llama3"]);
    refused(json!({"rope_scaling": "linear"}), &["rope_scaling", "an object", "\"linear\""]);
    refused(
        json!({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}),
        &["rope_theta", "10000", "rope_parameters.rope_theta", "5"],
    );
    refused(
        json!({"rope_scaling": {"type": "default"}, "rope_parameters": {"type": "linear", "factor": 2}}),
        &["rope_scaling", "rope_parameters", "linear"],
    );
    refused(json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), &["rope_parameters.partial_rotary_factor", "0.5"]);
    refused(json!({"rope_theta": -1}), &["rope_theta", "-1", "positive"]);
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 8192});
    refused(json!({"rope_scaling": llama3}), &["high_freq_factor", "larger"]);
}

#[test]
fn unsupported_models_are_rejected() {
    refused(json!({"model_type": "gpt2"}), &["model_type", "\"gpt2\"", "llama"]);
    refused(json!({"model_type": 3}), &["model_type", "3"]);
    refused(json!({"model_type": null, "architectures": ["GPT2LMHeadModel"]}), &["architectures", "GPT2LMHeadModel"]);
    refused(json!({"model_type": "gemma3"}), &["model_type", "gemma3", "gemma3_text"]);
    refused(json!({"model_type": "mistral", "attention_bias": true}), &["attention_bias", "true", "no bias"]);
    refused(json!({"model_type": "olmo2", "mlp_bias": true}), &["mlp_bias", "true", "no bias"]);
    refused(json!({"hidden_act": "relu"}), &["hidden_act", "\"relu\"", "silu"]);
    refused(json!({"use_bidirectional_attention": true}), &["use_bidirectional_attention", "left to right"]);
    refused(json!({"sliding_window": 4096}), &["sliding_window", "4096"]);
    refused(json!({"layer_types": ["full_attention", "linear_attention"]}), &["layer_types", "linear_attention", "full_attention"]);
    refused(json!({"quantization_config": {"bits": 4}}), &["quantization_config", "bits", "not quantized"]);
    refused(json!({"partial_rotary_factor": 0.25}), &["partial_rotary_factor", "0.25"]);
}

#[test]
fn qwen2_is_read_and_written_with_its_model_type() {
    let qwen2 = |changes: Value| {
        let mut config = with(json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}));
        changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        config
    };
    for changes in [
        json!({}),
        json!({"model_type": null}),
        json!({"sliding_window": 4096, "max_window_layers": 2}),
        json!({"sliding_window": 4096, "use_sliding_window": false, "max_window_layers": 2}),
        json!({"sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 4}),
        json!({"sliding_window": 4096, "use_sliding_window": true, "layer_types": vec!["full_attention"; 4]}),
        json!({"sliding_window": null, "use_sliding_window": true}),
        json!({"tie_word_embeddings": true, "head_dim": 6}),
    ] {
        let config = read(&qwen2(changes.clone()));
        assert_eq!(config.family.kind(), ModelFamily::Qwen2, "{changes}");
        let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
        assert_eq!((&written["model_type"], &written["architectures"][0]), (&json!("qwen2"), &json!("Qwen2ForCausalLM")));
        assert_eq!(read(&written), config);
        let shape = |name: &str| config.parameter_list().unwrap().iter().find(|spec| spec.name == name).map(|spec| spec.shape.clone());
        let d = config.head_dim;
        assert_eq!(shape("model.layers.3.self_attn.q_proj.bias"), Some(vec![8 * d]));
        assert_eq!(shape("model.layers.3.self_attn.v_proj.bias"), Some(vec![4 * d]));
        assert_eq!(shape("model.layers.3.self_attn.o_proj.bias"), None);
    }
    for changes in [json!({"mlp_bias": true}), json!({"model_type": "qwen2_moe"})] {
        let error = Config::from_json_str(&qwen2(changes).to_string(), "config.json").expect_err("refused").to_string();
        assert!(error.contains("not supported") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn llama_supports_attention_biases() {
    let config = read(&with(json!({"attention_bias": true})));
    let list = config.parameter_list().unwrap();
    let biases: Vec<&str> = list.iter().filter_map(|spec| spec.name.strip_prefix("model.layers.1.")?.strip_suffix(".bias")).collect();
    assert_eq!(biases, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]);
    assert!(list.iter().filter(|spec| spec.name.ends_with(".bias")).all(|spec| spec.init == ParamInit::Constant(0.0)));
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    assert_eq!((&written["attention_bias"], &written["model_type"]), (&json!(true), &json!("llama")));
    assert_eq!(read(&written), config);
}

#[test]
fn invalid_sizes_are_rejected() {
    for key in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        refused(json!({key: null}), &[key, "missing"]);
        refused(json!({key: "64"}), &[key, "whole number", "\"64\""]);
        refused(json!({key: -1}), &[key, "whole number", "-1"]);
        refused(json!({key: 1.5}), &[key, "whole number", "1.5"]);
        refused(json!({key: 0}), &[key, "0", "at least 1"]);
    }
    refused(json!({"num_key_value_heads": 0}), &["num_key_value_heads", "at least 1"]);
    refused(json!({"num_key_value_heads": 3}), &["num_attention_heads", "8", "num_key_value_heads is 3", "multiple"]);
    refused(json!({"hidden_size": 30}), &["hidden_size", "30", "num_attention_heads is 8", "head_dim"]);
    refused(json!({"head_dim": 5}), &["head_dim", "5", "even"]);
    refused(json!({"head_dim": 1024}), &["head dimensions", "256", "1024"]);
    refused(json!({"num_hidden_layers": 1u64 << 40}), &["num_hidden_layers", "4096"]);
    refused(json!({"num_attention_heads": 1u64 << 40, "num_key_value_heads": 1}), &["num_attention_heads"]);
    refused(json!({"vocab_size": u64::MAX}), &["model.embed_tokens.weight", "memory"]);
    refused(json!({"intermediate_size": 1u64 << 60}), &["mlp.gate_proj.weight", "memory"]);
    refused(json!({"vocab_size": 1u64 << 55}), &["the model", "memory"]);
    refused(json!({"hidden_size": 1u64 << 63}), &["head dimensions", "256"]);
    refused(json!({"hidden_size": 1u64 << 63, "head_dim": 4}), &["model.embed_tokens.weight", "memory"]);
}

#[test]
fn type_errors_name_the_key() {
    refused(json!({"rms_norm_eps": "small"}), &["rms_norm_eps", "a number", "\"small\""]);
    refused(json!({"rms_norm_eps": -1}), &["rms_norm_eps", "-1"]);
    refused(json!({"initializer_range": -0.5}), &["initializer_range", "-0.5"]);
    refused(json!({"tie_word_embeddings": 1}), &["tie_word_embeddings", "true or false"]);
    refused(json!({"bos_token_id": [1]}), &["bos_token_id", "a token id"]);
    refused(json!({"eos_token_id": [1, "x"]}), &["eos_token_id", "list of token ids"]);
    refused(json!({"attention_bias": "no"}), &["attention_bias", "true or false"]);
    refused(json!({"dtype": "float16"}), &["torch_dtype", "float32", "dtype", "float16"]);
}

#[test]
fn invalid_files_are_rejected() {
    for (text, word) in
        [("", "JSON"), ("{", "JSON"), ("[]", "an object"), ("null", "an object"), (r#"{"a": 1, "a": 2}"#, "`a` occurs twice")]
    {
        let error = Config::from_json_str(text, "c.json").unwrap_err().to_string();
        assert!(error.starts_with("c.json: ") && error.contains(word), "{error}");
    }
    let error = Config::read("no/such/folder").unwrap_err().to_string();
    assert!(error.contains("no/such/folder") && error.contains("no such directory"), "{error}");
}

#[test]
fn attention_is_read_per_layer_and_head() {
    let layer = json!({"default": "gate", "heads": {"0": "taylor=0..4", "2-5": "norm"}});
    let map = json!({"default": "softmax", "layers": {"0": "taylor=0..4", "2-3": layer}});
    let config = read(&with(json!({"attention_variant": map})));
    assert_eq!(config.heads(0), vec![variant("taylor=0..4"); 8]);
    assert_eq!(config.heads(1), vec![variant("softmax"); 8]);
    let expected = ["taylor=0..4", "gate", "norm", "norm", "norm", "norm", "gate", "gate"].map(variant);
    assert_eq!(config.heads(2), expected);
    assert_eq!(config.heads(3), expected);
    assert_eq!(config.uniform_attention(), None);

    assert_eq!(read(&with(json!({"attention_variant": "norm"}))).uniform_attention(), Some(&variant("norm")));
    assert_eq!(read(&with(json!({"attention_type": "softmax_divS_gatev2"}))).heads(3), vec![variant("gate"); 8]);
    read(&with(json!({"attention_type": "softmax_divS_gate", "attention_variant": "gate"})));
    // Inherited defaults: softmax for the model, the default of the model for a layer.
    let config = read(&with(json!({"attention_variant": {"layers": {"1": {"heads": {"7": "norm"}}}}})));
    assert_eq!((config.attention.head(1, 6), config.attention.head(1, 7)), (&variant("softmax"), &variant("norm")));
}

#[test]
fn invalid_attention_is_rejected() {
    let of = |value: Value| json!({"attention_variant": value});
    refused(of(json!("sofmax")), &["`attention_variant`", "softmax"]);
    refused(of(json!(3)), &["attention_variant", "a variant string or an object", "3"]);
    refused(of(json!({"defualt": "norm"})), &["attention_variant", "`defualt`", "did you mean `default`"]);
    refused(of(json!({"layers": {"0": {"head": {}}}})), &["attention_variant.layers.0", "`head`", "did you mean `heads`"]);
    refused(of(json!({"layers": {"4": "norm"}})), &["attention_variant.layers", "index 4", "4 layers"]);
    refused(of(json!({"layers": {"0-1": "norm", "1": "gate"}})), &["attention_variant.layers.1", "\"0-1\"", "once"]);
    refused(of(json!({"layers": {"0": {"heads": {"2-8": "norm"}}}})), &["attention_variant.layers.0.heads", "index 8", "8 heads"]);
    refused(of(json!({"layers": {"0": {"heads": {"2-5": "norm", "5-6": "gate"}}}})), &["layers.0.heads.5-6", "\"2-5\""]);
    for key in ["x", "", "-", "1-", "-1", "3-2", "+1", "1 ", "0-1-2", "99999999999999999999"] {
        refused(of(json!({"layers": {key: "norm"}})), &["attention_variant.layers.", "index"]);
    }
    refused(of(json!({"layers": ["norm"]})), &["attention_variant.layers", "an object"]);
    refused(of(json!({"layers": {"0": {"heads": {"0": {}}}}})), &["attention_variant.layers.0.heads.0", "a variant string"]);
    refused(json!({"attention_type": "gate", "attention_variant": "norm"}), &["attention_type", "attention_variant", "gate", "norm"]);
    refused(json!({"attention_type": "softmax", "attention_variant": {"layers": {"1": "norm"}}}), &["attention_type", "attention_variant"]);
    refused(json!({"attention_type": ["norm"]}), &["attention_type", "a string"]);
    refused(of(json!({"layers": {"2": {"heads": {"0": "softmax conv=3", "1": "softmax conv=4"}}}})), &["layer 2", "convolution"]);
}

#[test]
fn attention_is_set_or_unchanged_on_error() {
    let mut config = read(&small());
    config.set_attention(variant("norm")).unwrap();
    assert_eq!(config.uniform_attention(), Some(&variant("norm")));
    let mut map = AttentionMap::from(variant("gate"));
    map.set_layer(1, variant("norm"));
    map.set_head(2, 7, variant("softmax"));
    config.set_attention(map.clone()).unwrap();
    assert_eq!((config.attention.head(0, 0), config.attention.head(1, 5)), (&variant("gate"), &variant("norm")));
    assert_eq!((config.attention.head(2, 6), config.attention.head(2, 7)), (&variant("gate"), &variant("softmax")));
    let before = config.clone();
    map.set_head(2, 8, variant("softmax"));
    assert!(config.set_attention(map.clone()).unwrap_err().to_string().contains("index 8"));
    let mut map = AttentionMap::default();
    map.set_layer(4, variant("softmax"));
    assert!(config.set_attention(map).unwrap_err().to_string().contains("index 4"));
    assert!(config.set_attention_json(&json!({"layers": {"9": "norm"}})).is_err());
    assert_eq!(config, before);
    config.set_attention_json(&json!({"layers": {"0-2": "norm"}})).unwrap();
    assert_eq!(config.heads(2), vec![variant("norm"); 8]);
}

#[test]
fn written_files_are_read_by_other_tools() {
    let config = read(&with(json!({"pad_token_id": 0, "use_cache": true, "note": {"a": [1, 2.5]}})));
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    for (key, value) in with(json!({"pad_token_id": 0, "use_cache": true, "note": {"a": [1, 2.5]}})).as_object().unwrap() {
        assert_eq!(&written[key], value, "{key}");
    }
    assert_eq!((&written["head_dim"], &written["attention_bias"], written.get("attention_variant")), (&json!(4), &json!(false), None));

    let mut gate = config.clone();
    gate.set_attention(variant("gate")).unwrap();
    let written: Value = serde_json::from_str(&gate.to_json_string()).unwrap();
    assert_eq!(written["attention_variant"], json!(variant("gate").to_string()));
    // Other tools must not mistake it for a Llama model.
    assert_eq!((&written["model_type"], &written["architectures"]), (&json!("termwise_llama"), &json!(["TermwiseLlamaForCausalLM"])));
    assert_eq!(Config::from_json_str(&gate.to_json_string(), "the test").unwrap(), gate);
    // Identified only by its class, and as written by earlier builds: the same model.
    for model_type in [Value::Null, json!("llama")] {
        let mut older = written.clone();
        older["model_type"] = model_type;
        assert_eq!(Config::from_json_str(&older.to_string(), "the test").unwrap(), gate);
    }
    gate.set_attention(variant("softmax")).unwrap();
    assert_eq!(gate, config);
    assert_eq!(gate.to_json_string(), config.to_json_string());

    let layer = json!({"default": "softmax", "heads": {"0": "gate", "1": "gate", "5": "norm"}});
    let map = json!({"default": "softmax", "layers": {"1": "norm", "2": "norm", "3": layer}});
    let mixed = read(&with(json!({"attention_variant": map})));
    let written: Value = serde_json::from_str(&mixed.to_json_string()).unwrap();
    let (softmax, norm, gate) = (variant("softmax").to_string(), variant("norm").to_string(), variant("gate").to_string());
    let expected = json!({"default": norm, "layers": {"0": softmax, "3": {"default": softmax, "heads": {"0-1": gate, "5": norm}}}});
    assert_eq!(written["attention_variant"], expected);
}

#[test]
fn files_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let config = read(&with(json!({"attention_variant": {"layers": {"1": "norm"}}, "eos_token_id": [2, 3]})));
    config.write(folder.path()).unwrap();
    assert_eq!(Config::read(folder.path()).unwrap().to_json_string(), config.to_json_string());
    assert_eq!(Config::read(folder.path().join("config.json")).unwrap().heads(1), config.heads(1));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

/// Transformers must not run a changed attention as the softmax attention of the family.
#[test]
fn other_tools_are_led_to_termwise() {
    let own: Value = serde_json::from_str(&read(&with(json!({"attention_variant": "norm"}))).to_json_string()).unwrap();
    assert_eq!(own["attn_implementation"], "termwise");
    let auto_map = json!({"AutoConfig": "modeling_termwise.TermwiseLlamaConfig", "AutoModelForCausalLM": "modeling_termwise.TermwiseLlamaForCausalLM"});
    assert_eq!(own["auto_map"], auto_map);
    // With the family's attention the keys and the file are not written.
    let mut config = read(&own);
    let plain = config.family.attention().clone();
    config.set_attention(plain).unwrap();
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    assert!(written.get("attn_implementation").is_none() && written.get("auto_map").is_none() && config.files() == ["config.json"]);
    // Keys of other tools are kept.
    let (kept, custom) = (json!("flash_attention_2"), json!({"AutoModelForCausalLM": "modeling_other.Model"}));
    let config = read(&with(json!({"attn_implementation": kept, "auto_map": custom})));
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    assert_eq!((&written["attn_implementation"], &written["auto_map"]), (&kept, &custom));
    refused(json!({"termwise_attention": [["taylor=0..2"]]}), &["termwise_attention", "termwise.hf.restore"]);
}

#[test]
fn parameters_are_listed_in_order() {
    let map = json!({"layers": {"1": {"heads": {"3": "gated_softmax"}}, "2": "linear_cosine", "3": "softmax conv=3"}});
    let config = read(&with(json!({"attention_variant": map, "head_dim": 6, "num_hidden_layers": 4})));
    let specs = config.parameter_list().unwrap();
    let show = |prefix: &str| {
        let below = specs.iter().filter_map(|spec| Some((spec.name.strip_prefix(prefix)?, spec)));
        below.map(|(name, spec)| format!("{name} {:?} {:?}", spec.shape, spec.init)).collect::<Vec<_>>()
    };
    let plain = [
        "input_layernorm.weight [32] Constant(1.0)",
        "self_attn.q_proj.weight [48, 32] Normal",
        "self_attn.k_proj.weight [24, 32] Normal",
        "self_attn.v_proj.weight [24, 32] Normal",
        "self_attn.o_proj.weight [32, 48] Normal",
        "post_attention_layernorm.weight [32] Constant(1.0)",
        "mlp.gate_proj.weight [48, 32] Normal",
        "mlp.up_proj.weight [48, 32] Normal",
        "mlp.down_proj.weight [32, 48] Normal",
    ];
    assert_eq!(show("model.layers.0."), plain);
    let aux_tensors = [
        "self_attn.in_gate_proj.weight [4, 32] Normal",
        "self_attn.in_gate_proj.bias [4] Constant(0.0)",
        "self_attn.out_gate_proj.weight [8, 32] Normal",
        "self_attn.out_gate_proj.bias [8] Constant(0.0)",
        "self_attn.out_norm.weight [6] Constant(1.0)",
        "self_attn.out_norm.bias [6] Constant(0.0)",
    ];
    assert_eq!(show("model.layers.1."), [&plain[..5], &aux_tensors, &plain[5..]].concat());
    assert_eq!(show("model.layers.2.")[5], "self_attn.norm_const [1, 8, 1, 1] Constant(0.5)");
    let conv = specs.iter().find(|spec| spec.name == "model.layers.3.self_attn.k_conv1d.weight").unwrap();
    assert_eq!(conv.shape, [24, 1, 3]);
    assert!(matches!(conv.init, ParamInit::Uniform(bound) if (bound - 1.0 / 3f64.sqrt()).abs() < 1e-12));

    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names[0], "model.embed_tokens.weight");
    assert_eq!(names[names.len() - 2..], ["model.norm.weight", "lm_head.weight"]);
    assert_eq!(config.parameter_count().unwrap(), specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>());
    let mut tied = config;
    tied.tie_word_embeddings = true;
    assert_eq!(tied.parameter_list().unwrap().last().unwrap().name, "model.norm.weight");
}

proptest! {
    #[test]
    fn written_configurations_round_trip(
        entries in proptest::collection::vec((0usize..4, prop::option::of(0usize..8), 0usize..4), 0..12),
        default in 0usize..4, theta in 1.0..1e6f64, eps in 1e-9..1e-3f64, factor in prop::option::of(0.1..64.0f64),
    ) {
        let texts = ["softmax", "norm", "gate", "taylor=0..4"];
        let mut map = AttentionMap::from(variant(texts[default]));
        for (layer, head, text) in entries {
            match head {
                Some(head) => map.set_head(layer, head, variant(texts[text])),
                None => map.set_layer(layer, variant(texts[text])),
            }
        }
        let mut config = read(&small());
        config.set_attention(map).unwrap();
        (config.rope_theta, config.rms_norm_eps, config.rope_scaling) = (theta, eps, factor.map(|factor| RopeScaling::Linear { factor }));
        let text = config.to_json_string();
        let again = Config::from_json_str(&text, "again").unwrap();
        for layer in 0..4 {
            prop_assert_eq!(again.heads(layer), config.heads(layer));
        }
        prop_assert_eq!(again.to_json_string(), text);
        again.attention.clone_into(&mut config.attention);
        prop_assert_eq!(again, config);
    }

    #[test]
    fn damaged_files_never_panic(place in 0.0..1.0f64, byte in any::<char>()) {
        let map = json!({"layers": {"1": {"heads": {"2-5": "norm"}}}});
        let scaling = json!({"rope_type": "linear", "factor": 2.0});
        let text = with(json!({"attention_variant": map, "rope_scaling": scaling})).to_string();
        let place = (text.len() as f64 * place) as usize;
        let text: String = text.chars().enumerate().map(|(i, c)| if i == place { byte } else { c }).collect();
        let _ = Config::from_json_str(&text, "damaged");
    }
}

#[test]
fn a_real_configuration_is_read() {
    let Some(folder) = termwise_base::test_skip::shared("data/stories260K") else { return };
    let config = Config::read(&folder).unwrap();
    assert_eq!((config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads), (5, 64, 8, 4));
    assert_eq!((config.vocab_size, config.head_dim, config.tie_word_embeddings), (512, 8, true));
    assert_eq!(config.parameter_count().unwrap(), 260_032);
}

/// The attention of each of the four layers of a family's configuration.
fn attention_of(changes: Value) -> Vec<String> {
    let config = read(&with(changes));
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    assert_eq!(read(&written), config);
    assert_eq!(written.get("attention_variant"), None, "the attention of the family");
    (0..4).map(|layer| config.heads(layer)[0].to_string()).collect()
}

#[test]
fn family_keys_determine_the_attention_of_each_layer() {
    let (plain, near) = ("exp over=sum", "exp window=7 over=sum");
    assert_eq!(attention_of(json!({"model_type": "mistral", "sliding_window": null})), [plain; 4]);
    assert_eq!(attention_of(json!({"model_type": "mistral", "sliding_window": 7})), [near; 4]);
    assert_eq!(attention_of(json!({"model_type": "mistral"})), ["exp window=4096 over=sum"; 4]);
    assert_eq!(attention_of(json!({"model_type": "phi3"})), [plain; 4]);
    let qwen2 = json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 7, "max_window_layers": 2});
    assert_eq!(attention_of(qwen2), [plain, plain, near, near]);
    let off = "exp over=sum rope=off";
    assert_eq!(attention_of(json!({"model_type": "smollm3", "no_rope_layer_interval": 2})), [plain, off, plain, off]);
    assert_eq!(attention_of(json!({"model_type": "olmo2", "rms_norm_eps": 1e-6})), ["exp over=sum qk_norm=rms,all"; 4]);
    let gemma = |changes: Value| {
        let mut all = json!({"model_type": "gemma2", "hidden_act": null, "head_dim": 16, "query_pre_attn_scalar": 4, "sliding_window": 7});
        changes.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
        attention_of(all)
    };
    let (far, near) = ("exp scale=0.5 cap=50 over=sum", "exp scale=0.5 cap=50 window=7 over=sum");
    assert_eq!(gemma(json!({})), [near, far, near, far]);
    let third = gemma(json!({"model_type": "gemma3_text", "sliding_window_pattern": 3, "query_pre_attn_scalar": 16}));
    assert!(third.iter().map(|text| text.contains("window=7")).eq([true, true, false, true]) && !third[0].contains("scale"), "{third:?}");
}

#[test]
fn partial_rotary_embeddings_in_old_and_new_keys() {
    // As published for Pythia.
    let pythia = json!({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "num_key_value_heads": null,
        "rms_norm_eps": null, "rope_theta": null, "rotary_pct": 0.5, "rotary_emb_base": 500, "layer_norm_eps": 1e-3, "hidden_size": 64});
    let config = read(&with(pythia.clone()));
    assert_eq!((config.rotary_dim(), config.head_dim, config.rope_theta, config.rms_norm_eps), (4, 8, 500.0, 1e-3));
    assert_eq!(config.rope(0, 0).unwrap().frequencies().len(), 2);
    let written: Value = serde_json::from_str(&config.to_json_string()).unwrap();
    assert_eq!(read(&written), config);
    assert_eq!((&written["rotary_pct"], &written["rope_parameters"]["partial_rotary_factor"]), (&json!(0.5), &json!(0.5)));
    let merged = |changes: Value| {
        let mut all = pythia.clone();
        changes.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
        all
    };
    refused(
        merged(json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}})),
        &["rotary_pct", "rope_parameters.partial_rotary_factor"],
    );
    refused(merged(json!({"rope_theta": 400.0})), &["rotary_emb_base", "rope_theta"]);
    refused(merged(json!({"rotary_pct": 0.4})), &["partial_rotary_factor", "3 of 8"]);
    refused(merged(json!({"num_key_value_heads": 2})), &["num_key_value_heads", "grouped-query"]);
    refused(json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor", "no partial rotary"]);
    refused(json!({"model_type": "stablelm", "partial_rotary_factor": 0.5, "qk_layernorm": true}), &["qk_layernorm", "LayerNorm"]);
    refused(json!({"use_parallel_residual": true}), &["use_parallel_residual"]);
}

#[test]
fn contradicting_keys_are_both_named() {
    let full = json!(["full_attention", "sliding_attention", "full_attention", "full_attention"]);
    for (changes, words) in [
        (json!({"model_type": "qwen3", "layer_types": full, "use_sliding_window": false}), ["layer_types", "use_sliding_window"]),
        (json!({"model_type": "gemma2", "sliding_window": null, "layer_types": full}), ["layer_types", "sliding_window"]),
        (json!({"model_type": "gemma2", "layer_types": ["full_attention"]}), ["layer_types", "num_hidden_layers"]),
        (json!({"model_type": "mistral", "layer_types": full, "sliding_window": 7}), ["layer_types", "sliding_window"]),
        (json!({"model_type": "mistral", "use_sliding_window": false, "sliding_window": 7}), ["use_sliding_window", "sliding_window"]),
        (json!({"model_type": "smollm3", "no_rope_layers": [1, 0]}), ["no_rope_layers", "num_hidden_layers"]),
        (json!({"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}), ["hidden_act", "hidden_activation"]),
        (
            json!({"model_type": "gemma3_text", "rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}}),
            ["rope_local_base_freq", "rope_parameters.sliding_attention.rope_theta"],
        ),
        (json!({"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": true}), ["sliding_window", "at least 1"]),
    ] {
        refused(changes, &words);
    }
}
