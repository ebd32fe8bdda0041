//! RoPE in a configuration: `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both.

use serde_json::{Map, Value, json};
use termwise_attention::{RopeScaling, nearest};

use super::bad_value;
use super::read::conflict;
use crate::error::{Error, Result};
use crate::json::Keys;

const DEFAULT_THETA: f64 = 10_000.0;

const KNOWN: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
];

/// Theta and stretching, from wherever the file says them; places that disagree are an error.
pub(super) fn read(keys: &mut Keys) -> Result<(f64, Option<RopeScaling>)> {
    let mut theta = keys.number("rope_theta")?.map(|theta| ("rope_theta".to_owned(), theta));
    let mut scaling: Option<(&str, Option<RopeScaling>)> = None;
    for place in ["rope_scaling", "rope_parameters"] {
        let Some(mut inner) = keys.object(place)? else { continue };
        if let Some(found) = inner.number("rope_theta")? {
            let path = inner.path("rope_theta");
            match &theta {
                Some((first, value)) if *value != found => return Err(conflict(first, value, &path, found)),
                _ => theta = Some((path, found)),
            }
        }
        let found = read_scaling(inner, place)?;
        match scaling {
            Some((first, value)) if value != found => return Err(conflict(first, describe(value), place, describe(found))),
            _ => scaling = Some((place, found)),
        }
    }
    let theta = theta.map_or(DEFAULT_THETA, |(_, theta)| theta);
    let scaling = scaling.and_then(|(_, scaling)| scaling);
    validate(theta, scaling)?;
    Ok((theta, scaling))
}

fn read_scaling(mut keys: Keys, place: &str) -> Result<Option<RopeScaling>> {
    let unknown = keys.names().find(|name| !KNOWN.contains(&name.as_str()));
    if let Some(key) = unknown {
        let suggestion = nearest(key, KNOWN.iter().copied()).map(str::to_owned);
        return Err(Error::UnknownKey { place: place.into(), key: key.clone(), known: KNOWN, suggestion });
    }
    if let Some(factor) = keys.number("partial_rotary_factor")?
        && factor != 1.0
    {
        let advice = "RoPE turns whole heads here, which is factor 1; use a model with it";
        return Err(Error::Unsupported { key: keys.path("partial_rotary_factor"), found: factor.to_string(), advice });
    }
    let kind = match (keys.text("rope_type")?, keys.text("type")?) {
        (Some(new), Some(old)) if new != old => return Err(conflict(&keys.path("rope_type"), new, &keys.path("type"), old)),
        (new, old) => new.or(old),
    };
    let number = |keys: &mut Keys, key: &str| {
        let missing = Error::MissingKey { key: keys.path(key), expected: "a positive number" };
        keys.number(key)?.ok_or(missing)
    };
    match kind.as_deref() {
        Some("default" | "none") => Ok(None),
        Some("linear") => Ok(Some(RopeScaling::Linear { factor: number(&mut keys, "factor")? })),
        Some("llama3") => Ok(Some(RopeScaling::Llama3 {
            factor: number(&mut keys, "factor")?,
            low_freq_factor: number(&mut keys, "low_freq_factor")?,
            high_freq_factor: number(&mut keys, "high_freq_factor")?,
            original_context: number(&mut keys, "original_max_position_embeddings")?,
        })),
        Some(other) => Err(Error::Unsupported {
            key: keys.path("rope_type"),
            found: format!("\"{other}\""),
            advice: "RoPE can be \"default\", \"linear\" or \"llama3\"; use a model with one of these",
        }),
        None if keys.names().next().is_none() => Ok(None),
        None => Err(Error::MissingKey { key: keys.path("rope_type"), expected: "\"default\", \"linear\" or \"llama3\"" }),
    }
}

fn describe(scaling: Option<RopeScaling>) -> String {
    scaling.map_or("\"default\"".into(), |scaling| to_json(scaling).to_string())
}

/// Checks the numbers that the frequencies are computed from.
pub(super) fn validate(theta: f64, scaling: Option<RopeScaling>) -> Result<()> {
    let positive = |key: &str, value: f64| {
        if value.is_finite() && value > 0.0 { Ok(()) } else { Err(bad_value(key, value, "it must be a positive number")) }
    };
    positive("rope_theta", theta)?;
    match scaling {
        None => Ok(()),
        Some(RopeScaling::Linear { factor }) => positive("rope_scaling.factor", factor),
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
            positive("rope_scaling.factor", factor)?;
            positive("rope_scaling.low_freq_factor", low_freq_factor)?;
            positive("rope_scaling.high_freq_factor", high_freq_factor)?;
            positive("rope_scaling.original_max_position_embeddings", original_context)?;
            if low_freq_factor >= high_freq_factor {
                let expected = format!("low_freq_factor is {low_freq_factor}: the first must be larger than the second");
                return Err(bad_value("rope_scaling.high_freq_factor", high_freq_factor, expected));
            }
            Ok(())
        }
    }
}

/// The value of the key `rope_scaling`.
pub(super) fn to_json(scaling: RopeScaling) -> Value {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    match scaling {
        RopeScaling::Linear { factor } => {
            put("rope_type", "linear".into());
            put("factor", factor.into());
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            put("rope_type", "llama3".into());
            put("factor", factor.into());
            put("low_freq_factor", low_freq_factor.into());
            put("high_freq_factor", high_freq_factor.into());
            // Hugging Face checks that this one is an integer.
            let whole = original_context.fract() == 0.0 && original_context < 2f64.powi(53);
            put("original_max_position_embeddings", if whole { json!(original_context as u64) } else { json!(original_context) });
        }
    }
    Value::Object(map)
}
