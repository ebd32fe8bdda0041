//! From run folders to results.

use std::path::Path;

use termwise_train::eval::Part;
use termwise_train::metrics::{self, Line};
use termwise_train::sweep::{Job, Metrics, State, Status};

use super::claim::{Claim, Decision};
use super::experiment::{Experiment, TUNING_SEED, Task, Variant};
use super::results::{ClaimOutcome, CurvePoint, Outcome, Run, Summary, TaskOutcome, VariantOutcome};
use super::schedule::Schedule;
use termwise_lab::plan;

use crate::Error;

/// Every run of the schedule as it stands in the folder.
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
        // Not the system's separator: the file is for pages and other machines.
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
    read_metrics(&job.path(folder, ""), &mut run)?;
    Ok(run)
}

/// Fills in what the folder of a run says, if there is one; the last step.
pub fn read_metrics(folder: &Path, run: &mut Run) -> Result<u64, Error> {
    let lines = if folder.join(metrics::METRICS).is_file() { metrics::read(folder)? } else { Vec::new() };
    let last = lines.last().map_or(0, Line::step);
    for line in lines {
        match line {
            Line::Train(train) => run.train.push((train.step, train.loss)),
            Line::HeldOut { step, evaluation, .. } => {
                let part = |part: Option<Part>| part.map(|part| part.loss);
                let (recall, rest, beyond) = (part(evaluation.recall), part(evaluation.rest), part(evaluation.beyond));
                run.curve.push(CurvePoint { step, loss: evaluation.loss, recall, rest, beyond });
                run.held_out = Some(evaluation);
            }
        }
    }
    Ok(last)
}

/// One experiment by the runs that are finished; [`super::Results::decide`] decides its claims.
pub fn outcome(index: usize, experiment: &Experiment, schedule: &Schedule, states: &[State]) -> Result<Outcome, Error> {
    let tasks = experiment.tasks.iter().enumerate().map(|(t, task)| {
        let variants = experiment.variants.iter().enumerate().map(|(v, variant)| {
            let jobs: Vec<usize> = schedule.of(index, t, v).map(|place| place.job).collect();
            let mut outcome = variant_outcome(task, variant, &jobs, schedule, states)?;
            outcome.rate = schedule.of(index, t, v).find_map(|place| place.rate);
            outcome.tuning = schedule.tuning(index, t, v).map(|place| place.job).collect();
            Ok(outcome)
        });
        let variants = variants.collect::<Result<Vec<_>, Error>>()?;
        let claims = experiment.claims.iter().map(undecided).collect();
        Ok(TaskOutcome { task: task.name.clone(), metric: task.metric, variants, claims })
    });
    let tasks = tasks.collect::<Result<Vec<_>, Error>>()?;
    Ok(Outcome { id: experiment.id, question: experiment.question.into(), paper: experiment.paper.into(), tasks })
}

fn variant_outcome(task: &Task, variant: &Variant, jobs: &[usize], schedule: &Schedule, states: &[State]) -> Result<VariantOutcome, Error> {
    let finished: Vec<&Metrics> = jobs.iter().filter_map(|&job| finished(&states[job])).collect();
    let summary = |name: &str| {
        let numbers: Vec<f64> = finished.iter().filter_map(|metrics| metrics.get(name).copied()).collect();
        Summary::of(&numbers)
    };
    let kept = jobs.first().map(|&job| kept(&schedule.plan.jobs[job])).transpose()?;
    Ok(VariantOutcome {
        variant: variant.clone(),
        state_bytes: kept.map(|kept| kept.bytes),
        state_numbers: kept.map(|kept| kept.numbers),
        constant_state: kept.is_some_and(|kept| kept.constant),
        numbers: jobs.iter().filter_map(|&job| number(&schedule.plan.jobs[job], &states[job], task.metric.key())).collect(),
        metric: summary(task.metric.key()),
        loss: summary("held_out.loss"),
        recall: summary("held_out.recall.loss"),
        rest: summary("held_out.rest.loss"),
        excess: summary("held_out.excess.all"),
        within: summary("held_out.within.loss"),
        beyond: summary("held_out.beyond.loss"),
        rate: None,
        tuning: Vec::new(),
        runs: jobs.to_vec(),
        failed: jobs.iter().filter(|&&job| failed(&states[job])).count(),
    })
}

/// What decoding keeps at the length of training. The vocabulary does not matter to it.
fn kept(job: &Job) -> Result<plan::Kept, Error> {
    let settings = termwise_train::Settings::from_toml(&job.settings.to_string(), "a run")?;
    Ok(plan::kept(&settings.config(settings.vocab.max(2))?, settings.length as u64))
}

fn finished(state: &State) -> Option<&Metrics> {
    match state {
        State::Ended(record) => match &record.status {
            Status::Finished { metrics } => Some(metrics),
            Status::Failed { .. } => None,
        },
        State::Open | State::Equal(_) => None,
    }
}

fn failed(state: &State) -> bool {
    matches!(state, State::Ended(record) if matches!(record.status, Status::Failed { .. }))
}

fn number(job: &Job, state: &State, key: &str) -> Option<(u64, f64)> {
    Some((seed(job), *finished(state)?.get(key)?))
}

fn seed(job: &Job) -> u64 {
    job.settings.get("seed").and_then(toml::Value::as_integer).unwrap_or(0) as u64
}

fn undecided(claim: &Claim) -> ClaimOutcome {
    let decision = Decision::open(String::new());
    ClaimOutcome { text: claim.text.clone(), rule: Some(claim.rule.clone()), stated: claim.rule.describe(), also: Vec::new(), decision }
}
