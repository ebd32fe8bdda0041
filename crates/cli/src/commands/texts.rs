//! The texts of `convert`, `frontier` and `atlas`: kinds of text apart, some fitted to, some evaluated.

use std::path::{Path, PathBuf};

use clap::Args;
use termwise_convert::{Cutting, Named, Texts};
use termwise_data::Source;
use termwise_llama::Config;

use super::settings::DataSettings;
use super::source::{cache_folder, open_packed};
use crate::error::Failure;

/// Which texts, and how they are cut.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Text of --data, or other text, to fit to [default: all of --data]; of text that is fitted to, only the second half is evaluated
    #[arg(long, value_name = "PATH")]
    pub calibration: Vec<String>,
    /// Tokens of a context that is evaluated [default: 2048, or what the model was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Contexts to fit to, over all texts
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = super::size(4096))]
    pub calibration_contexts: usize,
    /// Tokens of a context to fit to [default: 2048, or what the model was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub calibration_length: Option<usize>,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
}

/// Tokens of a context where neither the user nor the model says less.
const LENGTH: usize = 2048;

impl TextArgs {
    /// The names of the texts, and their contexts, of which so many of each text are evaluated.
    pub fn cut(
        &self,
        folder: &Path,
        data: &DataSettings,
        config: &Config,
        contexts: usize,
        quiet: bool,
    ) -> Result<(Vec<String>, Texts), Failure> {
        let list = |table: &toml::Table| -> Vec<String> {
            let values = table.get("data").and_then(toml::Value::as_array).into_iter().flatten();
            values.filter_map(|value| value.as_str().map(str::to_owned)).collect()
        };
        let named = list(data.table());
        let others = self.calibration.iter().filter(|path| !named.contains(path));
        let all: Vec<String> = named.iter().chain(others).cloned().collect();
        if named.is_empty() {
            return Err(Failure::usage("there is no text; name some with --data, as in --data book.txt"));
        }
        let cache = cache_folder(self.cache.as_deref());
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        for path in &all {
            sources.push(open_packed(folder, data, Some(path), &cache, quiet)?.source);
        }
        let texts: Vec<Named> = all
            .iter()
            .zip(&sources)
            .map(|(path, source)| Named {
                name: Path::new(path).file_stem().map_or(path.clone(), |name| name.to_string_lossy().into_owned()),
                source: source.as_ref(),
                fitted: self.calibration.is_empty() || self.calibration.contains(path),
                evaluated: named.contains(path),
            })
            .collect();
        let usual = LENGTH.min(config.max_position_embeddings);
        let cutting = Cutting {
            length: self.length.unwrap_or(usual),
            contexts,
            calibration_length: self.calibration_length.unwrap_or(usual),
            calibration_contexts: self.calibration_contexts,
        };
        Ok((all, Texts::cut(&texts, cutting)?))
    }
}
