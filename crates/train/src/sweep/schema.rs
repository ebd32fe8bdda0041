//! Training settings as the settings of a sweep.

use toml::{Table, Value};

use super::plan::Schema;
use crate::settings::keys::{self, Effect};
use crate::settings::{Layer, Settings};

/// The settings of `termwise train`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrainingSchema;

impl Schema for TrainingSchema {
    fn keys(&self) -> Vec<String> {
        keys::names().filter(|name| *name != "threads").map(str::to_owned).collect()
    }

    fn resolve(&self, requested: &Table) -> std::result::Result<Table, String> {
        let resolve = || Settings::resolve(&[Layer::new(requested.clone(), "the sweep")?]);
        let settings = resolve().map_err(|error| error.to_string())?;
        let mut table = Table::try_from(settings).map_err(|error| error.to_string())?;
        // Each run uses its share of the sweep's threads.
        table.remove("threads");
        Ok(table)
    }

    fn decides(&self, key: &str) -> bool {
        keys::find(key).is_none_or(|key| key.effect != Effect::None)
    }

    /// Multiply-adds of training up to a constant: matrices, the output over a vocabulary of a few hundred, and pairs of positions.
    fn work(&self, settings: &Table) -> f64 {
        let number = |key: &str| settings.get(key).and_then(Value::as_integer).unwrap_or(1) as f64;
        let (hidden, length) = (number("hidden"), number("length"));
        let layer = 4.0 * hidden * hidden + 3.0 * hidden * number("mlp") + hidden * length;
        number("steps") * number("accumulate") * number("batch") * length * (number("layers") * layer + hidden * number("vocab").max(256.0))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sweep::Plan;

    fn parse(text: &str) -> Result<Plan, String> {
        Plan::parse(text, Path::new("sweep.toml"), &TrainingSchema, "held_out.loss").map_err(|error| error.to_string())
    }

    #[test]
    fn run_hashes_depend_only_on_settings_that_affect_results() {
        let hash = |base: &str| parse(&format!("[base]\n{base}")).unwrap_or_else(|error| panic!("{error}")).jobs[0].hash.clone();
        let plain = hash("");
        for base in ["threads = 3", "keep = 9", "log_every = 3", "checkpoint_every = 7", "recipe = \"language\"", "lr = 1e-2", "lr = 0.01"]
        {
            assert_eq!(hash(base), plain, "{base}");
        }
        for base in ["steps = 3", "seed = 9", "lr = 1", "attention = \"norm\"", "eval_every = 7"] {
            assert_ne!(hash(base), plain, "{base}");
        }
    }

    #[test]
    fn settings_of_a_run_are_complete_and_round_trip() {
        let plan = parse("[axes]\nattention = [\"softmax conv=3\", \"norm\"]\nlr = [1e-3]\nseed = [1, 2]")
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(plan.jobs.len(), 4);
        for job in &plan.jobs {
            let settings = Settings::from_toml(&job.settings.to_string(), "a run").unwrap_or_else(|error| panic!("{error}"));
            let mut again = Table::try_from(settings).expect("TOML");
            again.remove("threads");
            assert_eq!(again, job.settings);
        }
    }

    #[test]
    fn mistakes_are_reported() {
        for (text, expected) in [
            ("[axes]\natention = [\"norm\"]", "did you mean `attention`"),
            ("[axes]\nattention = [\"nrom\"]", "nrom"),
            ("[base]\nstepz = 3", "did you mean `steps`"),
            ("[axes]\nlr = [\"fast\"]", "lr"),
            ("[axes]\nthreads = [1]", "axis `threads` is not a setting"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
