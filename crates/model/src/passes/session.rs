//! A session: the buffers of forward and backward passes at one batch size and sequence length.

use std::sync::Arc;

use termwise_attention::{Attention, FusedOptions, Inputs, Layer, Mode, Saved, Scratch, Shape};
use termwise_kernels::gemm::{Matrix, Write};

use super::activations::{Activations, GateLogits, Keep};
use super::batch::{Batch, Loss, check_ids, check_len, check_lengths, count_targets};
use super::timing::{Stage, StageTiming};
use super::{NonpositiveDenominator, Objective};
use crate::architecture::{Architecture, Widths};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ops::lm_head::{self, LmHead, Projection};
use crate::ops::products::{Precision, Products, Weight};
use crate::ops::{Buffer, embedding, layernorm, rmsnorm, zeros};
use crate::params::{ParamLayout, Params};

/// The implementation of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionEngine {
    /// Tiled and vectorized.
    #[default]
    Fused,
    /// Plain loops, as a reference.
    Reference,
}

/// Options of a session. They change results by rounding at most: float32, or bfloat16 with [`Precision::Bf16`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct SessionOptions {
    /// The implementation of attention.
    pub engine: AttentionEngine,
    /// The evaluation mode of the fused implementation.
    pub mode: Mode,
    /// The precision of the products of linear layers and of attention.
    pub precision: Precision,
    /// Keep no activations: all layers share one set of buffers, and there is no backward pass.
    pub forward_only: bool,
}

setters!(SessionOptions { engine: AttentionEngine, mode: Mode, precision: Precision, forward_only: bool });

/// The buffers of a model for batches of B rows of T positions: activations for the backward pass, and scratch that all layers share.
///
/// Each layer keeps two residuals, q, k, v, the output of attention, gate logits, and gate and up of the MLP. The backward pass recomputes
/// norm outputs and MLP activations. The operating system commits memory at first use, so a session that never trains needs no memory for
/// gradients.
///
/// Results are bit-identical for any number of threads on one instruction set.
pub struct Session {
    pub(super) layout: Arc<ParamLayout>,
    pub(super) shape: Shape,
    /// One per layer.
    pub(super) attention: Vec<Layer>,
    /// One per layer.
    pub(super) engines: Vec<Box<dyn Attention<f32> + Send>>,
    /// The data that each layer's attention keeps for its backward pass, in the order of layers.
    pub(super) saved: Vec<Saved>,
    pub(super) activations: Activations,
    pub(super) gradients: ActivationGradients,
    pub(super) products: Products,
    pub(super) lm_head: LmHead,
    pub(super) targets: Vec<i32>,
    pub(super) losses: Vec<f64>,
    /// Whether `activations.h` is the output of the final norm.
    pub(super) has_output: bool,
    /// Time spent in each stage.
    pub timing: StageTiming,
}

/// The inputs and the output of a layer's attention during a forward pass.
#[non_exhaustive]
pub struct ObservedAttention<'a> {
    /// Layer index.
    pub layer: usize,
    /// The variants of its heads and its rotary embedding.
    pub attention: &'a Layer,
    /// Batch size, sequence length and heads.
    pub shape: Shape,
    /// q, k and v before convolution and RoPE, gate logits, lengths.
    pub inputs: &'a Inputs<'a, f32>,
    /// The output. [B, T, H, d]
    pub y: &'a [f32],
}

/// Gradients of activations. All layers share them.
pub(super) struct ActivationGradients {
    /// Of the residual. [M, C]
    pub x: Buffer,
    /// Of a sublayer's output before its post-norm, [M, C]; empty without post-norms.
    pub sublayer: Buffer,
    /// Of q, k and v. [M, (H + 2·G)·d]
    pub qkv: Buffer,
    /// Of the output of attention. [M, H·d]
    pub y: Buffer,
    /// Of the gate logits, one entry per kind of gate in the model.
    pub gates: Vec<GateLogits>,
    /// Scratch of the norms' backward passes.
    pub norm: Buffer,
    pub token_positions: embedding::TokenPositions,
}

