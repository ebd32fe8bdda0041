//! Runs side by side within a budget of threads, each continued where it was left; beside other processes in the same folder.

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
use termwise_base::files::{self, beside, write_whole};
use termwise_report::counted;

/// Longer than anybody writes a summary.
const WRITING: Duration = Duration::from_secs(60);

/// What runs one job.
pub trait Runner: Sync {
    /// Runs a job to its end, from where it was left if its folder has something of it. An error is for what is wrong beyond this
    /// job, and ends the sweep; a job that fails by itself is an [`Outcome`].
    fn run(&self, job: &Job, control: &Control) -> Result<Outcome>;

    /// The fingerprint of the data that a job would be trained on now, if it is known.
    fn fingerprint(&self, _job: &Job) -> Option<String> {
        None
    }
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
    /// Another process is working in its folder, which says nothing about the run. It is tried again later.
    Locked,
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
    pub stop: Stop<'a>,
    /// To be told how much of the run is done, from 0 to 1; the first time with what was done before.
    pub report: &'a dyn Fn(f64),
}

/// Whether a run should stop: all of them, or this one, which another process has taken over.
#[derive(Clone, Copy, Debug)]
pub struct Stop<'a> {
    all: &'a AtomicBool,
    own: &'a AtomicBool,
}

impl Stop<'_> {
    /// Asks all runs to stop.
    pub fn store(&self, stop: bool, order: Ordering) {
        self.all.store(stop, order);
    }

    /// As that of the two.
    pub fn load(&self, order: Ordering) -> bool {
        self.all.load(order) || self.own.load(order)
    }
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
    /// The other processes in the folder.
    pub others: Others,
}

/// Other processes that work in the same folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Others {
    /// Which of several this is, if that is known.
    pub shard: Option<Shard>,
    /// Wait for runs that others have begun, and take up those of dead ones; otherwise end when there is nothing left to begin.
    pub wait: bool,
    /// How they notice each other.
    pub timing: Timing,
}

impl Others {
    /// None are expected, and all are heeded.
    pub const USUAL: Others = Others { shard: None, wait: true, timing: Timing::USUAL };
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
    /// A run ended, here or in another process.
    Ended(usize, Record),
    /// A run stopped and can be continued.
    Stopped(usize),
    /// Nothing is left to begin; so many runs are under way in other processes.
    Waiting(usize),
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
/// Several processes may do so in one folder at a time, on several machines: each run is claimed by one of them (see [`Timing`]), and those of processes that
/// died are taken up by others.
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
            // It counts as open until then.
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
                    // The receiver lives as long as the workers do.
                    let tell = |index: usize, message: Message| {
                        let _ = send.send((index, message));
                    };
                    let work = || -> Result<()> {
                        while !stop.load(Ordering::Relaxed) && !broken.load(Ordering::Relaxed) {
                            let next = board.lock().unwrap_or_else(PoisonError::into_inner).next(&tell)?;
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
                            let done = run_one(&plan.jobs[index], folder, runner, threads, own, &|message| tell(index, message));
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
                            tell(index, Message::Left(ended));
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
    // It may have changed meanwhile.
    same_data(plan, folder, &states, &[], runner)?;
    Ok(states)
}

/// The runs that are left, and what others do of them.
struct Board<'a> {
    plan: &'a Plan,
    folder: &'a Path,
    runs: PathBuf,
    claims: Claims,
    /// In the order of this process, each with the record that it had at the beginning: once it has another one, it was run.
    left: Vec<(usize, Option<Record>)>,
    /// Runs of others that were told last.
    told: usize,
}

/// What a worker does next.
enum Next {
    /// With the record that it had at the beginning.
    Run(usize, Claim, Option<Box<Record>>),
    /// Others have begun what is left.
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
        Ok(Board { plan, folder, runs, claims, left, told: 0 })
    }

