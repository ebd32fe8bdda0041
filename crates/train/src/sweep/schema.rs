//! Training settings as the settings of a sweep.

use toml::Table;

use super::plan::Schema;
use crate::settings::{Layer, Settings, keys};

/// Settings that leave the outcome as it is; sizes and recipes count by the values they stand for.
const FREE: &[&str] = &["recipe", "model", "threads", "keep", "checkpoint_every", "log_every"];

/// The settings of `termwise train`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrainingSchema;

impl Schema for TrainingSchema {
    fn keys(&self) -> Vec<String> {
        keys::KEYS.iter().filter(|key| key.name != "threads").map(|key| key.name.to_string()).collect()
    }

    fn resolve(&self, asked: &Table) -> std::result::Result<Table, String> {
        let resolve = || Settings::resolve(&[Layer::new(asked.clone(), "the sweep")?]);
        let settings = resolve().map_err(|error| error.to_string())?;
        let mut table = Table::try_from(settings).map_err(|error| error.to_string())?;
        // Each run has its share of the sweep's threads.
        table.remove("threads");
        Ok(table)
    }

    fn decides(&self, key: &str) -> bool {
        !FREE.contains(&key)
    }
}
