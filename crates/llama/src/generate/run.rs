//! Tokens through the layers.

use rayon::prelude::*;
use termwise_attention::parts::kernel::Sign;
use termwise_attention::{Fused, FusedOptions, Layer, Memory, Mode, Scratch, State};

use super::decoder::{Decoder, Row};
use crate::error::{Error, Result};
use crate::kernels::gemv;
use crate::model::Nonpositive;
use crate::model::forward::Pass;
use crate::model::layer::{FEW, Products};
use crate::ops::lm_head::soft_cap;

/// Less memory than this is swept by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;
/// The shortest window for which attention has buffers of its own.
pub(super) const SHORTEST: usize = 16;

impl Decoder {
    /// Up to W tokens of one row.
    pub(super) fn run_window(&mut self, row: usize, ids: &[u32]) -> Result<()> {
        let Decoder { model, options, engines, rows, activations, columns, widened, timing, .. } = self;
        let (architecture, weights, t) = (model.architecture(), model.weights(), ids.len());
        let time = t.next_power_of_two().clamp(SHORTEST, options.window);
        let Row { states, position, .. } = &mut rows[row];
        let products = if t <= FEW { Products::Gemv { columns } } else { Products::Gemm { widened } };
        Pass { architecture, weights, products, timing }.forward(ids, activations, |l, block, layer| {
            let in_layer = |source| Error::Layer { layer: l, source };
            let state = &mut states[l];
            let (inputs, y) = layer.inputs(block, weights, (time, architecture.widths), Some(std::slice::from_ref(&t)));
            let engine = engines.get(state.layer(), time).map_err(in_layer)?;
            match engine.extend(state, &inputs, y).map_err(in_layer)?.nonpositive {
                Some(found) => Err(denominator(l, row, found, state)),
                None => Ok(()),
            }
        })?;
        *position += t;
        let c = architecture.widths.c;
        self.activations.h.copy_within((t - 1) * c..t * c, 0);
        self.project_logits(&[row]);
        Ok(())
    }

    /// The tokens of `active`. A row that fails keeps its error and takes no further part: later layers leave its states alone, and its
    /// logits and position stay. What the products compute for it is not read.
    pub(super) fn run_step(&mut self) -> Result<()> {
        let Decoder { model, rows, activations, active, ids, columns, timing, .. } = self;
        let (architecture, weights, m) = (model.architecture(), model.weights(), active.len());
        if m == 0 {
            return Ok(());
        }
        let (widths, products) = (architecture.widths, Products::Gemv { columns });
        Pass { architecture, weights, products, timing }.forward(ids, activations, |l, block, layer| {
            let one = |(index, row): (usize, &mut Row)| {
                let Ok(slot) = active.binary_search(&index) else { return };
                if row.error.is_some() {
                    return;
                }
                let state = &mut row.states[l];
                row.error = match state.step(&layer.position(block, weights, (slot, widths)), &mut row.y) {
                    Ok(report) => report.nonpositive.map(|found| denominator(l, index, found, state)),
                    Err(source) => Some(Error::Layer { layer: l, source }),
                };
                if row.error.is_some() {
                    row.y.fill(0.0);
                }
            };
            let bytes: usize = active.iter().map(|&row| rows[row].states[l].bytes()).sum();
            if m > 1 && bytes > WORTH_THREADS {
                rows.par_iter_mut().enumerate().with_max_len(1).for_each(one);
            } else {
                rows.iter_mut().enumerate().for_each(one);
            }
            for (&row, y) in active.iter().zip(layer.y.chunks_exact_mut(widths.queries)) {
                y.copy_from_slice(&rows[row].y);
            }
            Ok(())
        })?;
        let active = std::mem::take(&mut self.active);
        active.iter().for_each(|&row| self.rows[row].position += self.rows[row].error.is_none() as usize);
        self.project_logits(&active);
        self.active = active;
        Ok(())
    }

    /// The logits of these rows from the first positions of h, one for each; a row with a logit that is NaN or infinite fails.
    fn project_logits(&mut self, slots: &[usize]) {
        let Decoder { model, rows, activations, columns, step_logits, logits, .. } = self;
        let (architecture, m) = (model.architecture(), slots.len());
        let (c, v) = (architecture.widths.c, architecture.widths.v);
        let weight = model.weights().matrix(&architecture.lm_head);
        gemv::forward(&activations.h[..m * c], weight, None, &mut step_logits[..m * v], c, columns);
        soft_cap(&mut step_logits[..m * v], architecture.logit_cap);
        for (&index, found) in slots.iter().zip(step_logits.chunks_exact(v)) {
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

fn denominator(layer: usize, row: usize, found: termwise_attention::Nonpositive, state: &State) -> Error {
    let variant = &state.heads()[found.head];
    let advice = if variant.kernel.sign() == Sign::Positive {
        "whose weights are positive, so its scores are too large for sums in float32: take a lower order, or keep keys and values"
    } else {
        "whose weights can be negative or zero: take one where they cannot, such as an even order"
    };
    Error::Denominator { at: Nonpositive::at(layer, row, found), variant: variant.to_string(), advice }
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
