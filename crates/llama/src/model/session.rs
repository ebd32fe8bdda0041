//! The buffers of a run at one shape.

use std::sync::Arc;

use termwise_attention::{Attention, FusedOptions, Inputs, Layer, Mode, Saved, Scratch, Shape};

use super::architecture::Widths;
use super::batch::{Batch, Loss, check_ids, check_len, check_lengths, count_targets};
use super::forward::Pass;
use super::layer::{Activations, Gate, Keep, Products, Weights};
use super::timing::{Stage, Timing};
use super::{Nonpositive, Objective};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ops::lm_head::{self, LmHead};
use crate::ops::{Buffer, embedding, layernorm, linear, rmsnorm, zeros};
use crate::params::{Layout, Params};

/// What computes attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// Tiles and vector instructions.
    #[default]
    Fused,
    /// Plain loops, to compare with.
    Reference,
}

/// Choices of a session that change no result beyond rounding.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// What computes attention.
    pub engine: Engine,
    /// How the fused engine computes it.
    pub mode: Mode,
    /// Keep no activations: one set of buffers serves all layers, and there is no backward pass.
    pub forward_only: bool,
}

/// A model's buffers for B rows of T positions: activations that the backward pass needs, one set of scratch for all layers.
///
/// Saved for each layer: two residuals, q, k, v, the attention's output, gate logits, and the MLP's gate and up. Normed inputs and the
/// MLP's product are computed again on the way back, each inside a pass that runs anyway. Memory is taken as it is first used, so
/// a session that never trains has no room for gradients.
///
/// Results are bit-identical for any number of threads.
pub struct Session {
    pub(super) layout: Arc<Layout>,
    pub(super) shape: Shape,
    /// Of each layer.
    pub(super) attention: Vec<Layer>,
    /// Of each layer.
    pub(super) engines: Vec<Box<dyn Attention<f32> + Send>>,
    /// What each layer's attention has left for its backward pass, the last layer last.
    pub(super) saved: Vec<Saved>,
    pub(super) activations: Activations,
    pub(super) gradients: Gradients,
    pub(super) lm_head: LmHead,
    pub(super) targets: Vec<i32>,
    pub(super) losses: Vec<f64>,
    /// Whether `activations.h` is the output of the last norm.
    has_output: bool,
    /// Time spent in each stage.
    pub timing: Timing,
}

/// A layer's attention during a pass: what went in, what came out.
#[non_exhaustive]
pub struct Observed<'a> {
    /// Counted from 0.
    pub layer: usize,
    /// Its heads and rope.
    pub attention: &'a Layer,
    /// B, T and the heads.
    pub shape: Shape,
    /// q, k, v before convolution and RoPE, gates, lengths.
    pub inputs: &'a Inputs<'a, f32>,
    /// Its output, [B, T, H, d].
    pub y: &'a [f32],
}

/// Gradients of activations, shared by all layers.
pub(super) struct Gradients {
    /// Of the residual, [M, C].
    pub x: Buffer,
    /// Of what attention and MLP add to it, where a norm stands behind them, [M, C]; empty elsewhere.
    pub step: Buffer,
    /// Of q, k and v, [M, (H + 2·G)·d].
    pub qkv: Buffer,
    pub y: Buffer,
    /// Of each kind of gate that any layer has.
    pub gates: Vec<Gate>,
    /// Partial sums of the norms' weights.
    pub norm: Buffer,
    pub groups: embedding::Groups,
}

impl Session {
    /// Room for B rows of T positions of models with this configuration and layout.
    pub fn new(config: &Config, layout: &Arc<Layout>, batch: usize, time: usize, options: Options) -> Result<Session> {
        let shape = Shape { batch, time, ..config.shape() };
        shape.validate()?;
        layout.check(config)?;
        let too_large = || Error::TooLarge { what: format!("a batch of {batch} rows of {time} positions") };
        let m = batch.checked_mul(time).filter(|&m| m <= u32::MAX as usize).ok_or_else(too_large)?;
        let architecture = layout.architecture();
        let Widths { c, v, queries, .. } = architecture.widths;
        let zeros = |width| zeros("a batch", m, width);
        let keep = if options.forward_only { Keep::Nothing } else { Keep::All };
        let activations = Activations::new(architecture, m, keep)?;
        let gradients = Gradients {
            x: zeros(c)?,
            step: zeros(if architecture.has_after_norms() { c } else { 0 })?,
            qkv: zeros(architecture.widths.qkv())?,
            y: zeros(queries)?,
            gates: Gate::all(m, architecture.gates().into_iter())?,
            norm: Buffer::zeros(if architecture.norm.bias.is_some() { layernorm::scratch_len(m, c) } else { rmsnorm::scratch_len(m, c) })?,
            groups: embedding::Groups::new(m, v),
        };
        let attention = config.attention_layers(time)?;
        let scratch = Scratch::default();
        let mut engines: Vec<Box<dyn Attention<f32> + Send>> = Vec::new();
        for layer in &attention {
            if !options.forward_only {
                layer.check_trainable()?;
            }
            engines.push(match options.engine {
                Engine::Fused => Box::new(layer.fused_with(batch, time, FusedOptions::default().mode(options.mode).scratch(&scratch))?),
                Engine::Reference => Box::new(layer.naive::<f32>(batch, time)?),
            });
        }
        Ok(Session {
            layout: layout.clone(),
            shape,
            saved: Vec::with_capacity(attention.len()),
            attention,
            engines,
            activations,
            gradients,
            lm_head: LmHead::new(m, v, architecture.logit_cap)?,
            targets: vec![0; m],
            losses: vec![0.0; m],
            has_output: false,
            timing: Timing::new(),
        })
    }

