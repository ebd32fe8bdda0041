//! From run folders to results.

use std::path::Path;

use termwise_train::eval::{Evaluation, Part};
use termwise_train::metrics::{self, LastEvaluation, Line};
use termwise_train::sweep::{Job, State, Status};

use super::claim::{Claim, Decision};
use super::experiment::{Experiment, TUNING_SEED, Task, Variant};
use super::results::{ClaimOutcome, CurvePoint, Outcome, Run, Summary, TaskOutcome, VariantOutcome};
use super::schedule::Schedule;
use termwise_analysis::plan;

use crate::Error;

/// Every run of the schedule, as stored in the folder.
pub fn runs(schedule: &Schedule, states: &[State], folder: &Path) -> Result<Vec<Run>, Error> {
    schedule.plan.jobs.iter().zip(states).map(|(job, state)| run(job, state, folder)).collect()
}

fn run(job: &Job, state: &State, folder: &Path) -> Result<Run, Error> {
    let text = |index: usize| job.point.get(index).and_then(toml::Value::as_str).unwrap_or_default().to_owned();
    let (status, note, seconds) = match state {
        State::Ended(record) => match &record.status {
            Status::Finished { .. } => ("finished", String::new(), record.seconds),
            Status::Failed { reason } => ("failed", reason.clone(), record.seconds),
        },
        State::Open | State::Equal(_) => ("open", String::new(), 0.0),
    };
    let mut run = Run {
        hash: job.hash.clone(),
        // Not the system's separator, because reports and other machines read the path.
        folder: format!("runs/{}", job.hash),
        task: text(0),
        attention: job.settings.get("attention").and_then(toml::Value::as_str).unwrap_or_default().to_owned(),
        seed: seed(job),
        rate: job.point.get(2).and_then(toml::Value::as_float),
        tuning: job.point.get(2).is_some_and(toml::Value::is_float) && seed(job) == TUNING_SEED as u64,
        status: status.into(),
        note,
        seconds,
        provenance: if let State::Ended(record) = state { record.provenance.clone() } else { Vec::new() },
        held_out: None,
        curve: Vec::new(),
        train: Vec::new(),
    };
    let (_, last) = read_metrics(&job.path(folder, ""), &mut run)?;
    if run.status == "finished" {
        // The evaluation at the declared last step decides; an earlier one never replaces it.
        let steps = job.settings.get("steps").and_then(toml::Value::as_integer).unwrap_or(0).max(0) as u64;
        match last.at(steps) {
            Ok(evaluation) => run.held_out = Some(evaluation),
            Err(reason) => (run.status, run.note, run.held_out) = ("failed".into(), reason, None),
        }
    }
    Ok(run)
}

/// Reads the metrics of a run's folder, if there are any. Returns the last step and the last evaluation.
pub fn read_metrics(folder: &Path, run: &mut Run) -> Result<(u64, LastEvaluation), Error> {
    let lines = if folder.join(metrics::METRICS).is_file() { metrics::read(folder)? } else { Vec::new() };
    let last = lines.iter().fold(LastEvaluation::Missing, LastEvaluation::after);
    let step = lines.last().map_or(0, Line::step);
    for line in lines {
        match line {
            Line::Train(train) => run.train.push((train.step, train.loss)),
            Line::HeldOut { step, evaluation: Some(evaluation), .. } => {
                let part = |part: Option<Part>| part.map(|part| part.loss);
                let (recall, rest, beyond) = (part(evaluation.recall), part(evaluation.rest), part(evaluation.beyond));
                run.curve.push(CurvePoint { step, loss: evaluation.loss, recall, rest, beyond, accuracy: evaluation.accuracy });
            }
            Line::HeldOut { evaluation: None, .. } => {}
        }
    }
    run.held_out = if let LastEvaluation::Finite(_, evaluation) = last { Some(evaluation) } else { None };
    Ok((step, last))
}

/// The outcome of an experiment, from its finished runs. [`super::Results::decide`] decides its claims.
pub fn outcome(index: usize, experiment: &Experiment, schedule: &Schedule, runs: &[Run]) -> Result<Outcome, Error> {
    let tasks = experiment.tasks.iter().enumerate().map(|(t, task)| {
        let variants = experiment.variants.iter().enumerate().map(|(v, variant)| {
            let jobs: Vec<usize> = schedule.of(index, t, v).map(|place| place.job).collect();
            let mut outcome = variant_outcome(task, variant, &jobs, schedule, runs)?;
            outcome.rate = schedule.of(index, t, v).find_map(|place| place.rate);
            outcome.tuning = schedule.tuning(index, t, v).map(|place| place.job).collect();
            Ok(outcome)
        });
        let variants = variants.collect::<Result<Vec<_>, Error>>()?;
        let claims = experiment.claims.iter().map(undecided).collect();
        Ok(TaskOutcome { task: task.name.clone(), metric: task.metric, separate_tuning: !task.rates.is_empty(), variants, claims })
    });
    let tasks = tasks.collect::<Result<Vec<_>, Error>>()?;
    Ok(Outcome { id: experiment.id, question: experiment.question.into(), paper: experiment.paper.into(), tasks })
}

fn variant_outcome(task: &Task, variant: &Variant, jobs: &[usize], schedule: &Schedule, runs: &[Run]) -> Result<VariantOutcome, Error> {
    let own = || jobs.iter().map(|&job| &runs[job]);
    let summary = |of: &dyn Fn(&Evaluation) -> Option<f64>| {
        let numbers: Vec<f64> = own().filter(|run| run.status == "finished").filter_map(|run| of(run.held_out.as_ref()?)).collect();
        Summary::of(&numbers)
    };
    let kept = jobs.first().map(|&job| kept(&schedule.plan.jobs[job])).transpose()?;
    Ok(VariantOutcome {
        variant: variant.clone(),
        state_bytes: kept.map(|kept| kept.bytes),
        state_numbers: kept.map(|kept| kept.numbers),
        constant_state: kept.is_some_and(|kept| kept.constant),
        numbers: own().filter_map(|run| run.number(task.metric)).collect(),
        metric: summary(&|found| task.metric.of(found)),
        loss: summary(&|found| Some(found.loss)),
        recall: summary(&|found| Some(found.recall?.loss)),
        rest: summary(&|found| Some(found.rest?.loss)),
        excess: summary(&|found| Some(found.excess?.all)),
        within: summary(&|found| Some(found.within?.loss)),
        beyond: summary(&|found| Some(found.beyond?.loss)),
        rate: None,
        tuning: Vec::new(),
        runs: jobs.to_vec(),
        failed: own().filter(|run| run.status == "failed").count(),
    })
}

/// Recurrent state or KV cache at the training length, which do not depend on the vocabulary.
fn kept(job: &Job) -> Result<plan::Kept, Error> {
    let settings = termwise_train::Settings::from_toml(&job.settings.to_string(), "a run")?;
    Ok(plan::kept(&settings.config(settings.vocab.max(2))?, settings.length as u64))
}

fn seed(job: &Job) -> u64 {
    job.settings.get("seed").and_then(toml::Value::as_integer).unwrap_or(0) as u64
}

fn undecided(claim: &Claim) -> ClaimOutcome {
    let decision = Decision::undecided(String::new());
    ClaimOutcome { text: claim.text.clone(), rule: Some(claim.rule.clone()), stated: claim.rule.describe(), also: Vec::new(), decision }
}
