//! The decoder: a model with its memory of past tokens, for generation token by token.
//!
//! One decoded token: [`Decoder::step`] (`step.rs`) → the layers (`passes/forward.rs`) with attention on each row's state → logits
//! (`step.rs`) → [`super::Sampler::sample`]. A prompt: [`Decoder::prefill`] (`prefill.rs`).
//!
//! Dimensions: B rows, each an independent sequence; the others as in [`crate::ops`].

use std::path::Path;
use std::sync::Arc;

use termwise_attention::{Layer, Shape, State};
use termwise_kernels::gemv;

use super::options::{DecoderOptions, MemoryPolicy};
use super::prefill::{MIN_CHUNK, PrefillEngines};
use super::truncate::{nothing_to_truncate, truncate_attention, truncate_heads};
use super::weights::DecoderWeights;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::ops::{Buffer, zeros};
use crate::passes::activations::{Activations, Keep};
use crate::passes::forward::GEMV_MAX_ROWS;
use crate::passes::timing::StageTiming;

/// Positions whose rotary angles are precomputed: a long prompt, in a few megabytes.
const ROPE_TABLE_POSITIONS: usize = 4096;

/// A model that decodes B independent sequences (rows), with one attention [`State`] per layer and row.
///
/// Each row has its own position. Its results are bit-identical for any number of other rows and of threads on one instruction set. [`Decoder::step`] reads
/// every weight once for all rows and does not allocate unless a cache grows.
///
/// `max_position_embeddings` is the context length of the model. A KV cache is limited to it unless [`DecoderOptions::beyond_context`] is set.
/// A recurrent state of constant size has no limit; beyond the context length, positions are extrapolated.
///
/// A row that fails in [`Decoder::prefill`] or [`Decoder::step_rows`] is marked as failed, since only some of its layers have processed the
/// token. All further use of the row fails until [`Decoder::clear`] or [`Decoder::load`] resets it. Other rows of the same call are complete.
///
/// ```
/// use termwise_model::decode::{Decoder, DecoderOptions, Sampler, SamplingOptions};
/// # use termwise_model::{Config, Model};
/// # let text = r#"{"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
/// #     "attention_variant": "taylor=0..2"}"#;
/// # let model = Model::fresh(Config::from_json_str(text, "doc")?, 1)?;
/// let mut decoder = Decoder::new(model, DecoderOptions::default())?;
/// let mut sampler = Sampler::new(SamplingOptions::default(), decoder.config().vocab_size)?;
/// decoder.prefill(0, &[3, 1, 4])?;
/// for _ in 0..5 {
///     let token = sampler.sample(decoder.logits(0)?);
///     decoder.step(&[Some(token)])?;
/// }
/// assert_eq!(decoder.position(0)?, 8);
/// # Ok::<(), termwise_model::Error>(())
/// ```
pub struct Decoder {
    pub(super) model: DecoderWeights,
    pub(super) options: DecoderOptions,
    pub(super) shape: Shape,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) engines: PrefillEngines,
    pub(super) rows: Vec<DecoderRow>,
    /// Rows of the current step, ascending.
    pub(super) active: Vec<usize>,
    /// Their tokens.
    pub(super) ids: Vec<u32>,
    pub(super) activations: Activations,
    /// Scratch of [`gemv::forward`].
    pub(super) columns: Buffer,
    /// A bfloat16 matrix converted to float32.
    pub(super) widened: Buffer,
    /// Logits of the rows of the current step. [B, V]
    pub(super) step_logits: Buffer,
    /// Logits of all rows. [B, V]
    pub(super) logits: Buffer,
    pub(super) timing: StageTiming,
}

/// The attention of one layer.
pub(super) struct DecoderLayer {
    /// The attention of a new row.
    pub attention: Layer,
    /// The attention after the switch to a recurrent state, and the bytes of that state for one row.
    pub switched: Option<(Layer, usize)>,
}

/// One sequence.
pub(super) struct DecoderRow {
    /// One per layer.
    pub states: Vec<State>,
    pub position: usize,
    /// Output of attention at the current position. [H·d]
    pub(super) y: Vec<f32>,
    /// Whether only some of the layers have processed the last token.
    pub(super) failed: bool,
    /// The error of the row in the current call.
    pub(super) error: Option<Error>,
}

/// The error of one row.
#[derive(Debug)]
#[non_exhaustive]
pub struct RowError {
    /// Row index.
    pub row: usize,
    /// The error.
    pub error: Error,
}

