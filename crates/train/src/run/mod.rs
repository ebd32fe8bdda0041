//! A training run: its directory and the training loop.
//!
//! ```text
//! runs/<name>/
//!     settings.toml             every setting
//!     provenance.json           the builds that worked on it, and its first command: [`crate::provenance`]
//!     metrics.jsonl             see [`crate::metrics`]
//!     events.out.tfevents.*     the same for TensorBoard
//!     checkpoints/step-N/       see [`crate::checkpoint`]
//!     warnings.log              warnings
//!     nonfinite-step-N/         the diagnosis of a NaN or infinity: [`crate::nonfinite`]
//! runs/.<name>.replaced/        the run that this one replaces, until the first checkpoint
//! ```
//!
//! Batch i of a run depends only on i, the source and the seed, and every sum has a fixed order. A run that was killed and resumed therefore ends with
//! the same bytes as an uninterrupted one, for any number of threads. With micro-batches this also holds for any number of processes:
//! see [`crate::collective`]. Only rank 0 accesses the directory; the others read the checkpoint that it names, so all read the same files.

mod launch;
mod replace;
mod training;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Best, Checkpoints, Loaded, LocatedCheckpoint, MANIFEST, SETTINGS, STATE, State};
use crate::collective::{Alone, Collective};
use crate::error::{Error, Result};
use crate::eval::Evaluation;
use crate::learner::{self, Engine};
use crate::metrics::{self, METRICS};
use crate::native::Native;
use crate::progress::{Display, WARNINGS};
use crate::provenance::{self, Provenance};
use crate::settings::keys::Effect;
use crate::settings::{Layer, Settings};
use termwise_base::files::{self, create_folder, read_text, write_whole};
use termwise_data::{Rows, Source};

pub use launch::{PlannedRun, TrainRequest, check_name};
pub(crate) use replace::locate;
pub use replace::replaced_by;

use replace::Replacement;
use training::{Training, Writer};

/// Where a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At step 0, in a directory without a run.
    #[default]
    Fresh,
    /// At step 0, replacing the run in the directory, if there is one. The old run is kept until the new run has a checkpoint, and restored if it fails before.
    Replace,
    /// At the newest valid checkpoint; at step 0 if a run was killed before its first checkpoint.
    Resume,
    /// At exactly this checkpoint.
    At(PathBuf),
}

impl Start {
    /// Whether the run starts at step 0 with the requested settings, not with those in its directory.
    pub fn is_new(&self) -> bool {
        matches!(self, Start::Fresh | Start::Replace)
    }
}

/// Options of a run that do not affect its results.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's directory.
    pub folder: PathBuf,
    /// Where it starts.
    pub start: Start,
    /// Receiver of progress events.
    pub display: Display,
    /// If set, the run ends after the current step with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// The machine's peak operations per second, to show utilization.
    pub peak: Option<f64>,
    /// Files to add to every checkpoint, such as a tokenizer.
    pub files: Vec<(String, Vec<u8>)>,
    /// This build, recorded in the run's directory.
    pub provenance: Provenance,
    /// The ranks that share the work.
    pub collective: Arc<dyn Collective>,
    /// The engine, if not the native one.
    pub engine: Option<Arc<dyn Engine>>,
}

