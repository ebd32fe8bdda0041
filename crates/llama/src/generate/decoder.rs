//! A model that reads and writes token by token.
//!
//! Legend: B rows, each a text of its own; W positions of a window; the others as in [`crate::ops`].

use termwise_attention::{Layer as AttentionLayer, Memory, Mode, Shape, State, Variant};

use super::buffers::Buffers;
use super::cut::{cut_heads, nothing_to_cut};
use super::run::{Engines, SHORTEST};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::batch::check_ids;
use crate::model::places::Places;
use crate::ops::Buffer;
use crate::params::EMBEDDING;

/// What a model remembers of the tokens that it has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remember {
    /// A state of constant size where the kernel has a finite map and no clamp; all keys and values elsewhere.
    #[default]
    Natural,
    /// Every exp kernel cut to its series up to this order, which has a finite map.
    Cut(usize),
    /// All keys and values, exactly, until the state of the series up to this order is smaller in bytes; from then on that state,
    /// made of the keys and values. Each layer of each row turns when its own cache has grown that large, which is looked at after each
    /// token that is written and each window that is read.
    Switch(usize),
}

/// Choices of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderOptions {
    /// B, texts at once.
    pub rows: usize,
    /// W, positions that a prompt is read in at most at once: what buffers are made for.
    pub window: usize,
    /// How attention inside a window is computed.
    pub mode: Mode,
    /// What is remembered.
    pub remember: Remember,
    /// Whether a cache of keys and values may hold more positions than the model was made for.
    pub beyond_context: bool,
}

/// One row, windows of 256 positions, the cheaper mode, the natural memory, no further than the context.
impl Default for DecoderOptions {
    fn default() -> DecoderOptions {
        DecoderOptions { rows: 1, window: 256, mode: Mode::Auto, remember: Remember::Natural, beyond_context: false }
    }
}

/// The inference of a model: one set of activations for all layers, one attention [`State`] for each layer of each row.
///
/// Rows are independent: each has its own position, begins and ends when it likes, and has the same bits in a batch of any size and on
/// any number of threads. [`Decoder::step`] reads every weight once for all rows and allocates nothing unless a cache grows.
///
/// `max_position_embeddings` is the longest context that a model was trained for. A state of constant size has no end: RoPE turns on, and
/// how the model writes beyond that length is for the reader to judge. A cache of keys and values ends there unless
/// [`DecoderOptions::beyond_context`] says otherwise.
///
/// After an error the row that it names has taken part of a token in: [`Decoder::clear`] it before it is used again.
///
/// ```
/// use termwise_llama::generate::{Decoder, DecoderOptions, Sampler, Sampling};
/// # use termwise_llama::{Config, Model};
/// # let text = r#"{"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
/// #     "attention_variant": "taylor=0..2"}"#;
/// # let model = Model::fresh(Config::from_json_str(text, "doc")?, 1)?;
/// let mut decoder = Decoder::new(&model, DecoderOptions::default())?;
/// let mut sampler = Sampler::new(Sampling::default(), model.config.vocab_size)?;
/// decoder.read(0, &[3, 1, 4])?;
/// for _ in 0..5 {
///     let token = sampler.choose(decoder.logits(0));
///     decoder.step(&[Some(token)])?;
/// }
/// assert_eq!(decoder.position(0), 8);
/// # Ok::<(), termwise_llama::Error>(())
/// ```
pub struct Decoder<'m> {
    pub(super) model: &'m Model,
    pub(super) options: DecoderOptions,
    pub(super) places: Places,
    pub(super) shape: Shape,
    pub(super) layers: Vec<Layer>,
    pub(super) engines: Engines,
    pub(super) rows: Vec<Row>,
    /// Rows of the step at hand, ascending.
    pub(super) active: Vec<usize>,
    /// Their tokens.
    pub(super) ids: Vec<u32>,
    pub(super) buffers: Buffers,
    /// [B, V]
    pub(super) logits: Buffer,
}

/// What a layer's rows are made of.
pub(super) struct Layer {
    /// Variants that a fresh row begins with.
    pub attention: AttentionLayer,
    /// Variants that it turns to, and the bytes of one row's state of them.
    pub later: Option<(AttentionLayer, usize)>,
}

/// One text.
pub(super) struct Row {
    /// Of each layer.
    pub states: Vec<State>,
    pub position: usize,
    /// Attention's output [H·d] and what it reports of the token at hand.
    pub(super) y: Vec<f32>,
    pub(super) nonpositive: Option<termwise_attention::Nonpositive>,
}

