//! Results, as stored in `results.json`. Paths of runs are relative to its folder.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_train::eval::Evaluation;
use termwise_train::provenance::{self, Provenance};
use termwise_train::sweep::Statistic;

use super::claim::{self, Decision, Rule, Side, Verdict};
use super::declaration::Declaration;
use super::environment::Environment;
use super::experiment::{Id, Metric, Variant};
use super::inside::Inside;
use super::interval::Numbers;
use super::recall::RunSlices;
use super::scale::Scale;
use super::theorem::Theorem;
use crate::Error;

/// Version of the file format.
pub const FORMAT: u32 = 2;
/// Name of the file.
pub const FILE: &str = "results.json";

/// All results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`]
    pub format: u32,
    /// A note about the file itself, for example that numbers were rounded; usually empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// The compute budget.
    pub scale: Scale,
    /// Build, machine and command.
    pub environment: Environment,
    /// Duration and number of runs.
    pub timing: Timing,
    /// When the claims of each experiment were fixed; empty in files of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declarations: Vec<Declaration>,
    /// Experiments that train models.
    pub experiments: Vec<Outcome>,
    /// Term spectra of the softmax models, if E6 was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
    /// Experiments in closed form.
    pub theorems: Vec<Theorem>,
    /// Requested experiments that are left out.
    pub left_out: Vec<LeftOut>,
    /// At scale text: loss on associative-recall hits and by position, of some runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recall: Vec<RunSlices>,
    /// Training tokens per run, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// All runs, each once.
    pub runs: Vec<Run>,
}

/// Duration and number of runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds of this session, from start to results.
    pub seconds: f64,
    /// Sum of the seconds of all finished runs, over all sessions.
    pub run_seconds: f64,
    /// Concurrent runs.
    pub parallel: usize,
    /// Number of runs; shared runs count once.
    pub runs: usize,
    /// Finished runs, over all sessions.
    pub finished: usize,
    /// Failed runs.
    pub failed: usize,
}

/// A requested experiment that was not run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The experiment.
    pub id: Id,
    /// The reason, and an alternative.
    pub reason: String,
}

/// One experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The experiment.
    pub id: Id,
    /// The question.
    pub question: String,
    /// The result of the paper.
    pub paper: String,
    /// Results per task.
    pub tasks: Vec<TaskOutcome>,
}

/// One experiment on one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskOutcome {
    /// The task's name.
    pub task: String,
    /// The compared metric; lower is better.
    pub metric: Metric,
    /// Whether learning rates were chosen on held-out data that the comparison does not use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub separate_tuning: bool,
    /// Results per variant.
    pub variants: Vec<VariantOutcome>,
    /// The claims.
    pub claims: Vec<ClaimOutcome>,
}

/// One variant over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantOutcome {
    /// Name and attention, without the words that the task adds.
    #[serde(flatten)]
    pub variant: Variant,
    /// Bytes of recurrent state or KV cache per sequence at the task's length, over all layers and heads.
    pub state_bytes: Option<u64>,
    /// Values of the formula in them, without padding to whole vectors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_numbers: Option<u64>,
    /// Whether they are independent of the context.
    pub constant_state: bool,
    /// The metric by seed, of the runs that finished. It decides the claims.
    #[serde(default)]
    pub numbers: Numbers,
    /// Summary of these numbers.
    pub metric: Option<Summary>,
    /// Held-out loss on all tokens.
    pub loss: Option<Summary>,
    /// Held-out loss on recall tokens.
    pub recall: Option<Summary>,
    /// Held-out loss on the other tokens.
    pub rest: Option<Summary>,
    /// Loss minus the entropy of the data.
    pub excess: Option<Summary>,
    /// Held-out loss within the training length, if evaluation is longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Summary>,
    /// Held-out loss beyond the training length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<Summary>,
    /// The chosen learning rate, if it is tuned per variant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Its tuning runs by learning rate, as indices into [`Results::runs`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tuning: Vec<usize>,
    /// Its runs by seed, as indices into [`Results::runs`].
    pub runs: Vec<usize>,
    /// Number of failed runs.
    pub failed: usize,
}