impl Decoder {
    /// A decoder of this model. Float32 weights are shared with the model; bfloat16 weights are a copy.
    pub fn new(model: impl Into<Arc<Model>>, options: DecoderOptions) -> Result<Decoder> {
        Decoder::with(DecoderWeights::new(model.into(), options.weights)?, options)
    }

    /// A decoder of the model in a directory. Weights are read directly in the type of [`DecoderOptions::weights`].
    pub fn open(folder: impl AsRef<Path>, options: DecoderOptions) -> Result<Decoder> {
        Decoder::with(DecoderWeights::read(folder.as_ref(), options.weights)?, options)
    }

    fn with(model: DecoderWeights, options: DecoderOptions) -> Result<Decoder> {
        let config = &model.config;
        let (rows, prefill_chunk) =
            (options.rows, options.prefill_chunk.checked_next_multiple_of(MIN_CHUNK).unwrap_or(options.prefill_chunk));
        if rows == 0 || prefill_chunk == 0 {
            return Err(Error::BatchLength { what: "rows and prefill_chunk, each at least 1", expected: 1, found: 0 });
        }
        super::memory::check(config, options)?;
        let widths = model.architecture().widths;
        let activations = Activations::new(model.architecture(), prefill_chunk.max(rows), Keep::Nothing)?;
        let shape = config.shape();
        let mut layers = Vec::new();
        let positions = config.context().min(ROPE_TABLE_POSITIONS);
        for (layer, attention) in config.attention_layers(positions)?.into_iter().enumerate() {
            layers.push(DecoderLayer::new(attention, options.memory).map_err(|source| Error::Layer { layer, source })?);
        }
        if let MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) = options.memory {
            truncate_attention(config, order)?;
        }
        if matches!(options.memory, MemoryPolicy::SwitchToState(_)) && layers.iter().all(|layer| layer.switched.is_none()) {
            let problem = "no layer can switch from its KV cache to a recurrent state: all heads of a layer need an exp kernel, or another kernel with \
                           a finite feature map, without a window, a clamp or a cap";
            return Err(nothing_to_truncate(config, problem));
        }
        let widest = widths.c.max(2 * widths.i).max(widths.qkv());
        let columns = gemv::scratch_len(rows, widths.v).max(gemv::scratch_len(rows.max(GEMV_MAX_ROWS), widest));
        let mut engines = PrefillEngines::new(options.mode);
        // Fails here rather than at the first prompt if the mode does not support a layer.
        for (layer, of) in layers.iter().enumerate() {
            engines.get(&of.attention, MIN_CHUNK).map_err(|source| Error::Layer { layer, source })?;
        }
        Ok(Decoder {
            options: options.prefill_chunk(prefill_chunk),
            shape,
            engines,
            rows: (0..rows).map(|_| DecoderRow::new(&layers, shape)).collect::<Result<_>>()?,
            layers,
            active: Vec::with_capacity(rows),
            ids: Vec::with_capacity(rows),
            activations,
            columns: zeros("a step", columns, 1)?,
            widened: Buffer::default(),
            step_logits: zeros("a step", rows, widths.v)?,
            logits: zeros("a step", rows, widths.v)?,
            timing: StageTiming::new(),
            model,
        })
    }

    /// The configuration of the model.
    pub fn config(&self) -> &Config {
        &self.model.config
    }

    /// B, the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The memory of past tokens.
    pub fn memory(&self) -> MemoryPolicy {
        self.options.memory
    }

    /// Whether the memory of a new row has constant size.
    pub fn is_constant(&self) -> bool {
        self.layers.iter().all(|layer| layer.attention.heads().iter().all(|variant| variant.state_rows(self.shape.d).is_some()))
    }

    /// Logits of the next token of a row; zeros before the first token. [V]
    pub fn logits(&self, row: usize) -> Result<&[f32]> {
        self.check_usable(row)?;
        let v = self.model.config.vocab_size;
        Ok(&self.logits[row * v..][..v])
    }

    /// Whether a row has failed and was not reset by [`Decoder::clear`] or [`Decoder::load`].
    pub fn failed(&self, row: usize) -> Result<bool> {
        Ok(self.row(row)?.failed)
    }

    /// The number of tokens that a row has read.
    pub fn position(&self, row: usize) -> Result<usize> {
        Ok(self.row(row)?.position)
    }

    /// The number of tokens until the KV cache of a row reaches the context length; `None` if there is no limit.
    pub fn remaining_context(&self, row: usize) -> Result<Option<usize>> {
        let row = self.row(row)?;
        // Beyond a length at which the rotary frequencies change, cached keys would have the wrong rotation.
        let fixed = self.model.config.rope_scaling.as_ref().is_none_or(|scaling| scaling.fixed_up_to().is_none());
        let endless = fixed && (self.options.beyond_context || row.states.iter().all(State::is_constant));
        Ok((!endless).then(|| self.model.config.context().saturating_sub(row.position)))
    }

    /// Bytes of the memory of a row, over all layers.
    pub fn state_bytes(&self, row: usize) -> Result<usize> {
        Ok(self.row(row)?.states.iter().map(State::bytes).sum())
    }

    /// The memory of a row, one state per layer.
    pub fn states(&self, row: usize) -> Result<&[State]> {
        Ok(&self.row(row)?.states)
    }

    /// The number of layers of a row that have switched from a KV cache to a recurrent state ([`MemoryPolicy::SwitchToState`]).
    pub fn switched_layers(&self, row: usize) -> Result<usize> {
        Ok(self.layers.iter().zip(&self.row(row)?.states).filter(|(layer, state)| state.heads() != layer.attention.heads()).count())
    }

    /// Resets a row to position zero.
    pub fn clear(&mut self, row: usize) -> Result<()> {
        self.check_row(row)?;
        // New states, so the memory of a long cache is freed.
        self.rows[row] = DecoderRow::new(&self.layers, self.shape)?;
        let v = self.model.config.vocab_size;
        self.logits[row * v..][..v].fill(0.0);
        Ok(())
    }

    pub(super) fn check_row(&self, row: usize) -> Result<()> {
        self.row(row).map(|_| ())
    }

    /// Fails for rows that are marked as failed.
    pub(super) fn check_usable(&self, row: usize) -> Result<()> {
        if self.row(row)?.failed { Err(Error::FailedRow { row }) } else { Ok(()) }
    }

    fn row(&self, row: usize) -> Result<&DecoderRow> {
        let rows = self.rows.len();
        self.rows.get(row).ok_or_else(|| Error::BatchValue {
            what: "row",
            row,
            position: 0,
            found: row as i64,
            expected: format!("below {rows}"),
        })
    }

    pub(super) fn check_context(&self, row: usize, tokens: usize) -> Result<()> {
        match self.remaining_context(row)? {
            Some(remaining) if tokens > remaining => {
                Err(Error::Context { row, requested: self.rows[row].position + tokens, context: self.model.config.context() })
            }
            _ => Ok(()),
        }
    }

    /// Compresses each KV cache of a row that is larger than its recurrent state ([`MemoryPolicy::SwitchToState`]).
    pub(super) fn switch_to_states(&mut self, row: usize) -> Result<()> {
        if !matches!(self.options.memory, MemoryPolicy::SwitchToState(_)) {
            return Ok(());
        }
        for (l, (layer, state)) in self.layers.iter().zip(&mut self.rows[row].states).enumerate() {
            if let Some((attention, bytes)) = &layer.switched
                && state.heads() != attention.heads()
                && state.bytes() > *bytes
            {
                state.compress(attention).map_err(|source| Error::Layer { layer: l, source })?;
            }
        }
        Ok(())
    }
}

