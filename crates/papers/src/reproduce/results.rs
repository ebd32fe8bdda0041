//! What was found, as it stands in `results.json`. Paths of runs are relative to its folder.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_train::eval::Evaluation;
use termwise_train::sweep::Statistic;

use super::claim::{Decision, Rule, Verdict};
use super::environment::Environment;
use super::experiment::{Id, Metric, Variant};
use super::inside::Inside;
use super::scale::Scale;
use super::theorem::Theorem;
use crate::Error;

/// Of the layout of the file.
pub const FORMAT: u32 = 1;
/// Its name.
pub const FILE: &str = "results.json";

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`]
    pub format: u32,
    /// How much was spent.
    pub scale: Scale,
    /// Where.
    pub environment: Environment,
    /// For how long.
    pub timing: Timing,
    /// By training.
    pub experiments: Vec<Outcome>,
    /// Inside the softmax models, where E6 was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
    /// By closed forms.
    pub theorems: Vec<Theorem>,
    /// What was asked for and is not among the experiments, and why.
    pub left_out: Vec<LeftOut>,
    /// Every run once.
    pub runs: Vec<Run>,
}

/// How long it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds of this session, from start to results.
    pub seconds: f64,
    /// Seconds of all finished runs, one after the other, in whatever session.
    pub run_seconds: f64,
    /// Runs side by side.
    pub parallel: usize,
    /// Runs in all, shared ones once.
    pub runs: usize,
    /// Finished, in whatever session.
    pub finished: usize,
    /// Failed.
    pub failed: usize,
}

/// An experiment that was asked for and not run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its name.
    pub id: Id,
    /// Why, and what to do.
    pub reason: String,
}

/// One experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Its name.
    pub id: Id,
    /// What was asked.
    pub question: String,
    /// What the paper found.
    pub paper: String,
    /// On each task.
    pub tasks: Vec<TaskOutcome>,
}

/// One experiment on one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskOutcome {
    /// The task's name.
    pub task: String,
    /// What was compared; lower is better.
    pub metric: Metric,
    /// Each variant over its seeds.
    pub variants: Vec<VariantOutcome>,
    /// Each claim.
    pub claims: Vec<ClaimOutcome>,
}

/// One variant over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantOutcome {
    /// Name and attention; the task may have added words.
    #[serde(flatten)]
    pub variant: Variant,
    /// Bytes that decoding keeps at the task's length, all layers and heads, one row.
    pub state_bytes: Option<u64>,
    /// Whether that does not grow with the context.
    pub constant_state: bool,
    /// Of the metric.
    pub metric: Option<Spread>,
    /// Held-out loss on all tokens.
    pub loss: Option<Spread>,
    /// On tokens that can only be recalled.
    pub recall: Option<Spread>,
    /// On the others.
    pub rest: Option<Spread>,
    /// Loss over the best possible.
    pub excess: Option<Spread>,
    /// Its runs by seed, as places in [`Results::runs`].
    pub runs: Vec<usize>,
    /// How many of them failed.
    pub failed: usize,
}

/// A number over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation with n − 1; absent for a single run.
    pub deviation: Option<f64>,
    /// n
    pub count: usize,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub greatest: f64,
}

impl Spread {
    /// Of these numbers; `None` where there are none.
    pub fn of(numbers: &[f64]) -> Option<Spread> {
        let Statistic { mean, deviation, count } = Statistic::of(numbers)?;
        let (least, greatest) = numbers.iter().fold((mean, mean), |(least, greatest), &x| (x.min(least), x.max(greatest)));
        Some(Spread { mean, deviation, count, least, greatest })
    }

    /// Without the extremes.
    pub fn statistic(&self) -> Statistic {
        Statistic { mean: self.mean, deviation: self.deviation, count: self.count }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.deviation {
            Some(deviation) => write!(f, "{:.3} ± {deviation:.3}", self.mean),
            None => write!(f, "{:.3}", self.mean),
        }
    }
}

/// A claim and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClaimOutcome {
    /// What was claimed.
    pub text: String,
    /// How numbers over seeds decide it; absent where it is decided by closed forms.
    pub rule: Option<Rule>,
    /// The rule in words.
    pub stated: String,
    /// What it came to.
    #[serde(flatten)]
    pub decision: Decision,
}

impl ClaimOutcome {
    /// Claim and numbers in one line, without the verdict.
    pub fn with_numbers(&self) -> String {
        let mut text = self.text.clone();
        match (&self.decision.difference, self.decision.margin) {
            (Some(difference), Some(margin)) => {
                let role = if matches!(self.rule, Some(Rule::Equal { .. })) { "allowed" } else { "least" };
                text += &format!(": difference {difference}, {role} {margin:.3} nats");
            }
            (Some(difference), None) => text += &format!(": difference {difference} nats"),
            _ => {}
        }
        match self.decision.note.as_str() {
            "" => text,
            note => format!("{text}: {note}"),
        }
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Of its settings.
    pub hash: String,
    /// Its folder; the settings lie beside it under the same name with `.toml`.
    pub folder: String,
    /// The task's name.
    pub task: String,
    /// The attention in full.
    pub attention: String,
    /// Seed of weights and data.
    pub seed: u64,
    /// `finished`, `failed` or `open`.
    pub status: String,
    /// Why it failed.
    pub note: String,
    /// What it took.
    pub seconds: f64,
    /// The last evaluation.
    pub held_out: Option<Evaluation>,
    /// Held-out loss and loss on recall tokens by step.
    pub curve: Vec<CurvePoint>,
    /// Training loss by step.
    pub train: Vec<(u64, f64)>,
}

/// An evaluation during training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Steps done.
    pub step: u64,
    /// On all tokens.
    pub loss: f64,
    /// On recall tokens.
    pub recall: Option<f64>,
    /// On the others.
    pub rest: Option<f64>,
}

impl Results {
    /// Every claim with its experiment and, where there are several, its task.
    pub fn claims(&self) -> impl Iterator<Item = (Id, Option<&str>, &ClaimOutcome)> {
        let trained = self.experiments.iter().flat_map(|outcome| {
            let several = outcome.tasks.len() > 1;
            let own = outcome.tasks.iter().flat_map(move |task| {
                let name = several.then_some(task.task.as_str());
                task.claims.iter().map(move |claim| (outcome.id, name, claim))
            });
            let inside = self.inside.iter().filter(|_| outcome.id == Id::E6).flat_map(|inside| &inside.claims);
            own.chain(inside.map(|claim| (Id::E6, None, claim)))
        });
        let computed = self.theorems.iter().flat_map(|theorem| theorem.claims.iter().map(move |claim| (theorem.id, None, claim)));
        trained.chain(computed)
    }

    /// Claims of a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.claims().filter(|(_, _, claim)| claim.decision.verdict == verdict).count()
    }

    /// Reads the file of a folder.
    pub fn read(folder: &Path) -> Result<Results, Error> {
        let path = folder.join(FILE);
        let text = std::fs::read_to_string(&path).map_err(termwise_llama::Error::io("read", &path))?;
        let wrong = |problem: String| Error::Sizes(format!("{} is no file of results: {problem}", path.display()));
        let value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        termwise_report::read(value).map_err(|error| wrong(error.to_string()))
    }

    /// Writes the file into a folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(FILE);
        let written = write_whole(&path, termwise_report::to_json(self).as_bytes());
        Ok(written.map_err(|error| termwise_llama::Error::io(error.action, error.path)(error.source))?)
    }
}