impl RunOptions {
    /// A new run in this directory.
    pub fn new(folder: impl Into<PathBuf>) -> RunOptions {
        RunOptions {
            folder: folder.into(),
            start: Start::Fresh,
            display: Display::Silent,
            stop: Arc::default(),
            peak: None,
            files: Vec::new(),
            provenance: Provenance::default(),
            collective: Arc::new(Alone),
            engine: None,
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The run's directory.
    pub folder: PathBuf,
    /// Total steps done.
    pub step: u64,
    /// Whether all steps are done; otherwise the run was stopped and can be resumed.
    pub finished: bool,
    /// The newest checkpoint.
    pub checkpoint: PathBuf,
    /// Mean loss of the last logged steps, if any.
    pub loss: Option<f64>,
    /// The last evaluation of this session; absent if there was none or its loss was NaN or infinite.
    pub held_out: Option<Evaluation>,
    /// Whether the last loss is NaN, infinite, or far above that of the first step or of a uniform prediction.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub diverged: bool,
    /// The best held-out loss.
    pub best: Option<Best>,
    /// Number of skipped updates.
    pub skipped: u64,
    /// Number of warnings in this session.
    pub warnings: usize,
    /// Tokens per second in this session, without evaluations and checkpoints.
    pub tokens_per_second: f64,
}

/// Resolves a path to resume: a run, or one checkpoint of a run.
pub fn resume_at(path: &Path) -> Result<(PathBuf, Start)> {
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let place = whole.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "checkpoints"));
    let step = whole.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-")).map(str::parse::<u64>);
    let named = place.is_some() && matches!(step, Some(Ok(_)));
    let complete = whole.join(STATE).is_file() && whole.join(MANIFEST).is_file();
    if !named && !complete {
        return Ok((path.into(), Start::Resume));
    }
    match place.and_then(Path::parent).filter(|run| run.join(SETTINGS).is_file()) {
        Some(run) => {
            // As the user wrote it, if equivalent.
            let written = path.parent().and_then(Path::parent).filter(|written| written.canonicalize().is_ok_and(|written| written == run));
            Ok((written.unwrap_or(run).into(), Start::At(path.into())))
        }
        None => {
            let problem = format!(
                "this is a checkpoint outside of its run, and resuming would modify it; move it to the directory `checkpoints` of its run, \
                 or start a new run from its weights with --from {}",
                path.display()
            );
            Err(Error::NoCheckpoint { folder: path.into(), problem })
        }
    }
}

/// The settings of the run in a directory, overridden by these. For [`Start::Resume`].
pub fn resumed_settings(folder: &Path, above: &[Layer]) -> Result<Settings> {
    let path = folder.join(SETTINGS);
    if !path.is_file() {
        let problem = "it has no settings.toml; omit --resume to start a run".into();
        return Err(Error::NoRun { folder: folder.into(), problem });
    }
    let text = read_text(&path).map_err(Error::io("read", &path))?;
    let mut layers = vec![Layer::of_run(&text, &path.display().to_string())?];
    layers.extend_from_slice(above);
    Settings::resolve(&layers)
}

/// Trains a model on `source`. With several ranks, each rank calls this with the same settings.
///
/// # Errors
/// [`Error::FirstRank`] on other ranks if rank 0 has failed and all ranks know it. Any other error may occur on one rank only; the caller must then end the others.
pub fn train(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    settings.validate()?;
    if settings.engine != options.engine.as_ref().map_or("native", |engine| engine.name()) {
        let expected = "this engine is a separate program, started by `termwise train`".to_owned();
        return Err(Error::Setting { place: String::new(), key: "engine".into(), found: settings.engine.clone(), expected });
    }
    let threads = if settings.threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { settings.threads };
    let pool = termwise_base::threads::pool(threads)?;
    pool.install(|| match options.collective.rank() {
        0 => run_rank0(settings, source, options),
        _ => run_worker(settings, source, options),
    })
}

/// Progress of a start when it fails.
#[derive(Default)]
struct Reached {
    /// The directory contains only files of this process.
    alone: bool,
    /// The other ranks have received the start message.
    informed: bool,
    /// A step was made that a resumed run can continue, or a diagnosis was written.
    stepped: bool,
}

/// Rank 0: locks the directory.
fn run_rank0(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    let folder = &options.folder;
    let mut reached = Reached::default();
    let mut created = false;
    let mut start = || -> Result<Outcome> {
        replace::recover_missing(folder)?;
        created = !folder.exists();
        create_folder(folder)?;
        // Locked until the end.
        let (_lock, recovered) = replace::recover(folder, lock(folder)?, options.start == Start::Replace)?;
        with_lock(settings, source, options, recovered, &mut reached)
    };
    let outcome = start();
    if outcome.is_err() && reached.alone && !reached.stepped {
        undo(folder, created);
    }
    if outcome.is_err() && !reached.informed {
        // Other ranks wait for a message even if the start fails. This error is returned.
        let _ = options.collective.broadcast(&mut Vec::new());
    }
    outcome
}