impl DecoderLayer {
    fn new(attention: Layer, memory: MemoryPolicy) -> Result<DecoderLayer, termwise_attention::Error> {
        match memory {
            MemoryPolicy::Auto => Ok(DecoderLayer { attention, switched: None }),
            MemoryPolicy::Truncate(order) => {
                let truncated = attention.with_heads(truncate_heads(attention.heads(), order)?)?;
                Ok(DecoderLayer { attention: truncated, switched: None })
            }
            MemoryPolicy::SwitchToState(order) => {
                let truncated = attention.with_heads(truncate_heads(attention.heads(), order)?)?;
                // An empty state shows whether the layer can be compressed: windows, clamps and caps prevent it.
                let mut state = attention.state(1)?;
                let switches = truncated.heads() != attention.heads() && state.compress(&truncated).is_ok() && state.is_constant();
                Ok(DecoderLayer { attention, switched: switches.then(|| (truncated, state.bytes())) })
            }
        }
    }
}

impl DecoderRow {
    fn new(layers: &[DecoderLayer], shape: Shape) -> Result<DecoderRow> {
        let state = |(layer, of): (usize, &DecoderLayer)| of.attention.state(1).map_err(|source| Error::Layer { layer, source });
        let states = layers.iter().enumerate().map(state).collect::<Result<_>>()?;
        Ok(DecoderRow { states, position: 0, y: vec![0.0; shape.heads * shape.e], failed: false, error: None })
    }
}
