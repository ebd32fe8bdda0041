//! A model that reads and writes token by token.
//!
//! Legend: B rows, each a text of its own; W positions of a window; the others as in [`crate::ops`].

use std::path::Path;
use std::sync::Arc;

use termwise_attention::{Layer as AttentionLayer, Mode, Shape, State};

use super::cut::{cut_heads, nothing_to_cut};
use super::held::Held;
use super::run::{Engines, SHORTEST};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::gemv;
use crate::model::Model;
use crate::model::batch::check_ids;
use crate::model::layer::{Activations, FEW, Keep};
use crate::model::timing::Timing;
use crate::ops::{Buffer, zeros};
use crate::weights::FloatType;

/// Positions whose rotary angles are kept: those of a long prompt, in a few megabytes.
const ANGLES: usize = 4096;

/// What a model remembers of the tokens that it has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryPolicy {
    /// A state of constant size where the kernel has a finite map and no clamp; all keys and values elsewhere.
    #[default]
    Auto,
    /// Every exp kernel cut to its series up to this order, which has a finite map.
    Truncate(usize),
    /// All keys and values, exactly, until the state of the series up to this order is smaller in bytes; from then on that state,
    /// made of the keys and values. Each layer of each row switches when its own cache has grown that large, which is checked after each
    /// token that is written and each window that is read. Layers with a window, a clamp or a cap do not switch; a model in which no layer
    /// can switch is refused.
    SwitchToState(usize),
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
    pub memory: MemoryPolicy,
    /// How weights are held: float32, or bfloat16, which halves what is read for each token and rounds every weight to 8 bits of precision.
    pub weights: FloatType,
    /// Whether a cache of keys and values may hold more positions than the model was made for.
    pub beyond_context: bool,
}

