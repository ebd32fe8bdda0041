//! Attention and memory of a run's model on a text.

use std::path::{Path, PathBuf};

use serde::Serialize;
use termwise_analysis::look::{HeadLook, Request, look};
use termwise_data::Tokenizer;
use termwise_model::Model;
use termwise_train::resolve;
use termwise_train::source::language_of;

use crate::serve::live::{Stamp, stamp};

/// Maximum number of tokens of a text.
pub const MAX_TOKENS: usize = 512;

/// The model of the last request, cached for the next one.
pub struct Opened {
    folder: PathBuf,
    /// Stamp of the directory: an overwritten run has other checkpoints under the same names.
    stamp: Option<Stamp>,
    model: Model,
    tokenizer: Tokenizer,
}

/// The response.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// The checkpoint.
    pub model: String,
    /// The text, token by token.
    pub tokens: Vec<String>,
    /// Layers of the model.
    pub layers: usize,
    /// Heads of a layer.
    pub heads: usize,
    /// The requested view.
    pub look: HeadLook,
}

impl Opened {
    /// The best checkpoint of the run in a directory; `before` if it is unchanged.
    pub fn of_run(run: &Path, before: Option<Opened>) -> Result<Opened, String> {
        let folder = resolve::model(Some(&run.display().to_string())).map_err(|error| error.to_string())?.folder;
        let stamp = stamp(&folder);
        if let Some(before) = before.filter(|before| before.folder == folder && before.stamp == stamp) {
            return Ok(before);
        }
        let tokenizer = if folder.join("tokenizer.json").is_file() {
            Tokenizer::open(&folder.display().to_string(), None)
        } else {
            Ok(Tokenizer::bytes())
        };
        let (model, tokenizer) = (Model::read(&folder).map_err(|error| error.to_string())?, tokenizer.map_err(|error| error.to_string())?);
        Ok(Opened { folder, stamp, model, tokenizer })
    }

    /// An example text: a question in the model's synthetic language, or a sentence.
    pub fn example(&self) -> String {
        let question = language_of(&self.folder).ok().flatten().and_then(|language| language.question(0).ok().flatten());
        question.map_or_else(|| "Once upon a time there was a little girl, and the little girl".into(), |question| question.text)
    }

    /// Attention and memory of a head on a text.
    pub fn answer(&self, text: &str, mut request: Request) -> Result<Answer, String> {
        let ids = self.tokenizer.encode(text, true).map_err(|error| error.to_string())?;
        if ids.is_empty() || ids.len() > MAX_TOKENS {
            return Err(format!("the text has {} tokens; it must have 1 to {MAX_TOKENS}", ids.len()));
        }
        request.query = request.query.min(ids.len() - 1);
        let token = |&id: &u32| self.tokenizer.decode(&[id], false).unwrap_or_else(|_| format!("[{id}]"));
        let found = look(&self.model, &ids, request).map_err(|error| error.to_string())?;
        let config = &self.model.config;
        Ok(Answer {
            model: self.folder.display().to_string(),
            tokens: ids.iter().map(token).collect(),
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            look: found,
        })
    }
}
