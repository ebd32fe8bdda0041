//! Tokens through the layers.

use rayon::prelude::*;
use termwise_attention::parts::kernel::Sign;
use termwise_attention::{Fused, FusedOptions, Layer, Memory, Mode, Scratch, State};

use super::buffers::Product;
use super::decoder::{Decoder, Row};
use crate::error::{Error, Result};
use crate::model::Nonpositive;

/// Less memory than this is swept by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;
/// The shortest window for which attention has buffers of its own.
pub(super) const SHORTEST: usize = 16;

impl Decoder<'_> {
    /// Up to W tokens of one row.
    pub(super) fn run_window(&mut self, row: usize, ids: &[u32]) -> Result<()> {
        let Decoder { model, options, places, engines, rows, buffers, .. } = self;
        let w = model.params.values();
        let t = ids.len();
        let product = Product::for_window(t);
        let time = t.next_power_of_two().clamp(SHORTEST, options.window);
        let Row { states, position, .. } = &mut rows[row];
        buffers.begin(model, places, ids);
        for (l, (at, state)) in places.layers.iter().zip(states).enumerate() {
            buffers.project(at, w, t, product);
            let engine = engines.get(state.layer(), time).map_err(|source| Error::Layer { layer: l, source })?;
            let (inputs, y) = buffers.inputs(at, w, time, Some(std::slice::from_ref(&t)));
            let report = engine.extend(state, &inputs, y).map_err(|source| Error::Layer { layer: l, source })?;
            if let Some(found) = report.nonpositive {
                return Err(denominator(l, row, found, state));
            }
            buffers.finish(model, places, l, t, product);
        }
        *position += t;
        self.project_logits(row, t - 1)
    }

    /// The tokens of `active`.
    pub(super) fn run_step(&mut self) -> Result<()> {
        let Decoder { model, places, rows, buffers, active, ids, shape, .. } = self;
        let (w, m, width) = (model.params.values(), active.len(), shape.heads * shape.e);
        if m == 0 {
            return Ok(());
        }
        buffers.begin(model, places, ids);
        for (l, at) in places.layers.iter().enumerate() {
            buffers.project(at, w, m, Product::Few);
            let one = |(row, state): (usize, &mut Row)| -> Result<()> {
                let Ok(slot) = active.binary_search(&row) else { return Ok(()) };
                let inputs = buffers.row_inputs(at, w, slot);
                let report = state.states[l].step(&inputs, &mut state.y).map_err(|source| Error::Layer { layer: l, source })?;
                state.nonpositive = report.nonpositive;
                Ok(())
            };
            let bytes: usize = active.iter().map(|&row| rows[row].states[l].bytes()).sum();
            if m > 1 && bytes > WORTH_THREADS {
                rows.par_iter_mut().enumerate().with_max_len(1).try_for_each(one)?;
            } else {
                rows.iter_mut().enumerate().try_for_each(one)?;
            }
            for (slot, &row) in active.iter().enumerate() {
                if let Some(found) = rows[row].nonpositive {
                    return Err(denominator(l, row, found, &rows[row].states[l]));
                }
                buffers.y[slot * width..][..width].copy_from_slice(&rows[row].y);
            }
            buffers.finish(model, places, l, m, Product::Few);
        }
        for slot in 0..self.active.len() {
            let row = self.active[slot];
            self.rows[row].position += 1;
        }
        let (c, v) = (self.model.config.hidden_size, self.model.config.vocab_size);
        let head = &w[self.places.head.clone()];
        self.buffers.head(head, m, c);
        for (slot, &row) in self.active.iter().enumerate() {
            self.logits[row * v..][..v].copy_from_slice(&self.buffers.logits[slot * v..][..v]);
        }
        self.active.iter().try_for_each(|&row| self.check_logits(row))
    }

    /// The logits of one position of the buffers, as the row's.
    fn project_logits(&mut self, row: usize, at: usize) -> Result<()> {
        let (c, v) = (self.model.config.hidden_size, self.model.config.vocab_size);
        self.buffers.h.copy_within(at * c..(at + 1) * c, 0);
        self.buffers.head(&self.model.params.values()[self.places.head.clone()], 1, c);
        self.logits[row * v..][..v].copy_from_slice(&self.buffers.logits[..v]);
        self.check_logits(row)
    }

    fn check_logits(&self, row: usize) -> Result<()> {
        match self.logits(row).iter().position(|logit| !logit.is_finite()) {
            None => Ok(()),
            Some(token) => Err(Error::Logit { row, position: self.rows[row].position - 1, token, value: self.logits(row)[token] }),
        }
    }
}

fn denominator(layer: usize, row: usize, found: termwise_attention::Nonpositive, state: &State) -> Error {
    let termwise_attention::Nonpositive { head, position, value, .. } = found;
    let variant = &state.heads()[head];
    let advice = if variant.kernel.sign() == Sign::Positive {
        "whose weights are positive, so its scores are too large for sums in float32: take a lower order, or keep keys and values"
    } else {
        "whose weights can be negative or zero: take one where they cannot, such as an even order"
    };
    Error::Denominator { at: Nonpositive { layer, head, row, position, value }, variant: variant.to_string(), advice }
}

/// What computes the attention of windows, made when first needed, shared by all layers with the same heads.
pub(super) struct Engines {
    scratch: Scratch,
    mode: Mode,
    built: Vec<(Layer, usize, Fused)>,
}

impl Engines {
    pub fn new(mode: Mode) -> Engines {
        Engines { scratch: Scratch::default(), mode, built: Vec::new() }
    }

    pub fn get(&mut self, layer: &Layer, time: usize) -> Result<&mut Fused, termwise_attention::Error> {
        let known = self.built.iter().position(|(known, length, _)| *length == time && known.is_same(layer));
        let index = match known {
            Some(index) => index,
            None => {
                let options = FusedOptions::default().mode(self.mode).scratch(&self.scratch).continues(Memory::Natural);
                self.built.push((layer.clone(), time, layer.fused_with(1, time, options)?));
                self.built.len() - 1
            }
        };
        Ok(&mut self.built[index].2)
    }
}
