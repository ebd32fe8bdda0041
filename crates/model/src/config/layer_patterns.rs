//! The properties of a family that differ between layers: sliding windows, and layers without RoPE.

use serde_json::{Value, json};

use super::bad_value;
use super::family::{ModelFamily, WindowRule};
use super::read::conflict;
use crate::error::{Error, Result};
use crate::json::{JsonKeys, show};

/// Whether each layer applies RoPE to q and k.
pub(super) fn ropes(kind: ModelFamily, keys: &JsonKeys, layers: usize) -> Result<Vec<bool>> {
    if kind != ModelFamily::SmolLm3 {
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

/// The sliding window of each layer.
pub(super) fn windows(kind: ModelFamily, keys: &JsonKeys, ropes: &[bool]) -> Result<Vec<Option<usize>>> {
    let (traits, layers) = (kind.traits(), ropes.len());
    let enabled = match keys.peek("use_sliding_window") {
        None => None,
        Some(Value::Bool(enabled)) => Some(*enabled),
        Some(other) => return Err(Error::KeyType { key: "use_sliding_window".into(), expected: "true or false", found: show(other) }),
    };
    let given = peek_size(keys, "sliding_window")?;
    let window = if given.is_none() && !keys.is_null("sliding_window") { traits.defaults.window } else { given };
    let window = match (traits.windows, enabled) {
        (WindowRule::None, Some(false)) => None,
        (WindowRule::None, _) if window.is_some() => {
            let (key, found) = ("sliding_window".into(), show(&json!(window)));
            return Err(Error::Unsupported { key, found, advice: "this family has no window; use the family of the weights" });
        }
        (WindowRule::Configured, enabled) => window.filter(|_| enabled == Some(true)),
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
            let advice = "supported layer types: \"full_attention\" and \"sliding_attention\"; use a model with these";
            let types = types.ok_or_else(|| Error::Unsupported { key: "layer_types".into(), found: show(list), advice })?;
            if types.len() != layers {
                return Err(conflict("layer_types", format!("{} layers", types.len()), "num_hidden_layers", layers));
            }
            Some((show(list), types))
        }
    };
    let expected: Vec<bool> = match traits.windows {
        WindowRule::None => vec![false; layers],
        WindowRule::All => vec![window.is_some(); layers],
        WindowRule::Configured if kind == ModelFamily::SmolLm3 => ropes.iter().map(|rope| window.is_some() && !rope).collect(),
        WindowRule::Configured => {
            let first = peek_number(keys, "max_window_layers")?.unwrap_or(28);
            (0..layers).map(|layer| window.is_some() && layer >= first).collect()
        }
        WindowRule::ExceptEvery(n) => {
            let n = peek_size(keys, "sliding_window_pattern")?.filter(|_| kind == ModelFamily::Gemma3).unwrap_or(n);
            (1..=layers).map(|layer| !layer.is_multiple_of(n)).collect()
        }
    };
    let sliding = match types {
        None => expected,
        Some((text, types)) => {
            // In these families, `sliding_window` alone determines the layers.
            if matches!(traits.windows, WindowRule::None | WindowRule::All) && types != expected {
                return Err(conflict("layer_types", text, "sliding_window", show(&json!(window))));
            }
            if window.is_none() && types.contains(&true) && enabled == Some(false) {
                return Err(conflict("layer_types", text, "use_sliding_window", false));
            }
            types
        }
    };
    if window.is_none() && sliding.contains(&true) {
        let types = keys.peek("layer_types").map_or("a window in some layers".into(), show);
        return Err(conflict("layer_types", types, "sliding_window", "not in use"));
    }
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

fn peek_number(keys: &JsonKeys, key: &str) -> Result<Option<usize>> {
    let Some(value) = keys.peek(key) else { return Ok(None) };
    let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
    number.map(Some).ok_or_else(|| Error::KeyType { key: key.into(), expected: "a whole number", found: show(value) })
}

fn peek_size(keys: &JsonKeys, key: &str) -> Result<Option<usize>> {
    match peek_number(keys, key)? {
        Some(0) => Err(bad_value(key, 0, "it must be at least 1")),
        size => Ok(size),
    }
}
