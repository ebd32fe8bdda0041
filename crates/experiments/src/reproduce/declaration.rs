//! `claims.json`: the claims, rules, seeds and settings of each experiment, written before the first run.
//!
//! The file is append-only. An experiment whose declaration differs from the recorded one gets a further entry, with the number of runs that had
//! ended by then, so the report can state which rules were fixed in advance.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use termwise_base::files::write_whole;
use termwise_train::sweep;

use super::experiment::{Experiment, Id, TUNING_SEED};
use crate::Error;

/// Name of the file.
pub const FILE: &str = "claims.json";

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Declarations {
    declarations: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    experiment: Id,
    /// Of `declared`.
    hash: String,
    ended_before: usize,
    declared: Value,
}

/// When the claims, rules, seeds and settings of an experiment were fixed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Declaration {
    /// The experiment.
    pub experiment: Id,
    /// blake3 hash of its claims, rules, seeds and settings.
    pub hash: String,
    /// Runs in the folder that had ended when they were written.
    pub ended_before: usize,
    /// Whether an earlier declaration of this experiment in the folder differs.
    pub changed: bool,
}

impl Declaration {
    /// Whether they were written before the first run of the folder had ended.
    pub fn is_in_advance(&self) -> bool {
        self.ended_before == 0
    }
}

/// Records the experiments in the file of a folder, unless it has them already.
///
/// # Errors
/// If the file cannot be read or written, or an entry does not match its hash.
pub fn record(experiments: &[Experiment], seeds: usize, folder: &Path) -> Result<Vec<Declaration>, Error> {
    let path = folder.join(FILE);
    let _alone = sweep::writing_alone(folder);
    let refuse = |problem: String| Error::Sizes(format!("{}: {problem}; remove the file to record the claims again", path.display()));
    let mut file: Declarations = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Declarations::default(),
        found => {
            let bytes = found.map_err(termwise_model::Error::io("read", &path))?;
            serde_json::from_slice(&bytes).map_err(|error| refuse(format!("not a file of claims ({error})")))?
        }
    };
    if let Some(entry) = file.declarations.iter().find(|entry| entry.hash != hash(&entry.declared)) {
        return Err(refuse(format!("the hash of {} does not match its claims, so the file was edited", entry.experiment.name())));
    }
    let (known, ended) = (file.declarations.len(), ended_runs(folder));
    let mut found = Vec::new();
    for experiment in experiments {
        let declared = declared(experiment, seeds);
        let hash = hash(&declared);
        let of_this = |entry: &&Entry| entry.experiment == experiment.id;
        let changed = file.declarations.iter().filter(of_this).any(|entry| entry.hash != hash);
        let ended_before = match file.declarations.iter().filter(of_this).find(|entry| entry.hash == hash) {
            Some(entry) => entry.ended_before,
            None => {
                file.declarations.push(Entry { experiment: experiment.id, hash: hash.clone(), ended_before: ended, declared });
                ended
            }
        };
        found.push(Declaration { experiment: experiment.id, hash, ended_before, changed });
    }
    if file.declarations.len() > known {
        let text = serde_json::to_string_pretty(&file).expect("claims are numbers and text") + "\n";
        write_whole(&path, text.as_bytes()).map_err(|error| termwise_model::Error::io(error.action, error.path)(error.source))?;
    }
    Ok(found)
}

/// Keys of objects are sorted, so equal declarations have equal bytes.
fn hash(declared: &Value) -> String {
    blake3::hash(declared.to_string().as_bytes()).to_hex().to_string()
}

fn declared(experiment: &Experiment, seeds: usize) -> Value {
    let tasks = experiment.tasks.iter().map(|task| {
        json!({
            "name": task.name,
            "metric": task.metric,
            "settings": task.base,
            "words": task.words,
            "learning_rates": task.rates,
            "tuning_settings": task.tuning,
            "tuning_seed": (!task.rates.is_empty()).then_some(TUNING_SEED),
        })
    });
    let claims = experiment.claims.iter().map(|claim| json!({ "text": claim.text, "rule": claim.rule, "stated": claim.rule.describe() }));
    json!({
        "experiment": experiment.id,
        "seeds": (1..=seeds).collect::<Vec<_>>(),
        "variants": experiment.variants,
        "tasks": tasks.collect::<Vec<_>>(),
        "claims": claims.collect::<Vec<_>>(),
    })
}

/// Records of runs in the folder, of any experiment: their results may have been seen.
fn ended_runs(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder.join("runs")).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json")).count()
}
