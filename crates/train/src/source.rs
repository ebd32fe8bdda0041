//! The data named by settings.

use std::path::{Path, PathBuf};

use termwise_data::Result as DataResult;
use termwise_data::language::Language;
use termwise_data::prepare::{Prepare, prepare};
use termwise_data::{Builtin, DataConfig, HeldOutPart, Layout, Rows, Source, TextSource, Tokenizer, tokens::Tokens};

use crate::error::{Error, Result};
use crate::settings::{Layer, Settings};
use termwise_base::files::read_text;

/// Source of the settings in messages.
const ORIGIN: &str = "the arguments";

/// Files next to a `tokenizer.json` that other tools read.
const TOKENIZER_FILES: [&str; 4] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"];

impl Settings {
    /// The text data named by the settings; `None` for built-in data.
    pub fn data_config(&self) -> Result<Option<DataConfig>> {
        let is_builtin = |name: &String| Builtin::is_name(name) || name.starts_with("builtin:");
        if let Some(name) = self.data.iter().find(|name| is_builtin(name)) {
            let expected = match (&self.data[..], Builtin::is_name(name)) {
                ([_], true) => return Ok(None),
                (_, true) => format!("`{name}` cannot be combined with other data; for a file of this name, write ./{name}"),
                (_, false) => {
                    let names = Builtin::names().collect::<Vec<_>>().join(", ");
                    format!("built-in data are {names}; for a file of this name, write ./{name}")
                }
            };
            return Err(Error::Setting { place: String::new(), key: "data".into(), found: format!("{:?}", self.data), expected });
        }
        let parse = |key: &'static str| move |problem: String| termwise_data::Error::DataSetting { key, problem };
        let config = DataConfig {
            sources: self.data.clone(),
            tokenizer: self.tokenizer.clone(),
            end_of_document: self.end_of_document.clone(),
            special_tokens: self.special_tokens,
            field: self.field.clone(),
            documents: self.documents.parse().map_err(parse("documents"))?,
            held_out: self.held_out,
            split_seed: self.split_seed,
            layout: self.layout.parse().map_err(parse("layout"))?,
            valid: self.valid_data.clone(),
            part: HeldOutPart::new(&self.valid_range, self.valid_tokens).map_err(parse("valid_range"))?,
        };
        config.check()?;
        Ok(Some(config))
    }

    /// The built-in data of these settings; `None` for text.
    pub fn builtin(&self) -> Result<Option<Builtin>> {
        match (self.data_config()?, &self.data[..]) {
            (None, [name]) => Ok(Builtin::open(name, &self.language)?),
            _ => Ok(None),
        }
    }

    /// Opens the data. Text is tokenized into `cache` unless it is already there.
    pub fn open_source(&self, cache: &Path, how: &Prepare) -> Result<Box<dyn Source>> {
        Ok(match (self.builtin()?, self.data_config()?) {
            (Some(builtin), _) => Box::new(builtin),
            (None, Some(config)) => Box::new(TextSource::prepare(&config, cache, how)?),
            (None, None) => return Err(Error::Internal("the data is neither text nor built in")),
        })
    }

    /// All text named by the settings, in order and without a split; `None` for built-in data.
    pub fn open_whole(&self, cache: &Path, how: &Prepare) -> Result<Option<WholeText>> {
        let Some(config) = self.data_config()? else { return Ok(None) };
        let (tokenizer, tokens) = prepare(&config, cache, how)?;
        if config.layout == Layout::Padded && tokens.documents() == 1 {
            let problem = "= padded reads one document per row, and the text is a single document; \
                use --layout packed, or split the text with --documents";
            return Err(termwise_data::Error::DataSetting { key: "layout", problem: problem.into() }.into());
        }
        Ok(Some(WholeText { tokenizer, tokens, layout: config.layout }))
    }