/// One row, windows of 256 positions, the cheaper mode, the natural memory, float32, no further than the context.
impl Default for DecoderOptions {
    fn default() -> DecoderOptions {
        DecoderOptions {
            rows: 1,
            window: 256,
            mode: Mode::Auto,
            memory: MemoryPolicy::Auto,
            weights: FloatType::F32,
            beyond_context: false,
        }
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
/// A row that fails during [`Decoder::read`] or [`Decoder::step_rows`] is marked as failed: some of its layers have taken the token in and
/// others have not. Every use of it except [`Decoder::clear`] and [`Decoder::load`] is refused until one of these resets it. Other rows of
/// the same call are unaffected: all of their layers have taken the token in, and their logits are new.
///
/// ```
/// use termwise_llama::generate::{Decoder, DecoderOptions, Sampler, Sampling};
/// # use termwise_llama::{Config, Model};
/// # let text = r#"{"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
/// #     "attention_variant": "taylor=0..2"}"#;
/// # let model = Model::fresh(Config::from_json_str(text, "doc")?, 1)?;
/// let mut decoder = Decoder::new(model, DecoderOptions::default())?;
/// let mut sampler = Sampler::new(Sampling::default(), decoder.config().vocab_size)?;
/// decoder.read(0, &[3, 1, 4])?;
/// for _ in 0..5 {
///     let token = sampler.choose(decoder.logits(0)?);
///     decoder.step(&[Some(token)])?;
/// }
/// assert_eq!(decoder.position(0)?, 8);
/// # Ok::<(), termwise_llama::Error>(())
/// ```
pub struct Decoder {
    pub(super) model: Held,
    pub(super) options: DecoderOptions,
    pub(super) shape: Shape,
    pub(super) layers: Vec<Layer>,
    pub(super) engines: Engines,
    pub(super) rows: Vec<Row>,
    /// Rows of the step at hand, ascending.
    pub(super) active: Vec<usize>,
    /// Their tokens.
    pub(super) ids: Vec<u32>,
    pub(super) activations: Activations,
    /// Products of a few rows, before they are put in order.
    pub(super) columns: Buffer,
    /// A matrix of bfloat16 in float32.
    pub(super) widened: Buffer,
    /// [B, V]: of the rows of the step at hand, and of all.
    pub(super) step_logits: Buffer,
    pub(super) logits: Buffer,
    pub(super) timing: Timing,
}

/// What a layer's rows are made of.
pub(super) struct Layer {
    /// What a fresh row begins with.
    pub attention: AttentionLayer,
    /// What it switches to, and the bytes of one row's state of that.
    pub later: Option<(AttentionLayer, usize)>,
}

/// One text.
pub(super) struct Row {
    /// Of each layer.
    pub states: Vec<State>,
    pub position: usize,
    /// Attention's output [H·d].
    pub(super) y: Vec<f32>,
    /// Whether only some of the layers have taken the last token in.
    pub(super) failed: bool,
    /// Why the row failed in the call at hand.
    pub(super) error: Option<Error>,
}

/// A row that failed, and why.
#[derive(Debug)]
pub struct RowError {
    /// The row.
    pub row: usize,
    /// The cause.
    pub error: Error,
}

impl Decoder {
    /// Room for texts of this model, which is shared where its weights are read as they are, and let go where they are copied.
    pub fn new(model: impl Into<Arc<Model>>, options: DecoderOptions) -> Result<Decoder> {
        Decoder::with(Held::new(model.into(), options.weights)?, options)
    }

    /// Room for texts of the model in a folder, read directly into the type that the options ask for.
    pub fn open(folder: impl AsRef<Path>, options: DecoderOptions) -> Result<Decoder> {
        Decoder::with(Held::read(folder.as_ref(), options.weights)?, options)
    }

    fn with(model: Held, options: DecoderOptions) -> Result<Decoder> {
        let config = &model.config;
        let (rows, window) = (options.rows, options.window.checked_next_multiple_of(SHORTEST).unwrap_or(options.window));
        if rows == 0 || window == 0 {
            return Err(Error::BatchLength { what: "rows and positions of a window, each at least 1", expected: 1, found: 0 });
        }
        super::memory::check(config, options)?;
        let widths = model.architecture().widths;
        let activations = Activations::new(model.architecture(), window.max(rows), Keep::Nothing)?;
        let shape = config.shape();
        let mut layers = Vec::new();
        let positions = config.context().min(ANGLES);
        for (layer, attention) in config.attention_layers(positions)?.into_iter().enumerate() {
            layers.push(Layer::new(attention, options.memory).map_err(|source| Error::Layer { layer, source })?);
        }
        if let MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) = options.memory {
            super::cut::cut(config, order)?;
        }
        if matches!(options.memory, MemoryPolicy::SwitchToState(_)) && layers.iter().all(|layer| layer.later.is_none()) {
            let problem = "no layer can switch from its cache to a state: all heads of a layer need exp, or another kernel with a finite map, \
                           without a window, a clamp or a cap";
            return Err(nothing_to_cut(config, problem));
        }
        let widest = widths.c.max(2 * widths.i).max(widths.qkv());
        let columns = gemv::scratch_len(rows, widths.v).max(gemv::scratch_len(rows.max(FEW), widest));
        let mut engines = Engines::new(options.mode);
        // What the mode cannot do is said here, not at the first prompt.
        for (layer, of) in layers.iter().enumerate() {
            engines.get(&of.attention, SHORTEST).map_err(|source| Error::Layer { layer, source })?;
        }
        Ok(Decoder {
            options: DecoderOptions { window, ..options },
            shape,
            engines,
            rows: (0..rows).map(|_| Row::new(&layers, shape)).collect::<Result<_>>()?,
            layers,
            active: Vec::with_capacity(rows),
            ids: Vec::with_capacity(rows),
            activations,
            columns: zeros("a step", columns, 1)?,
            widened: Buffer::default(),
            step_logits: zeros("a step", rows, widths.v)?,
            logits: zeros("a step", rows, widths.v)?,
            timing: Timing::new(),
            model,
        })
    }

    /// Sizes and choices of the model.
    pub fn config(&self) -> &Config {
        &self.model.config
    }

    /// Reads tokens into a row, in windows; afterwards its logits are those of the token that follows them. An error in the middle marks
    /// the row as failed.
    pub fn read(&mut self, row: usize, tokens: &[u32]) -> Result<()> {
        self.check_usable(row)?;
        check_ids(tokens, tokens.len().max(1), self.model.config.vocab_size)?;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if !matches!(self.options.memory, MemoryPolicy::SwitchToState(_)) {
            self.check_room(row, tokens.len())?;
        }
        for window in tokens.chunks(self.options.window) {
            // Layers may have switched to states since the window before, which makes room.
            self.check_room(row, window.len())?;
            let read = if let [token] = *window {
                self.take(row, token);
                self.run_step()
            } else {
                self.run_window(row, window)
            };
            let read = read.and_then(|()| self.rows[row].error.take().map_or(Ok(()), Err)).and_then(|()| self.switch(row));
            if read.is_err() {
                self.rows[row].failed = true;
                return read;
            }
        }
        Ok(())
    }

    /// As [`Decoder::read`] for every row: ids [B, T], of which the first `lengths[row]` count, which may be none.
    ///
    /// A row that fails does not keep the others from being read; the error is that of the first failed row.
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
        if let Some(row) = lengths.iter().position(|&length| length > time) {
            let (expected, found) = (format!("at most {time}"), lengths[row] as i64);
            return Err(Error::BatchValue { what: "length", row, position: 0, found, expected });
        }
        let mut first = Ok(());
        for (row, (ids, &length)) in ids.chunks(time.max(1)).zip(lengths).enumerate().filter(|(_, (_, length))| **length > 0) {
            first = first.and(self.read(row, &ids[..length]));
        }
        first
    }