    /// The loss of each position in the last [`Objective::loss`] or [`Objective::loss_and_grad`], [B, T], zero where none counts.
    pub fn token_losses(&self) -> &[f64] {
        &self.losses
    }

    /// Runs the layers on ids [B, T] and leaves the last norm's output behind for [`Session::logits`].
    pub fn run(&mut self, params: &Params, ids: &[u32], lengths: Option<&[usize]>) -> Result<Option<Nonpositive>> {
        self.observe(params, ids, lengths, &mut |_| {})
    }

    /// As [`Session::run`], showing each layer's attention as soon as it is computed.
    pub fn observe(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        watch: &mut dyn FnMut(Observed),
    ) -> Result<Option<Nonpositive>> {
        self.check(params, ids, lengths)?;
        self.timing.start();
        self.forward(params, ids, lengths, Keep::Nothing, watch)
    }

    /// Logits [rows, V] of the positions in `rows` (of B·T, row-major) after [`Session::run`] or [`Objective::loss`]. Refused after a
    /// backward pass, which overwrites the output of the forward pass.
    pub fn logits(&mut self, params: &Params, rows: std::ops::Range<usize>, logits: &mut [f32]) -> Result<()> {
        let Widths { c, v, .. } = self.layout.architecture().widths;
        check_len("parameters", params.values().len(), self.layout.len())?;
        if !self.has_output {
            return Err(Error::NoOutput);
        }
        let m = self.targets.len();
        if rows.start > rows.end || rows.end > m {
            return Err(Error::Rows { start: rows.start, end: rows.end, rows: m });
        }
        check_len("logits", logits.len(), rows.len() * v)?;
        let head = &params.values()[self.layout.architecture().lm_head.clone()];
        linear::forward(&self.activations.h[rows.start * c..rows.end * c], head, None, logits, c);
        lm_head::soft_cap(logits, self.layout.architecture().logit_cap);
        Ok(())
    }

    /// Leaves the output of the last norm behind, and what attention saves if asked; the first denominator that was not positive.
    fn forward(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        save: Keep,
        watch: &mut dyn FnMut(Observed),
    ) -> Result<Option<Nonpositive>> {
        let Session { layout, shape, attention, engines, saved, activations, timing, has_output, .. } = self;
        *has_output = false;
        let (architecture, weights) = (layout.architecture(), Weights::F32(params.values()));
        let mut nonpositive = None;
        let mut pass = Pass { architecture, weights, products: Products::Gemm { widened: &mut Buffer::default() }, timing };
        // Those of a pass that was not gone back give their memory to this one.
        saved.clear();
        pass.forward(ids, activations, |l, block, layer| {
            let (inputs, y) = layer.inputs(block, weights, (ids.len(), architecture.widths), lengths);
            let report = match save {
                Keep::All => engines[l].forward(&inputs, y).map(|found| {
                    let report = found.report();
                    saved.push(found);
                    report
                }),
                Keep::Nothing => engines[l].infer(&inputs, y),
            };
            let report = report.map_err(|source| Error::Layer { layer: l, source })?;
            nonpositive = nonpositive.or(report.nonpositive.map(|found| Nonpositive::at(l, found.row, found)));
            watch(Observed { layer: l, attention: &attention[l], shape: *shape, inputs: &inputs, y });
            Ok(())
        })?;
        *has_output = true;
        Ok(nonpositive)
    }

    fn check(&self, params: &Params, ids: &[u32], lengths: Option<&[usize]>) -> Result<()> {
        let Shape { batch, time, .. } = self.shape;
        check_len("parameters", params.values().len(), self.layout.len())?;
        check_len("ids", ids.len(), self.targets.len())?;
        check_lengths(lengths, batch, time)?;
        check_ids(ids, time, self.layout.architecture().widths.v)
    }

    fn prepare(&mut self, params: &Params, batch: &Batch) -> Result<usize> {
        self.check(params, batch.ids, batch.lengths)?;
        let count = count_targets(batch, self.shape.time, self.layout.architecture().widths.v, &mut self.targets)?;
        self.timing.start();
        Ok(count)
    }

    /// In the order of positions, whatever order they were computed in.
    fn sum_losses(&self, count: usize, nonpositive: Option<Nonpositive>) -> Loss {
        Loss { sum: self.losses.iter().sum(), count, nonpositive }
    }
}

impl Objective for Session {
    fn loss(&mut self, params: &Params, batch: &Batch) -> Result<Loss> {
        let count = self.prepare(params, batch)?;
        let nonpositive = self.forward(params, batch.ids, batch.lengths, Keep::Nothing, &mut |_| {})?;
        let head = &params.values()[self.layout.architecture().lm_head.clone()];
        self.lm_head.forward(&self.activations.h, head, &self.targets, &mut self.losses);
        self.timing.forward(Stage::Head);
        Ok(self.sum_losses(count, nonpositive))
    }

    fn loss_and_grad(&mut self, params: &Params, batch: &Batch, grads: &mut Params) -> Result<Loss> {
        if self.activations.keep == Keep::Nothing {
            return Err(Error::ForwardOnly);
        }
        let count = self.prepare(params, batch)?;
        check_len("gradients", grads.values().len(), self.layout.len())?;
        let nonpositive = self.forward(params, batch.ids, batch.lengths, Keep::All, &mut |_| {})?;
        let scale = 1.0 / batch.tokens.unwrap_or(count).max(1) as f32;
        self.has_output = false;
        self.backward(params, batch.ids, batch.lengths, scale, grads)?;
        Ok(self.sum_losses(count, nonpositive))
    }
}
