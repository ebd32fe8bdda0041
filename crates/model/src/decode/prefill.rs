//! Prefill: reading a prompt in chunks, with the same fused attention as training.

use termwise_attention::{Fused, FusedOptions, Layer, Mode, Scratch, StateKind};

use super::decoder::{Decoder, DecoderRow};
use super::options::MemoryPolicy;
use super::step::denominator_error;
use crate::error::{Error, Result};
use crate::ops::products::Products;
use crate::passes::batch::check_ids;
use crate::passes::forward::{AttentionRows, ForwardPass, GEMV_MAX_ROWS, MatMul};

/// The shortest sequence length for which attention buffers are created. Shorter chunks are padded to it.
pub(super) const MIN_CHUNK: usize = 16;

impl Decoder {
    /// Reads tokens into a row, in chunks, and computes the logits of the next token. If a chunk fails, the row is marked as failed.
    pub fn prefill(&mut self, row: usize, tokens: &[u32]) -> Result<()> {
        self.check_usable(row)?;
        check_ids(tokens, tokens.len().max(1), self.model.config.vocab_size)?;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if !matches!(self.options.memory, MemoryPolicy::SwitchToState(_)) {
            self.check_context(row, tokens.len())?;
        }
        for chunk in tokens.chunks(self.options.prefill_chunk) {
            // Layers may have switched to states after the previous chunk, which have no context limit.
            self.check_context(row, chunk.len())?;
            self.active.clear();
            self.active.push(row);
            let read = if let [token] = *chunk {
                self.ids.clear();
                self.ids.push(token);
                self.run_step()
            } else {
                self.run_chunk(row, chunk)
            };
            let read = read.and_then(|()| self.rows[row].error.take().map_or(Ok(()), Err)).and_then(|()| self.switch_to_states(row));
            if read.is_err() {
                self.rows[row].failed = true;
                return read;
            }
        }
        Ok(())
    }

    /// As [`Decoder::prefill`] for every row: the first `lengths[row]` tokens of each row of ids [B, T]. A length may be zero.
    ///
    /// All rows are read even if one of them fails. The error is that of the first failed row.
    pub fn prefill_rows(&mut self, ids: &[u32], lengths: &[usize]) -> Result<()> {
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
            first = first.and(self.prefill(row, &ids[..length]));
        }
        first
    }

    /// Runs one chunk of a row, the only row in `active`.
    fn run_chunk(&mut self, row: usize, ids: &[u32]) -> Result<()> {
        let Decoder { model, options, engines, rows, activations, columns, widened, timing, .. } = self;
        let (architecture, weights, t) = (model.architecture(), model.weights(), ids.len());
        let time = t.next_power_of_two().clamp(MIN_CHUNK, options.prefill_chunk);
        let attention_rows = AttentionRows { widths: architecture.widths, positions: time, lengths: Some(&[t]) };
        let DecoderRow { states, position, .. } = &mut rows[row];
        let mut products = Products::F32;
        let matmul = if t <= GEMV_MAX_ROWS { MatMul::Gemv { columns } } else { MatMul::Gemm { widened, products: &mut products } };
        let mut pass = ForwardPass { architecture, weights, matmul, activations, timing, rows: t };

        pass.embed(ids);
        for (l, block) in architecture.blocks.iter().enumerate() {
            let (inputs, y) = pass.project_qkv(l)?.attention(block, weights, attention_rows);
            let in_layer = |source| Error::Layer { layer: l, source };
            let state = &mut states[l];
            let engine = engines.get(state.layer(), time).map_err(in_layer)?;
            if let Some(found) = engine.extend(state, &inputs, y).map_err(in_layer)?.nonpositive {
                return Err(denominator_error(l, row, found, state));
            }
            pass.finish_layer(l)?;
        }
        *position += t;
        let c = architecture.widths.c;
        self.activations.h.copy_within((t - 1) * c..t * c, 0);
        self.project_logits();
        Ok(())
    }
}

/// The fused attention of prefill chunks, created at first use and shared by layers with the same heads.
pub(super) struct PrefillEngines {
    scratch: Scratch,
    mode: Mode,
    engines: Vec<(Layer, usize, Fused)>,
}

impl PrefillEngines {
    pub fn new(mode: Mode) -> PrefillEngines {
        PrefillEngines { scratch: Scratch::default(), mode, engines: Vec::new() }
    }

    /// The engine of a layer for chunks of up to `time` positions.
    pub fn get(&mut self, layer: &Layer, time: usize) -> Result<&mut Fused, termwise_attention::Error> {
        let known = self.engines.iter().position(|(known, length, _)| *length == time && known.is_same(layer));
        let index = match known {
            Some(index) => index,
            None => {
                let options = FusedOptions::default().mode(self.mode).scratch(&self.scratch).continues(StateKind::Auto);
                self.engines.push((layer.clone(), time, layer.fused_with(1, time, options)?));
                self.engines.len() - 1
            }
        };
        Ok(&mut self.engines[index].2)
    }
}
