//! Saving the memory of a row to a file and loading it.
//!
//! The file is the safetensors file of [`State::save_layers`] with these additions:
//!
//! | entry | content |
//! |---|---|
//! | tensor `tokens` [n], int64 | the token ids so far |
//! | metadata `model` | a description of the model with a fingerprint of its weights |
//! | metadata `config` | the configuration keys that affect the computation, as JSON |
//! | metadata `draws` | the number of random draws of the sampler |
//! | metadata `blake3` | a hash of all other content |
//!
//! Loading fails if `config` is missing, as in files of earlier versions.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use termwise_attention::{Layer, State, StateKind, Variant};
use termwise_base::files::{read, with_metadata, write_whole};

use super::decoder::Decoder;
use crate::error::{Error, Result};
use crate::weights::Checkpoint;

const TOKENS: &str = "tokens";
const MODEL: &str = "model";
const CONFIG: &str = "config";
const DRAWS: &str = "draws";
const HASH: &str = "blake3";

/// The tokens and the sampler position that are stored with the memory of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedSequence {
    /// All token ids so far: the tokens that the row has read, and at most one sampled token that it has not.
    pub tokens: Vec<u32>,
    /// Random draws of the sampler so far.
    pub draws: u64,
}

impl SavedSequence {
    /// Tokens so far, and random draws so far.
    pub fn new(tokens: Vec<u32>, draws: u64) -> SavedSequence {
        SavedSequence { tokens, draws }
    }
}

impl Decoder {
    /// Saves the memory of a row atomically. The row must have read all tokens of `saved`, or all but the last.
    pub fn save(&self, row: usize, saved: &SavedSequence, path: impl AsRef<Path>) -> Result<()> {
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
        let content = safetensors::serialize(all, None).map_err(damaged)?;
        let metadata: BTreeMap<String, String> = metadata.into_iter().collect();
        Ok(write_whole(path, &with_metadata(&content, &metadata))?)
    }

    /// Restores the memory of a row, bit-identical to when it was saved. Fails without changing the row if the file belongs to another model,
    /// configuration, variant or size. The logits of the row are zero until it reads the next token.
    pub fn load(&mut self, row: usize, path: impl AsRef<Path>) -> Result<SavedSequence> {
        self.check_row(row)?;
        let path = path.as_ref();
        let refuse = |problem: String| Error::StateFile { path: path.into(), problem };
        if !path.is_file() {
            return Err(refuse(if path.exists() { "not a regular file".into() } else { "no such file".into() }));
        }
        let file = Checkpoint::open(path)?;
        let text = |key: &str| file.metadata().get(key).map(String::as_str);
        let Some(model) = text(MODEL) else {
            return Err(refuse("not a saved decoder state: the metadata entry `model` is missing".into()));
        };
        let own = self.model.describe();
        if model != own {
            return Err(refuse(format!(
                "saved from the model `{model}`, but this model is `{own}`; load it with the model that it was saved from"
            )));
        }
        let saved = text(CONFIG).and_then(|config| serde_json::from_str::<Map<String, Value>>(config).ok());
        let saved = saved.ok_or_else(|| {
            refuse("the metadata entry `config` is missing (file of an earlier version); save the state again with --save-state".into())
        })?;
        if let Some(difference) = difference(&saved, &self.model.config.computation()) {
            return Err(refuse(difference));
        }
        // Read instead of memory-mapped: if another process truncates the file, reading fails instead of crashing.
        let bytes = read(path, u64::MAX - 1).map_err(Error::io("read", path))?;
        verify(path, &bytes)?;
        // A layer that can switch to a state was saved before or after the switch.
        let layers: Vec<(&Layer, StateKind)> = self
            .layers
            .iter()
            .enumerate()
            .map(|(l, layer)| {
                let saved = text(&format!("layer.{l}.heads")).unwrap_or_default();
                let switched = layer
                    .switched
                    .as_ref()
                    .map(|(attention, _)| attention)
                    .filter(|attention| attention.heads().iter().map(Variant::to_string).eq(saved.lines()));
                (switched.unwrap_or(&layer.attention), StateKind::Auto)
            })
            .collect();
        let states = State::from_bytes(&bytes, path, &layers, 1)?;
        let (_, tokens) = file.read_i64(TOKENS)?;
        let vocabulary = self.model.config.vocab_size;
        let narrow = |&token: &i64| u32::try_from(token).ok().filter(|&token| (token as usize) < vocabulary);
        let tokens: Option<Vec<u32>> = tokens.iter().map(narrow).collect();
        let tokens = tokens.ok_or_else(|| {
            refuse(format!("contains a token id that is not below the vocabulary size {vocabulary}; the file is damaged"))
        })?;
        let read = states.first().and_then(|state| state.position(0)).unwrap_or(0);
        if states.iter().any(|state| state.position(0) != Some(read)) || !(read..=read + 1).contains(&tokens.len()) {
            let listed = tokens.len();
            return Err(refuse(format!(
                "positions of the layers (the first: {read}) do not match the {listed} tokens in the file; the file is damaged"
            )));
        }
        let draws = text(DRAWS)
            .and_then(|draws| draws.parse().ok())
            .ok_or_else(|| refuse("the metadata entry `draws` is missing or not a number; the file is damaged".into()))?;
        self.clear(row)?;
        let row = &mut self.rows[row];
        row.position = read;
        row.states = states;
        Ok(SavedSequence { tokens, draws })
    }
}

/// A message with the keys in which two configurations differ.
fn difference(saved: &Map<String, Value>, own: &Map<String, Value>) -> Option<String> {
    let mut keys: Vec<&String> = saved.keys().chain(own.keys().filter(|key| !saved.contains_key(*key))).collect();
    keys.retain(|&key| saved.get(key) != own.get(key));
    let value = |map: &Map<String, Value>, key: &String| map.get(key).map_or("absent".into(), Value::to_string);
    let each = keys.iter().map(|key| format!("`{key}` was {} and is {}", value(saved, key), value(own, key)));
    let list = each.collect::<Vec<_>>().join(", ");
    (!list.is_empty()).then(|| format!("saved with another configuration: {list}; load it with that configuration"))
}

/// A hash of the metadata, except [`HASH`], and of the name, type, shape and values of every tensor.
fn digest(metadata: &HashMap<String, String>, tensors: &[(&str, TensorView)]) -> String {
    let mut hasher = blake3::Hasher::new();
    // Each part is prefixed by its length, so different files never hash the same bytes.
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

/// Checks the hash of a file.
fn verify(path: &Path, bytes: &[u8]) -> Result<()> {
    let refuse = |problem: String| Error::StateFile { path: path.into(), problem };
    let damaged = |error: safetensors::SafeTensorError| refuse(format!("not a valid safetensors file ({error}); the file is damaged"));
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let tensors = SafeTensors::deserialize(bytes).map_err(damaged)?;
    match metadata.get(HASH) {
        None => Err(refuse(
            "the metadata entry `blake3` is missing (file of an earlier version); save the state again with --save-state".into(),
        )),
        Some(hash) if *hash != digest(&metadata, &tensors.iter().collect::<Vec<_>>()) => {
            Err(refuse("the hash does not match the content; the file is damaged".into()))
        }
        Some(_) => Ok(()),
    }
}
