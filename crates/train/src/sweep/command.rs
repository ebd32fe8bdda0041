//! A sweep as one call.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use termwise_base::provenance::Provenance;
use termwise_report::{Block, Cell, Document, Table, counted};

use super::{
    Event, Options, Others, Plan, ProcessRunner, Record, SlurmJob, State, Status, Summary, TrainingSchema, equalities, run, states,
    writing_alone,
};
use crate::error::{Error, Result};

/// The metric that compares runs unless the plan names one.
const METRIC: &str = "held_out.loss";

/// A plan as a file or as its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanSource {
    /// A TOML file.
    File(PathBuf),
    /// The contents of such a file.
    Text(String),
}

/// Options of [`execute`] and [`list`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SweepRequest {
    /// Base settings and axes.
    pub plan: PlanSource,
    /// Folder of the sweep; default: `sweeps/` and the name of the file.
    pub folder: Option<PathBuf>,
    /// Concurrent runs.
    pub parallel: usize,
    /// Threads of all runs together.
    pub threads: usize,
    /// Rerun failed runs.
    pub retry: bool,
    /// Skip runs whose attention is mathematically equal to that of an earlier run.
    pub skip_equal: bool,
    /// Rerun runs that another build has finished.
    pub rerun_other_builds: bool,
    /// Other processes in the folder.
    pub others: Others,
    /// Words that start this program, for the runs.
    pub respawn_argv: Vec<OsString>,
    /// This build.
    pub provenance: Provenance,
}

/// Flags that end other processes: the runs of a sweep, or the PyTorch trainer.
#[derive(Clone, Debug, Default)]
pub struct SweepControl {
    /// Lets every run write a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// Does not wait for checkpoints any longer.
    pub kill: Arc<AtomicBool>,
}

impl SweepRequest {
    /// One run at a time on all threads.
    pub fn new(plan: PlanSource) -> SweepRequest {
        SweepRequest {
            plan,
            folder: None,
            parallel: 1,
            threads: termwise_base::threads::available(),
            retry: false,
            skip_equal: false,
            rerun_other_builds: false,
            others: Others::DEFAULT,
            respawn_argv: Vec::new(),
            provenance: Provenance::default(),
        }
    }

    /// Reads the plan.
    ///
    /// # Errors
    /// If it cannot be read or has unknown settings.
    pub fn read_plan(&self) -> Result<Plan> {
        match &self.plan {
            PlanSource::File(file) => Plan::read(file, &TrainingSchema, METRIC),
            PlanSource::Text(text) => Plan::parse(text, Path::new("the plan"), &TrainingSchema, METRIC),
        }
    }

    /// The folder of the sweep.
    pub fn folder(&self) -> PathBuf {
        let name = match &self.plan {
            PlanSource::File(file) => file.file_stem().unwrap_or_default(),
            PlanSource::Text(_) => "sweep".as_ref(),
        };
        self.folder.clone().unwrap_or_else(|| Path::new("sweeps").join(name))
    }

    /// Groups of runs with mathematically equal attention, one sentence each.
    pub fn equal_runs(&self, plan: &Plan) -> Vec<String> {
        let hint = if self.skip_equal { "" } else { "; --skip-equal runs one of them" };
        equalities(plan).iter().map(|equality| format!("{equality}{hint}")).collect()
    }
}

/// The result of a sweep.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SweepOutcome {
    /// Every combination of the axes.
    pub plan: Plan,
    /// One state per run of the plan.
    pub states: Vec<State>,
    /// Means and deviations over seeds.
    pub summary: Summary,
    /// Whether it was requested to stop.
    pub interrupted: bool,
    /// A warning if finished runs of other builds are among those of this build.
    pub mixed_builds: Option<String>,
    /// The file with the summary, if it was written.
    pub written: Option<PathBuf>,
}

impl SweepOutcome {
    fn new(request: &SweepRequest, plan: Plan, states: Vec<State>) -> SweepOutcome {
        let finished = plan.jobs.iter().zip(&states).filter_map(|(job, state)| Some((job.hash.as_str(), ended(state)?)));
        let mixed_builds = mixed(&finished.collect::<Vec<_>>(), &request.provenance);
        let summary = Summary::new(&plan, &states);
        SweepOutcome { plan, states, summary, interrupted: false, mixed_builds, written: None }
    }

    /// Whether every run has finished with a finite metric.
    pub fn is_complete(&self) -> bool {
        self.states.iter().all(|state| match state {
            State::Ended(record) => matches!(&record.status, Status::Finished { metrics } if metrics.contains_key(&self.plan.metric)),
            State::Equal(_) => true,
            State::Open => false,
        })
    }

    /// An error if runs have finished and none has measured the metric of the plan.
    ///
    /// # Errors
    /// Names the metrics that were measured.
    pub fn check_metric(&self, request: &SweepRequest) -> Result<()> {
        let measured: Vec<_> = self.summary.runs.iter().filter(|run| !run.metrics.is_empty()).collect();
        if measured.is_empty() || measured.iter().any(|run| run.metrics.contains_key(&self.plan.metric)) {
            return Ok(());
        }
        let there: BTreeSet<&str> = measured.iter().flat_map(|run| run.metrics.keys()).map(String::as_str).collect();
        let there = there.into_iter().collect::<Vec<_>>().join(", ");
        let problem = format!("no run has measured the metric `{}`, by which runs are compared; measured were {there}", self.plan.metric);
        let path = if let PlanSource::File(file) = &request.plan { file.clone() } else { "the plan".into() };
        Err(Error::Sweep { path, problem })
    }