/// A metric over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Standard deviation with n − 1; absent for a single run.
    pub deviation: Option<f64>,
    /// Number of runs, n.
    pub count: usize,
    /// Minimum; absent in files that have only mean and deviation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// Maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greatest: Option<f64>,
}

impl Summary {
    /// The summary of these numbers; `None` if there are none.
    pub fn of(numbers: &[f64]) -> Option<Summary> {
        let Statistic { mean, deviation, count } = Statistic::of(numbers)?;
        let (least, greatest) = numbers.iter().fold((mean, mean), |(least, greatest), &x| (x.min(least), x.max(greatest)));
        Some(Summary { mean, deviation, count, least: Some(least), greatest: Some(greatest) })
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.deviation {
            Some(deviation) => write!(f, "{:.3} ± {deviation:.3}", self.mean),
            None => write!(f, "{:.3}", self.mean),
        }
    }
}

/// A claim and its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClaimOutcome {
    /// The claim.
    pub text: String,
    /// The rule over seeds; absent for claims in closed form.
    pub rule: Option<Rule>,
    /// The rule in words.
    pub stated: String,
    /// Other experiments with the same rule on the same runs; the claim is counted once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Id>,
    /// The decision.
    #[serde(flatten)]
    pub decision: Decision,
}

impl ClaimOutcome {
    /// Claim and numbers in one line, without the verdict.
    pub fn with_numbers(&self) -> String {
        let mut text = self.text.clone();
        if let (Some(rule), Some(difference)) = (&self.rule, &self.decision.difference) {
            text += &format!(": {} = {difference}", rule.compared());
            match self.decision.margin {
                Some(margin) if matches!(rule, Rule::Equal { .. }) => text += &format!(", margin ±{margin:.3}"),
                None if matches!(rule, Rule::Equal { .. }) => {}
                _ => text += &format!(", larger standard deviation {:.3}", difference.deviation),
            }
        }
        if !self.decision.note.is_empty() {
            text += &format!(": {}", self.decision.note);
        }
        match (self.decision.corrected, self.decision.p) {
            (Some(corrected), Some(p)) if p < 1.0 => text + &format!(" (p = {p:.2e}; with Holm's correction {})", corrected.name()),
            _ => text,
        }
    }

    /// The rule, and the other experiments with this claim.
    pub fn with_rule(&self) -> String {
        let also: Vec<String> = self.also.iter().map(|id| id.name().to_uppercase()).collect();
        let shared = if also.is_empty() { String::new() } else { format!(" Also a claim of {}, counted once.", also.join(" and ")) };
        format!("Rule: {}.{shared}", self.stated)
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Hash of its settings.
    pub hash: String,
    /// Its folder. The settings are next to it, with the extension `.toml`.
    pub folder: String,
    /// The task's name.
    pub task: String,
    /// The attention in full.
    pub attention: String,
    /// Seed of weights and data.
    pub seed: u64,
    /// Learning rate, if it is tuned per variant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Whether it is a tuning run, which decides no claim and may fail.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tuning: bool,
    /// `finished`, `failed` or `open`.
    pub status: String,
    /// The reason of a failure.
    pub note: String,
    /// Duration.
    pub seconds: f64,
    /// The builds that made it; empty if unknown.
    #[serde(default)]
    pub provenance: Vec<Provenance>,
    /// The last evaluation, for a finished run at its last step; absent if it is not finite.
    pub held_out: Option<Evaluation>,
    /// Held-out loss and loss on recall tokens by step.
    pub curve: Vec<CurvePoint>,
    /// Training loss by step.
    pub train: Vec<(u64, f64)>,
}

/// An evaluation during training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Completed steps.
    pub step: u64,
    /// Loss on all tokens.
    pub loss: f64,
    /// Loss on recall tokens.
    pub recall: Option<f64>,
    /// Loss on the other tokens.
    pub rest: Option<f64>,
    /// Loss beyond the training length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<f64>,
    /// Accuracy, for tasks with scored answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

impl Run {
    /// Its seed and metric, if it finished.
    pub fn number(&self, metric: Metric) -> Option<(u64, f64)> {
        let found = self.held_out.filter(|_| self.status == "finished")?;
        Some((self.seed, metric.of(&found).filter(|number| number.is_finite())?))
    }
}

/// Whether two claims have the same rule on the same task.
fn same(one: &(Id, Option<&str>, &ClaimOutcome), other: &(Id, Option<&str>, &ClaimOutcome)) -> bool {
    std::ptr::eq(one.2, other.2) || one.2.rule.is_some() && (one.1, &one.2.rule) == (other.1, &other.2.rule)
}

impl Results {
    /// Every claim of every experiment with its task; shared claims are repeated.
    pub fn claims(&self) -> impl Iterator<Item = (Id, Option<&str>, &ClaimOutcome)> {
        let trained = self.experiments.iter().flat_map(|outcome| {
            let own = outcome.tasks.iter().flat_map(|task| task.claims.iter().map(|claim| (outcome.id, Some(task.task.as_str()), claim)));
            let inside = self.inside.iter().filter(|_| outcome.id == Id::E6).flat_map(|inside| &inside.claims);
            own.chain(inside.map(|claim| (Id::E6, None, claim)))
        });
        let computed = self.theorems.iter().flat_map(|theorem| theorem.claims.iter().map(move |claim| (theorem.id, None, claim)));
        trained.chain(computed)
    }

