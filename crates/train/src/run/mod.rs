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
//!     nonfinite-step-N/         see [`crate::nonfinite`]
//! ```
//!
//! Batch i of a run is batch i of its source under its seed, whatever happened before, and every sum has a fixed order: a run that was killed
//! and resumed ends with the same bytes as one that was not, on any number of threads.

mod training;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};
use termwise_llama::Model;

use crate::AdamW;
use crate::checkpoint::{Best, Found, Loaded, Shelf, State};
use crate::error::{Error, Result};
use crate::eval::Evaluation;
use crate::progress::Display;
use crate::provenance::{self, Provenance};
use crate::settings::keys::Effect;
use crate::settings::{Layer, Settings};
use termwise_base::files::{create_folder, write_whole};
use termwise_data::Source;

use training::Training;

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At step 0, in a folder without a run.
    #[default]
    Fresh,
    /// At the newest good checkpoint; at step 0 where a run was killed before its first.
    Resume,
    /// At this checkpoint and no other.
    At(PathBuf),
}

/// How a run is made; nothing here changes its results.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's folder.
    pub folder: PathBuf,
    /// Where it begins.
    pub start: Start,
    /// Where progress is shown.
    pub display: Display,
    /// Set from outside, it ends the run after the step at hand, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// What the machine can do at most, in operations a second, if progress should say the share of it.
    pub peak: Option<f64>,
    /// Files to put into every checkpoint, such as a tokenizer.
    pub files: Vec<(String, Vec<u8>)>,
    /// Which build this is, for the run's folder.
    pub provenance: Provenance,
}

impl RunOptions {
    /// A fresh run in this folder.
    pub fn new(folder: impl Into<PathBuf>) -> RunOptions {
        let (start, display, stop) = (Start::Fresh, Display::Auto, Arc::default());
        RunOptions { folder: folder.into(), start, display, stop, peak: None, files: Vec::new(), provenance: Provenance::default() }
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
    /// The last evaluation, where any was made.
    pub held_out: Option<Evaluation>,
    /// The best held-out loss.
    pub best: Option<Best>,
    /// Updates that were skipped.
    pub skipped: u64,
    /// Warnings of this session.
    pub warnings: usize,
    /// Tokens a second over this session, evaluations and checkpoints not counted.
    pub tokens_per_second: f64,
}

/// The settings of a run in a folder, with these above them. Use for [`Start::Resume`].
pub fn resumed_settings(folder: &Path, above: &[Layer]) -> Result<Settings> {
    let path = folder.join("settings.toml");
    if !path.is_file() {
        let problem = "there is no settings.toml, so no run to resume; leave out --resume to start one".into();
        return Err(Error::NoCheckpoint { folder: folder.into(), problem });
    }
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let mut layers = vec![Layer::of_run(&text, &path.display().to_string())?];
    layers.extend_from_slice(above);
    Settings::resolve(&layers)
}

/// Trains a model on `source` as the settings say.
pub fn train(settings: &Settings, source: &dyn Source, options: &RunOptions) -> Result<Outcome> {
    settings.validate()?;
    let threads = if settings.threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { settings.threads };
    let pool = termwise_base::threads::pool(threads)?;
    pool.install(|| {
        let folder = &options.folder;
        create_folder(folder)?;
        let _lock = lock(folder)?;
        let shelf = Shelf::new(folder.join("checkpoints"));
        let leftovers = shelf.clean()?;
        let (begin, mut warnings) = begin(settings, source, options, &shelf)?;
        warnings.extend(leftovers.iter().map(|path| format!("removed what an interrupted write left at {}", path.display())));
        let path = folder.join("settings.toml");
        write_whole(&path, settings.to_toml().as_bytes())?;
        let mut options = options.clone();
        options.files.push((provenance::FILE.into(), provenance::note(folder, &options.provenance)?));
        Training::new(settings, source, &options, shelf, begin, warnings)?.run()
    })
}

/// Held while a process works in a folder; the operating system frees it however the process ends.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("run.lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::RunLocked { folder: folder.into() }),
        Err(std::fs::TryLockError::Error(error)) => Err(Error::io("lock", &path)(error)),
    }
}

/// What a session starts from.
struct Begin {
    model: Model,
    optimizer: AdamW,
    state: State,
    checkpoint: Option<PathBuf>,
}

fn begin(settings: &Settings, source: &dyn Source, options: &RunOptions, shelf: &Shelf) -> Result<(Begin, Vec<String>)> {
    let found = match &options.start {
        Start::Fresh if options.folder.join("settings.toml").exists() => {
            return Err(Error::RunExists { folder: options.folder.clone() });
        }
        Start::Fresh => None,
        Start::Resume => shelf.newest()?,
        Start::At(path) => Some(shelf.exactly(path)?),
    };
    let Some(Found { path, loaded, skipped }) = found else { return Ok((fresh(settings, source)?, Vec::new())) };
    let Loaded { model, mut optimizer, state, settings: before } = loaded;
    let differences = settings.differences(&before);
    if !differences.is_empty() {
        return Err(Error::SettingsDiffer { checkpoint: path, differences });
    }
    if state.source != source.fingerprint() {
        let differences = settings.differing(&before, Effect::Data);
        return Err(Error::DataDiffers { checkpoint: path, asked: source.fingerprint(), found: state.source, differences });
    }
    optimizer.config = settings.adamw();
    let warnings = skipped.iter().map(|error| format!("{error}; resuming from {} instead", path.display())).collect();
    Ok((Begin { model, optimizer, state, checkpoint: Some(path) }, warnings))
}

fn fresh(settings: &Settings, source: &dyn Source) -> Result<Begin> {
    let config = settings.config(source.vocabulary())?;
    let model = if settings.from.is_empty() {
        Model::fresh(config, settings.seed)?
    } else {
        Model::with_weights(config, &termwise_llama::weights::Checkpoint::open(&settings.from)?)?
    };
    let optimizer = AdamW::new(&model.params, settings.adamw());
    let state = State { seed: settings.seed, settings: settings.hash(), source: source.fingerprint(), ..State::default() };
    Ok(Begin { model, optimizer, state, checkpoint: None })
}
