//! The attention of each head of each layer.
//!
//! In JSON, a variant string for the whole model, or a map per layer and head, with indices or inclusive ranges:
//!
//! ```json
//! {"default": "softmax",
//!  "layers": {"0": "taylor=0..4", "3": {"default": "softmax", "heads": {"0": "taylor=0..4", "2-5": "norm"}}}}
//! ```

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};
use termwise_attention::Variant;
use termwise_base::nearest;

use super::{FamilyConfig, bad_value};
use crate::error::{Error, Result};
use crate::json::show;

/// The variant of every head: a default, and exceptions for layers and heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionMap {
    default: Variant,
    layers: BTreeMap<usize, LayerAttention>,
}

/// The variants of one layer: a default, and exceptions for heads.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerAttention {
    default: Variant,
    heads: BTreeMap<usize, Variant>,
}

/// Softmax in every head.
impl Default for AttentionMap {
    fn default() -> AttentionMap {
        "softmax".parse::<Variant>().expect("`softmax` is a published name").into()
    }
}

impl From<Variant> for AttentionMap {
    fn from(default: Variant) -> AttentionMap {
        AttentionMap { default, layers: BTreeMap::new() }
    }
}

/// One variant per layer.
impl From<Vec<Variant>> for AttentionMap {
    fn from(layers: Vec<Variant>) -> AttentionMap {
        let mut map = most_frequent(&layers).map_or_else(AttentionMap::default, |default| default.clone().into());
        for (layer, variant) in layers.into_iter().enumerate() {
            if variant != map.default {
                map.set_layer(layer, variant);
            }
        }
        map
    }
}

impl From<Variant> for LayerAttention {
    fn from(default: Variant) -> LayerAttention {
        LayerAttention { default, heads: BTreeMap::new() }
    }
}

impl LayerAttention {
    /// The variant of a head.
    pub fn head(&self, head: usize) -> &Variant {
        self.heads.get(&head).unwrap_or(&self.default)
    }
}

impl AttentionMap {
    /// The variant of layers without an entry.
    pub fn default_variant(&self) -> &Variant {
        &self.default
    }

    /// The layers with an entry, ascending.
    pub fn layers(&self) -> impl Iterator<Item = (usize, &LayerAttention)> {
        self.layers.iter().map(|(&layer, attention)| (layer, attention))
    }

    /// The entry of a layer, if it has one.
    pub fn layer(&self, layer: usize) -> Option<&LayerAttention> {
        self.layers.get(&layer)
    }

    /// The variant of a head.
    pub fn head(&self, layer: usize, head: usize) -> &Variant {
        self.layers.get(&layer).map_or(&self.default, |attention| attention.head(head))
    }

    /// The variants of a layer's first `count` heads.
    pub fn heads(&self, layer: usize, count: usize) -> Vec<Variant> {
        (0..count).map(|head| self.head(layer, head).clone()).collect()
    }

    /// Sets the variant of all heads of a layer.
    pub fn set_layer(&mut self, layer: usize, variant: Variant) {
        self.layers.insert(layer, variant.into());
    }

    /// Sets the variant of one head.
    pub fn set_head(&mut self, layer: usize, head: usize, variant: Variant) {
        self.layers.entry(layer).or_insert_with(|| self.default.clone().into()).heads.insert(head, variant);
    }

    /// The variant of all heads, if they have the same, in a model with this many layers and heads.
    pub fn uniform_over(&self, layers: usize, heads: usize) -> Option<&Variant> {
        let first = self.head(0, 0);
        let own = |attention: &LayerAttention| (0..heads).all(|head| attention.head(head) == first);
        let mut entries = self.layers.range(..layers);
        let defaults_count = entries.clone().count() < layers;
        (entries.all(|(_, attention)| own(attention)) && (!defaults_count || self.default == *first)).then_some(first)
    }

    /// Checks that every entry refers to an existing layer and head.
    pub(super) fn check_range(&self, layers: usize, heads: usize) -> Result<()> {
        for (&layer, attention) in &self.layers {
            if layer >= layers {
                return Err(out_of_range("attention_variant.layers".into(), layer, "layers", layers));
            }
            if let Some((&head, _)) = attention.heads.range(heads..).next() {
                return Err(out_of_range(format!("attention_variant.layers.{layer}.heads"), head, "heads", heads));
            }
        }
        Ok(())
    }

    /// Reads the format above from the value of `key`. Without `default`, layers without an entry have the attention of the family.
    pub(super) fn from_json(value: &Value, key: &str, family: &FamilyConfig, layers: usize, heads: usize) -> Result<AttentionMap> {
        const KNOWN: &[&str] = &["default", "layers"];
        let map = match value {
            Value::String(text) => return Ok(parse_variant(text, key)?.into()),
            Value::Object(map) => map,
            other => return Err(wrong_type(key, other)),
        };
        refuse_unknown(map, key, KNOWN)?;
        let mut attention = match map.get("default") {
            Some(default) => read_variant(default, &format!("{key}.default"))?.into(),
            None => family.attention().clone(),
        };
        let place = format!("{key}.layers");
        for (range, value, place) in entries(map.get("layers"), &place, "layers", layers)? {
            for index in range {
                let layer = LayerAttention::from_json(value, &place, attention.head(index, 0), heads)?;
                attention.layers.insert(index, layer);
            }
        }
        Ok(attention)
    }

