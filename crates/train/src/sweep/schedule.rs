//! Runs side by side within a budget of threads, each continued where it was left.

use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::duplicates::earlier_equals;
use super::plan::{Job, Plan};
use super::progress::{Progress, Tracker};
use super::record::{Metrics, Record, Status};
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use termwise_base::files::{self, beside, write_whole};

/// What runs one job.
pub trait Runner: Sync {
    /// Runs a job to its end, from where it was left if its folder has something of it. An error is for what is wrong beyond this
    /// job, and ends the sweep; a job that fails by itself is an [`Outcome`].
    fn run(&self, job: &Job, control: &Control) -> Result<Outcome>;
}

/// How a call of a [`Runner`] ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The run is finished.
    Finished(Metrics),
    /// It was asked to stop, and can be continued.
    Stopped,
    /// It failed, and why.
    Failed(String),
}

/// What a runner is given beside the job.
pub struct Control<'a> {
    /// The folder of the run.
    pub folder: &'a Path,
    /// A file with its complete settings.
    pub settings: &'a Path,
    /// A file for what it prints.
    pub log: &'a Path,
    /// Threads it may use.
    pub threads: usize,
    /// Whether it should stop, leaving what is needed to continue.
    pub stop: &'a AtomicBool,
    /// To be told how much of the run is done, from 0 to 1; the first time with what was done before.
    pub report: &'a dyn Fn(f64),
}

/// How a sweep is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Runs at a time; never more than threads.
    pub parallel: usize,
    /// Threads of all of them together.
    pub threads: usize,
    /// Run again what failed.
    pub retry: bool,
    /// Leave out runs that differ from an earlier one only by an attention of the same output.
    pub skip_equal: bool,
    /// Run again what is finished and was made by anything but this build.
    pub only: Option<Provenance>,
}

/// Where a run stands.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It has not ended, and may not have begun.
    Open,
    /// It has ended.
    Ended(Record),
    /// It is left out; this earlier run has the same output.
    Equal(usize),
}

/// What happens during a sweep. Jobs are indices into the plan's.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A run began, or was taken up again.
    Started(usize),
    /// A run ended.
    Ended(usize, Record),
    /// A run stopped and can be continued.
    Stopped(usize),
    /// Something moved.
    Progress(Progress),
}

/// Where every run of a plan stands, from the folder of its sweep, which need not exist.
pub fn states(plan: &Plan, folder: &Path, skip_equal: bool) -> Result<Vec<State>> {
    let equals = if skip_equal { earlier_equals(&plan.jobs) } else { vec![None; plan.jobs.len()] };
    let state = |(job, equal): (&Job, Option<usize>)| {
        Ok(match (Record::read(folder, job)?, equal) {
            (Some(record), _) => State::Ended(record),
            (None, Some(earlier)) => State::Equal(earlier),
            (None, None) => State::Open,
        })
    };
    plan.jobs.iter().zip(equals).map(state).collect()
}

