//! Decoding one token per row: from token ids to logits.

use rayon::prelude::*;
use termwise_attention::State;
use termwise_attention::parts::kernel::Sign;
use termwise_kernels::gemv;

use super::decoder::{Decoder, DecoderRow, RowError};
use crate::error::{Error, Result};
use crate::ops::lm_head::soft_cap;
use crate::passes::NonpositiveDenominator;
use crate::passes::batch::check_ids;
use crate::passes::forward::{ForwardPass, MatMul};

/// Rows step in parallel only if their states have more bytes than this. Below, waking threads takes as long as the step.
const PARALLEL_MIN_BYTES: usize = 512 << 10;

impl Decoder {
    /// As [`Decoder::step_rows`]; fails with the error of the first failed row.
    pub fn step(&mut self, tokens: &[Option<u32>]) -> Result<()> {
        self.step_rows(tokens)?.into_iter().next().map_or(Ok(()), |failed| Err(failed.error))
    }

    /// Reads one token into every row that has one and computes the logits of the next token.
    ///
    /// Returns the rows that failed, in ascending order, and marks them as failed. All other rows are complete. The result does not depend on the
    /// number of threads. If the call itself fails (token id outside the vocabulary, full context, row that failed before), no row is changed.
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
                self.check_context(row, 1)?;
                self.active.push(row);
                self.ids.push(token);
            }
        }
        if let Err(error) = self.run_step() {
            // The error concerns all rows: none of them is known to be complete.
            self.active.iter().for_each(|&row| self.rows[row].failed = true);
            return Err(error);
        }
        let mut failures = Vec::new();
        for (row, _) in tokens.iter().enumerate().filter(|(_, token)| token.is_some()) {
            let stepped = self.rows[row].error.take().map_or(Ok(()), Err).and_then(|()| self.switch_to_states(row));
            if let Err(error) = stepped {
                self.rows[row].failed = true;
                failures.push(RowError { row, error });
            }
        }
        Ok(failures)
    }

    /// Runs the tokens `ids` of the rows `active`.
    ///
    /// A row that fails stores its error. Later layers skip it, and its logits and position do not change.
    pub(super) fn run_step(&mut self) -> Result<()> {
        let Decoder { model, rows, activations, active, ids, columns, timing, .. } = self;
        let (architecture, weights, m) = (model.architecture(), model.weights(), active.len());
        if m == 0 {
            return Ok(());
        }
        let widths = architecture.widths;
        let mut pass = ForwardPass { architecture, weights, matmul: MatMul::Gemv { columns }, activations, timing, rows: m };

        pass.embed(ids);
        for (l, block) in architecture.blocks.iter().enumerate() {
            let layer = pass.project_qkv(l)?;
            let step_row = |(index, row): (usize, &mut DecoderRow)| {
                let Ok(position) = active.binary_search(&index) else { return };
                if row.error.is_some() {
                    return;
                }
                let state = &mut row.states[l];
                row.error = match state.step(&layer.attention_at(position, block, weights, widths), &mut row.y) {
                    Ok(report) => report.nonpositive.map(|found| denominator_error(l, index, found, state)),
                    Err(source) => Some(Error::Layer { layer: l, source }),
                };
                if row.error.is_some() {
                    row.y.fill(0.0);
                }
            };
            let bytes: usize = active.iter().map(|&row| rows[row].states[l].bytes()).sum();
            if m > 1 && bytes > PARALLEL_MIN_BYTES {
                rows.par_iter_mut().enumerate().with_max_len(1).for_each(step_row);
            } else {
                rows.iter_mut().enumerate().for_each(step_row);
            }
            for (&row, y) in active.iter().zip(layer.y.chunks_exact_mut(widths.queries)) {
                y.copy_from_slice(&rows[row].y);
            }
            pass.finish_layer(l)?;
        }
        active.iter().for_each(|&row| rows[row].position += rows[row].error.is_none() as usize);
        self.project_logits();
        Ok(())
    }

    /// Computes the logits of the rows `active` from the first positions of h. A row with a NaN or infinite logit fails.
    pub(super) fn project_logits(&mut self) {
        let Decoder { model, rows, activations, active, columns, step_logits, logits, .. } = self;
        let (architecture, m) = (model.architecture(), active.len());
        let (c, v) = (architecture.widths.c, architecture.widths.v);
        let weight = model.weights().matrix(&architecture.lm_head);
        gemv::forward(&activations.h[..m * c], weight, None, &mut step_logits[..m * v], c, columns);
        soft_cap(&mut step_logits[..m * v], architecture.logit_cap);
        for (&index, found) in active.iter().zip(step_logits.chunks_exact(v)) {
            let row = &mut rows[index];
            if row.error.is_some() {
                continue;
            }
            match found.iter().position(|logit| !logit.is_finite()) {
                Some(token) => row.error = Some(Error::Logit { row: index, position: row.position - 1, token, value: found[token] }),
                None => logits[index * v..][..v].copy_from_slice(found),
            }
        }
    }
}

/// The error of a denominator that is not positive.
pub(super) fn denominator_error(layer: usize, row: usize, found: termwise_attention::Nonpositive, state: &State) -> Error {
    let variant = &state.heads()[found.head];
    let advice = if variant.near.kernel.sign() == Sign::Positive {
        "its weights are positive, so the scores are too large for float32 sums; use a lower order or a KV cache"
    } else {
        "its weights can be negative or zero; use a variant with positive weights, such as an even order"
    };
    Error::Denominator { at: NonpositiveDenominator::at(layer, row, found), variant: variant.to_string(), advice }
}
