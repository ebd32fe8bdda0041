//! Parallel execution of runs within a thread budget. Interrupted runs are resumed. Several processes may share the directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::claim::{self, Claim, Claims, Held, Timing};
use super::duplicates::earlier_equals;
use super::plan::{self, Job, Plan};
use super::progress::{Progress, Tracker};
use super::record::{Metrics, Record, Status};
use super::shard::Shard;
use crate::checkpoint::{Checkpoints, read_state};
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use crate::run::is_locked;
use crate::settings::keys::{self, Effect};
use termwise_base::files::{self, hidden_sibling, write_whole};
use termwise_report::counted;

/// Longer than writing a summary takes.
const SUMMARY_TIMEOUT: Duration = Duration::from_secs(60);

/// Executes jobs.
pub trait Runner: Sync {
    /// Runs a job to its end, resuming it if its directory already contains a run. An error concerns more than this
    /// job and ends the sweep; a failure of the job itself is an [`Outcome`].
    fn run(&self, job: &Job, control: &Control) -> Result<Outcome>;

    /// The fingerprint of the data on which a job would be trained now, if known.
    fn fingerprint(&self, _job: &Job) -> Option<String> {
        None
    }
}

/// The result of a call of a [`Runner`].
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The run is finished.
    Finished(Metrics),
    /// It was stopped and can be resumed.
    Stopped,
    /// It failed, with the reason.
    Failed(String),
    /// Another process is working in its directory. The run is retried later.
    Locked,
}

/// Arguments of a runner other than the job.
pub struct Control<'a> {
    /// The directory of the run.
    pub folder: &'a Path,
    /// A file with its complete settings.
    pub settings: &'a Path,
    /// A file for its output.
    pub log: &'a Path,
    /// Number of threads that it may use.
    pub threads: usize,
    /// Set if the run should stop and remain resumable.
    pub stop: Stop<'a>,
    /// Callback for the fraction of the run that is done, from 0 to 1; the first call reports the fraction done before.
    pub report: &'a dyn Fn(f64),
}

/// Stop request for all runs, or for this run because another process has taken it over.
#[derive(Clone, Copy, Debug)]
pub struct Stop<'a> {
    all: &'a AtomicBool,
    own: &'a AtomicBool,
}

impl Stop<'_> {
    /// Requests all runs to stop.
    pub fn store(&self, stop: bool, order: Ordering) {
        self.all.store(stop, order);
    }

    /// Whether either flag is set.
    pub fn load(&self, order: Ordering) -> bool {
        self.all.load(order) || self.own.load(order)
    }
}

/// Options of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of concurrent runs, at most the number of threads.
    pub parallel: usize,
    /// Total number of threads.
    pub threads: usize,
    /// Rerun failed runs.
    pub retry: bool,
    /// Skip runs that differ from an earlier one only by an attention with the same output.
    pub skip_equal: bool,
    /// Rerun finished runs of other builds.
    pub only: Option<Provenance>,
    /// Other processes in the directory.
    pub others: Others,
}

/// Cooperation with other processes in the same directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Others {
    /// The shard of this process, if known.
    pub shard: Option<Shard>,
    /// Wait for runs that other processes have started, and take over those of dead processes. Otherwise end when no run is left to start.
    pub wait: bool,
    /// Intervals and timeouts.
    pub timing: Timing,
}

impl Others {
    /// No other processes are expected, but their claims are respected.
    pub const DEFAULT: Others = Others { shard: None, wait: true, timing: Timing::DEFAULT };
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It has not ended, and may not have started.
    Open,
    /// It has ended.
    Ended(Record),
    /// It is skipped; this earlier run has the same output.
    Equal(usize),
}

/// Events of a sweep. Jobs are indices into the plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A run was started or resumed.
    Started(usize),
    /// A run ended, in this or another process.
    Ended(usize, Record),
    /// A run was stopped and can be resumed.
    Stopped(usize),
    /// No run is left to start; this many runs are in progress in other processes.
    Waiting(usize),
    /// The progress changed.
    Progress(Progress),
}

