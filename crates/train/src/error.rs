//! What can go wrong in training.

use std::path::PathBuf;

use termwise_base::files;

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written.
    #[error(transparent)]
    Io(#[from] files::Error),
    /// The data.
    #[error(transparent)]
    Data(#[from] termwise_data::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] termwise_model::Error),
    /// Attention.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A loss that is no number while a model is evaluated.
    #[error(
        "the loss of batch {batch} is not finite{}; the weights or the attention cannot take this text",
        denominator.map_or(String::new(), |at| format!(": {at}"))
    )]
    EvaluationNotFinite {
        /// Which batch, from 0.
        batch: u64,
        /// The first denominator of an attention that was not positive.
        denominator: Option<termwise_model::NonpositiveDenominator>,
    },
    /// A text that is not TOML, or not of the right shape.
    #[error("{place}: {source}")]
    Toml {
        /// The file or whatever else holds it.
        place: String,
        /// What is wrong with it.
        source: Box<toml::de::Error>,
    },
    /// A setting that does not exist.
    #[error("{place} has the unknown key `{key}`{}", suggestion.as_ref().map_or("; `termwise train --help` lists all".into(), |s| format!("; did you mean `{s}`?")))]
    UnknownSetting {
        /// The file or whatever else holds it.
        place: String,
        /// The key.
        key: String,
        /// The one that was probably meant.
        suggestion: Option<String>,
    },
    /// A setting's value that cannot be.
    #[error("{}`{key}` is {found}, but {expected}", if place.is_empty() { String::new() } else { format!("{place}: ") })]
    Setting {
        /// The file or whatever else holds it.
        place: String,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A text that is not JSON, or not of the right shape.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A file of a checkpoint that is not as it was written.
    #[error("the checkpoint is damaged: {}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A checkpoint that was asked for and is damaged, though another one is good.
    #[error("{error}; the newest good checkpoint before it is {}: resume from that one, or give only the run's folder", good.display())]
    OlderIsGood {
        /// What is wrong with the one that was asked for.
        error: Box<Error>,
        /// One that is good.
        good: PathBuf,
    },
    /// Nothing to resume from.
    #[error("{}: {problem}", folder.display())]
    NoCheckpoint {
        /// The run's folder.
        folder: PathBuf,
        /// What was found and what to do.
        problem: String,
    },
    /// Settings under which a checkpoint was not made.
    #[error(
        "cannot resume {} with other settings, since the result would belong to neither:\n  {}\nleave these out, or start a new run",
        checkpoint.display(), .differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
    )]
    SettingsDiffer {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// What differs.
        differences: Vec<crate::settings::Difference>,
    },
    /// Data with which a checkpoint was not made.
    #[error(
        "cannot resume {}: its data had the fingerprint {found}, the data now has {asked}; restore what it was trained on, or start a new run{}",
        checkpoint.display(), .differences.iter().map(|difference| format!("\n  {difference}")).collect::<String>()
    )]
    DataDiffers {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Fingerprint of the data at hand.
        asked: String,
        /// Fingerprint in the checkpoint.
        found: String,
        /// Settings of data that differ.
        differences: Vec<crate::settings::Difference>,
    },
    /// A run's folder that holds one already.
    #[error(
        "{} holds a run already; continue it with --resume, replace it with --overwrite, or choose another name{}",
        folder.display(),
        replaces.as_ref().map_or(String::new(), |old| format!("; the run that it replaces is kept in {} until its first checkpoint", old.display()))
    )]
    RunExists {
        /// The folder.
        folder: PathBuf,
        /// The run that it replaces, if it has no checkpoint yet.
        replaces: Option<PathBuf>,
    },
    /// A run's folder that another process works in.
    #[error("another process is working in {}; wait for it to end, or choose another name", folder.display())]
    RunLocked {
        /// The folder.
        folder: PathBuf,
    },
    /// A model and batches that do not fit into memory.
    #[error(
        "the model and batches of {batch} × {length} tokens need at least {}, and {} of memory can be had; take a smaller model, batch or length",
        gigabytes(*needed), gigabytes(*available)
    )]
    Memory {
        /// Rows.
        batch: usize,
        /// Positions of a row.
        length: usize,
        /// Bytes that they need at least.
        needed: u64,
        /// Bytes that the system has.
        available: u64,
    },
    /// A pool of threads that cannot be had.
    #[error(transparent)]
    Threads(#[from] termwise_base::threads::Error),
    /// A loss or gradient that is NaN or infinite.
    #[error("{diagnosis}; the update was not made{}", .file.as_ref().map_or(String::new(), |file| format!("; the diagnosis is in {}", file.display())))]
    NonFinite {
        /// The origin, as far as it is known.
        diagnosis: Box<crate::nonfinite::Diagnosis>,
        /// The file of the diagnosis.
        file: Option<PathBuf>,
    },
    /// A sweep that cannot be run, or a record of one that cannot be read.
    #[error("{}: {problem}", path.display())]
    Sweep {
        /// Its file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A model that is not where its name could lead.
    #[error("{}: {}; {hint}", if asked.is_empty() { "no model was named".into() } else { format!("there is no model `{asked}`") }, tried.join("; "))]
    NoModel {
        /// As it was asked for; empty where it was not.
        asked: String,
        /// What was looked for.
        tried: Vec<String>,
        /// What to do.
        hint: String,
    },
    /// A rank that ended while others worked with it.
    #[error("rank {rank} has ended, and the others with it; resume from the newest checkpoint, with any number of ranks")]
    RankLost {
        /// Which.
        rank: usize,
    },
    /// MPI as it cannot be used.
    #[error("MPI cannot be used: {problem}")]
    Mpi {
        /// Why.
        problem: String,
    },
    /// What rank 0 has said already.
    #[error("rank 0 could not go on")]
    FirstRank,
    /// Ranks that do not work on the same.
    #[error("the ranks do not work on the same run, since {what} differs: {}", .found.join(", "))]
    RanksDiffer {
        /// In what.
        what: &'static str,
        /// What each has.
        found: Vec<String>,
    },
    /// Another engine that failed; it has said where.
    #[error("the {engine} engine failed: {problem}")]
    Engine {
        /// Its name in settings.
        engine: &'static str,
        /// What it said.
        problem: String,
    },
    /// A part of the program that ended without an answer.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether what was asked for makes no sense: settings and names of models are the user's own words, wherever they stand.
    pub fn is_usage(&self) -> bool {
        use termwise_model::Error as Model;
        match self {
            Error::Attention(_)
            | Error::NoModel { .. }
            | Error::Setting { .. }
            | Error::Toml { .. }
            | Error::UnknownSetting { .. }
            | Error::Model(Model::Attention(_) | Model::AttentionEntry { .. }) => true,
            Error::Io(error) => error.source.kind() == std::io::ErrorKind::NotFound,
            Error::Data(error) => error.is_usage(),
            _ => false,
        }
    }

    /// For `map_err`: names what was attempted and on which file.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let with_source = files::Error::io(action, path);
        move |source| with_source(source).into()
    }

    /// For `map_err`: names the file that is not valid JSON.
    pub(crate) fn json(path: impl Into<PathBuf>) -> impl FnOnce(serde_json::Error) -> Error {
        let path = path.into();
        move |source| Error::Json { path, source }
    }

    /// A setting's error, with the place where it stands.
    pub(crate) fn at(self, place: &str) -> Error {
        match self {
            Error::Setting { key, found, expected, .. } => Error::Setting { place: place.into(), key, found, expected },
            other => other,
        }
    }
}
