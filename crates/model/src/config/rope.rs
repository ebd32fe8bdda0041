//! The rotary embedding in a configuration: `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that contains both, per kind of layer if they
//! differ.

use serde_json::{Map, Value, json};
use termwise_attention::RopeScaling;
use termwise_base::nearest;

use super::read::conflict;
use super::{ModelFamily, bad_value};
use crate::error::{Error, Result};
use crate::json::JsonKeys;

const KNOWN: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
];

/// `rope_theta` and scaling.
pub(super) type RopeBase = (f64, Option<RopeScaling>);

/// Values outside the scaling object that a scaling may use.
#[derive(Clone, Copy)]
struct RopeContext {
    kind: ModelFamily,
    /// `max_position_embeddings`
    context: usize,
    /// `original_max_position_embeddings`, a top-level key in Phi-3.
    original: Option<f64>,
}

/// Reads `rope_theta` and scaling from all keys that can contain them. Contradictions are errors. The second result is that of layers with a
/// window, in families that distinguish them.
pub(super) fn read(keys: &mut JsonKeys, kind: ModelFamily, context: usize) -> Result<(RopeBase, Option<RopeBase>)> {
    const NESTED: [&str; 2] = ["full_attention", "sliding_attention"];
    let defaults = kind.traits().defaults;
    let original = keys.peek("original_max_position_embeddings").and_then(Value::as_f64);
    let around = RopeContext { kind, context, original };
    let (mut places, mut local_places) = (Vec::new(), Vec::new());
    places.extend(keys.object("rope_scaling")?);
    if let Some(mut inner) = keys.object("rope_parameters")? {
        if defaults.local_theta.is_some() && NESTED.iter().any(|name| inner.peek(name).is_some()) {
            places.extend(inner.object(NESTED[0])?);
            local_places.extend(inner.object(NESTED[1])?);
            if let Some(key) = inner.names().next() {
                let suggestion = nearest(key, NESTED).map(str::to_owned);
                return Err(Error::UnknownKey { place: "rope_parameters".into(), key: key.clone(), known: &NESTED, suggestion });
            }
        } else {
            places.push(inner);
        }
    }
    let old_key = kind.traits().old_rotary_keys.map(|[_, theta]| theta);
    let old = old_key.map(|key| keys.number(key)).transpose()?.flatten();
    let base = agree(keys, "rope_theta", places, old.unwrap_or(defaults.theta), around)?;
    if let Some(old) = old.filter(|old| *old != base.0) {
        return Err(conflict(old_key.unwrap_or_default(), old, "rope_theta", base.0));
    }
    let local = match defaults.local_theta {
        Some(theta) => Some(agree(keys, "rope_local_base_freq", local_places, theta, around)?),
        None => None,
    };
    Ok((base, local))
}

/// Reads the fraction of the coordinates that RoPE rotates. Contradictions are errors.
pub(super) fn read_partial_factor(keys: &mut JsonKeys, kind: ModelFamily) -> Result<f64> {
    const KEY: &str = "partial_rotary_factor";
    let default = kind.traits().defaults.rotary;
    let mut found: Vec<(String, f64)> = Vec::new();
    // `rotary_pct` is the old key of GPT-NeoX.
    for key in [KEY, "rotary_pct"] {
        let value = if default.is_some() { keys.number(key)? } else { keys.peek(key).and_then(Value::as_f64) };
        found.extend(value.map(|value| (key.to_owned(), value)));
    }
    for outer in ["rope_parameters", "rope_scaling"] {
        let value = keys.peek(outer).and_then(|object| object.get(KEY)).and_then(Value::as_f64);
        found.extend(value.map(|value| (format!("{outer}.{KEY}"), value)));
    }
    let Some((key, factor)) = found.first().cloned() else { return Ok(default.unwrap_or(1.0)) };
    if let Some((other, value)) = found.iter().find(|(_, value)| *value != factor) {
        return Err(conflict(&key, factor, other, value));
    }
    if default.is_none() && factor != 1.0 {
        let advice = "this family has no partial rotary embedding; use the family of the weights";
        return Err(Error::Unsupported { key, found: factor.to_string(), advice });
    }
    Ok(factor)
}

