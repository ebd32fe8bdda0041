//! Resolves the directory, start and settings of a requested run.

use std::path::{Component, Path, PathBuf};

use termwise_data::{Builtin, Prepare, Source};
use termwise_model::ParamLayout;
use termwise_report::{counted, thousands};

use super::{RunOptions, Start, resume_at, resumed_settings};
use crate::checkpoint::SETTINGS;
use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::settings::{Layer, Settings};

/// A run as it was requested.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TrainRequest {
    /// Settings, later ones above earlier ones.
    pub layers: Vec<Layer>,
    /// Folder of runs.
    pub runs: PathBuf,
    /// Name of the run; default: model, attention and a hash of the settings.
    pub name: Option<String>,
    /// Folder of the run, in place of `runs` and `name`.
    pub folder: Option<PathBuf>,
    /// Run or checkpoint to resume, by folder or by name; an empty path is the run with these settings.
    pub resume: Option<PathBuf>,
    /// Replace the run in the folder.
    pub overwrite: bool,
    /// Number of ranks that share each step, if a launcher has started several.
    pub ranks: Option<usize>,
}

/// A run that is about to start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlannedRun {
    /// Folder of the run.
    pub folder: PathBuf,
    /// Where it begins.
    pub start: Start,
    /// Its settings.
    pub settings: Settings,
}

impl TrainRequest {
    /// A new run in the folder `runs`.
    pub fn new(layers: Vec<Layer>) -> TrainRequest {
        TrainRequest { layers, runs: "runs".into(), ..TrainRequest::default() }
    }

    /// Resolves folder, start and settings.
    ///
    /// # Errors
    /// If a setting cannot be used, or if there is no run to resume.
    pub fn plan(&self) -> Result<PlannedRun> {
        let (folder, start) = self.place()?;
        let mut settings = if start.is_new() { Settings::resolve(&self.layers)? } else { resumed_settings(&folder, &self.layers)? };
        if let Some(ranks) = self.ranks
            && start.is_new()
            && !self.layers.iter().any(|layer| layer.has("micro_batches"))
        {
            settings.micro_batches = settings.micro_batches_for(ranks);
        }
        Ok(PlannedRun { folder, start, settings })
    }

    fn place(&self) -> Result<(PathBuf, Start)> {
        let named = || -> Result<PathBuf> {
            match (&self.folder, &self.name) {
                (Some(folder), _) => Ok(folder.clone()),
                (None, Some(name)) => Ok(self.runs.join(name)),
                (None, None) => Ok(self.runs.join(Settings::resolve(&self.layers)?.name())),
            }
        };
        match &self.resume {
            None => Ok((named()?, if self.overwrite { Start::Replace } else { Start::Fresh })),
            Some(path) if path.as_os_str().is_empty() => Ok((named()?, Start::Resume)),
            Some(path) => {
                // A name alone may be that of a run, as for other commands.
                let named = self.runs.join(path);
                let by_name = !path.exists() && path.components().count() == 1;
                if by_name && !named.is_dir() {
                    let problem = format!("neither it nor {} is a directory; `termwise runs` lists runs", named.display());
                    return Err(Error::NoRun { folder: path.clone(), problem });
                }
                resume_at(if by_name { &named } else { path })
            }
        }
    }
}

impl PlannedRun {
    /// Opens the data. Rank 0 tokenizes them first, and the other ranks read its cache.
    ///
    /// # Errors
    /// If the data cannot be read, or if a rank has ended.
    pub fn open_source(&self, cache: &Path, how: &Prepare, ranks: &dyn Collective) -> Result<Box<dyn Source>> {
        let open = || self.settings.open_source(cache, how);
        let early = if ranks.rank() > 0 { None } else { Some(open()?) };
        ranks.barrier()?;
        early.map_or_else(open, Ok)
    }

    /// Options with the folder, start and tokenizer files of this run.
    ///
    /// # Errors
    /// If the tokenizer cannot be read.
    pub fn options(&self) -> Result<RunOptions> {
        Ok(RunOptions { start: self.start.clone(), files: self.settings.tokenizer_files()?, ..RunOptions::new(&self.folder) })
    }