    fn next(&mut self, tell: &dyn Fn(usize, Message)) -> Result<Next> {
        let listing = self.claims.list()?;
        let mut at = 0;
        while at < self.left.len() {
            let (index, before) = &self.left[at];
            let (index, job) = (*index, &self.plan.jobs[*index]);
            // Without a record it has not ended; a claim that was had is looked at again, since it may have ended in between.
            let ended =
                |before: &Option<Record>| Ok::<_, Error>(Record::read(self.folder, job)?.filter(|now| before.as_ref() != Some(now)));
            if listing.has_record(&job.hash)
                && let Some(record) = ended(before)?
            {
                self.left.remove(at);
                claim::sweep_up(&self.runs, &job.hash);
                tell(index, Message::Left(Some(record)));
                continue;
            }
            // A process that works in its folder has no claim if its sweep was killed or if it is not part of one.
            let claim = if is_locked(&job.path(self.folder, "")) { None } else { self.claims.take(&job.hash, &listing)? };
            let Some(claim) = claim else {
                at += 1;
                continue;
            };
            let (_, before) = self.left.remove(at);
            if let Some(record) = Record::read(self.folder, job)?.filter(|now| before.as_ref() != Some(now)) {
                claim.release();
                tell(index, Message::Left(Some(record)));
                continue;
            }
            if before.as_ref().is_some_and(|record| matches!(record.status, Status::Finished { .. })) {
                remove(job, self.folder)?;
            }
            return Ok(Next::Run(index, claim, before.map(Box::new)));
        }
        if self.left.len() != self.told {
            self.told = self.left.len();
            if self.told > 0 {
                tell(self.left[0].0, Message::Waiting(self.told));
            }
        }
        Ok(if self.left.is_empty() { Next::Nothing } else { Next::Wait })
    }
}

enum Message {
    /// So many runs are under way elsewhere.
    Waiting(usize),
    Started,
    Done(f64),
    /// With its record if it ended.
    Left(Option<Record>),
}

/// How a worker left a run.
enum Ran {
    Ended(Record),
    /// It can be continued, or another process has taken it over.
    Stopped,
    /// Another process is working in its folder.
    Locked,
}

fn run_one(job: &Job, folder: &Path, runner: &dyn Runner, threads: usize, stop: Stop, tell: &dyn Fn(Message)) -> Result<Ran> {
    let settings = job.path(folder, "toml");
    write_whole(&settings, job.settings.to_string().as_bytes())?;
    tell(Message::Started);
    let start = Instant::now();
    let (run_folder, log) = (job.path(folder, ""), job.path(folder, "log"));
    let report = |fraction: f64| tell(Message::Done(fraction));
    let control = Control { folder: &run_folder, settings: &settings, log: &log, threads, stop, report: &report };
    let outcome = runner.run(job, &control)?;
    let status = match outcome {
        Outcome::Stopped => return Ok(Ran::Stopped),
        Outcome::Locked => return Ok(Ran::Locked),
        // The process that has taken it over records how it ends.
        _ if stop.own.load(Ordering::Relaxed) => return Ok(Ran::Stopped),
        Outcome::Failed(reason) => Status::Failed { reason },
        Outcome::Finished(metrics) => Status::Finished { metrics: metrics.into_iter().filter(|(_, x)| x.is_finite()).collect() },
    };
    let (provenance, data) = (provenance::read(&run_folder), data_of(&run_folder));
    let record = Record { hash: job.hash.clone(), seconds: start.elapsed().as_secs_f64(), provenance, data, status };
    record.write(folder, job)?;
    Ok(Ran::Ended(record))
}

/// Fingerprint of the data of a run, by its newest checkpoint.
fn data_of(run: &Path) -> Option<String> {
    let checkpoints = Checkpoints::new(run.join("checkpoints")).list().ok()?;
    checkpoints.iter().rev().find_map(|(_, path)| read_state(path).ok()).map(|state| state.source).filter(|source| !source.is_empty())
}

/// Refuses to mix runs on different data: those that are finished, and those of the queue, which would be trained on the data as it is now. Only runs with equal settings
/// of data are compared.
fn same_data(plan: &Plan, folder: &Path, states: &[State], queue: &[usize], runner: &dyn Runner) -> Result<()> {
    let of_data = |key: &str| keys::find(key).is_some_and(|key| key.effect == Effect::Data);
    let group = |job: &Job| {
        let settings = job.settings.iter().filter(|(key, _)| of_data(key)).map(|(key, value)| (key.clone(), value.clone()));
        plan::hash(&settings.collect())
    };
    // Of each group: how many finished runs have a fingerprint.
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
        list.extend(now.map(|now| format!("{now} (the data as it is now)")));
        let problem = format!(
            "runs on different data cannot be compared; the fingerprints of their data are {}; restore the data that the finished runs were trained on, or run the sweep in another folder with --out",
            list.join(", ")
        );
        return Err(Error::Sweep { path: folder.into(), problem });
    }
    Ok(())
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

/// Held while a process writes what several may write, such as the summary of a sweep; another one that writes is waited for. Where a file system has no locks
/// there is nothing to hold.
pub fn writing_alone(folder: &Path) -> Option<fs::File> {
    let begun = Instant::now();
    loop {
        match files::lock(&folder.join("sweep.lock")) {
            Ok(None) if begun.elapsed() < WRITING => thread::sleep(Duration::from_millis(50)),
            found => return found.ok().flatten(),
        }
    }
}