    /// The job array of all open runs.
    pub fn slurm_job(&self, request: &SweepRequest) -> SlurmJob {
        let folder = request.folder();
        let named = if let PlanSource::File(file) = &request.plan { file.file_stem() } else { folder.file_name() };
        SlurmJob::of(&named.unwrap_or_default().to_string_lossy(), &folder, &self.plan, &self.states)
    }

    /// Every run with its settings and status.
    pub fn listing(&self) -> Document {
        Document { title: String::new(), lead: vec![Block::table("runs", listed(&self.plan, &self.states))], sections: Vec::new() }
    }
}

/// The runs of a sweep as they are, without training.
///
/// # Errors
/// If the plan or the folder cannot be read.
pub fn list(request: &SweepRequest) -> Result<SweepOutcome> {
    let plan = request.read_plan()?;
    let states = states(&plan, &request.folder(), request.skip_equal)?;
    Ok(SweepOutcome::new(request, plan, states))
}

/// Trains every run that is not finished, each in a separate process, and writes the summary.
///
/// # Errors
/// If the plan cannot be read, or if files cannot be written. A run that fails is part of the result.
pub fn execute(request: &SweepRequest, control: &SweepControl, observe: &mut dyn FnMut(&Plan, &Event)) -> Result<SweepOutcome> {
    let (plan, folder) = (request.read_plan()?, request.folder());
    let runner = ProcessRunner::new(request.respawn_argv.clone(), control.kill.clone());
    let options = Options {
        parallel: request.parallel,
        threads: request.threads,
        retry: request.retry,
        skip_equal: request.skip_equal,
        only: request.rerun_other_builds.then(|| request.provenance.clone()),
        others: request.others,
    };
    let states = run(&plan, &folder, &runner, &options, &control.stop, &mut |event| observe(&plan, event))?;
    let mut outcome = SweepOutcome::new(request, plan, states);
    outcome.interrupted = control.stop.load(Ordering::Relaxed);
    let _alone = writing_alone(&folder);
    outcome.summary.write(&folder, &request.provenance)?;
    outcome.written = Some(folder.join("summary.json"));
    Ok(outcome)
}

fn ended(state: &State) -> Option<&Record> {
    if let State::Ended(record) = state { Some(record) } else { None }
}

/// Names finished runs that this build did not make, by build.
fn mixed(records: &[(&str, &Record)], here: &Provenance) -> Option<String> {
    let mut builds: Vec<(String, Vec<&str>)> = Vec::new();
    for (hash, record) in records.iter().filter(|(_, record)| record.is_of_another(here)) {
        let name = record.made_by();
        match builds.iter_mut().find(|(other, _)| *other == name) {
            Some((_, hashes)) => hashes.push(&hash[..hash.len().min(6)]),
            None => builds.push((name, vec![&hash[..hash.len().min(6)]])),
        }
    }
    if builds.is_empty() {
        return None;
    }
    let list: Vec<String> =
        builds.iter().map(|(name, hashes)| format!("\n  {name}: {} ({})", counted(hashes.len(), "run"), hashes.join(" "))).collect();
    Some(format!(
        "warning: some finished runs are of other builds than this one, {}, and their numbers may differ; \
         --rerun-other-builds reruns them{}",
        here.name(),
        list.concat()
    ))
}

fn listed(plan: &Plan, states: &[State]) -> Table {
    let mut table = Table::new(counted(plan.jobs.len(), "run"), ["run", "settings", "status"]);
    for (job, state) in plan.jobs.iter().zip(states) {
        let status = match state {
            State::Open => "open".into(),
            State::Equal(earlier) => format!("equal to {}", plan.jobs[*earlier].hash),
            State::Ended(record) => match &record.status {
                Status::Finished { .. } => "finished".into(),
                Status::Failed { reason } => format!("failed: {reason}"),
            },
        };
        table.rows.push(vec![Cell::code(&job.hash), Cell::text(plan.name(job)), Cell::text(status)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_runs_of_other_builds_are_named() {
        let here = Provenance::default();
        let mut older = here.clone();
        older.build.version = "0.0.1".into();
        let finished = |provenance| Record {
            hash: "0123456789".into(),
            seconds: 1.0,
            provenance,
            data: None,
            status: Status::Finished { metrics: Default::default() },
        };
        let (own, other, failed) = (
            finished(vec![here.clone()]),
            finished(vec![older.clone()]),
            Record { status: Status::Failed { reason: String::new() }, ..finished(vec![older]) },
        );
        assert_eq!(mixed(&[("0123456789", &own), ("aaaaaaaaaa", &failed)], &here), None);
        let warning = mixed(&[("0123456789", &own), ("abcdef0123", &other)], &here).expect("another build");
        assert!(warning.contains("0.0.1") && warning.contains("1 run (abcdef)") && !warning.contains("012345 "), "{warning}");
        assert!(warning.contains("--rerun-other-builds"), "{warning}");
    }
}