impl<'m> Decoder<'m> {
    /// Room for texts of this model.
    pub fn new(model: &'m Model, options: DecoderOptions) -> Result<Decoder<'m>> {
        let config = &model.config;
        if options.rows == 0 || options.window == 0 {
            return Err(Error::BatchLength { what: "rows and positions of a window, each at least 1", expected: 1, found: 0 });
        }
        let shape = Shape { batch: 1, ..config.shape() };
        let places = Places::new(config, model.params.layout())?;
        super::memory::check(config, options)?;
        let mut layers = Vec::new();
        for layer in 0..config.num_hidden_layers {
            let attention = config.attention_layer(layer, &config.heads(layer))?;
            layers.push(Layer::new(attention, options.remember).map_err(|source| Error::Layer { layer, source })?);
        }
        if let Remember::Cut(order) | Remember::Switch(order) = options.remember {
            super::cut::cut(config, order)?;
        }
        if matches!(options.remember, Remember::Switch(_)) && layers.iter().all(|layer| layer.later.is_none()) {
            let problem = "no layer can turn from its cache to a state, for which all of its heads need exp, or another finite kernel, without a clamp";
            return Err(nothing_to_cut(config, problem));
        }
        let rows = (0..options.rows).map(|_| Row::new(&layers, shape)).collect::<Result<_>>()?;
        let window = options.window.next_multiple_of(SHORTEST);
        let signals = places.layers.iter().flat_map(|at| at.signals.iter().map(|signal| (signal.extra, signal.outputs)));
        let buffers = Buffers::new(config, window.max(options.rows), options.rows, signals)?;
        let mut decoder = Decoder {
            model,
            options: DecoderOptions { window, ..options },
            places,
            shape,
            layers,
            engines: Engines::new(options.mode),
            rows,
            active: Vec::with_capacity(options.rows),
            ids: Vec::with_capacity(options.rows),
            buffers,
            logits: Buffer::zeros(options.rows * config.vocab_size)?,
        };
        // What the mode cannot do is said here, not at the first prompt.
        for layer in 0..decoder.layers.len() {
            let attention = decoder.layers[layer].attention.clone();
            decoder.engines.get(&attention, SHORTEST).map_err(|source| Error::Layer { layer, source })?;
        }
        Ok(decoder)
    }

    /// Reads tokens into a row, in windows; afterwards its logits are those of the token that follows them.
    pub fn read(&mut self, row: usize, tokens: &[u32]) -> Result<()> {
        self.check_row(row)?;
        check_ids(tokens, tokens.len().max(1), self.model.config.vocab_size)?;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if !matches!(self.options.remember, Remember::Switch(_)) {
            self.check_room(row, tokens.len())?;
        }
        for window in tokens.chunks(self.options.window) {
            self.check_room(row, window.len())?;
            if let [token] = *window {
                self.take(row, token);
                self.run_step()?;
            } else {
                self.run_window(row, window)?;
            }
            self.turn(row)?;
        }
        Ok(())
    }

    /// As [`Decoder::read`] for every row: ids [B, T], of which the first `lengths[row]` count, which may be none.
    pub fn extend(&mut self, ids: &[u32], lengths: &[usize]) -> Result<()> {
        let rows = self.rows.len();
        let found = lengths.len();
        if found != rows {
            return Err(Error::BatchLength { what: "lengths", expected: rows, found });
        }
        let time = ids.len() / rows;
        if ids.len() != rows * time {
            return Err(Error::BatchLength { what: "ids", expected: rows * time, found: ids.len() });
        }
        for (row, (ids, &length)) in ids.chunks(time.max(1)).zip(lengths).enumerate() {
            if length > time {
                let expected = format!("at most {time}");
                return Err(Error::BatchValue { what: "length", row, position: 0, found: length as i64, expected });
            }
            if length > 0 {
                self.read(row, &ids[..length])?;
            }
        }
        Ok(())
    }

    /// Reads one token into every row that has one; afterwards the logits of these rows are those of the token that follows.
    pub fn step(&mut self, tokens: &[Option<u32>]) -> Result<()> {
        if tokens.len() != self.rows.len() {
            return Err(Error::BatchLength { what: "tokens", expected: self.rows.len(), found: tokens.len() });
        }
        self.active.clear();
        self.ids.clear();
        for (row, token) in tokens.iter().enumerate() {
            if let Some(token) = *token {
                check_ids(&[token], 1, self.model.config.vocab_size)?;
                self.check_room(row, 1)?;
                self.active.push(row);
                self.ids.push(token);
            }
        }
        self.run_step()?;
        for (row, _) in tokens.iter().enumerate().filter(|(_, token)| token.is_some()) {
            self.turn(row)?;
        }
        Ok(())
    }

    /// B
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// What is remembered.
    pub fn remember(&self) -> Remember {
        self.options.remember
    }

    /// Whether a fresh row takes memory of constant size.
    pub fn is_constant(&self) -> bool {
        self.layers.iter().all(|layer| layer.attention.heads().iter().all(|variant| variant.state_rows(self.shape.d).is_some()))
    }

    /// Logits [V] of the token that follows what a row has read; zeros before it has read anything.
    pub fn logits(&self, row: usize) -> &[f32] {
        let v = self.model.config.vocab_size;
        &self.logits[row * v..][..v]
    }

    /// Tokens that a row has read.
    pub fn position(&self, row: usize) -> usize {
        self.rows[row].position
    }

    /// Tokens that a row can still read before its cache is as long as the model's context; `None` where nothing ends.
    pub fn room(&self, row: usize) -> Option<usize> {
        if self.options.beyond_context || self.rows[row].states.iter().all(State::is_constant) {
            return None;
        }
        Some(self.model.config.max_position_embeddings.saturating_sub(self.rows[row].position))
    }

    /// Bytes that a row remembers with, all layers, from the buffers that hold them.
    pub fn state_bytes(&self, row: usize) -> usize {
        self.rows[row].states.iter().map(State::bytes).sum()
    }

    /// The memory of a row, layer by layer.
    pub fn states(&self, row: usize) -> &[State] {
        &self.rows[row].states
    }

    /// Multiply-adds of a row's next token, from what it remembers now: 1 for each weight of a matrix, and in each head 2·N·(e + 1) for a
    /// state of N rows, one to update and one to read, or d + e for each key of a cache.
    pub fn operations(&self, row: usize) -> u64 {
        let matrices = self.model.params.layout().entries().iter().filter(|entry| entry.is_matrix() && entry.spec.name != EMBEDDING);
        let head = (self.model.config.vocab_size * self.model.config.hidden_size) as u64;
        let tied = if self.model.config.tie_word_embeddings { head } else { 0 };
        let weights: u64 = matrices.map(|entry| entry.spec.len() as u64).sum::<u64>() + tied;
        let Shape { d, e, .. } = self.shape;
        let attention = |state: &State| -> u64 {
            let of = |variant: &Variant| match variant.state_rows(d) {
                Some(rows) if state.memory() == Memory::Natural => 2 * rows as u64 * (e as u64 + 1),
                _ => (state.position(0).unwrap_or(0) as u64 + 1) * (d + e) as u64,
            };
            state.heads().iter().map(of).sum()
        };
        weights + self.rows[row].states.iter().map(attention).sum::<u64>()
    }

    /// Layers of a row that have turned from their cache to a state, by [`Remember::Switch`].
    pub fn turned(&self, row: usize) -> usize {
        self.layers.iter().zip(&self.rows[row].states).filter(|(layer, state)| state.heads() != layer.attention.heads()).count()
    }

    /// Forgets what a row has read: as new.
    pub fn clear(&mut self, row: usize) -> Result<()> {
        self.check_row(row)?;
        // Caches go back to the system, so that one long text does not keep memory from the others.
        self.rows[row] = Row::new(&self.layers, self.shape)?;
        let v = self.model.config.vocab_size;
        self.logits[row * v..][..v].fill(0.0);
        Ok(())
    }

    pub(super) fn check_row(&self, row: usize) -> Result<()> {
        if row < self.rows.len() {
            return Ok(());
        }
        let expected = format!("below {}", self.rows.len());
        Err(Error::BatchValue { what: "row", row, position: 0, found: row as i64, expected })
    }

    fn check_room(&self, row: usize, tokens: usize) -> Result<()> {
        match self.room(row) {
            Some(room) if tokens > room => {
                Err(Error::Context { row, asked: self.rows[row].position + tokens, context: self.model.config.max_position_embeddings })
            }
            _ => Ok(()),
        }
    }

    fn take(&mut self, row: usize, token: u32) {
        self.active.clear();
        self.ids.clear();
        self.active.push(row);
        self.ids.push(token);
    }

    /// Turns the caches of a row that have grown larger than the state that they can become.
    fn turn(&mut self, row: usize) -> Result<()> {
        for (l, (layer, state)) in self.layers.iter().zip(&mut self.rows[row].states).enumerate() {
            if let Some((attention, bytes)) = &layer.later
                && state.heads() != attention.heads()
                && state.bytes() > *bytes
            {
                state.compress(attention).map_err(|source| Error::Layer { layer: l, source })?;
            }
        }
        Ok(())
    }
}

impl Layer {
    fn new(attention: AttentionLayer, remember: Remember) -> Result<Layer, termwise_attention::Error> {
        match remember {
            Remember::Natural => Ok(Layer { attention, later: None }),
            Remember::Cut(order) => {
                let cut = cut_heads(attention.heads(), order)?;
                Ok(Layer { attention: attention.with_heads(cut)?, later: None })
            }
            Remember::Switch(order) => {
                let cut = attention.with_heads(cut_heads(attention.heads(), order)?)?;
                let state = cut.state(1)?;
                let later = (state.is_constant() && cut.heads() != attention.heads()).then(|| (cut, state.bytes()));
                Ok(Layer { attention, later })
            }
        }
    }
}

impl Row {
    fn new(layers: &[Layer], shape: Shape) -> Result<Row> {
        let state = |(layer, heads): (usize, &Layer)| heads.attention.state(1).map_err(|source| Error::Layer { layer, source });
        let states = layers.iter().enumerate().map(state).collect::<Result<_>>()?;
        Ok(Row { states, position: 0, y: vec![0.0; shape.heads * shape.e], nonpositive: None })
    }
}