/// The state of every run of a plan, read from the directory of its sweep, which need not exist.
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

/// Runs all open runs, and failed ones on request. Returns the state of every run; after `stop` some are open.
///
/// Several processes, also on different machines, may call this in one directory. Each run is claimed by one process (see [`Timing`]); runs of dead
/// processes are taken over by others.
///
/// Errors end the sweep after the current runs. Finished runs are kept.
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
    let mut states = states(plan, folder, options.skip_equal)?;
    let made_again = |state: &State| matches!((state, &options.only), (State::Ended(record), Some(build)) if record.is_of_another(build));
    let wanted = |state: &State| match state {
        State::Open => true,
        State::Ended(record) => made_again(state) || options.retry && matches!(record.status, Status::Failed { .. }),
        State::Equal(_) => false,
    };
    let queue: Vec<usize> = (0..states.len()).filter(|&index| wanted(&states[index])).collect();
    same_data(plan, folder, &states, &queue, runner)?;
    let parallel = options.parallel.clamp(1, options.threads.max(1)).min(queue.len());
    let threads = (options.threads / parallel.max(1)).max(1);
    for (index, state) in states.iter_mut().enumerate() {
        if queue.contains(&index) && made_again(state) {
            // It is open until then.
            *state = State::Open;
        }
    }
    let mut tracker = Tracker::new(&states, &queue, |index| plan.jobs[index].work);
    let board = Mutex::new(Board::new(plan, folder, &queue, options)?);
    let held = Held::default();
    let (send, receive) = mpsc::channel();
    let broken = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| held.keep_alive(options.others.timing));
        let _end = held.until_dropped();
        let workers: Vec<_> = (0..parallel)
            .map(|_| {
                let (send, board, broken, held) = (send.clone(), &board, &broken, &held);
                scope.spawn(move || -> Result<()> {
                    // The receiver outlives the workers.
                    let send = |index: usize, message: Message| {
                        let _ = send.send((index, message));
                    };
                    let work = || -> Result<()> {
                        while !stop.load(Ordering::Relaxed) && !broken.load(Ordering::Relaxed) {
                            let next = board.lock().unwrap_or_else(PoisonError::into_inner).next(&send)?;
                            let (index, claim, before) = match next {
                                Next::Run(index, claim, before) => (index, claim, before.map(|before| *before)),
                                Next::Wait if options.others.wait => {
                                    thread::sleep(options.others.timing.look);
                                    continue;
                                }
                                Next::Wait | Next::Nothing => break,
                            };
                            held.hold(&claim);
                            let own = Stop { all: stop, own: claim.lost() };
                            let done = run_one(&plan.jobs[index], folder, runner, threads, own, &|message| send(index, message));
                            held.drop_claim(&claim);
                            claim.release();
                            let ended = match done? {
                                Ran::Ended(record) => Some(record),
                                Ran::Stopped => None,
                                Ran::Locked => {
                                    board.lock().unwrap_or_else(PoisonError::into_inner).left.push((index, before));
                                    thread::sleep(options.others.timing.look);
                                    None
                                }
                            };
                            send(index, Message::Left(ended));
                        }
                        Ok(())
                    };
                    let done = work();
                    if done.is_err() {
                        broken.store(true, Ordering::Relaxed);
                    }
                    done
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
                Message::Waiting(count) => observe(&Event::Waiting(count)),
            }
            observe(&Event::Progress(tracker.progress(start.elapsed())));
        }
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    // It may have changed in the meantime.
    same_data(plan, folder, &states, &[], runner)?;
    Ok(states)
}

/// The remaining runs, and those claimed by other processes.
struct Board<'a> {
    plan: &'a Plan,
    folder: &'a Path,
    runs: PathBuf,
    claims: Claims,
    /// In the order of this process, each with its record at the start: a different record means that it was rerun.
    left: Vec<(usize, Option<Record>)>,
    /// Runs of other processes that were reported last.
    reported: usize,
}