/// [`train`] with the directory locked.
fn with_lock(
    settings: &Settings,
    source: &dyn Source,
    options: &RunOptions,
    recovered: replace::Recovered,
    reached: &mut Reached,
) -> Result<Outcome> {
    let folder = &options.folder.clone();
    let replaces = match (&options.start, holds_run(folder)?) {
        (Start::Fresh, true) => return Err(Error::RunExists { folder: folder.clone(), replaces: recovered.replaced }),
        (Start::Replace, held) => held,
        _ => false,
    };
    reached.alone = options.start.is_new() && !replaces;
    let checkpoints = Checkpoints::new(folder.join("checkpoints"));
    let mut warnings = recovered.warnings;
    if !options.start.is_new() {
        warnings.extend(checkpoints.clean()?);
    }
    let (begin, further) = begin(settings, source, options, &checkpoints)?;
    warnings.extend(further);
    if begin.checkpoint.is_none() {
        let config = &begin.learner.model().config;
        let heads: Vec<_> = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer)).collect();
        warnings.extend(termwise_model::decode::warnings(&heads));
        warnings.extend(settings.precision()?.warning().map(str::to_owned));
        // Some data errors occur only on reading.
        source.train(settings.seed, 0, settings.batch, settings.length, &mut Rows::default())?;
    }
    let mut options = options.clone();
    let replacement = match (replaces, recovered.replaced) {
        (true, _) => Some(Replacement::begin(folder, &settings.to_toml(), &options.provenance)?),
        (false, Some(_)) => Some(Replacement::resume(folder)?),
        (false, None) => None,
    };
    write_whole(&folder.join(SETTINGS), settings.to_toml().as_bytes())?;
    options.files.push((provenance::FILE.into(), provenance::note(folder, &options.provenance)?));
    let writer = Writer::open(folder, checkpoints, begin.state.step, replacement)?;
    reached.informed = true;
    let mut message = serde_json::to_vec(&StartMessage { checkpoint: begin.checkpoint.clone() }).map_err(Error::json(folder))?;
    options.collective.broadcast(&mut message)?;
    let mut training = Training::new(settings, source, &options, Some(writer), begin, warnings)?;
    let outcome = training.run().map_err(|error| training.failed(error));
    reached.stepped = training.done() > 0 || matches!(outcome, Err(Error::NonFinite { .. }));
    outcome
}

/// Message of rank 0 to the others: where to start.
#[derive(Serialize, Deserialize)]
struct StartMessage {
    checkpoint: Option<PathBuf>,
}

/// Other ranks: read the checkpoint that rank 0 names, and write nothing.
fn run_worker(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    let mut message = Vec::new();
    options.collective.broadcast(&mut message)?;
    let Ok(StartMessage { checkpoint }) = serde_json::from_slice(&message) else { return Err(Error::FirstRank) };
    let begin = match checkpoint {
        None => fresh(settings, source)?,
        Some(path) => {
            let Loaded { learner, state, .. } = crate::checkpoint::read(&path)?;
            Begin { learner, state, checkpoint: Some(path) }
        }
    };
    let options = RunOptions { display: Display::Silent, ..options.clone() };
    Training::new(settings, source, &options, None, begin, Vec::new())?.run()
}

/// Whether an entry of a run's directory is part of the run.
fn is_run_file(name: &str) -> bool {
    let files = [SETTINGS, provenance::FILE, METRICS, metrics::LATER_METRICS, WARNINGS, LOCK, replace::MARKER, "checkpoints"];
    // Temporary files of these.
    let own = name.strip_prefix('.').and_then(|name| name.strip_suffix(".part")).unwrap_or(name);
    files.contains(&own) || name.contains(".tfevents.") || own.starts_with("nonfinite-step-")
}

