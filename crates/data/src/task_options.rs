//! Options of built-in data as words: `facts=20 keys=128`, separated by spaces or commas. Omitted options have their defaults.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use termwise_base::nearest;

use crate::error::{Error, Result};

fn table(options: &impl Serialize) -> toml::Table {
    toml::Table::try_from(options).expect("options are numbers that TOML can represent")
}

/// Parses options without validating their values.
pub(crate) fn read<T: Default + Serialize + DeserializeOwned>(text: &str) -> Result<T> {
    let refuse = |problem| Error::DataSetting { key: "builtin_options", problem };
    let mut table = table(&T::default());
    let mut seen = Vec::new();
    for word in text.split([' ', ',']).filter(|word| !word.is_empty()) {
        let (key, value) = word.split_once('=').ok_or_else(|| refuse(format!("contains `{word}`; write options as `facts=12 keys=64`")))?;
        let Some(slot) = table.get_mut(key) else {
            let known: Vec<&str> = table.keys().map(String::as_str).collect();
            let hint = match nearest(key, known.iter().copied()) {
                Some(close) => format!("did you mean `{close}`?"),
                None => format!("there are {}", known.join(", ")),
            };
            return Err(refuse(format!("has no option `{key}`; {hint}")));
        };
        if seen.contains(&key) {
            return Err(refuse(format!("sets `{key}` twice; set it once")));
        }
        seen.push(key);
        *slot = match slot {
            toml::Value::Float(_) => value.parse().ok().map(toml::Value::Float),
            toml::Value::String(_) => Some(toml::Value::String(value.into())),
            _ => value.parse().ok().map(toml::Value::Integer),
        }
        .ok_or_else(|| refuse(format!("sets `{key}` to `{value}`; it must be a number like {slot}")))?;
    }
    table.try_into().map_err(|error: toml::de::Error| refuse(format!("is invalid: {}", error.message())))
}

/// Implements `FromStr` and `Display` for the options of a task.
macro_rules! text_form {
    ($type:ty) => {
        impl std::str::FromStr for $type {
            type Err = $crate::error::Error;

            fn from_str(text: &str) -> $crate::error::Result<$type> {
                $crate::task_options::read(text)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::task_options::write(self, f)
            }
        }
    };
}

pub(crate) use text_form;

/// Formats the options that differ from their defaults, separated by spaces.
pub(crate) fn write<T: Default + Serialize>(options: &T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let default = table(&T::default());
    let changed = table(options).into_iter().filter(|(key, value)| default.get(key) != Some(value));
    for (i, (key, value)) in changed.enumerate() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        write!(f, "{}{key}={value}", if i == 0 { "" } else { " " })?;
    }
    Ok(())
}