    /// Every claim once: claims with the same rule and task have the same runs.
    pub fn distinct(&self) -> Vec<(Id, Option<&str>, &ClaimOutcome)> {
        let mut once: Vec<(Id, Option<&str>, &ClaimOutcome)> = Vec::new();
        for found in self.claims() {
            if !once.iter().any(|other| same(other, &found)) {
                once.push(found);
            }
        }
        once
    }

    /// The builds of finished runs, each with its number of runs.
    pub fn builds(&self) -> Vec<(String, usize)> {
        let mut builds: Vec<(String, usize)> = Vec::new();
        for run in self.runs.iter().filter(|run| run.status == "finished") {
            let name = provenance::names(&run.provenance);
            match builds.iter_mut().find(|(other, _)| *other == name) {
                Some((_, count)) => *count += 1,
                None => builds.push((name, 1)),
            }
        }
        builds
    }

    /// Notes on the builds of these results, one line each.
    pub fn notes(&self) -> Vec<&'static str> {
        let debug = self.environment.debug.then_some("note: this is a debug build; a release build is faster");
        let several = "warning: the runs were made by several builds; --rerun-other-builds reruns those of other builds";
        debug.into_iter().chain((self.builds().len() > 1).then_some(several)).collect()
    }

    /// Whether every run has ended and all runs that decide claims have finished. A tuning run may fail if its learning rate is too high.
    pub fn is_complete(&self) -> bool {
        let ended = |run: &Run| run.status == "finished" || run.tuning && run.status == "failed";
        let compared = |outcome: &VariantOutcome| !outcome.runs.is_empty();
        let tasks = self.experiments.iter().flat_map(|outcome| &outcome.tasks);
        self.runs.iter().all(ended) && tasks.flat_map(|task| &task.variants).all(compared)
    }