fn agree(keys: &mut JsonKeys, key: &str, places: Vec<JsonKeys>, otherwise: f64, around: RopeContext) -> Result<RopeBase> {
    let mut theta = keys.number(key)?.map(|theta| (key.to_owned(), theta));
    let mut scaling: Option<(String, Option<RopeScaling>)> = None;
    for mut inner in places {
        if let Some(found) = inner.number("rope_theta")? {
            let path = inner.path("rope_theta");
            match &theta {
                Some((first, value)) if *value != found => return Err(conflict(first, value, &path, found)),
                _ => theta = Some((path, found)),
            }
        }
        let place = inner.path("").trim_end_matches('.').to_owned();
        let found = read_scaling(inner, &place, around)?;
        match scaling {
            Some((first, value)) if value != found => {
                return Err(conflict(&first, describe(value.as_ref()), &place, describe(found.as_ref())));
            }
            _ => scaling = Some((place, found)),
        }
    }
    let theta = theta.map_or(otherwise, |(_, theta)| theta);
    let scaling = scaling.and_then(|(_, scaling)| scaling);
    validate(theta, scaling.as_ref())?;
    Ok((theta, scaling))
}

fn read_scaling(mut keys: JsonKeys, place: &str, around: RopeContext) -> Result<Option<RopeScaling>> {
    let unknown = keys.names().find(|name| !KNOWN.contains(&name.as_str()));
    if let Some(key) = unknown {
        let suggestion = nearest(key, KNOWN.iter().copied()).map(str::to_owned);
        return Err(Error::UnknownKey { place: place.into(), key: key.clone(), known: KNOWN, suggestion });
    }
    keys.number("partial_rotary_factor")?;
    let kind = match (keys.text("rope_type")?, keys.text("type")?) {
        (Some(new), Some(old)) if new != old => return Err(conflict(&keys.path("rope_type"), new, &keys.path("type"), old)),
        (new, old) => new.or(old),
    };
    let required = |keys: &JsonKeys, key: &str, value: Option<f64>| {
        value.ok_or_else(|| Error::MissingKey { key: keys.path(key), expected: "a positive number" })
    };
    let number = |keys: &mut JsonKeys, key: &str| keys.number(key).and_then(|value| required(keys, key, value));
    let context = around.context as f64;
    let original = |keys: &mut JsonKeys| match (around.original, keys.number("original_max_position_embeddings")?) {
        (Some(outer), Some(inner)) if outer != inner => {
            let key = "original_max_position_embeddings";
            Err(conflict(key, outer, &keys.path(key), inner))
        }
        (outer, inner) => Ok(outer.or(inner).unwrap_or(if around.kind == ModelFamily::Phi3 { 4096.0 } else { context })),
    };
    let list = |keys: &mut JsonKeys, key: &str| {
        keys.numbers(key)?.ok_or_else(|| Error::MissingKey { key: keys.path(key), expected: "a list of numbers, one per pair" })
    };
    match kind.as_deref() {
        Some("default" | "none") => Ok(None),
        Some("linear") => Ok(Some(RopeScaling::Linear { factor: number(&mut keys, "factor")? })),
        Some("dynamic") => Ok(Some(RopeScaling::Dynamic { factor: number(&mut keys, "factor")?, original_context: context })),
        Some("llama3") => Ok(Some(RopeScaling::Llama3 {
            factor: number(&mut keys, "factor")?,
            low_freq_factor: number(&mut keys, "low_freq_factor")?,
            high_freq_factor: number(&mut keys, "high_freq_factor")?,
            original_context: original(&mut keys)?,
        })),
        // Names in early files of Phi-3.
        Some(name) if name == "longrope" || around.kind == ModelFamily::Phi3 && ["su", "yarn"].contains(&name) => {
            let original_context = original(&mut keys)?;
            let factor = keys.number("factor")?.unwrap_or(context / original_context);
            let natural = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original_context.ln()).sqrt() };
            Ok(Some(RopeScaling::Long {
                short_factor: list(&mut keys, "short_factor")?,
                long_factor: list(&mut keys, "long_factor")?,
                original_context,
                attention_factor: keys.number("attention_factor")?.unwrap_or(natural),
            }))
        }
        Some("yarn") => {
            let original_context = original(&mut keys)?;
            let factor = number(&mut keys, "factor")?;
            let natural = match (keys.number("mscale")?, keys.number("mscale_all_dim")?) {
                (Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                    RopeScaling::yarn_attention(factor, m) / RopeScaling::yarn_attention(factor, all)
                }
                _ => RopeScaling::yarn_attention(factor, 1.0),
            };
            Ok(Some(RopeScaling::Yarn {
                factor,
                beta_fast: keys.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.number("beta_slow")?.unwrap_or(1.0),
                truncate: keys.bool("truncate")?.unwrap_or(true),
                original_context,
                attention_factor: keys.number("attention_factor")?.unwrap_or(natural),
            }))
        }
        Some(other) => Err(Error::Unsupported {
            key: keys.path("rope_type"),
            found: format!("\"{other}\""),
            advice: "supported RoPE types: \"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" and \"longrope\"; use a model with one of these",
        }),
        None if keys.names().next().is_none() => Ok(None),
        None => Err(Error::MissingKey { key: keys.path("rope_type"), expected: "\"default\", \"linear\", \"llama3\" or another kind" }),
    }
}

