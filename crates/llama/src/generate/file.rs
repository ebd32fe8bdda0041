//! A row's memory in a file, to go on later.
//!
//! The safetensors file of [`State::save_layers`], and beside its tensors `tokens` [n], the text so far (int64), and in the metadata
//! `model`, a description of the model with a fingerprint of its weights, `config`, the keys of its configuration that decide what is computed
//! (as JSON), `draws`, the random numbers used so far, and `blake3`, a hash of everything else. Files of earlier versions without `config` are
//! refused.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use termwise_attention::{Layer, Memory, State, Variant};
use termwise_base::files::{read, write_whole};

use super::decoder::Decoder;
use crate::error::{Error, Result};
use crate::weights::Checkpoint;

const TOKENS: &str = "tokens";
const MODEL: &str = "model";
const CONFIG: &str = "config";
const DRAWS: &str = "draws";
const HASH: &str = "blake3";

/// What a file says besides the memory itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// The text so far: what was read, and at most one token more, which was written last and not read yet.
    pub tokens: Vec<u32>,
    /// Draws of the sampler so far.
    pub draws: u64,
}

impl Decoder {
    /// Writes the memory of a row, which has read the tokens of `saved`, all or all but the last; the file appears whole or not at all.
    pub fn save(&self, row: usize, saved: &Saved, path: impl AsRef<Path>) -> Result<()> {
        self.check_usable(row)?;
        let path = path.as_ref();
        let (expected, found) = (self.position(row)?, saved.tokens.len());
        if found != expected && found != expected + 1 {
            return Err(Error::BatchLength { what: "tokens to be saved", expected, found });
        }
        let damaged = |error: safetensors::SafeTensorError| Error::Header { problem: error.to_string() }.in_file(path.display());
        let bytes = State::to_bytes(self.states(row)?).map_err(damaged)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
        let mut metadata: HashMap<String, String> = header.metadata().clone().unwrap_or_default();
        metadata.insert(MODEL.into(), self.model.describe());
        metadata.insert(CONFIG.into(), Value::Object(self.model.config.computation()).to_string());
        metadata.insert(DRAWS.into(), saved.draws.to_string());
        let layers = SafeTensors::deserialize(&bytes).map_err(damaged)?;
        let tokens: Vec<u8> = saved.tokens.iter().flat_map(|&token| (token as i64).to_le_bytes()).collect();
        let tokens_view = TensorView::new(Dtype::I64, vec![saved.tokens.len()], &tokens).map_err(damaged)?;
        let all: Vec<(&str, TensorView)> = layers.iter().chain([(TOKENS, tokens_view)]).collect();
        metadata.insert(HASH.into(), digest(&metadata, &all));
        let content = safetensors::serialize(all, Some(metadata)).map_err(damaged)?;
        Ok(write_whole(path, &content)?)
    }