    /// Number of distinct claims with a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.distinct().iter().filter(|(_, _, claim)| claim.decision.verdict == verdict).count()
    }

    /// The same with Holm's correction within each experiment.
    pub fn count_corrected(&self, verdict: Verdict) -> usize {
        let of = |claim: &ClaimOutcome| claim.decision.corrected.unwrap_or(claim.decision.verdict);
        self.distinct().iter().filter(|(_, _, claim)| of(claim) == verdict).count()
    }

    /// The same results with the verdicts of this version's rules.
    pub fn decided(&self) -> Results {
        let mut results = self.clone();
        results.decide();
        results
    }

    /// Decides every claim over seeds by its rule, and records the experiments that share it.
    pub fn decide(&mut self) {
        for task in self.experiments.iter_mut().flat_map(|outcome| &mut outcome.tasks) {
            for outcome in &mut task.variants {
                if outcome.numbers.is_empty() {
                    outcome.numbers = outcome.runs.iter().filter_map(|&run| self.runs.get(run)?.number(task.metric)).collect();
                }
                let numbers: Vec<f64> = outcome.numbers.iter().map(|&(_, number)| number).collect();
                outcome.metric = Summary::of(&numbers);
            }
            let (variants, runs) = (&task.variants, &self.runs);
            let side = |name: &str| {
                let Some(found) = variants.iter().find(|outcome| outcome.variant.name == name) else { return Side::default() };
                let numbers = found.numbers.clone();
                let failed = |run: &&Run| run.status != "open" && !numbers.iter().any(|(seed, _)| *seed == run.seed);
                let reason = |run: &Run| if run.note.is_empty() { "no finite metric at its last step".into() } else { run.note.clone() };
                let failed = found.runs.iter().filter_map(|&run| runs.get(run)).filter(failed).map(|run| (run.seed, reason(run))).collect();
                Side { declared: found.runs.len(), numbers, failed }
            };
            for claim in &mut task.claims {
                if let Some(rule) = &claim.rule {
                    (claim.stated, claim.decision) = (rule.describe(), rule.decide(&side));
                }
            }
        }
        for outcome in &mut self.experiments {
            let tested = outcome.tasks.iter_mut().flat_map(|task| &mut task.claims).filter(|claim| claim.rule.is_some());
            claim::correct(&mut tested.map(|claim| &mut claim.decision).collect::<Vec<_>>());
        }
        let others = |found: &(Id, Option<&str>, &ClaimOutcome)| {
            self.claims().filter(|other| same(other, found) && other.0 != found.0).map(|(id, _, _)| id).collect::<Vec<Id>>()
        };
        let mut shared = self.claims().map(|found| others(&found)).collect::<Vec<_>>().into_iter();
        for outcome in &mut self.experiments {
            let inside = self.inside.iter_mut().filter(|_| outcome.id == Id::E6).flat_map(|inside| &mut inside.claims);
            let claims = outcome.tasks.iter_mut().flat_map(|task| &mut task.claims).chain(inside);
            claims.zip(&mut shared).for_each(|(claim, also)| claim.also = also);
        }
    }

    /// Reads a results file, or that of a folder, and decides its claims by the rules of this version: earlier versions pooled variances.
    pub fn read(path: &Path) -> Result<Results, Error> {
        let path = if path.is_dir() { path.join(FILE) } else { path.to_owned() };
        let text = std::fs::read_to_string(&path).map_err(termwise_model::Error::io("read", &path))?;
        let wrong = |error: serde_json::Error| Error::Sizes(format!("{} is not a results file: {error}", path.display()));
        let mut value: serde_json::Value = serde_json::from_str(&text).map_err(wrong)?;
        let format = value["format"].as_u64();
        if format.is_none_or(|format| format > FORMAT.into()) {
            let found = format.map_or("no format".into(), |format| format!("format {format}"));
            return Err(Error::Sizes(format!(
                "{} has {found}, this program reads up to {FORMAT}; a newer termwise may have made it",
                path.display()
            )));
        }
        if format == Some(1) {
            // Differences have other fields in this format and are recomputed.
            let tasks = value["experiments"].as_array_mut().into_iter().flatten().flat_map(|outcome| outcome["tasks"].as_array_mut());
            let claims = tasks.flatten().flat_map(|task| task["claims"].as_array_mut()).flatten();
            claims.for_each(|claim| claim["difference"] = serde_json::Value::Null);
            value["format"] = FORMAT.into();
        }
        let mut results: Results = serde_json::from_value(value).map_err(wrong)?;
        results.decide();
        Ok(results)
    }

    /// Writes the file to a folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(FILE);
        let written = write_whole(&path, termwise_report::to_json(self, Some(&self.environment.provenance)).as_bytes());
        Ok(written.map_err(|error| termwise_model::Error::io(error.action, error.path)(error.source))?)
    }
}
