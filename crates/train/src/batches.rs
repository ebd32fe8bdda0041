//! Tokenized text and the batches that a run reads.

use std::path::Path;

use serde::Serialize;
use termwise_data::{Builtin, Prepare, Prepared, Rows, Source, TextSource, Tokenizer};

use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::source::cache_folder;

/// Length of a row of parity bits.
const PARITY_LENGTH: usize = 64;
/// Length of a row of text.
const TEXT_LENGTH: usize = 256;

/// Tokenizes the text of these settings, unless its tokens are in the cache.
///
/// # Errors
/// If the data is built in, or if it cannot be read.
pub fn prepare(settings: &Settings, cache: Option<&Path>, how: &Prepare) -> Result<Prepared> {
    let config = settings.data_config()?.ok_or_else(|| Error::Setting {
        place: String::new(),
        key: "data".into(),
        found: format!("{:?}", settings.data),
        expected: "built-in data need no tokens; name files, folders or globs".into(),
    })?;
    Ok(Prepared::new(&TextSource::prepare(&config, &cache_folder(cache), how)?))
}

/// Which batches are read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchRequest {
    /// Seed of the run.
    pub seed: u64,
    /// Rows of a batch.
    pub rows: usize,
    /// Tokens of a row; default: 256, a document of the built-in language, or 64 bits.
    pub length: Option<usize>,
    /// Held-out batches instead of those for training.
    pub held_out: bool,
}

impl Default for BatchRequest {
    fn default() -> BatchRequest {
        BatchRequest { seed: 1, rows: 4, length: None, held_out: false }
    }
}

impl BatchRequest {
    /// Four rows for training with seed 1.
    pub fn new() -> BatchRequest {
        BatchRequest::default()
    }
}

enum Opened {
    Builtin(Builtin, Box<Tokenizer>),
    Text(Box<TextSource>),
}

/// The batches of a run.
pub struct Batches {
    opened: Opened,
    request: BatchRequest,
    length: usize,
    /// The tokenized text; `None` if the data is built in.
    pub prepared: Option<Prepared>,
}

/// A batch: ids and labels \[rows, length\]. A label is the next token, or −100 if it is ignored.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Batch {
    /// Its number.
    pub index: u64,
    /// Tokens.
    pub ids: Vec<Vec<u32>>,
    /// Labels.
    pub labels: Vec<Vec<i32>>,
}

/// A row of a [`Batch`] as text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchText {
    /// Labels that count.
    pub labelled: usize,
    /// The tokens up to the last label that is not ignored.
    pub text: String,
    /// The labels, if they are not the next tokens.
    pub labels: Option<String>,
}

impl Batches {
    /// Opens the data of these settings. Text is tokenized into the cache if its tokens are not there.
    ///
    /// # Errors
    /// If the data cannot be read.
    pub fn open(settings: &Settings, request: &BatchRequest, cache: Option<&Path>, how: &Prepare) -> Result<Batches> {
        let (opened, usual, prepared) = match (settings.builtin()?, settings.data_config()?) {
            (Some(source), _) => {
                let (tokenizer, usual) = (source.tokenizer()?, source.document().unwrap_or(PARITY_LENGTH));
                (Opened::Builtin(source, Box::new(tokenizer)), usual, None)
            }
            (None, config) => {
                let text = TextSource::prepare(&config.unwrap_or_default(), &cache_folder(cache), how)?;
                let prepared = Prepared::new(&text);
                (Opened::Text(Box::new(text)), TEXT_LENGTH, Some(prepared))
            }
        };
        Ok(Batches { opened, length: request.length.unwrap_or(usual), request: request.clone(), prepared })
    }

    fn source(&self) -> &dyn Source {
        match &self.opened {
            Opened::Builtin(source, _) => source,
            Opened::Text(text) => &**text,
        }
    }

    fn tokenizer(&self) -> &Tokenizer {
        match &self.opened {
            Opened::Builtin(_, tokenizer) => tokenizer,
            Opened::Text(text) => text.tokenizer(),
        }
    }

