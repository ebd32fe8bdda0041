//! Settings of built-in data as words: `facts=20 keys=128`, the others as by default, separated by spaces or commas.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use termwise_base::nearest;

use crate::error::{Error, Result};

fn table(dials: &impl Serialize) -> toml::Table {
    toml::Table::try_from(dials).expect("numbers of every size that TOML has")
}

/// Reads dials; their values are not checked.
pub(crate) fn read<T: Default + Serialize + DeserializeOwned>(text: &str) -> Result<T> {
    let refuse = |problem| Error::DataSetting { key: "language", problem };
    let mut table = table(&T::default());
    let mut seen = Vec::new();
    for word in text.split([' ', ',']).filter(|word| !word.is_empty()) {
        let (key, value) =
            word.split_once('=').ok_or_else(|| refuse(format!("has the word `{word}`; write settings as `facts=12 keys=64`")))?;
        let Some(slot) = table.get_mut(key) else {
            let known: Vec<&str> = table.keys().map(String::as_str).collect();
            let hint = match nearest(key, known.iter().copied()) {
                Some(close) => format!("did you mean `{close}`?"),
                None => format!("there are {}", known.join(", ")),
            };
            return Err(refuse(format!("has no setting `{key}`; {hint}")));
        };
        if seen.contains(&key) {
            return Err(refuse(format!("gives `{key}` twice; give it once")));
        }
        seen.push(key);
        *slot = match slot {
            toml::Value::Float(_) => value.parse().ok().map(toml::Value::Float),
            toml::Value::String(_) => Some(toml::Value::String(value.into())),
            _ => value.parse().ok().map(toml::Value::Integer),
        }
        .ok_or_else(|| refuse(format!("gives `{key}` the value `{value}`; it must be a number like {slot}")))?;
    }
    table.try_into().map_err(|error: toml::de::Error| refuse(format!("cannot be: {}", error.message())))
}

/// Writes those that are not as by default, separated by spaces.
pub(crate) fn write<T: Default + Serialize>(dials: &T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let default = table(&T::default());
    let changed = table(dials).into_iter().filter(|(key, value)| default.get(key) != Some(value));
    for (i, (key, value)) in changed.enumerate() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        write!(f, "{}{key}={value}", if i == 0 { "" } else { " " })?;
    }
    Ok(())
}
