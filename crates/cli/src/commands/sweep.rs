//! `termwise sweep`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use termwise_base::provenance::Provenance;
use termwise_report::{Block, Cell, Document, Table, counted, duration};
use termwise_train::Error;
use termwise_train::log::tell;
use termwise_train::sweep::{self, Event, Options, Plan, ProcessRunner, Record, State, Status, Summary, TrainingSchema};

use super::share::{ShareArgs, Submitted, without_submitting};
use super::size;
use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_or};

/// What runs are compared by where the file does not say.
const METRIC: &str = "held_out.loss";

/// Train every combination of settings
///
/// The file contains base settings and axes. Every combination of axis values is one run. Finished runs are reused, so a sweep can be
/// interrupted, extended and restarted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise sweep recall.toml --list
  termwise sweep recall.toml --parallel 4
  termwise sweep recall.toml --retry --skip-equal
  termwise sweep recall.toml --submit slurm --dry-run       print the job script

A file:
  metric = \"held_out.recall.loss\"     # the smaller the better [default: held_out.loss]

  [base]                              # settings as for `termwise train --config`, or base = \"FILE\"
  model = \"tiny\"
  steps = 1000

  [axes]
  attention = [\"softmax conv=3\", \"linear_elu conv=3\"]
  lr = [1e-3, 3e-3, 1e-2]
  seed = [1, 2, 3]

Means and standard deviations are over seeds. Ctrl-C, SIGTERM and SIGUSR1 let every run write a checkpoint; the same command resumes. Several processes, also on several machines, can share a folder: each takes unclaimed runs.")]
pub struct SweepArgs {
    /// TOML file with base settings and axes
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Folder of the sweep [default: sweeps/FILE]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Concurrent runs; they share the threads
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = size(1024))]
    pub parallel: usize,
    /// Rerun failed runs
    #[arg(long)]
    pub retry: bool,
    /// Skip runs whose attention is mathematically equal to that of an earlier run
    #[arg(long)]
    pub skip_equal: bool,
    /// Rerun runs that another build has finished
    #[arg(long)]
    pub rerun_other_builds: bool,
    /// List runs and their status, without training
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub share: ShareArgs,
    /// Print JSON, which `termwise report` renders
    #[arg(long)]
    pub json: bool,
    /// Suppress progress and warnings
    #[arg(long, short)]
    pub quiet: bool,
    /// Also print sections that are collapsed in the HTML report
    #[arg(long)]
    pub details: bool,
}