    /// A batch by its number; `None` beyond the last held-out batch.
    ///
    /// # Errors
    /// If the source cannot make rows of this length.
    pub fn get(&self, index: u64) -> Result<Option<Batch>> {
        let (BatchRequest { seed, rows, held_out, .. }, length) = (&self.request, self.length);
        let mut batch = Rows::default();
        if !held_out {
            self.source().train(*seed, index, *rows, length, &mut batch)?;
        } else if !self.source().held_out(index, *rows, length, &mut batch)? {
            return Ok(None);
        }
        let ids = batch.ids.chunks(length).map(<[u32]>::to_vec).collect();
        Ok(Some(Batch { index, ids, labels: batch.labels.chunks(length).map(<[i32]>::to_vec).collect() }))
    }

    /// The rows of a batch as text.
    ///
    /// # Errors
    /// If a token cannot be decoded.
    pub fn texts(&self, batch: &Batch) -> Result<Vec<BatchText>> {
        let own_labels = matches!(&self.opened, Opened::Builtin(builtin, _) if builtin.has_own_labels());
        let row = |(ids, labels): (&Vec<u32>, &Vec<i32>)| -> Result<BatchText> {
            // Padding is left out.
            let end = labels.iter().rposition(|&label| label != -100).map_or(0, |last| last + 1);
            let counted: Vec<u32> = labels.iter().filter_map(|&label| u32::try_from(label).ok()).collect();
            let labelled = counted.len();
            let labels = own_labels.then(|| self.tokenizer().decode(&counted, false)).transpose()?;
            Ok(BatchText { labelled, text: self.tokenizer().decode(&ids[..end], false)?, labels })
        };
        batch.ids.iter().zip(&batch.labels).map(row).collect()
    }

    /// A sentence about a held-out batch that does not exist, with the number of the last one.
    ///
    /// # Errors
    /// If the data cannot be read.
    pub fn missing(&self, index: u64) -> Result<String> {
        let mut count = 0;
        while self.get(count)?.is_some() {
            count += 1;
        }
        let found = match count {
            0 => "nothing is held out".to_owned(),
            _ => format!("of {} × {} tokens each, the last is {}", self.request.rows, self.length, count - 1),
        };
        Ok(format!("there is no held-out batch {index}; {found}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Layer;

    fn settings(text: &str) -> Settings {
        Settings::resolve(&[Layer::new(text.parse().expect("TOML"), "a test").expect("a layer")]).expect("settings")
    }

    #[test]
    fn batches_are_those_of_the_source_and_have_an_end() {
        let (folder, how) = (tempfile::tempdir().expect("a folder"), Prepare::default());
        let file = folder.path().join("text.txt");
        std::fs::write(&file, "abcdefgh".repeat(100)).expect("written");
        let settings = settings(&format!("data = [{:?}]\nheld_out = 0.25", file.display().to_string()));
        let prepared = prepare(&settings, Some(folder.path()), &how).expect("tokens");
        let request = BatchRequest { rows: 2, length: Some(20), held_out: true, ..BatchRequest::new() };
        let batches = Batches::open(&settings, &request, Some(folder.path()), &how).expect("batches");
        assert_eq!(batches.prepared.as_ref(), Some(&prepared));
        let batch = batches.get(0).expect("a batch").expect("the first");
        assert_eq!((batch.ids.len(), batch.ids[0].len(), batch.labels[0][0]), (2, 20, batch.ids[0][1] as i32));
        let texts = batches.texts(&batch).expect("texts");
        assert!(texts[0].labelled == 20 && "abcdefgh".repeat(4).contains(&texts[0].text) && texts[0].labels.is_none(), "{texts:?}");
        let missing = batches.missing(1000).expect("a sentence");
        let last: u64 = missing.rsplit(' ').next().expect("a word").parse().expect("a number");
        assert!(batches.get(last).expect("a batch").is_some() && batches.get(last + 1).expect("none").is_none(), "{missing}");
    }

    #[test]
    fn built_in_data_has_batches_and_no_tokens() {
        let parity = settings("data = [\"builtin:parity\"]");
        let batches = Batches::open(&parity, &BatchRequest { length: Some(9), ..BatchRequest::new() }, None, &Prepare::default());
        let batches = batches.expect("batches");
        let texts = batches.texts(&batches.get(0).expect("a batch").expect("one")).expect("texts");
        assert!(texts.len() == 4 && texts.iter().all(|row| row.labels.is_some()) && batches.prepared.is_none());
        let refused = prepare(&parity, None, &Prepare::default()).expect_err("no text").to_string();
        assert!(refused.contains("built-in data need no tokens"), "{refused}");
    }
}
