//! Settings of a run: flags and a TOML file with the same keys (see [`keys::KEYS`]).
//!
//! Settings have priorities: defaults, then files, then flags. A layer that names a `recipe` or a `model` includes the settings
//! of that preset, which its own keys override. The result contains every value, so a run's `settings.toml` means the same in any later
//! version.

mod check;
mod compare;
pub mod keys;
mod layer;
mod model;
pub mod presets;

use std::fmt;

use toml::{Table, Value};

pub use self::compare::Difference;
pub use self::keys::Settings;
pub use self::layer::Layer;
use crate::AdamWConfig;
use crate::error::{Error, Result};
use crate::schedule::Schedule;
use crate::step::Cut;
use termwise_data::Builtin;

impl Settings {
    /// Merges these layers over the defaults; later layers override earlier ones. The recipe `language` is added if the layers
    /// name no data, no model to start from and no recipe. The settings of a synthetic task are added if the layers name it and no recipe.
    /// The result is valid.
    pub fn resolve(layers: &[Layer]) -> Result<Settings> {
        let recipe = |name: &str| Layer::new(Table::from_iter([("recipe".to_owned(), Value::from(name))]), "the defaults");
        let mut table = recipe("default")?.table;
        let given = |key: &str| layers.iter().rev().find_map(|layer| layer.table.get(key));
        let builtin = given("data").is_none_or(|data| *data == Value::from(vec!["builtin"]));
        if builtin && given("recipe").is_none() && given("from").is_none() {
            table.extend(recipe("language")?.table);
        }
        if let (Some([Value::String(task)]), true) = (given("data").and_then(Value::as_array).map(Vec::as_slice), given("recipe").is_none())
        {
            table.extend(Builtin::settings(task).parse::<Table>().expect("settings of tasks are valid TOML; a test resolves each"));
        }
        for layer in layers {
            table.extend(layer.table.clone());
        }
        let place = layers.last().map_or("", |layer| layer.place.as_str());
        let mut settings: Settings =
            Value::Table(table).try_into().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        settings.fill();
        settings.validate()?;
        if settings.starts_elsewhere(layers) {
            settings.config(settings.vocab.max(1))?;
        }
        Ok(settings)
    }

    /// Whether these layers name a new model to start from. A saved run only records its own.
    fn starts_elsewhere(&self, layers: &[Layer]) -> bool {
        let requested = layers.iter().rev().find(|layer| layer.table.contains_key("from"));
        !self.from.is_empty() && requested.is_some_and(|layer| !layer.of_run)
    }

    /// The settings in a TOML string; missing keys have their defaults.
    pub fn from_toml(text: &str, place: &str) -> Result<Settings> {
        Settings::resolve(&[Layer::parse(text, place)?])
    }

    /// The settings of a checkpoint.
    pub(crate) fn from_checkpoint(text: &str, place: &str) -> Result<Settings> {
        Settings::resolve(&[Layer::of_run(text, place)?])
    }

    /// Replaces zeros that mean "same as another setting", so later changes of that setting have no effect.
    fn fill(&mut self) {
        if self.kv_heads == 0 {
            self.kv_heads = self.heads;
        }
        if self.head_dim == 0 && self.heads > 0 {
            self.head_dim = self.hidden / self.heads;
        }
        if self.horizon == 0 {
            self.horizon = self.steps;
        }
    }

    /// Restores zeros that mean "same as another setting", for a file that will be edited: a change of the number of steps then also
    /// changes the horizon.
    #[must_use]
    pub fn with_zeros(mut self, layers: &[Layer]) -> Settings {
        let given = |key: &str| layers.iter().rev().find_map(|layer| layer.table.get(key)).and_then(Value::as_integer).unwrap_or(0);
        if given("kv_heads") == 0 {
            self.kv_heads = 0;
        }
        if given("head_dim") == 0 {
            self.head_dim = 0;
        }
        if given("horizon") == 0 {
            self.horizon = 0;
        }
        self
    }

    /// The split of a step into micro-batches.
    pub fn cut(&self) -> Cut {
        let &Settings { batch, length, accumulate, micro_batches, .. } = self;
        Cut { batch, length, accumulate, micro_batches }
    }

    /// Default number of micro-batches for several ranks: 8, so that 1, 2, 4 and 8 ranks have equal shares and identical
    /// results. It is smaller if the rows are not divisible, and larger for more ranks.
    pub fn micro_batches_for(&self, ranks: usize) -> usize {
        let even = |&micro_batches: &usize| Cut { micro_batches, ..self.cut() }.is_even();
        let most = ranks.next_power_of_two().max(8);
        let power = (0..=most.ilog2()).rev().map(|exponent| 1 << exponent).find(even).unwrap_or(1);
        let rows = self.batch.saturating_mul(self.accumulate);
        if power >= ranks { power } else { (ranks..=rows.min(1 << 16)).find(even).unwrap_or(power) }
    }

    /// The learning rate schedule.
    pub fn schedule(&self) -> Schedule {
        Schedule { peak: self.lr, warmup: self.warmup, decay: self.decay, horizon: self.horizon, last: self.final_lr }
    }

    /// The optimizer hyperparameters.
    pub fn adamw(&self) -> AdamWConfig {
        let Settings { beta1, beta2, adam_eps: eps, weight_decay, decay_matrices_only, .. } = *self;
        AdamWConfig { beta1, beta2, eps, weight_decay, decay_matrices_only }
    }

    fn table(&self) -> Table {
        Table::try_from(self).expect("settings contain only values that TOML can represent")
    }

    /// Every setting, with headings; [`Settings::from_toml`] parses it.
    pub fn to_toml(&self) -> String {
        let table = self.table();
        let mut text = String::new();
        for key in keys::KEYS {
            if let Some(value) = table.get(key.name) {
                text += &format!("# {}\n{} = {value}\n", key.help, key.name);
            }
        }
        text
    }
}

fn bad(key: &str, found: impl fmt::Display, expected: String) -> Error {
    Error::Setting { place: String::new(), key: key.into(), found: found.to_string(), expected }
}