fn describe(scaling: Option<&RopeScaling>) -> String {
    scaling.map_or("\"default\"".into(), |scaling| to_json(scaling).to_string())
}

/// Checks the range of theta and of the scaling parameters.
pub(super) fn validate(theta: f64, scaling: Option<&RopeScaling>) -> Result<()> {
    let positive = |key: &str, value: f64| {
        let key = if key == "rope_theta" { key.to_owned() } else { format!("rope_scaling.{key}") };
        if value.is_finite() && value > 0.0 { Ok(()) } else { Err(bad_value(key, value, "it must be a positive number")) }
    };
    let larger = |(large, a): (&str, f64), (small, b): (&str, f64)| {
        let expected = || format!("{small} is {b}: the first must be larger than the second");
        if a > b { Ok(()) } else { Err(bad_value(format!("rope_scaling.{large}"), a, expected())) }
    };
    positive("rope_theta", theta)?;
    match scaling {
        None => Ok(()),
        Some(RopeScaling::Linear { factor }) => positive("factor", *factor),
        Some(RopeScaling::Dynamic { factor, original_context }) => {
            positive("factor", *factor)?;
            positive("original_max_position_embeddings", *original_context)
        }
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            positive("original_max_position_embeddings", *original_context)?;
            larger(("high_freq_factor", *high_freq_factor), ("low_freq_factor", *low_freq_factor))
        }
        Some(RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor, .. }) => {
            positive("factor", *factor)?;
            positive("beta_fast", *beta_fast)?;
            positive("beta_slow", *beta_slow)?;
            positive("original_max_position_embeddings", *original_context)?;
            positive("attention_factor", *attention_factor)?;
            larger(("beta_fast", *beta_fast), ("beta_slow", *beta_slow))?;
            if theta == 1.0 {
                Err(bad_value("rope_theta", theta, "yarn needs frequencies that differ, so it must not be 1"))
            } else {
                Ok(())
            }
        }
        Some(RopeScaling::Long { short_factor, long_factor, original_context, attention_factor }) => {
            positive("original_max_position_embeddings", *original_context)?;
            positive("attention_factor", *attention_factor)?;
            short_factor.iter().try_for_each(|factor| positive("short_factor", *factor))?;
            long_factor.iter().try_for_each(|factor| positive("long_factor", *factor))
        }
    }
}

/// The value of the key `rope_scaling`.
pub(super) fn to_json(scaling: &RopeScaling) -> Value {
    // Transformers requires an integer.
    let context = |value: f64| if value.fract() == 0.0 && value < 2f64.powi(53) { json!(value as u64) } else { json!(value) };
    match scaling {
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        // Its context length is that of the model.
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": context(*original_context),
        }),
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_context, attention_factor } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
            "original_max_position_embeddings": context(*original_context),
            "attention_factor": attention_factor,
        }),
        RopeScaling::Long { short_factor, long_factor, original_context, attention_factor } => json!({
            "rope_type": "longrope",
            "short_factor": short_factor,
            "long_factor": long_factor,
            "original_max_position_embeddings": context(*original_context),
            "attention_factor": attention_factor,
        }),
    }
}

/// The value of the key `rope_parameters`.
pub(super) fn parameters(theta: f64, scaling: Option<&RopeScaling>) -> Value {
    let mut map = match scaling.map(to_json) {
        Some(Value::Object(map)) => map,
        _ => Map::from_iter([("rope_type".into(), json!("default"))]),
    };
    map.insert("rope_theta".into(), json!(theta));
    Value::Object(map)
}