/// Whether a directory contains a run or a part of one.
fn holds_run(folder: &Path) -> Result<bool> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("list", folder))?;
    Ok(entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(|name| name != LOCK && is_run_file(name))))
}

/// Removes the files of a run that was rejected before its first step, so that the corrected command can start; other files are kept. The settings are
/// removed last: until then the run can be resumed.
fn undo(folder: &Path, created: bool) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_run_file));
    paths.sort_by_key(|path| path.ends_with(SETTINGS));
    for path in paths {
        // A file that cannot be removed is reported by the next attempt.
        let _ = std::fs::remove_file(path);
    }
    if created {
        // Only if it is empty.
        let _ = std::fs::remove_dir(folder);
    }
}

/// Exit code of a run that was stopped and left a checkpoint: that of an interrupt (SIGINT).
pub const EXIT_INTERRUPTED: u8 = 130;

/// Exit code if another process is working in the run's directory: `EX_TEMPFAIL`, try again later.
pub const EXIT_LOCKED: u8 = 75;

const LOCK: &str = "run.lock";

/// Whether a process is currently working in a run's directory.
pub fn is_locked(folder: &Path) -> bool {
    let held = |file: File| matches!(file.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock));
    File::open(folder.join(LOCK)).is_ok_and(held)
}

/// Locked while a process works in a directory.
pub(crate) fn lock(folder: &Path) -> Result<File> {
    files::lock(&folder.join(LOCK))?.ok_or_else(|| Error::RunLocked { folder: folder.into() })
}

/// The initial state of a session.
struct Begin {
    learner: Box<Native>,
    state: State,
    checkpoint: Option<PathBuf>,
}

fn begin(settings: &Settings, source: &dyn Source, options: &RunOptions, checkpoints: &Checkpoints) -> Result<(Begin, Vec<String>)> {
    let found = match &options.start {
        Start::Fresh | Start::Replace => None,
        Start::Resume => match checkpoints.newest()? {
            None => return Ok((fresh(settings, source)?, restart_warnings(&options.folder)?)),
            found => found,
        },
        Start::At(path) => Some(checkpoints.exactly(path)?),
    };
    let Some(LocatedCheckpoint { path, loaded, skipped }) = found else { return Ok((fresh(settings, source)?, Vec::new())) };
    let Loaded { learner, state, settings: before } = loaded;
    let differences = settings.differences(&before);
    if !differences.is_empty() {
        return Err(Error::SettingsDiffer { checkpoint: path, differences });
    }
    if state.source != source.fingerprint() {
        let differences = settings.differing(&before, Effect::Data);
        return Err(Error::DataDiffers { checkpoint: path, requested: source.fingerprint(), found: state.source, differences });
    }
    let warnings = skipped.iter().map(|error| format!("{error}; resuming from {} instead", path.display())).collect();
    Ok((Begin { learner, state, checkpoint: Some(path) }, warnings))
}

/// Warnings for a run without checkpoints that restarts at step 0. That is correct if it was killed before its first checkpoint. An error if it must
/// have had one.
fn restart_warnings(folder: &Path) -> Result<Vec<String>> {
    let last = metrics::last_step(folder)?;
    let every = if folder.join(SETTINGS).is_file() { resumed_settings(folder, &[])?.checkpoint_every } else { 0 };
    if every > 0 && last > every {
        let problem = format!(
            "its metrics end at step {last} and it wrote a checkpoint every {every} steps, but there is no checkpoint; \
             put the folder `checkpoints` back, or start a new run"
        );
        return Err(Error::NoCheckpoint { folder: folder.into(), problem });
    }
    Ok(if last > 0 { vec![format!("there is no checkpoint; restarting at step 0 (metrics end at step {last})")] } else { Vec::new() })
}

fn fresh(settings: &Settings, source: &dyn Source) -> Result<Begin> {
    let state = State { seed: settings.seed, settings: settings.hash(), source: source.fingerprint(), ..State::default() };
    Ok(Begin { learner: learner::fresh(settings, source)?, state, checkpoint: None })
}