/// The next action of a worker.
enum Next {
    /// Run a job, given with its record at the start.
    Run(usize, Claim, Option<Box<Record>>),
    /// All remaining runs were started by other processes.
    Wait,
    Nothing,
}

impl<'a> Board<'a> {
    fn new(plan: &'a Plan, folder: &'a Path, queue: &[usize], options: &Options) -> Result<Board<'a>> {
        let order = options.others.shard.map_or_else(|| queue.to_vec(), |shard| shard.order(queue));
        let before = |index: usize| Ok((index, Record::read(folder, &plan.jobs[index])?));
        let left = order.into_iter().map(before).collect::<Result<_>>()?;
        let runs = folder.join("runs");
        let claims = Claims::new(runs.clone(), options.others.timing);
        Ok(Board { plan, folder, runs, claims, left, reported: 0 })
    }

    fn next(&mut self, send: &dyn Fn(usize, Message)) -> Result<Next> {
        let listing = self.claims.list()?;
        let mut at = 0;
        while at < self.left.len() {
            let (index, before) = &self.left[at];
            let (index, job) = (*index, &self.plan.jobs[*index]);
            // Without a record the run has not ended. A run with a claim is checked again, since it may have ended in between.
            let ended =
                |before: &Option<Record>| Ok::<_, Error>(Record::read(self.folder, job)?.filter(|now| before.as_ref() != Some(now)));
            if listing.has_record(&job.hash)
                && let Some(record) = ended(before)?
            {
                self.left.remove(at);
                claim::sweep_up(&self.runs, &job.hash);
                send(index, Message::Left(Some(record)));
                continue;
            }
            // A process may work in the directory without a claim, if its sweep was killed or if it is not part of a sweep.
            let claim = if is_locked(&job.path(self.folder, "")) { None } else { self.claims.take(&job.hash, &listing)? };
            let Some(claim) = claim else {
                at += 1;
                continue;
            };
            let (_, before) = self.left.remove(at);
            if let Some(record) = Record::read(self.folder, job)?.filter(|now| before.as_ref() != Some(now)) {
                claim.release();
                send(index, Message::Left(Some(record)));
                continue;
            }
            if before.as_ref().is_some_and(|record| matches!(record.status, Status::Finished { .. })) {
                remove(job, self.folder)?;
            }
            return Ok(Next::Run(index, claim, before.map(Box::new)));
        }
        if self.left.len() != self.reported {
            self.reported = self.left.len();
            if self.reported > 0 {
                send(self.left[0].0, Message::Waiting(self.reported));
            }
        }
        Ok(if self.left.is_empty() { Next::Nothing } else { Next::Wait })
    }
}

enum Message {
    /// This many runs are in progress in other processes.
    Waiting(usize),
    Started,
    Done(f64),
    /// With its record, if it ended.
    Left(Option<Record>),
}

/// How a worker finished with a run.
enum Ran {
    Ended(Record),
    /// It can be resumed, or another process has taken it over.
    Stopped,
    /// Another process is working in its directory.
    Locked,
}

fn run_one(job: &Job, folder: &Path, runner: &dyn Runner, threads: usize, stop: Stop, send: &dyn Fn(Message)) -> Result<Ran> {
    let settings = job.path(folder, "toml");
    write_whole(&settings, job.settings.to_string().as_bytes())?;
    send(Message::Started);
    let start = Instant::now();
    let (run_folder, log) = (job.path(folder, ""), job.path(folder, "log"));
    let report = |fraction: f64| send(Message::Done(fraction));
    let control = Control { folder: &run_folder, settings: &settings, log: &log, threads, stop, report: &report };
    let outcome = runner.run(job, &control)?;
    let status = match outcome {
        Outcome::Stopped => return Ok(Ran::Stopped),
        Outcome::Locked => return Ok(Ran::Locked),
        // The process that has taken it over writes the record.
        _ if stop.own.load(Ordering::Relaxed) => return Ok(Ran::Stopped),
        Outcome::Failed(reason) => Status::Failed { reason },
        Outcome::Finished(metrics) => Status::Finished { metrics: metrics.into_iter().filter(|(_, x)| x.is_finite()).collect() },
    };
    let (provenance, data) = (provenance::read(&run_folder), data_of(&run_folder));
    let record = Record { hash: job.hash.clone(), seconds: start.elapsed().as_secs_f64(), provenance, data, status };
    record.write(folder, job)?;
    Ok(Ran::Ended(record))
}