/// Runs what is open, and what failed where asked for. Returns where every run stands afterwards: after `stop` some are open.
///
/// Errors end the sweep after the runs that are under way; what had ended is kept.
pub fn run(
    plan: &Plan,
    folder: &Path,
    runner: &dyn Runner,
    options: &Options,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(&Event),
) -> Result<Vec<State>> {
    let runs = folder.join("runs");
    fs::create_dir_all(&runs).map_err(Error::io("create", &runs))?;
    let _lock = lock(folder)?;
    let mut states = states(plan, folder, options.skip_equal)?;
    for (index, state) in states.iter_mut().enumerate() {
        if let (State::Ended(record), Some(build)) = (&*state, &options.only)
            && record.is_of_another(build)
        {
            remove(&plan.jobs[index], folder)?;
            *state = State::Open;
        }
    }
    let wanted = |state: &State| match state {
        State::Open => true,
        State::Ended(record) => options.retry && matches!(record.status, Status::Failed { .. }),
        State::Equal(_) => false,
    };
    let queue: Vec<usize> = (0..states.len()).filter(|&index| wanted(&states[index])).collect();
    let parallel = options.parallel.clamp(1, options.threads.max(1)).min(queue.len());
    let threads = (options.threads / parallel.max(1)).max(1);
    let mut tracker = Tracker::new(&states, &queue, |index| plan.jobs[index].work);
    let (send, receive) = mpsc::channel();
    let next = AtomicUsize::new(0);
    let broken = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..parallel)
            .map(|_| {
                let (send, queue, next, broken) = (send.clone(), &queue, &next, &broken);
                scope.spawn(move || -> Result<()> {
                    while !stop.load(Ordering::Relaxed) && !broken.load(Ordering::Relaxed) {
                        let Some(&index) = queue.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                        let tell = |message| {
                            // The receiver lives as long as the workers do.
                            let _ = send.send((index, message));
                        };
                        let done = run_one(&plan.jobs[index], folder, runner, threads, stop, &tell);
                        if done.is_err() {
                            broken.store(true, Ordering::Relaxed);
                        }
                        tell(Message::Left(done?));
                    }
                    Ok(())
                })
            })
            .collect();
        drop(send);
        let start = Instant::now();
        for (index, message) in receive {
            match message {
                Message::Started => {
                    tracker.started(index);
                    observe(&Event::Started(index));
                }
                Message::Done(fraction) => tracker.done(index, fraction),
                Message::Left(Some(record)) => {
                    tracker.ended(index, &record);
                    observe(&Event::Ended(index, record.clone()));
                    states[index] = State::Ended(record);
                }
                Message::Left(None) => {
                    tracker.stopped(index);
                    observe(&Event::Stopped(index));
                }
            }
            observe(&Event::Progress(tracker.progress(start.elapsed())));
        }
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(states)
}

enum Message {
    Started,
    Done(f64),
    /// With its record if it ended.
    Left(Option<Record>),
}

fn run_one(
    job: &Job,
    folder: &Path,
    runner: &dyn Runner,
    threads: usize,
    stop: &AtomicBool,
    tell: &dyn Fn(Message),
) -> Result<Option<Record>> {
    let settings = job.path(folder, "toml");
    write_whole(&settings, job.settings.to_string().as_bytes())?;
    tell(Message::Started);
    let start = Instant::now();
    let (run_folder, log) = (job.path(folder, ""), job.path(folder, "log"));
    let report = |fraction: f64| tell(Message::Done(fraction));
    let control = Control { folder: &run_folder, settings: &settings, log: &log, threads, stop, report: &report };
    let status = match runner.run(job, &control)? {
        Outcome::Stopped => return Ok(None),
        Outcome::Failed(reason) => Status::Failed { reason },
        Outcome::Finished(metrics) => Status::Finished { metrics: metrics.into_iter().filter(|(_, x)| x.is_finite()).collect() },
    };
    let provenance = provenance::read(&run_folder);
    let record = Record { hash: job.hash.clone(), seconds: start.elapsed().as_secs_f64(), provenance, status };
    record.write(folder, job)?;
    Ok(Some(record))
}

/// Forgets a run. Its folder leaves its name first, so that half a run is never taken up again.
fn remove(job: &Job, folder: &Path) -> Result<()> {
    let unless_missing = |done: std::io::Result<()>, path: &Path| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    };
    let run = job.path(folder, "");
    let old = beside(&run, "old");
    unless_missing(fs::remove_dir_all(&old), &old)?;
    unless_missing(fs::rename(&run, &old), &run)?;
    for path in [job.path(folder, "json"), job.path(folder, "log")] {
        unless_missing(fs::remove_file(&path), &path)?;
    }
    unless_missing(fs::remove_dir_all(&old), &old)
}

/// One sweep at a time in a folder.
fn lock(folder: &Path) -> Result<File> {
    let problem = "another sweep is running in this folder; wait for it or choose another";
    files::lock(&folder.join("sweep.lock"))?.ok_or_else(|| Error::Sweep { path: folder.into(), problem: problem.into() })
}
