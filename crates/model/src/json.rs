//! Strict reading of JSON: duplicate keys are errors, and error messages contain the path of the key.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, Result};

/// Parses JSON. A duplicate key in an object is an error; serde_json alone would keep the last value.
pub(crate) fn parse(text: &str) -> Result<Value> {
    serde_json::from_str::<StrictJson>(text).map(|strict| strict.0).map_err(Error::Json)
}

/// A value for error messages, shortened if long.
pub(crate) fn show(value: &Value) -> String {
    const MAX_SHOWN_CHARS: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= MAX_SHOWN_CHARS { text } else { text.chars().take(MAX_SHOWN_CHARS).chain(['…']).collect() }
}

/// The entries of an object, removed one by one. [`JsonKeys::rest`] returns the remaining entries. `null` counts as absent.
pub(crate) struct JsonKeys {
    /// Path of this object with a trailing dot; empty for the root.
    place: String,
    map: Map<String, Value>,
}

impl JsonKeys {
    pub(crate) fn new(map: Map<String, Value>) -> JsonKeys {
        JsonKeys { place: String::new(), map }
    }

    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.map.keys()
    }

    pub(crate) fn rest(self) -> Map<String, Value> {
        self.map
    }

    pub(crate) fn peek(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the value of the key is `null`.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub(crate) fn value(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    pub(crate) fn size(&mut self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(crate) fn token(&mut self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", as_token)
    }

    pub(crate) fn tokens(&mut self, key: &str) -> Result<Option<Vec<u32>>> {
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(as_token).collect(),
            one => Some(vec![as_token(one)?]),
        })
    }

    pub(crate) fn number(&mut self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn numbers(&mut self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "a list of numbers", |value| value.as_array()?.iter().map(Value::as_f64).collect())
    }

    pub(crate) fn bool(&mut self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&mut self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |value| value.as_str().map(str::to_owned))
    }

    pub(crate) fn object(&mut self, key: &str) -> Result<Option<JsonKeys>> {
        let place = format!("{}.", self.path(key));
        Ok(self.typed(key, "an object", |value| value.as_object().cloned())?.map(|map| JsonKeys { place, map }))
    }

    fn typed<T>(&mut self, key: &str, expected: &'static str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(Error::KeyType { key: self.path(key), expected, found: show(&value) }),
        }
    }
}

fn as_token(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

struct StrictJson(Value);

impl<'de> Deserialize<'de> for StrictJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<StrictJson, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(StrictJson)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number beyond the range of float64"))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(StrictJson(value)) = seq.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!("the key `{key}` occurs twice")));
            }
            map.insert(key, access.next_value::<StrictJson>()?.0);
        }
        Ok(Value::Object(map))
    }
}
