//! Differences between settings, and names derived from settings.

use std::fmt;

use toml::Table;

use super::Settings;
use super::keys::{self, Effect};

impl Settings {
    /// The settings that affect the computation and differ.
    pub fn differences(&self, other: &Settings) -> Vec<Difference> {
        self.differing(other, Effect::Computation)
    }

    /// The settings of this effect that differ.
    pub(crate) fn differing(&self, other: &Settings, effect: Effect) -> Vec<Difference> {
        let (ours, theirs) = (self.table(), other.table());
        let show = |table: &Table, name| table.get(name).map_or("absent".into(), ToString::to_string);
        let differing = keys::KEYS.iter().filter(|key| key.effect == effect && ours.get(key.name) != theirs.get(key.name));
        differing.map(|key| Difference { key: key.name, requested: show(&ours, key.name), found: show(&theirs, key.name) }).collect()
    }

    /// A hash of the settings that affect the computation or name the data.
    pub fn hash(&self) -> String {
        let table = self.table();
        let mut hasher = blake3::Hasher::new();
        for key in keys::KEYS.iter().filter(|key| key.effect.is_computed()) {
            if let Some(value) = table.get(key.name) {
                hasher.update(format!("{} = {value}\n", key.name).as_bytes());
            }
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }

    /// A name for the run: model, attention and a short hash.
    pub fn name(&self) -> String {
        let attention = self.attention.as_str().unwrap_or("mixed");
        let plain: String = attention.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(40).collect();
        let model = if self.from.is_empty() { &self.model } else { "from" };
        format!("{model}-{}-{}", plain.trim_matches('-'), &self.hash()[..8])
    }
}

/// A setting whose requested value differs from that of the checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The key.
    pub key: &'static str,
    /// The requested value.
    pub requested: String,
    /// The value in the checkpoint.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} requested, {} in the checkpoint", self.key, self.requested, self.found)
    }
}