    /// The tokenizer's files, for [`crate::RunOptions::files`].
    pub fn tokenizer_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        if let Some(builtin) = self.builtin()? {
            return Ok(vec![("tokenizer.json".into(), builtin.tokenizer_json())]);
        }
        if self.tokenizer == "bytes" {
            return Ok(Vec::new());
        }
        let given = PathBuf::from(&self.tokenizer);
        let main = if given.is_dir() { given.join("tokenizer.json") } else { given };
        let mut files = Vec::new();
        for name in TOKENIZER_FILES {
            let path = if name == "tokenizer.json" { main.clone() } else { main.with_file_name(name) };
            if path.is_file() {
                files.push((name.to_owned(), termwise_base::files::read(&path, 1 << 30).map_err(Error::io("read", &path))?));
            }
        }
        Ok(files)
    }
}

/// All documents in order, as held-out data. Packed: every token is a label once, including ends of documents. Padded: one document
/// per row, from its beginning; tokens beyond the row are dropped.
#[derive(Debug)]
pub struct WholeText {
    tokenizer: Tokenizer,
    tokens: Tokens,
    layout: Layout,
}

impl WholeText {
    fn bytes_of(&self, ids: &[u32]) -> u64 {
        let weights = self.tokenizer.bytes_of_tokens();
        ids.iter().map(|&id| u64::from(weights[id as usize])).sum()
    }

    /// Fills a row with a window: the label of each token is the next token.
    fn put(&self, out: &mut Rows, row: usize, window: &[u32]) {
        let (first, count) = (row * out.time, window.len() - 1);
        out.ids[first..first + count].copy_from_slice(&window[..count]);
        out.labels[first..first + count].iter_mut().zip(&window[1..]).for_each(|(label, &id)| *label = id as i32);
    }

    fn packed(&self, index: u64, out: &mut Rows) -> DataResult<bool> {
        let (rows, time, length) = (out.rows, out.time, self.tokens.len());
        let Some(first) = index.checked_mul((rows * time) as u64).filter(|&first| first < length) else { return Ok(false) };
        let mut window = vec![self.tokenizer.end(); time + 1];
        for row in 0..rows {
            let start = first + (row * time) as u64;
            if start >= length {
                break;
            }
            let count = (length - start).min(time as u64) as usize;
            match start {
                0 => self.tokens.read(0, &mut window[1..=count])?,
                _ => self.tokens.read(start - 1, &mut window[..=count])?,
            }
            self.put(out, row, &window[..=count]);
            out.bytes += self.bytes_of(&window[1..=count]);
        }
        Ok(true)
    }

    fn padded(&self, index: u64, out: &mut Rows) -> DataResult<bool> {
        let (rows, documents) = (out.rows as u64, self.tokens.documents());
        let Some(first) = index.checked_mul(rows).filter(|&first| first < documents) else { return Ok(false) };
        out.lengths.resize(out.rows, 1);
        // If the tokenizer has no begin-of-document token, an end-of-document token precedes each document.
        let begins = self.tokens.manifest().begins;
        for document in first..(first + rows).min(documents) {
            let (row, start) = ((document - first) as usize, self.tokens.start(document)?);
            let whole = self.tokens.document(document)?;
            let count = (whole.end - start).min(out.time as u64 + u64::from(begins)) as usize;
            let mut ids = vec![self.tokenizer.end(); count + usize::from(!begins)];
            self.tokens.read(start, &mut ids[usize::from(!begins)..])?;
            self.put(out, row, &ids);
            out.lengths[row] = (ids.len() - 1).max(1);
            // All bytes of a document that fits are counted.
            out.bytes += if start + count as u64 == whole.end { whole.bytes } else { self.bytes_of(&ids[1..]) };
        }
        Ok(true)
    }
}

