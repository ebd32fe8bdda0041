//! What was found, as it stands in `results.json`. Paths of runs are relative to its folder.

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

/// Of the layout of the file.
pub const FORMAT: u32 = 2;
/// Its name.
pub const FILE: &str = "results.json";

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`]
    pub format: u32,
    /// What a reader must know about the file itself, such as that numbers were rounded; usually empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// How much was spent.
    pub scale: Scale,
    /// Where.
    pub environment: Environment,
    /// For how long.
    pub timing: Timing,
    /// When the claims of the experiments were fixed; empty in files of earlier versions, which do not record it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declarations: Vec<Declaration>,
    /// By training.
    pub experiments: Vec<Outcome>,
    /// Inside the softmax models, where E6 was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
    /// By closed forms.
    pub theorems: Vec<Theorem>,
    /// What was asked for and is not among the experiments, and why.
    pub left_out: Vec<LeftOut>,
    /// At scale text: loss on associative-recall hits and by position, of some runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recall: Vec<RunSlices>,
    /// Training tokens per run, where a number was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
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
    /// Whether learning rates were chosen on other held-out data than those that variants are compared on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub separate_tuning: bool,
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
    /// Numbers of the formula in them, without what rounding up to whole vectors adds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_numbers: Option<u64>,
    /// Whether that does not grow with the context.
    pub constant_state: bool,
    /// The metric by seed, of the runs that finished: what claims are decided by.
    #[serde(default)]
    pub numbers: Numbers,
    /// Of these numbers.
    pub metric: Option<Summary>,
    /// Held-out loss on all tokens.
    pub loss: Option<Summary>,
    /// On tokens that can only be recalled.
    pub recall: Option<Summary>,
    /// On the others.
    pub rest: Option<Summary>,
    /// Loss over the best possible.
    pub excess: Option<Summary>,
    /// Held-out loss on positions that rows of training have, where rows of evaluations are longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Summary>,
    /// On positions beyond them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<Summary>,
    /// The learning rate that is best for it, where each variant has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// The runs that chose it, by rate, as places in [`Results::runs`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tuning: Vec<usize>,
    /// Its runs by seed, as places in [`Results::runs`].
    pub runs: Vec<usize>,
    /// How many of them failed.
    pub failed: usize,
}

/// A number over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Standard deviation with n − 1; absent for a single run.
    pub deviation: Option<f64>,
    /// n
    pub count: usize,
    /// The smallest; absent where only mean and deviation are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// The largest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greatest: Option<f64>,
}

impl Summary {
    /// Of these numbers; `None` where there are none.
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

/// A claim and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClaimOutcome {
    /// What was claimed.
    pub text: String,
    /// How numbers over seeds decide it; absent where it is decided by closed forms.
    pub rule: Option<Rule>,
    /// The rule in words.
    pub stated: String,
    /// Other experiments that make the same claim by the same rule and runs, maybe in other words; it is counted once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Id>,
    /// What it came to.
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

    /// The rule, and which other experiments make the claim.
    pub fn with_rule(&self) -> String {
        let also: Vec<String> = self.also.iter().map(|id| id.name().to_uppercase()).collect();
        let shared = if also.is_empty() { String::new() } else { format!(" Also a claim of {}, counted once.", also.join(" and ")) };
        format!("Rule: {}.{shared}", self.stated)
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
    /// Learning rate, where variants have their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Whether it is there to choose a learning rate: no claim is decided by it, and it may fail.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tuning: bool,
    /// `finished`, `failed` or `open`.
    pub status: String,
    /// Why it failed.
    pub note: String,
    /// What it took.
    pub seconds: f64,
    /// Which builds made it; empty where that is not known.
    #[serde(default)]
    pub provenance: Vec<Provenance>,
    /// The last evaluation, of a finished run that at its last step; absent if it was not finite.
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
    /// Beyond the length of training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<f64>,
    /// Share of right answers, where the data is a task with answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

impl Run {
    /// Its seed and its number, if it finished.
    pub fn number(&self, metric: Metric) -> Option<(u64, f64)> {
        let found = self.held_out.filter(|_| self.status == "finished")?;
        Some((self.seed, metric.of(&found).filter(|number| number.is_finite())?))
    }
}

/// Whether two claims are one.
fn same(one: &(Id, Option<&str>, &ClaimOutcome), other: &(Id, Option<&str>, &ClaimOutcome)) -> bool {
    std::ptr::eq(one.2, other.2) || one.2.rule.is_some() && (one.1, &one.2.rule) == (other.1, &other.2.rule)
}

impl Results {
    /// Every claim of every experiment, with its task where there is one; shared ones as often as they are made.
    pub fn claims(&self) -> impl Iterator<Item = (Id, Option<&str>, &ClaimOutcome)> {
        let trained = self.experiments.iter().flat_map(|outcome| {
            let own = outcome.tasks.iter().flat_map(|task| task.claims.iter().map(|claim| (outcome.id, Some(task.task.as_str()), claim)));
            let inside = self.inside.iter().filter(|_| outcome.id == Id::E6).flat_map(|inside| &inside.claims);
            own.chain(inside.map(|claim| (Id::E6, None, claim)))
        });
        let computed = self.theorems.iter().flat_map(|theorem| theorem.claims.iter().map(move |claim| (theorem.id, None, claim)));
        trained.chain(computed)
    }

    /// Every claim once: two claims are one where rule and task are the same, since then their runs are.
    pub fn distinct(&self) -> Vec<(Id, Option<&str>, &ClaimOutcome)> {
        let mut once: Vec<(Id, Option<&str>, &ClaimOutcome)> = Vec::new();
        for found in self.claims() {
            if !once.iter().any(|other| same(other, &found)) {
                once.push(found);
            }
        }
        once
    }

    /// Builds whose finished runs are among these, each with how many; several are a mixture.
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

    /// Whether every run has ended, and all that claims are decided by have finished. A learning rate may be too high for a variant.
    pub fn is_complete(&self) -> bool {
        let ended = |run: &Run| run.status == "finished" || run.tuning && run.status == "failed";
        let compared = |outcome: &VariantOutcome| !outcome.runs.is_empty();
        let tasks = self.experiments.iter().flat_map(|outcome| &outcome.tasks);
        self.runs.iter().all(ended) && tasks.flat_map(|task| &task.variants).all(compared)
    }

    /// Claims of a verdict, each once.
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

    /// Decides every claim over seeds by its rule, and notes which experiments share it.
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

    /// Reads a file of results, or that of a folder, and decides its claims by the rules of this program: those of earlier ones pooled
    /// variances.
    pub fn read(path: &Path) -> Result<Results, Error> {
        let path = if path.is_dir() { path.join(FILE) } else { path.to_owned() };
        let text = std::fs::read_to_string(&path).map_err(termwise_model::Error::io("read", &path))?;
        let wrong = |error: serde_json::Error| Error::Sizes(format!("{} is no file of results: {error}", path.display()));
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
            // Differences have other fields there, and are computed anew.
            let tasks = value["experiments"].as_array_mut().into_iter().flatten().flat_map(|outcome| outcome["tasks"].as_array_mut());
            let claims = tasks.flatten().flat_map(|task| task["claims"].as_array_mut()).flatten();
            claims.for_each(|claim| claim["difference"] = serde_json::Value::Null);
            value["format"] = FORMAT.into();
        }
        let mut results: Results = serde_json::from_value(value).map_err(wrong)?;
        results.decide();
        Ok(results)
    }

    /// Writes the file into a folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(FILE);
        let written = write_whole(&path, termwise_report::to_json(self, Some(&self.environment.provenance)).as_bytes());
        Ok(written.map_err(|error| termwise_model::Error::io(error.action, error.path)(error.source))?)
    }
}