    /// Whether the run begins at step 0 in a directory without a run.
    pub fn is_first(&self) -> bool {
        self.start == Start::Fresh && !self.folder.join(SETTINGS).exists()
    }

    /// Model, attention, data, tokens and folder, one line each.
    ///
    /// # Errors
    /// If the settings describe no model.
    pub fn introduction(&self, vocabulary: usize) -> Result<String> {
        let settings = &self.settings;
        let config = settings.config(vocabulary)?;
        let attention = match (config.uniform_attention().map(ToString::to_string), settings.attention.as_str()) {
            // A preset by its name, and its parts.
            (Some(parts), Some(text)) if parts != text => format!("{text} ({parts})"),
            (Some(parts), _) => parts,
            (None, _) => "different between layers or heads".into(),
        };
        let data = settings.data.iter().map(|name| match Builtin::title(name) {
            Some(title) => format!("{name} (synthetic: {title})"),
            None => name.clone(),
        });
        let per_step = settings.batch.saturating_mul(settings.length).saturating_mul(settings.accumulate) as u64;
        Ok(format!(
            "model      {} parameters: {}, width {}, {}, {} tokens in the vocabulary\n\
             attention  {attention}\n\
             data       {}\n\
             training   {} of {} tokens, {} tokens in all; peak learning rate {}\n\
             directory  {}",
            thousands(ParamLayout::new(&config)?.len()),
            counted(config.num_hidden_layers, "layer"),
            config.hidden_size,
            counted(config.num_attention_heads, "head"),
            thousands(config.vocab_size),
            data.collect::<Vec<_>>().join(", "),
            counted(settings.steps, "step"),
            thousands(per_step),
            thousands(per_step.saturating_mul(settings.steps)),
            settings.lr,
            self.folder.display(),
        ))
    }
}

/// Checks the name of a run: a folder inside that of all runs.
///
/// # Errors
/// If the name is empty, `.`, absolute, or leaves the folder.
pub fn check_name(text: &str) -> std::result::Result<String, String> {
    let plain = !text.is_empty() && Path::new(text).components().all(|part| matches!(part, Component::Normal(_)));
    plain.then(|| text.to_owned()).ok_or_else(|| "a run's name is that of a folder: neither empty, nor `.`, nor absolute".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_and_start_follow_the_request() {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().to_owned();
        let layer = Layer::new("steps = 7\nbatch = 3\nlength = 96".parse().expect("TOML"), "a test").expect("a layer");
        let request = TrainRequest { runs: runs.clone(), name: Some("a".into()), ..TrainRequest::new(vec![layer]) };
        let plan = request.plan().expect("a plan");
        assert_eq!((plan.folder.clone(), &plan.start, plan.settings.steps), (runs.join("a"), &Start::Fresh, 7));
        let text = plan.introduction(100).expect("an introduction");
        assert!(text.contains("attention  softmax"), "{text}");
        let words = [
            "7 steps of 288 tokens, 2,016 tokens in all",
            "100 tokens in the vocabulary",
            "data       builtin (synthetic: associative recall)",
            &format!("directory  {}", runs.join("a").display()),
        ];
        assert!(words.iter().all(|words| text.contains(words)) && text.lines().count() == 5, "{text}");
        let replaced = TrainRequest { overwrite: true, folder: Some("b".into()), ..request.clone() }.plan().expect("a plan");
        assert_eq!((replaced.folder, replaced.start), ("b".into(), Start::Replace));

        // By name, as in `--resume a`.
        std::fs::create_dir(runs.join("a")).expect("a folder");
        std::fs::write(runs.join("a/settings.toml"), plan.settings.to_toml()).expect("written");
        let resumed = TrainRequest { name: None, resume: Some("a".into()), ..request.clone() }.plan().expect("a plan");
        assert_eq!((resumed.folder, resumed.start, resumed.settings.steps), (runs.join("a"), Start::Resume, 7));
        let absent = TrainRequest { resume: Some("absent".into()), ..request }.plan().expect_err("there is no such run");
        assert!(absent.is_usage() && absent.to_string().contains("`termwise runs` lists runs"), "{absent}");
        assert!(check_name("a/b").is_ok() && ["", ".", "..", "/a", "a/../b"].iter().all(|name| check_name(name).is_err()));
    }
}