    /// As [`Decoder::step_rows`]; the error is that of the first failed row.
    pub fn step(&mut self, tokens: &[Option<u32>]) -> Result<()> {
        self.step_rows(tokens)?.into_iter().next().map_or(Ok(()), |failed| Err(failed.error))
    }

    /// Reads one token into every row that has one; afterwards the logits of these rows are those of the token that follows.
    ///
    /// Returns the rows that failed, in ascending order, which are then marked as failed; all other rows have taken their tokens in. The
    /// result is the same for any number of threads. An error of the call itself, such as a token beyond the vocabulary, a full context or a
    /// row that has failed before, changes no row.
    pub fn step_rows(&mut self, tokens: &[Option<u32>]) -> Result<Vec<RowError>> {
        if tokens.len() != self.rows.len() {
            return Err(Error::BatchLength { what: "tokens", expected: self.rows.len(), found: tokens.len() });
        }
        self.active.clear();
        self.ids.clear();
        for (row, token) in tokens.iter().enumerate() {
            if let Some(token) = *token {
                self.check_usable(row)?;
                check_ids(&[token], 1, self.model.config.vocab_size)?;
                self.check_room(row, 1)?;
                self.active.push(row);
                self.ids.push(token);
            }
        }
        if let Err(error) = self.run_step() {
            // Not an error of one row: no layer is known to be complete.
            self.active.iter().for_each(|&row| self.rows[row].failed = true);
            return Err(error);
        }
        let mut failures = Vec::new();
        for (row, _) in tokens.iter().enumerate().filter(|(_, token)| token.is_some()) {
            let stepped = self.rows[row].error.take().map_or(Ok(()), Err).and_then(|()| self.switch(row));
            if let Err(error) = stepped {
                self.rows[row].failed = true;
                failures.push(RowError { row, error });
            }
        }
        Ok(failures)
    }

    /// B
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// What is remembered.
    pub fn memory(&self) -> MemoryPolicy {
        self.options.memory
    }

    /// Whether a fresh row takes memory of constant size.
    pub fn is_constant(&self) -> bool {
        self.layers.iter().all(|layer| layer.attention.heads().iter().all(|variant| variant.state_rows(self.shape.d).is_some()))
    }

    /// Logits [V] of the token that follows what a row has read; zeros before it has read anything.
    pub fn logits(&self, row: usize) -> Result<&[f32]> {
        self.check_usable(row)?;
        let v = self.model.config.vocab_size;
        Ok(&self.logits[row * v..][..v])
    }

