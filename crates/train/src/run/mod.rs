//! A run: a folder, and the loop that fills it.
//!
//! ```text
//! runs/<name>/
//!     settings.toml             every setting
//!     provenance.json           which builds worked on it, and the command that began it: [`crate::provenance`]
//!     metrics.jsonl             see [`crate::metrics`]
//!     events.out.tfevents.*     the same for TensorBoard
//!     checkpoints/step-N/       see [`crate::checkpoint`]
//!     warnings.log              what was unusual
//!     nonfinite-step-N/         the diagnosis of a step that was not finite: [`crate::nonfinite`]
//! runs/.<name>.replaced/        the run that this one replaces, until its first checkpoint
//! ```
//!
//! Batch i of a run is batch i of its source under its seed, whatever happened before, and every sum has a fixed order: a run that was killed
//! and resumed ends with the same bytes as one that was not, on any number of threads and, of a run that is cut into micro-batches, of processes:
//! see [`crate::collective`]. Rank 0 alone touches the folder; the others read the checkpoint that it names, so that all see the same files.

mod replace;
mod training;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Best, Checkpoints, Found, Loaded, MANIFEST, SETTINGS, STATE, State};
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

pub(crate) use replace::locate;
pub use replace::replaced_by;

use replace::Replacement;
use training::{Training, Writer};

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At step 0, in a folder without a run.
    #[default]
    Fresh,
    /// At step 0, in place of the run in the folder, if there is one. It is kept until the new run has a checkpoint, and put back if that fails before.
    Replace,
    /// At the newest good checkpoint; at step 0 where a run was killed before its first.
    Resume,
    /// At this checkpoint and no other.
    At(PathBuf),
}

impl Start {
    /// Whether the run begins at step 0 with the settings that were asked for, not with those of its folder.
    pub fn is_new(&self) -> bool {
        matches!(self, Start::Fresh | Start::Replace)
    }
}

/// How a run is made; nothing here changes its results.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's folder.
    pub folder: PathBuf,
    /// Where it begins.
    pub start: Start,
    /// Who is told how it goes.
    pub display: Display,
    /// Set from outside, it ends the run after the step at hand, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// What the machine can do at most, in operations a second, if progress should say the share of it.
    pub peak: Option<f64>,
    /// Files to put into every checkpoint, such as a tokenizer.
    pub files: Vec<(String, Vec<u8>)>,
    /// Which build this is, for the run's folder.
    pub provenance: Provenance,
    /// The ranks that share the work.
    pub collective: Arc<dyn Collective>,
    /// What computes, where that is not the native engine.
    pub engine: Option<Arc<dyn Engine>>,
}

impl RunOptions {
    /// A fresh run in this folder.
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

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// Steps done in all.
    pub step: u64,
    /// Whether that is all of them; otherwise the run was stopped and can be resumed.
    pub finished: bool,
    /// The newest checkpoint.
    pub checkpoint: PathBuf,
    /// Mean loss of the last logged steps, where any was made.
    pub loss: Option<f64>,
    /// The last evaluation of this session; absent if there was none or its loss was not finite.
    pub held_out: Option<Evaluation>,
    /// Whether the last loss is not finite, or far above that of the first step or of a uniform prediction.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub diverged: bool,
    /// The best held-out loss.
    pub best: Option<Best>,
    /// Updates that were skipped.
    pub skipped: u64,
    /// Warnings of this session.
    pub warnings: usize,
    /// Tokens a second over this session, evaluations and checkpoints not counted.
    pub tokens_per_second: f64,
}

/// What a path to resume stands for: a run, or exactly one checkpoint within it.
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
            // As the user wrote it, where that is the same.
            let written = path.parent().and_then(Path::parent).filter(|written| written.canonicalize().is_ok_and(|written| written == run));
            Ok((written.unwrap_or(run).into(), Start::At(path.into())))
        }
        None => {
            let problem = format!(
                "this is a checkpoint outside of its run, and to go on in it would change it; put it into the folder `checkpoints` of its run, \
                 or start a new run from its weights with --from {}",
                path.display()
            );
            Err(Error::NoCheckpoint { folder: path.into(), problem })
        }
    }
}

/// The settings of a run in a folder, with these above them. Use for [`Start::Resume`].
pub fn resumed_settings(folder: &Path, above: &[Layer]) -> Result<Settings> {
    let path = folder.join(SETTINGS);
    if !path.is_file() {
        let problem = "there is no settings.toml, so no run to resume; leave out --resume to start one".into();
        return Err(Error::NoCheckpoint { folder: folder.into(), problem });
    }
    let text = read_text(&path).map_err(Error::io("read", &path))?;
    let mut layers = vec![Layer::of_run(&text, &path.display().to_string())?];
    layers.extend_from_slice(above);
    Settings::resolve(&layers)
}

/// Trains a model on `source` as the settings say. Where several ranks work together each calls this, with the same settings.
///
/// # Errors
/// [`Error::FirstRank`] on other ranks where rank 0 has failed and all know it. Any other error may be of one rank alone: who calls this then ends the others.
pub fn train(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    settings.validate()?;
    if settings.engine != options.engine.as_ref().map_or("native", |engine| engine.name()) {
        let expected = "this engine is a program of its own, which `termwise train` starts".to_owned();
        return Err(Error::Setting { place: String::new(), key: "engine".into(), found: settings.engine.clone(), expected });
    }
    let threads = if settings.threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { settings.threads };
    let pool = termwise_base::threads::pool(threads)?;
    pool.install(|| match options.collective.rank() {
        0 => run_rank0(settings, source, options),
        _ => run_worker(settings, source, options),
    })
}