impl Source for WholeText {
    fn vocabulary(&self) -> usize {
        self.tokenizer.vocabulary()
    }

    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        self.tokens.manifest().shards.iter().for_each(|hash| _ = hasher.update(hash.as_bytes()));
        if self.layout == Layout::Padded {
            hasher.update(b"padded");
        }
        hasher.finalize().to_hex()[..16].to_string()
    }

    fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> DataResult<()> {
        Err(termwise_data::Error::Internal("evaluation text has no training batches"))
    }

    fn training_text(&self, start: u64, out: &mut [u32]) -> DataResult<usize> {
        let count = self.tokens.len().saturating_sub(start).min(out.len() as u64) as usize;
        self.tokens.read(start, &mut out[..count])?;
        Ok(count)
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> DataResult<bool> {
        out.reset(rows, time);
        match self.layout {
            _ if rows == 0 || time == 0 => Ok(false),
            Layout::Packed => self.packed(index, out),
            Layout::Padded => self.padded(index, out),
        }
    }
}

/// The given directory, or `termwise` in the user's cache directory.
pub fn cache_folder(requested: Option<&Path>) -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA")).or_else(|| Some(variable("HOME")?.join(".cache")));
    requested.map(Path::to_owned).or_else(|| Some(user()?.join("termwise"))).unwrap_or_else(|| ".termwise-cache".into())
}

/// The synthetic language on which a checkpoint was trained; `None` for other or unknown data.
pub fn language_of(folder: &Path) -> Result<Option<Language>> {
    let saved = folder.join("settings.toml");
    if !saved.is_file() {
        return Ok(None);
    }
    let text = read_text(&saved).map_err(Error::io("read", &saved))?;
    let builtin = Settings::resolve(&[Layer::of_run(&text, &saved.display().to_string())?])?.builtin()?;
    Ok(builtin.and_then(Builtin::into_language))
}

/// Evaluation text for an existing model.
pub struct Opened {
    /// Source whose held-out batches are the text.
    pub source: Box<dyn Source>,
    /// The data as named in the settings.
    pub data: Vec<String>,
    /// Whether it is only the held-out split.
    pub held_out_only: bool,
    /// How documents are arranged in windows.
    pub layout: String,
    /// Sequence length in training, if the directory is a checkpoint of a run.
    pub trained: Option<usize>,
}

/// Settings for data and tokenizer from a model's directory, with these settings above them; and whether it is a checkpoint of a run.
pub fn layers_of_model(folder: &Path, settings: &toml::Table) -> Result<(Vec<Layer>, bool)> {
    let saved = folder.join("settings.toml");
    let mut layers = Vec::new();
    let trained = saved.is_file();
    if trained {
        let text = read_text(&saved).map_err(Error::io("read", &saved))?;
        layers.push(Layer::of_run(&text, &saved.display().to_string())?);
    } else if !settings.contains_key("data") {
        let expected = "this model's directory names no data; pass --data FILE or --data builtin".into();
        return Err(Error::Setting { place: String::new(), key: "data".into(), found: "absent".into(), expected });
    }
    if !settings.contains_key("tokenizer") && folder.join("tokenizer.json").exists() {
        let own = toml::Table::from_iter([("tokenizer".to_owned(), toml::Value::String(folder.display().to_string()))]);
        layers.push(Layer::new(own, "the model's folder")?);
    }
    Ok((layers, trained))
}

/// All data named by the settings. If they name none, the held-out split of the data on which the checkpoint was trained. The directory's own tokenizer
/// is the default.
pub fn open_for_model(folder: &Path, settings: &toml::Table, held_out_only: bool, cache: &Path, how: &Prepare) -> Result<Opened> {
    let (mut layers, trained) = layers_of_model(folder, settings)?;
    let mut settings = settings.clone();
    if settings.contains_key("data") {
        // The held-out text of the run belongs to its own data.
        settings.entry("valid_data").or_insert(toml::Value::Array(Vec::new()));
    }
    let settings = &settings;
    layers.push(Layer::new(settings.clone(), ORIGIN)?);
    let resolved = Settings::resolve(&layers)?;
    let held_out_only = held_out_only || !settings.contains_key("data");
    let whole = if held_out_only { None } else { resolved.open_whole(cache, how)? };
    let source: Box<dyn Source> = match whole {
        Some(whole) => Box::new(whole),
        None => resolved.open_source(cache, how)?,
    };
    Ok(Opened { source, held_out_only, trained: trained.then_some(resolved.length), data: resolved.data, layout: resolved.layout })
}
