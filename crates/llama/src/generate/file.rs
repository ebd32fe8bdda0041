//! A row's memory in a file, to go on later.
//!
//! The safetensors file of [`State::save_layers`], and beside its tensors `tokens` [n], the text so far (int64), and in the metadata
//! `model`, a description of the model with a fingerprint of its weights, and `draws`, the random numbers used so far.

use std::collections::HashMap;
use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use termwise_attention::{Layer, Memory, State, Variant};

use super::decoder::Decoder;
use crate::error::{Error, Result};
use crate::files::Staged;
use crate::model::Model;
use crate::weights::Checkpoint;

const TOKENS: &str = "tokens";
const MODEL: &str = "model";
const DRAWS: &str = "draws";

/// What a file says besides the memory itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// The text so far: what was read, and at most one token more, which was written last and not read yet.
    pub tokens: Vec<u32>,
    /// Draws of the sampler so far.
    pub draws: u64,
}

impl Decoder<'_> {
    /// Writes the memory of a row, which has read the tokens of `saved`, all or all but the last; the file appears whole or not at all.
    pub fn save(&self, row: usize, saved: &Saved, path: impl AsRef<Path>) -> Result<()> {
        self.check_row(row)?;
        let path = path.as_ref();
        let (expected, found) = (self.position(row), saved.tokens.len());
        if found != expected && found != expected + 1 {
            return Err(Error::BatchLength { what: "tokens to be saved", expected, found });
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let beside = tempfile::Builder::new().prefix(".termwise-").tempdir_in(folder).map_err(Error::io("create a folder beside", path))?;
        let states = beside.path().join("states");
        State::save_layers(self.states(row), &states)?;
        let file = std::fs::File::open(&states).map_err(Error::io("open", &states))?;
        // SAFETY: the file is in a folder of our own, which nobody else changes; any bytes are valid.
        let bytes = unsafe { memmap2::Mmap::map(&file) }.map_err(Error::io("map into memory", &states))?;
        let damaged = |error: safetensors::SafeTensorError| Error::Header { problem: error.to_string() }.in_file(path.display());
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
        let mut metadata: HashMap<String, String> = header.metadata().clone().unwrap_or_default();
        metadata.insert(MODEL.into(), describe(self.model));
        metadata.insert(DRAWS.into(), saved.draws.to_string());
        let layers = SafeTensors::deserialize(&bytes).map_err(damaged)?;
        let tokens: Vec<u8> = saved.tokens.iter().flat_map(|&token| (token as i64).to_le_bytes()).collect();
        let tokens_view = TensorView::new(Dtype::I64, vec![saved.tokens.len()], &tokens).map_err(damaged)?;
        let all = layers.iter().chain([(TOKENS, tokens_view)]);
        let content = safetensors::serialize(all, Some(metadata)).map_err(damaged)?;
        Staged::write(path, |out| out.write_all(&content).map_err(Error::io("write", path)))?.publish()
    }

    /// Puts a row where the file was saved, bit for bit. Refused, and the row unchanged, where the file is of another model, of other
    /// variants or sizes; its logits are zeros until it reads on.
    pub fn load(&mut self, row: usize, path: impl AsRef<Path>) -> Result<Saved> {
        self.check_row(row)?;
        let path = path.as_ref();
        let file = Checkpoint::open(path)?;
        let refuse = |problem: String| Error::StateFile { path: path.into(), problem };
        let text = |key: &str| file.metadata().get(key).map(String::as_str);
        let Some(model) = text(MODEL) else { return Err(refuse("it is not the saved memory of a model: it names none".into())) };
        let own = describe(self.model);
        if model != own {
            return Err(refuse(format!("it was saved from the model `{model}`, and this is `{own}`")));
        }
        // A layer that turns has been saved before or after.
        let heads: Vec<(&Layer, Memory)> = self
            .layers
            .iter()
            .enumerate()
            .map(|(l, layer)| {
                let saved = text(&format!("layer.{l}.heads")).unwrap_or_default();
                let turned = layer
                    .later
                    .as_ref()
                    .map(|(layer, _)| layer)
                    .filter(|layer| layer.heads().iter().map(Variant::to_string).eq(saved.lines()));
                (turned.unwrap_or(&layer.attention), Memory::Natural)
            })
            .collect();
        let states = State::load_layers(path, &heads, 1)?;
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

/// Sizes and a fingerprint of all weights: the same for the same model, on every machine.
fn describe(model: &Model) -> String {
    let config = &model.config;
    let layers = config.num_hidden_layers;
    let hash = model.params.values().par_chunks(1 << 16).enumerate().map(|(piece, values)| {
        let mixed = |(i, value): (usize, &f32)| {
            let mut z = (value.to_bits() as u64) ^ (((piece << 16) + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z ^ (z >> 27)
        };
        values.iter().enumerate().map(mixed).fold(0u64, u64::wrapping_add)
    });
    let hash = hash.reduce(|| 0, u64::wrapping_add);
    let (c, h, g, v) = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.vocab_size);
    format!("{layers} layers, width {c}, {h} heads over {g}, vocabulary {v}, weights {hash:016x}")
}
