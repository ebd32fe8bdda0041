//! Reading a configuration from JSON.

use serde_json::Value;

use super::write::{LOADER_MODULE, LOADER_NAME};
use super::{AttentionMap, Config, FamilyConfig, ModelFamily, rope};
use crate::error::{Error, Result};
use crate::json::{JsonKeys, show};

pub(super) fn from_value(value: Value) -> Result<Config> {
    let Value::Object(map) = value else {
        return Err(Error::KeyType { key: "the whole file".into(), expected: "an object", found: show(&value) });
    };
    let mut keys = JsonKeys::new(map);
    let kind = ModelFamily::read(&mut keys)?;
    let defaults = kind.traits().defaults;

    let heads = required_size(&mut keys, "num_attention_heads")?;
    let hidden_size = required_size(&mut keys, "hidden_size")?;
    let head_dim = match keys.size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        // Zero heads are an error below.
        None if hidden_size.is_multiple_of(heads.max(1)) => hidden_size / heads.max(1),
        None => {
            let expected = format!("num_attention_heads is {heads}, which does not divide it; change one of them or set head_dim");
            return Err(super::bad_value("hidden_size", hidden_size, expected));
        }
    };
    // The defaults of Transformers.
    let context = keys.size("max_position_embeddings")?.unwrap_or(2048);
    let partial_rotary_factor = rope::read_partial_factor(&mut keys, kind)?;
    let (rope, local_rope) = rope::read(&mut keys, kind, context)?;
    let eps_key = if kind.traits().layer_norm { "layer_norm_eps" } else { "rms_norm_eps" };
    let mut config = Config {
        family: FamilyConfig::default(),
        vocab_size: required_size(&mut keys, "vocab_size")?,
        hidden_size,
        intermediate_size: required_size(&mut keys, "intermediate_size")?,
        num_hidden_layers: required_size(&mut keys, "num_hidden_layers")?,
        num_attention_heads: heads,
        num_key_value_heads: keys.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        rms_norm_eps: keys.number(eps_key)?.unwrap_or(defaults.eps),
        rope_theta: rope.0,
        rope_scaling: rope.1,
        partial_rotary_factor,
        tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(defaults.tie),
        max_position_embeddings: context,
        bos_token_id: keys.token("bos_token_id")?,
        eos_token_id: keys.tokens("eos_token_id")?.unwrap_or_default(),
        initializer_range: keys.number("initializer_range")?.unwrap_or(0.02),
        torch_dtype: read_dtype(&mut keys)?,
        attention: AttentionMap::default(),
        other: Default::default(),
    };
    // Checked first, since the attention map is allocated for these sizes.
    config.check_sizes()?;
    config.family = FamilyConfig::read(kind, &mut keys, &config, local_rope)?;
    config.attention = read_attention(&mut keys, &config.family, config.num_hidden_layers, heads)?;
    drop_loader_keys(&mut keys)?;
    config.other = keys.rest();
    Ok(config)
}

fn required_size(keys: &mut JsonKeys, key: &str) -> Result<usize> {
    let missing = || Error::MissingKey { key: key.into(), expected: "a whole number of at least 1" };
    keys.size(key)?.ok_or_else(missing)
}

fn read_dtype(keys: &mut JsonKeys) -> Result<Option<String>> {
    match (keys.text("torch_dtype")?, keys.text("dtype")?) {
        (Some(old), Some(new)) if old != new => Err(conflict("torch_dtype", old, "dtype", new)),
        (old, new) => Ok(old.or(new)),
    }
}

fn read_attention(keys: &mut JsonKeys, family: &FamilyConfig, layers: usize, heads: usize) -> Result<AttentionMap> {
    let published = keys.text("attention_type")?.map(Value::String);
    let own = keys.value("attention_variant");
    let read = |value: &Value, key| AttentionMap::from_json(value, key, family, layers, heads);
    match (own, published) {
        (None, None) => Ok(family.attention().clone()),
        (Some(value), None) => read(&value, "attention_variant"),
        (None, Some(value)) => read(&value, "attention_type"),
        (Some(value), Some(name)) => {
            let (map, published) = (read(&value, "attention_variant")?, read(&name, "attention_type")?);
            if map.uniform_over(layers, heads) == published.uniform_over(layers, heads) {
                Ok(map)
            } else {
                Err(conflict("attention_variant", show(&value), "attention_type", show(&name)))
            }
        }
    }
}

/// Removes the keys with which Transformers finds termwise. They are written again if the attention requires them.
fn drop_loader_keys(keys: &mut JsonKeys) -> Result<()> {
    if let Some(found) = keys.peek("termwise_attention") {
        let advice = "termwise.hf.use changed this model; load it with Transformers, or save it again after termwise.hf.restore(model)";
        return Err(Error::Unsupported { key: "termwise_attention".into(), found: show(found), advice });
    }
    if keys.peek("attn_implementation").is_some_and(|found| found == LOADER_NAME) {
        keys.value("attn_implementation");
    }
    let ours = |class: &Value| class.as_str().is_some_and(|class| class.starts_with(LOADER_MODULE));
    if keys.peek("auto_map").and_then(Value::as_object).is_some_and(|map| map.values().all(ours)) {
        keys.value("auto_map");
    }
    Ok(())
}

pub(super) fn conflict(first: &str, first_value: impl ToString, second: &str, second_value: impl ToString) -> Error {
    let (first_value, second_value) = (first_value.to_string(), second_value.to_string());
    Error::Conflict { first: first.into(), first_value, second: second.into(), second_value }
}