    /// The shortest form for a model with this many layers and heads: a variant string if all are equal, ranges for equal neighbours.
    pub(super) fn to_json(&self, layers: usize, heads: usize) -> Value {
        if let Some(variant) = self.uniform_over(layers, heads) {
            return json!(variant.to_string());
        }
        let rows: Vec<Vec<Variant>> = (0..layers).map(|layer| self.heads(layer, heads)).collect();
        let whole = rows.iter().filter_map(|row| row.first().filter(|first| row.iter().all(|variant| variant == *first)));
        let default = most_frequent(whole).unwrap_or(&self.default);
        let mut entries = Map::new();
        for (key, row) in runs(&rows) {
            if row.iter().any(|variant| variant != default) {
                entries.insert(key, row_to_json(row));
            }
        }
        json!({"default": default.to_string(), "layers": entries})
    }
}

impl LayerAttention {
    fn from_json(value: &Value, place: &str, inherited: &Variant, heads: usize) -> Result<LayerAttention> {
        const KNOWN: &[&str] = &["default", "heads"];
        let map = match value {
            Value::String(text) => return Ok(parse_variant(text, place)?.into()),
            Value::Object(map) => map,
            other => return Err(wrong_type(place, other)),
        };
        refuse_unknown(map, place, KNOWN)?;
        let default = match map.get("default") {
            Some(default) => read_variant(default, &format!("{place}.default"))?,
            None => inherited.clone(),
        };
        let mut attention = LayerAttention::from(default);
        for (range, value, place) in entries(map.get("heads"), &format!("{place}.heads"), "heads", heads)? {
            let variant = read_variant(value, &place)?;
            attention.heads.extend(range.map(|head| (head, variant.clone())));
        }
        Ok(attention)
    }
}

fn row_to_json(row: &[Variant]) -> Value {
    let default = most_frequent(row).expect("a valid model has at least one head");
    let mut heads = Map::new();
    for (key, variant) in runs(row) {
        if variant != default {
            heads.insert(key, json!(variant.to_string()));
        }
    }
    if heads.is_empty() { json!(default.to_string()) } else { json!({"default": default.to_string(), "heads": heads}) }
}

/// Runs of equal neighbours, each with its index or inclusive range.
fn runs<T: PartialEq>(items: &[T]) -> impl Iterator<Item = (String, &T)> {
    let mut start = 0;
    items.chunk_by(|a, b| a == b).map(move |run| {
        let (first, last) = (start, start + run.len() - 1);
        start += run.len();
        let key = if first == last { first.to_string() } else { format!("{first}-{last}") };
        (key, &run[0])
    })
}

/// The most frequent variant, the first of them in case of a tie.
fn most_frequent<'a>(variants: impl IntoIterator<Item = &'a Variant>) -> Option<&'a Variant> {
    let mut counts: Vec<(&Variant, usize)> = Vec::new();
    for variant in variants {
        match counts.iter_mut().find(|(other, _)| *other == variant) {
            Some((_, count)) => *count += 1,
            None => counts.push((variant, 1)),
        }
    }
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(variant, _)| variant)
}

/// The entries of a `layers` or `heads` object, each with its range and its path. Ranges that overlap or exceed the count are errors.
fn entries<'a>(
    value: Option<&'a Value>,
    place: &str,
    what: &'static str,
    count: usize,
) -> Result<Vec<(RangeInclusive<usize>, &'a Value, String)>> {
    let map = match value {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(Error::KeyType { key: place.into(), expected: "an object", found: show(other) }),
    };
    let mut taken: Vec<Option<&str>> = vec![None; count];
    let mut entries = Vec::with_capacity(map.len());
    for (key, value) in map {
        let range = parse_range(key).ok_or_else(|| {
            bad_value(format!("{place}.{key}"), show(value), "the key must be an index such as \"3\" or an inclusive range such as \"2-5\"")
        })?;
        if *range.end() >= count {
            return Err(out_of_range(place.into(), *range.end(), what, count));
        }
        for slot in &mut taken[range.clone()] {
            if let Some(other) = slot.replace(key) {
                let expected = format!("\"{other}\" covers some of the same {what}; each may be covered only once");
                return Err(bad_value(format!("{place}.{key}"), show(value), expected));
            }
        }
        entries.push((range, value, format!("{place}.{key}")));
    }
    Ok(entries)
}

fn parse_range(key: &str) -> Option<RangeInclusive<usize>> {
    let index = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<usize>().ok()).flatten();
    let (first, last) = match key.split_once('-') {
        Some((first, last)) => (index(first)?, index(last)?),
        None => (index(key)?, index(key)?),
    };
    (first <= last).then_some(first..=last)
}

fn read_variant(value: &Value, place: &str) -> Result<Variant> {
    let text = value.as_str();
    let wrong = || Error::KeyType { key: place.into(), expected: "a variant string", found: show(value) };
    parse_variant(text.ok_or_else(wrong)?, place)
}

fn parse_variant(text: &str, place: &str) -> Result<Variant> {
    text.parse().map_err(|source| Error::AttentionEntry { place: place.into(), source })
}

fn wrong_type(place: &str, found: &Value) -> Error {
    Error::KeyType { key: place.into(), expected: "a variant string or an object", found: show(found) }
}

fn refuse_unknown(map: &Map<String, Value>, place: &str, known: &'static [&'static str]) -> Result<()> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let suggestion = nearest(key, known.iter().copied()).map(str::to_owned);
            Err(Error::UnknownKey { place: place.into(), key: key.clone(), known, suggestion })
        }
    }
}

fn out_of_range(place: String, index: usize, what: &str, count: usize) -> Error {
    bad_value(place, format!("for index {index}"), format!("the model has {count} {what}, counted from 0"))
}