/// Fingerprint of the data of a run, from its newest checkpoint.
fn data_of(run: &Path) -> Option<String> {
    let checkpoints = Checkpoints::new(run.join("checkpoints")).list().ok()?;
    checkpoints.iter().rev().find_map(|(_, path)| read_state(path).ok()).map(|state| state.source).filter(|source| !source.is_empty())
}

/// Returns an error if runs on different data would be mixed: finished runs, and queued runs, which would be trained on the current data. Only runs with equal
/// data settings are compared.
fn same_data(plan: &Plan, folder: &Path, states: &[State], queue: &[usize], runner: &dyn Runner) -> Result<()> {
    let of_data = |key: &str| keys::find(key).is_some_and(|key| key.effect == Effect::Data);
    let group = |job: &Job| {
        let settings = job.settings.iter().filter(|(key, _)| of_data(key)).map(|(key, value)| (key.clone(), value.clone()));
        plan::hash(&settings.collect())
    };
    // Per group: number of finished runs per fingerprint.
    let mut groups: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for (job, state) in plan.jobs.iter().zip(states) {
        if let State::Ended(record @ Record { status: Status::Finished { .. }, .. }) = state
            && let Some(data) = record.data.clone().or_else(|| data_of(&job.path(folder, "")))
        {
            *groups.entry(group(job)).or_default().entry(data).or_default() += 1;
        }
    }
    let mut current: BTreeMap<String, Option<String>> = BTreeMap::new();
    for job in queue.iter().map(|&index| &plan.jobs[index]) {
        let name = group(job);
        if groups.contains_key(&name) {
            current.entry(name).or_insert_with(|| runner.fingerprint(job));
        }
    }
    for (name, found) in groups {
        let now = current.remove(&name).flatten().filter(|now| !found.contains_key(now));
        if found.len() == 1 && now.is_none() {
            continue;
        }
        let mut list: Vec<String> = found.iter().map(|(data, runs)| format!("{data} ({})", counted(*runs, "finished run"))).collect();
        list.extend(now.map(|now| format!("{now} (the current data)")));
        let problem = format!(
            "runs on different data cannot be compared; the fingerprints of their data are {}; restore the data of the finished runs, or run the sweep in another directory with --out",
            list.join(", ")
        );
        return Err(Error::Sweep { path: folder.into(), problem });
    }
    Ok(())
}

/// Removes a run. Its directory is renamed first, so an incomplete run is never resumed.
fn remove(job: &Job, folder: &Path) -> Result<()> {
    let unless_missing = |done: std::io::Result<()>, path: &Path| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    };
    let run = job.path(folder, "");
    let old = hidden_sibling(&run, "old");
    unless_missing(fs::remove_dir_all(&old), &old)?;
    unless_missing(fs::rename(&run, &old), &run)?;
    for path in [job.path(folder, "json"), job.path(folder, "log")] {
        unless_missing(fs::remove_file(&path), &path)?;
    }
    unless_missing(fs::remove_dir_all(&old), &old)
}

/// Runs with an exclusive lock on shared output, such as the summary of a sweep. Waits for other processes that write. Without file locks on
/// the file system, it runs without a lock.
pub fn writing_alone(folder: &Path) -> Option<fs::File> {
    let begun = Instant::now();
    loop {
        match files::lock(&folder.join("sweep.lock")) {
            Ok(None) if begun.elapsed() < SUMMARY_TIMEOUT => thread::sleep(Duration::from_millis(50)),
            found => return found.ok().flatten(),
        }
    }
}