impl Session {
    /// Buffers for batches of B rows of T positions, for models with this configuration and layout.
    pub fn new(config: &Config, layout: &Arc<ParamLayout>, batch: usize, time: usize, options: SessionOptions) -> Result<Session> {
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
        let gradients = ActivationGradients {
            x: zeros(c)?,
            sublayer: zeros(if architecture.has_post_norms() { c } else { 0 })?,
            qkv: zeros(architecture.widths.qkv())?,
            y: zeros(queries)?,
            gates: GateLogits::new(m, architecture.gates().into_iter())?,
            norm: Buffer::zeros(if architecture.norm.bias.is_some() { layernorm::scratch_len(m, c) } else { rmsnorm::scratch_len(m, c) })?,
            token_positions: embedding::TokenPositions::new(m, v),
        };
        let attention = config.attention_layers(time)?;
        let scratch = Scratch::default();
        let mut engines: Vec<Box<dyn Attention<f32> + Send>> = Vec::new();
        for layer in &attention {
            if !options.forward_only {
                layer.check_trainable()?;
            }
            engines.push(match options.engine {
                AttentionEngine::Fused => {
                    let bf16 = options.precision == Precision::Bf16;
                    Box::new(layer.fused_with(batch, time, FusedOptions::default().mode(options.mode).scratch(&scratch).bf16(bf16))?)
                }
                AttentionEngine::Reference => Box::new(layer.naive::<f32>(batch, time)?),
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
            products: Products::new(options.precision, architecture),
            lm_head: LmHead::new(m, v, architecture.logit_cap)?,
            targets: vec![0; m],
            losses: vec![0.0; m],
            has_output: false,
            timing: StageTiming::new(),
        })
    }

    /// The loss of each position in the last call of [`Objective::loss`] or [`Objective::loss_and_grad`], zero at ignored positions. [B, T]
    pub fn token_losses(&self) -> &[f64] {
        &self.losses
    }

    /// Runs the model on ids [B, T]. [`Session::logits`] then computes logits from the result.
    ///
    /// Returns the first denominator of an attention that was not positive.
    pub fn run(&mut self, params: &Params, ids: &[u32], lengths: Option<&[usize]>) -> Result<Option<NonpositiveDenominator>> {
        self.observe(params, ids, lengths, &mut |_| {})
    }

    /// As [`Session::run`]; calls `observe` with each layer's attention after it is computed.
    pub fn observe(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        observe: &mut dyn FnMut(ObservedAttention),
    ) -> Result<Option<NonpositiveDenominator>> {
        self.check(params, ids, lengths)?;
        self.timing.start();
        self.forward(params, ids, lengths, Keep::Nothing, observe)
    }

    /// Logits [rows, V] of the positions in `rows` (row-major in B·T) after [`Session::run`] or [`Objective::loss`]. Fails after a backward
    /// pass, which overwrites the output of the forward pass.
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
        let head = Weight::of(params.values(), &self.layout.architecture().lm_head, c);
        self.products.prepare(params, false)?;
        let h = Matrix::new(&self.activations.h[rows.start * c..rows.end * c], rows.len(), c);
        self.products.forward(logits, v, Write::Replace, h, head)?;
        lm_head::soft_cap(logits, self.layout.architecture().logit_cap);
        Ok(())
    }

    /// Number of positions at which the label has the largest logit, after [`Session::run`] or [`Objective::loss`]; [B, T] labels, −100 where there is
    /// none. The first of several equal logits counts as the largest.
    pub fn count_correct(&mut self, params: &Params, labels: &[i32]) -> Result<usize> {
        let v = self.layout.architecture().widths.v;
        let mut logits = vec![0.0; v];
        let mut correct = 0;
        for (at, &label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
            self.logits(params, at..at + 1, &mut logits)?;
            let best = logits.iter().enumerate().fold(0, |best, (token, &logit)| if logit > logits[best] { token } else { best });
            correct += usize::from(best == label as usize);
        }
        Ok(correct)
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

    /// The sum is taken in the order of positions, so it does not depend on the number of threads.
    fn sum_losses(&self, count: usize, nonpositive: Option<NonpositiveDenominator>) -> Loss {
        Loss { sum: self.losses.iter().sum(), count, nonpositive }
    }
}

impl Objective for Session {
    fn loss(&mut self, params: &Params, batch: &Batch) -> Result<Loss> {
        let count = self.prepare(params, batch)?;
        let nonpositive = self.forward(params, batch.ids, batch.lengths, Keep::Nothing, &mut |_| {})?;
        let Architecture { lm_head, widths, .. } = self.layout.architecture();
        let projection = Projection { weight: Weight::of(params.values(), lm_head, widths.c), products: &mut self.products };
        self.lm_head.forward(&self.activations.h, projection, &self.targets, &mut self.losses)?;
        self.timing.forward(Stage::LmHead);
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
