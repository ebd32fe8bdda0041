//! Errors of this crate.

use std::path::PathBuf;

use termwise_base::files;

/// Errors of this crate. Each states the request, the finding and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    Io(#[from] files::Error),
    /// An error in the data.
    #[error(transparent)]
    Data(#[from] termwise_data::Error),
    /// An error in the model.
    #[error(transparent)]
    Model(#[from] termwise_model::Error),
    /// An error in attention.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A loss that is NaN or infinite during evaluation.
    #[error(
        "the loss of batch {batch} is not finite{}; check the weights, or use an attention variant that is stable on this data",
        denominator.map_or(String::new(), |at| format!(": {at}"))
    )]
    EvaluationNotFinite {
        /// Index of the batch, from 0.
        batch: u64,
        /// The first attention denominator that was not positive.
        denominator: Option<termwise_model::NonpositiveDenominator>,
    },
    /// A string that is not TOML, or has the wrong structure.
    #[error("{place}: {source}")]
    Toml {
        /// The file or other origin.
        place: String,
        /// The problem.
        source: Box<toml::de::Error>,
    },
    /// An unknown setting.
    #[error("unknown key `{key}` in {place}{}", suggestion.as_ref().map_or("; `termwise train --help` lists all".into(), |s| format!("; did you mean `{s}`?")))]
    UnknownSetting {
        /// The file or other origin.
        place: String,
        /// The key.
        key: String,
        /// The most similar key.
        suggestion: Option<String>,
    },
    /// An invalid value of a setting.
    #[error("{}`{key}` is {found}, but {expected}", if place.is_empty() { String::new() } else { format!("{place}: ") })]
    Setting {
        /// The file or other origin.
        place: String,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The requirement.
        expected: String,
    },
    /// A string that is not JSON, or has the wrong structure.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: serde_json::Error,
    },
    /// A damaged checkpoint file.
    #[error("the checkpoint is damaged: {}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The requested checkpoint is damaged, but an earlier one is valid.
    #[error("{error}; the newest valid checkpoint before it is {}; resume from that one, or name only the run's directory", good.display())]
    OlderIsGood {
        /// The problem of the requested checkpoint.
        error: Box<Error>,
        /// The valid checkpoint.
        good: PathBuf,
    },
    /// A run that does not exist.
    #[error("there is no run `{}`: {problem}", folder.display())]
    NoRun {
        /// The requested directory or name.
        folder: PathBuf,
        /// The finding and the remedy.
        problem: String,
    },
    /// No checkpoint to resume from.
    #[error("{}: {problem}", folder.display())]
    NoCheckpoint {
        /// The run's directory.
        folder: PathBuf,
        /// The finding and the remedy.
        problem: String,
    },
    /// Settings that differ from those of the checkpoint.
    #[error(
        "cannot resume {} with different settings:\n  {}\nremove these settings, or start a new run",
        checkpoint.display(), .differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
    )]
    SettingsDiffer {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// The differences.
        differences: Vec<crate::settings::Difference>,
    },
    /// Data that differ from those of the checkpoint.
    #[error(
        "cannot resume {}: its training data had the fingerprint {found}, the current data has {requested}; restore the original data, or start a new run{}",
        checkpoint.display(), .differences.iter().map(|difference| format!("\n  {difference}")).collect::<String>()
    )]
    DataDiffers {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Fingerprint of the current data.
        requested: String,
        /// Fingerprint in the checkpoint.
        found: String,
        /// Data settings that differ.
        differences: Vec<crate::settings::Difference>,
    },
    /// A directory that already contains a run.
    #[error(
        "{} already contains a run; continue it with --resume, replace it with --overwrite, or choose another name{}",
        folder.display(),
        replaces.as_ref().map_or(String::new(), |old| format!("; the replaced run is kept in {} until the first checkpoint", old.display()))
    )]
    RunExists {
        /// The directory.
        folder: PathBuf,
        /// The replaced run, if there is no checkpoint yet.
        replaces: Option<PathBuf>,
    },
    /// A run that is in use by another process.
    #[error("another process is working in {}; wait for it to end, or choose another name", folder.display())]
    RunLocked {
        /// The directory.
        folder: PathBuf,
    },
    /// The model and its batches do not fit into memory.
    #[error(
        "the model and batches of {batch} × {length} tokens need at least {}, and {} of memory is available; use a smaller model, batch or length",
        gigabytes(*needed), gigabytes(*available)
    )]
    Memory {
        /// Batch size.
        batch: usize,
        /// Sequence length.
        length: usize,
        /// Bytes needed at least.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// Threads could not be started.
    #[error(transparent)]
    Threads(#[from] termwise_base::threads::Error),
    /// A loss or gradient that is NaN or infinite.
    #[error("{diagnosis}; the update was not made{}", .file.as_ref().map_or(String::new(), |file| format!("; the diagnosis is in {}", file.display())))]
    NonFinite {
        /// The origin, as far as known.
        diagnosis: Box<crate::nonfinite::Diagnosis>,
        /// Path of the diagnosis.
        file: Option<PathBuf>,
    },
    /// An invalid sweep, or an unreadable record of one.
    #[error("{}: {problem}", path.display())]
    Sweep {
        /// Its file or directory.
        path: PathBuf,
        /// The problem and the remedy.
        problem: String,
    },
    /// A model name that cannot be resolved.
    #[error("{}: {}; {hint}", if requested.is_empty() { "no model was named".into() } else { format!("there is no model `{requested}`") }, tried.join("; "))]
    NoModel {
        /// The requested name; empty if none was given.
        requested: String,
        /// The places that were searched.
        tried: Vec<String>,
        /// The remedy.
        hint: String,
    },
    /// A rank ended before the others.
    #[error("rank {rank} has terminated, so all ranks stop; resume from the newest checkpoint with any number of ranks")]
    RankLost {
        /// Index of the rank.
        rank: usize,
    },
    /// MPI is not usable.
    #[error("MPI cannot be used: {problem}")]
    Mpi {
        /// The problem.
        problem: String,
    },
    /// Rank 0 failed and has already printed its error.
    #[error("rank 0 failed; see its error message")]
    FirstRank,
    /// Ranks with different settings or data.
    #[error("the ranks do not have the same run: {what} differs: {}", .found.join(", "))]
    RanksDiffer {
        /// The quantity that differs.
        what: &'static str,
        /// Its value on each rank.
        found: Vec<String>,
    },
    /// Another engine failed and has reported where.
    #[error("the {engine} engine failed: {problem}")]
    Engine {
        /// Its name in settings.
        engine: &'static str,
        /// Its error message.
        problem: String,
    },
    /// A Python interpreter that is missing, or lacks required modules.
    #[error("{0}")]
    Python(String),
    /// A process that was killed by a signal.
    #[error("{0}")]
    Process(String),
    /// A part of the program ended without a result.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the request is invalid: settings and model names are user input, wherever they are stored.
    pub fn is_usage(&self) -> bool {
        use termwise_model::Error as Model;
        match self {
            Error::Attention(_)
            | Error::NoModel { .. }
            | Error::NoRun { .. }
            | Error::Python(_)
            | Error::Setting { .. }
            | Error::Toml { .. }
            | Error::UnknownSetting { .. }
            | Error::Model(Model::Attention(_) | Model::AttentionEntry { .. }) => true,
            Error::Io(error) => error.source.kind() == std::io::ErrorKind::NotFound,
            Error::Data(error) => error.is_usage(),
            _ => false,
        }
    }

    /// For `map_err`: adds the action and the path.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let with_source = files::Error::io(action, path);
        move |source| with_source(source).into()
    }

    /// For `map_err`: adds the path of the file that is not valid JSON.
    pub(crate) fn json(path: impl Into<PathBuf>) -> impl FnOnce(serde_json::Error) -> Error {
        let path = path.into();
        move |source| Error::Json { path, source }
    }

    /// Adds the origin to an error about a setting.
    pub(crate) fn at(self, place: &str) -> Error {
        match self {
            Error::Setting { key, found, expected, .. } => Error::Setting { place: place.into(), key, found, expected },
            other => other,
        }
    }
}