    /// Whether a row failed and has not been reset since, by [`Decoder::clear`] or [`Decoder::load`].
    pub fn failed(&self, row: usize) -> Result<bool> {
        Ok(self.row(row)?.failed)
    }

    /// Tokens that a row has read.
    pub fn position(&self, row: usize) -> Result<usize> {
        Ok(self.row(row)?.position)
    }

    /// Tokens that a row can still read before its cache is as long as the model's context; `None` where nothing ends.
    pub fn room(&self, row: usize) -> Result<Option<usize>> {
        let row = self.row(row)?;
        // Keys of a text whose rotary frequencies change with its length cannot be kept beyond where they do.
        let fixed = self.model.config.rope_scaling.as_ref().is_none_or(|scaling| scaling.fixed_up_to().is_none());
        let endless = fixed && (self.options.beyond_context || row.states.iter().all(State::is_constant));
        Ok((!endless).then(|| self.model.config.context().saturating_sub(row.position)))
    }

    /// Bytes that a row remembers with, all layers, from the buffers that hold them.
    pub fn state_bytes(&self, row: usize) -> Result<usize> {
        Ok(self.row(row)?.states.iter().map(State::bytes).sum())
    }

    /// The memory of a row, layer by layer.
    pub fn states(&self, row: usize) -> Result<&[State]> {
        Ok(&self.row(row)?.states)
    }

    /// Layers of a row that have switched from their cache to a state, by [`MemoryPolicy::SwitchToState`].
    pub fn switched(&self, row: usize) -> Result<usize> {
        Ok(self.layers.iter().zip(&self.row(row)?.states).filter(|(layer, state)| state.heads() != layer.attention.heads()).count())
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
        self.row(row).map(|_| ())
    }

    /// Refuses rows that failed.
    pub(super) fn check_usable(&self, row: usize) -> Result<()> {
        if self.row(row)?.failed { Err(Error::FailedRow { row }) } else { Ok(()) }
    }

    fn row(&self, row: usize) -> Result<&Row> {
        let rows = self.rows.len();
        self.rows.get(row).ok_or_else(|| Error::BatchValue {
            what: "row",
            row,
            position: 0,
            found: row as i64,
            expected: format!("below {rows}"),
        })
    }

    fn check_room(&self, row: usize, tokens: usize) -> Result<()> {
        match self.room(row)? {
            Some(room) if tokens > room => {
                Err(Error::Context { row, asked: self.rows[row].position + tokens, context: self.model.config.context() })
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

    /// Switches the caches of a row that have grown larger than the state that they can become.
    fn switch(&mut self, row: usize) -> Result<()> {
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
    fn new(attention: AttentionLayer, memory: MemoryPolicy) -> Result<Layer, termwise_attention::Error> {
        match memory {
            MemoryPolicy::Auto => Ok(Layer { attention, later: None }),
            MemoryPolicy::Truncate(order) => {
                let cut = attention.with_heads(cut_heads(attention.heads(), order)?)?;
                Ok(Layer { attention: cut, later: None })
            }
            MemoryPolicy::SwitchToState(order) => {
                let cut = attention.with_heads(cut_heads(attention.heads(), order)?)?;
                // Whatever cannot be compressed is known from the empty state: windows, clamps, caps.
                let mut state = attention.state(1)?;
                let switches = cut.heads() != attention.heads() && state.compress(&cut).is_ok() && state.is_constant();
                Ok(Layer { attention, later: switches.then(|| (cut, state.bytes())) })
            }
        }
    }
}

impl Row {
    fn new(layers: &[Layer], shape: Shape) -> Result<Row> {
        let state = |(layer, of): (usize, &Layer)| of.attention.state(1).map_err(|source| Error::Layer { layer, source });
        let states = layers.iter().enumerate().map(state).collect::<Result<_>>()?;
        Ok(Row { states, position: 0, y: vec![0.0; shape.heads * shape.e], failed: false, error: None })
    }
}