    /// Puts a row where the file was saved, bit for bit. Refused, and the row unchanged, where the file is of another model, configuration,
    /// variant or size; its logits are zeros until it reads on.
    pub fn load(&mut self, row: usize, path: impl AsRef<Path>) -> Result<Saved> {
        self.check_row(row)?;
        let path = path.as_ref();
        let refuse = |problem: String| Error::StateFile { path: path.into(), problem };
        if !path.is_file() {
            return Err(refuse(if path.exists() { "it is no regular file".into() } else { "there is no such file".into() }));
        }
        let file = Checkpoint::open(path)?;
        let text = |key: &str| file.metadata().get(key).map(String::as_str);
        let Some(model) = text(MODEL) else { return Err(refuse("it is not the saved memory of a model: it names none".into())) };
        let own = self.model.describe();
        if model != own {
            return Err(refuse(format!("it was saved from the model `{model}`, and this is `{own}`")));
        }
        let saved = text(CONFIG).and_then(|config| serde_json::from_str::<Map<String, Value>>(config).ok());
        let saved = saved.ok_or_else(|| {
            refuse("it has no record of the model's configuration, as files of earlier versions; write it again with --save-state".into())
        })?;
        if let Some(difference) = difference(&saved, &self.model.config.computation()) {
            return Err(refuse(difference));
        }
        // Not mapped: a file that is cut while it is read must be an error, and not the end of the process.
        let bytes = read(path, u64::MAX - 1).map_err(Error::io("read", path))?;
        verify(path, &bytes)?;
        // A layer that switches to a state has been saved before or after.
        let layers: Vec<(&Layer, Memory)> = self
            .layers
            .iter()
            .enumerate()
            .map(|(l, layer)| {
                let saved = text(&format!("layer.{l}.heads")).unwrap_or_default();
                let switched = layer
                    .later
                    .as_ref()
                    .map(|(attention, _)| attention)
                    .filter(|attention| attention.heads().iter().map(Variant::to_string).eq(saved.lines()));
                (switched.unwrap_or(&layer.attention), Memory::Natural)
            })
            .collect();
        let states = State::from_bytes(&bytes, path, &layers, 1)?;
        let (_, tokens) = file.read_i64(TOKENS)?;
        let vocabulary = self.model.config.vocab_size;
        let narrow = |&token: &i64| u32::try_from(token).ok().filter(|&token| (token as usize) < vocabulary);
        let tokens: Option<Vec<u32>> = tokens.iter().map(narrow).collect();
        let tokens =
            tokens.ok_or_else(|| refuse(format!("it holds a token that is not below the vocabulary of {vocabulary}; it is damaged")))?;
        let read = states.first().and_then(|state| state.position(0)).unwrap_or(0);
        if states.iter().any(|state| state.position(0) != Some(read)) || !(read..=read + 1).contains(&tokens.len()) {
            let listed = tokens.len();
            return Err(refuse(format!("its layers have read {read} tokens or another number, and {listed} are listed; it is damaged")));
        }
        let draws =
            text(DRAWS).and_then(|draws| draws.parse().ok()).ok_or_else(|| refuse("it has no number of draws; it is damaged".into()))?;
        self.clear(row)?;
        let row = &mut self.rows[row];
        row.position = read;
        row.states = states;
        Ok(Saved { tokens, draws })
    }
}

/// The keys in which two configurations differ.
fn difference(saved: &Map<String, Value>, own: &Map<String, Value>) -> Option<String> {
    let mut keys: Vec<&String> = saved.keys().chain(own.keys().filter(|key| !saved.contains_key(*key))).collect();
    keys.retain(|&key| saved.get(key) != own.get(key));
    let value = |map: &Map<String, Value>, key: &String| map.get(key).map_or("absent".into(), Value::to_string);
    let each = keys.iter().map(|key| format!("`{key}` was {} and is {}", value(saved, key), value(own, key)));
    let list = each.collect::<Vec<_>>().join(", ");
    (!list.is_empty()).then(|| format!("it was saved with another configuration: {list}; load it with that configuration"))
}

/// A hash of metadata, [`HASH`] aside, and of every tensor: name, type, shape, values.
fn digest(metadata: &HashMap<String, String>, tensors: &[(&str, TensorView)]) -> String {
    let mut hasher = blake3::Hasher::new();
    // Each part with its length: no two files give the same bytes.
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    };
    let mut entries: Vec<_> = metadata.iter().filter(|(key, _)| *key != HASH).collect();
    entries.sort();
    entries.iter().for_each(|(key, value)| [key, value].iter().for_each(|text| add(text.as_bytes())));
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    for (name, tensor) in tensors {
        add(name.as_bytes());
        add(format!("{:?} {:?}", tensor.dtype(), tensor.shape()).as_bytes());
        add(tensor.data());
    }
    hasher.finalize().to_hex().to_string()
}

/// Checks that a file is as it was written.
fn verify(path: &Path, bytes: &[u8]) -> Result<()> {
    let refuse = |problem: String| Error::StateFile { path: path.into(), problem };
    let damaged = |error: safetensors::SafeTensorError| refuse(format!("it cannot be read ({error}); it is damaged"));
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let tensors = SafeTensors::deserialize(bytes).map_err(damaged)?;
    match metadata.get(HASH) {
        None => Err(refuse("it has no hash of its values, as files of earlier versions; write it again with --save-state".into())),
        Some(hash) if *hash != digest(&metadata, &tensors.iter().collect::<Vec<_>>()) => {
            Err(refuse("its values are not those that were written; it is damaged".into()))
        }
        Some(_) => Ok(()),
    }
}