/// How far a start has come when it fails.
#[derive(Default)]
struct Reached {
    /// The folder contains nothing but the work of this process.
    alone: bool,
    /// The other ranks know where to begin.
    told: bool,
    /// A step was made that a resumed run can build on, or left a folder to look at.
    stepped: bool,
}

/// Rank 0: it holds the folder's lock.
fn run_rank0(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    let folder = &options.folder;
    let mut reached = Reached::default();
    let mut created = false;
    let mut start = || -> Result<Outcome> {
        replace::recover_missing(folder)?;
        created = !folder.exists();
        create_folder(folder)?;
        // Held until the end.
        let (_lock, recovered) = replace::recover(folder, lock(folder)?, options.start == Start::Replace)?;
        with_lock(settings, source, options, recovered, &mut reached)
    };
    let outcome = start();
    if outcome.is_err() && reached.alone && !reached.stepped {
        undo(folder, created);
    }
    if outcome.is_err() && !reached.told {
        // Others wait for a word, even if there is nothing to begin with. The error that matters is this one.
        let _ = options.collective.broadcast(&mut Vec::new());
    }
    outcome
}

/// As [`train`], with the folder's lock held.
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
        // Some data are refused only when they are read.
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
    reached.told = true;
    let mut message = serde_json::to_vec(&StartMessage { checkpoint: begin.checkpoint.clone() }).map_err(Error::json(folder))?;
    options.collective.broadcast(&mut message)?;
    let mut training = Training::new(settings, source, &options, Some(writer), begin, warnings)?;
    let outcome = training.run().map_err(|error| training.failed(error));
    reached.stepped = training.done() > 0 || matches!(outcome, Err(Error::NonFinite { .. }));
    outcome
}

/// Rank 0 to the others: where to begin.
#[derive(Serialize, Deserialize)]
struct StartMessage {
    checkpoint: Option<PathBuf>,
}

/// Another rank: it reads what rank 0 names, and writes nothing.
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

/// Whether a file or folder with this name in the folder of a run is part of the run.
fn is_run_file(name: &str) -> bool {
    let files = [SETTINGS, provenance::FILE, METRICS, metrics::LATER, WARNINGS, LOCK, replace::MARKER, "checkpoints"];
    // Temporary files of those.
    let own = name.strip_prefix('.').and_then(|name| name.strip_suffix(".part")).unwrap_or(name);
    files.contains(&own) || name.contains(".tfevents.") || own.starts_with("nonfinite-step-")
}

/// Whether a folder contains a run, or part of one.
fn holds_run(folder: &Path) -> Result<bool> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("list", folder))?;
    Ok(entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(|name| name != LOCK && is_run_file(name))))
}

/// Removes the files of a run that was refused before its first step, so the corrected command can begin; other files stay. The settings are
/// removed last: until then it is a run, which can be resumed.
fn undo(folder: &Path, created: bool) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_run_file));
    paths.sort_by_key(|path| path.ends_with(SETTINGS));
    for path in paths {
        // A file that cannot be removed is only in the way of the next attempt, which reports it.
        let _ = std::fs::remove_file(path);
    }
    if created {
        // Only if nothing else is in it.
        let _ = std::fs::remove_dir(folder);
    }
}

/// Exit code of a process whose run was asked to stop and left a checkpoint: what shells say of an interrupt.
pub const STOPPED: u8 = 130;

/// Exit code of a process that found another one working in its run's folder: `EX_TEMPFAIL`, to be tried again.
pub const LOCKED: u8 = 75;

const LOCK: &str = "run.lock";

/// Whether a process is working in the folder of a run at this moment.
pub fn is_locked(folder: &Path) -> bool {
    let held = |file: File| matches!(file.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock));
    File::open(folder.join(LOCK)).is_ok_and(held)
}

/// Held while a process works in a folder.
pub(crate) fn lock(folder: &Path) -> Result<File> {
    files::lock(&folder.join(LOCK))?.ok_or_else(|| Error::RunLocked { folder: folder.into() })
}

/// What a session starts from.
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
    let Some(Found { path, loaded, skipped }) = found else { return Ok((fresh(settings, source)?, Vec::new())) };
    let Loaded { learner, state, settings: before } = loaded;
    let differences = settings.differences(&before);
    if !differences.is_empty() {
        return Err(Error::SettingsDiffer { checkpoint: path, differences });
    }
    if state.source != source.fingerprint() {
        let differences = settings.differing(&before, Effect::Data);
        return Err(Error::DataDiffers { checkpoint: path, asked: source.fingerprint(), found: state.source, differences });
    }
    let warnings = skipped.iter().map(|error| format!("{error}; resuming from {} instead", path.display())).collect();
    Ok((Begin { learner, state, checkpoint: Some(path) }, warnings))
}

/// Warnings of a run without checkpoints that restarts at step 0, which is right if it was killed before its first checkpoint. An error if it must
/// have had one.
fn restart_warnings(folder: &Path) -> Result<Vec<String>> {
    let last = metrics::last_step(folder)?;
    let every = if folder.join(SETTINGS).is_file() { resumed_settings(folder, &[])?.checkpoint_every } else { 0 };
    if every > 0 && last > every {
        let problem = format!(
            "its metrics go to step {last} and it wrote a checkpoint every {every} steps, but there is none; \
             put the folder `checkpoints` back, or start a new run"
        );
        return Err(Error::NoCheckpoint { folder: folder.into(), problem });
    }
    Ok(if last > 0 { vec![format!("there is no checkpoint; of {last} steps the run begins again")] } else { Vec::new() })
}

fn fresh(settings: &Settings, source: &dyn Source) -> Result<Begin> {
    let state = State { seed: settings.seed, settings: settings.hash(), source: source.fingerprint(), ..State::default() };
    Ok(Begin { learner: learner::fresh(settings, source)?, state, checkpoint: None })
}