/// Ends well where every run is finished.
pub fn run(args: &SweepArgs, context: &mut Context) -> Result<Exit, Failure> {
    let plan = Plan::read(&args.file, &TrainingSchema, METRIC)?;
    let folder = args.out.clone().unwrap_or_else(|| Path::new("sweeps").join(args.file.file_stem().unwrap_or_default()));
    for equality in sweep::equalities(&plan).iter().filter(|_| !args.quiet) {
        let hint = if args.skip_equal { "" } else { "; --skip-equal runs one of them" };
        tell(&format!("note: {equality}{hint}"));
    }
    if args.share.submit.is_some() {
        let states = sweep::states(&plan, &folder, args.skip_equal)?;
        let open = states.iter().filter(|state| matches!(state, State::Open)).count();
        let gpu = plan.jobs.iter().any(|job| job.settings.get("engine").and_then(toml::Value::as_str) == Some("torch"));
        let name = args.file.file_stem().unwrap_or_default().to_string_lossy();
        let what = Submitted { name: &name, folder: &folder, open, gpu };
        return args.share.submit(&what, &without_submitting(&context.words), context);
    }
    let here = context.provenance.clone();
    let mut interrupted = false;
    let states = if args.list {
        sweep::states(&plan, &folder, args.skip_equal)?
    } else {
        let (stop, kill) = interrupts();
        let runner = ProcessRunner::new(context.again()?, kill);
        let options = Options {
            parallel: args.parallel,
            threads: context.threads,
            retry: args.retry,
            skip_equal: args.skip_equal,
            only: args.rerun_other_builds.then(|| here.clone()),
            others: args.share.others(),
        };
        let bar = Bar::new(args.quiet);
        let states = sweep::run(&plan, &folder, &runner, &options, &stop, &mut |event| show(&bar, &plan, event))?;
        interrupted = stop.load(Ordering::Relaxed);
        states
    };
    let ended: Vec<(&str, &Record)> =
        plan.jobs.iter().zip(&states).filter_map(|(job, state)| Some((job.hash.as_str(), ended(state)?))).collect();
    if let Some(warning) = mixed(&ended, &here).filter(|_| !args.quiet) {
        tell(&warning);
    }
    let summary = Summary::new(&plan, &states);
    if args.list && !args.json {
        let table = Document { title: String::new(), lead: vec![Block::table("runs", listed(&plan, &states))], sections: Vec::new() };
        match args.details {
            true => context.print_document(&table, true)?,
            false => context.print_brief(&table)?,
        }
        return Ok(Exit::Success);
    }
    if !args.list {
        let _alone = sweep::writing_alone(&folder);
        summary.write(&folder, &here)?;
    }
    context.print(&summary, args.json, args.details)?;
    if !args.list && !args.quiet {
        tell(&format!("written: {}", folder.join("summary.json").display()));
    }
    let measured: Vec<_> = summary.runs.iter().filter(|run| !run.metrics.is_empty()).collect();
    if !measured.is_empty() && measured.iter().all(|run| !run.metrics.contains_key(&plan.metric)) {
        let there: BTreeSet<&str> = measured.iter().flat_map(|run| run.metrics.keys()).map(String::as_str).collect();
        let there = there.into_iter().collect::<Vec<_>>().join(", ");
        let problem = format!("no run has measured the metric `{}`, by which runs are compared; measured were {there}", plan.metric);
        return Err(Error::Sweep { path: args.file.clone(), problem }.into());
    }
    let done = |state: &State| match state {
        State::Ended(record) => matches!(&record.status, Status::Finished { metrics } if metrics.contains_key(&plan.metric)),
        State::Equal(_) => true,
        State::Open => false,
    };
    Ok(match args.list || states.iter().all(done) {
        true => Exit::Success,
        false if interrupted => Exit::Interrupted,
        false => Exit::Failure,
    })
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
        "warning: finished runs of other builds stand among those of this one, {}, and their numbers may differ; \
         --rerun-other-builds runs them again{}",
        here.name(),
        list.concat()
    ))
}

/// What is said while others work.
pub(super) fn waiting(runs: usize) -> String {
    format!("waiting for {} of other processes; --no-wait exits instead", counted(runs, "run"))
}

/// The first Ctrl-C asks runs to stop, the second does not wait for them.
pub(super) fn interrupts() -> (Arc<AtomicBool>, Arc<AtomicBool>) {
    let kill = Arc::new(AtomicBool::new(false));
    let flag = kill.clone();
    (stop_or("waiting up to two minutes for checkpoints", move || flag.store(true, Ordering::Relaxed)), kill)
}

/// A line for each run that begins or ends, and one that moves.
fn show(bar: &Bar, plan: &Plan, event: &Event) {
    let name = |index: &usize| plan.name(&plan.jobs[*index]);
    bar.tell(&match event {
        Event::Progress(progress) => return bar.runs(progress),
        Event::Started(index) => format!("started   {}", name(index)),
        Event::Stopped(index) => format!("stopped   {}", name(index)),
        Event::Waiting(runs) => waiting(*runs),
        Event::Ended(index, record) => match &record.status {
            Status::Failed { reason } => format!("failed    {}: {reason}", name(index)),
            Status::Finished { metrics } => {
                let metric = &plan.metric;
                let value = metrics.get(metric).map_or("not measured".into(), |x| format!("{x:.4}"));
                format!("finished  {}: {metric} {value}, {}", name(index), duration(record.seconds))
            }
        },
    });
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
        let here = crate::build::here(&[]);
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
