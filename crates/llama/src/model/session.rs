//! The buffers of a run at one shape.

use std::sync::Arc;

use termwise_attention::{Attention, Extra, FusedOptions, Inputs, Layer as AttentionLayer, Mode, Saved, Scratch, Shape};

use super::batch::{Batch, Loss, check_ids, check_len, check_lengths, count_targets};
use super::clock::{Clock, Stage};
use super::places::{LayerPlaces, Places};
use super::{Nonpositive, Objective};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ops::head::Head;
use crate::ops::{Buffer, embedding, linear, rmsnorm};
use crate::params::{Layout, Params};

/// What computes attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
/// Saved for each layer: two residuals, q, k, v, the attention's output, gate signals, and the MLP's gate and up. Normed inputs and the
/// MLP's product are computed again on the way back, each inside a pass that runs anyway. Memory is taken as it is first used, so
/// a session that never trains has no room for gradients.
///
/// Results are bit-identical for any number of threads.
pub struct Session {
    pub(super) sizes: Sizes,
    pub(super) places: Places,
    pub(super) attention: Vec<AttentionLayer>,
    pub(super) shape: Shape,
    /// Of each layer.
    pub(super) engines: Vec<Box<dyn Attention<f32> + Send>>,
    /// Of each layer, or one that all share where nothing is kept.
    pub(super) layers: Vec<Layer>,
    /// Whether there is a backward pass.
    pub(super) keeps: bool,
    /// What each layer's attention saved in the forward pass.
    pub(super) saved: Vec<Option<Saved>>,
    /// x before each norm, [2·layers + 1] of [M, C]: before attention, before the MLP, layer by layer, and before the last norm. Two that
    /// take turns where nothing is kept.
    pub(super) residuals: Vec<Buffer>,
    /// 1/rms of each residual, [M].
    pub(super) inverses: Vec<Buffer>,
    /// h [M, C]: outputs of norms, steps towards the next residual, and on the way back their gradients.
    pub(super) h: Buffer,
    /// The MLP's product [M, I], or its gradient.
    pub(super) product: Buffer,
    pub(super) gradients: Gradients,
    pub(super) head: Head,
    pub(super) targets: Vec<i32>,
    pub(super) losses: Vec<f64>,
    /// Time spent in each stage.
    pub clock: Clock,
}

/// Dimensions by the legend of [`crate::ops`].
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub b: usize,
    pub t: usize,
    pub m: usize,
    pub c: usize,
    pub i: usize,
    pub v: usize,
    /// H·d
    pub queries: usize,
    /// G·d
    pub keys: usize,
    pub eps: f32,
    /// Length of the flat buffer of parameters.
    pub parameters: usize,
}

/// What a layer keeps for its backward pass.
pub(super) struct Layer {
    /// [M, H·d]
    pub q: Buffer,
    /// [M, G·d]
    pub k: Buffer,
    /// [M, G·d]
    pub v: Buffer,
    /// Attention's output, [M, H·d].
    pub y: Buffer,
    /// Gates of this layer, or of any where all share it.
    pub signals: Vec<(Extra, Buffer)>,
    /// [M, I]; its gradient after the backward pass.
    pub gate: Buffer,
    /// [M, I]; its gradient after the backward pass.
    pub up: Buffer,
}

/// A layer's attention during a pass: what went in, what came out.
pub struct Observed<'a> {
    /// Counted from 0.
    pub layer: usize,
    /// Its heads and rope.
    pub attention: &'a AttentionLayer,
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
    pub q: Buffer,
    pub k: Buffer,
    pub v: Buffer,
    pub y: Buffer,
    /// Of each kind of gate that any layer has.
    pub signals: Vec<(Extra, Buffer)>,
    /// Partial sums of the norms' weights.
    pub norm: Buffer,
    pub groups: embedding::Groups,
}

impl Session {
    /// Room for B rows of T positions of models with this configuration and layout.
    pub fn new(config: &Config, layout: &Arc<Layout>, batch: usize, time: usize, options: Options) -> Result<Session> {
        let shape = Shape { batch, time, ..config.shape() };
        shape.validate()?;
        let m = batch * time;
        let sizes = Sizes {
            b: batch,
            t: time,
            m,
            c: config.hidden_size,
            i: config.intermediate_size,
            v: config.vocab_size,
            queries: shape.heads * shape.d,
            keys: shape.kv_heads * shape.d,
            eps: config.rms_norm_eps as f32,
            parameters: layout.len(),
        };
        let places = Places::new(config, layout)?;
        let scratch = Scratch::default();
        let zeros = |width: usize| -> Result<Buffer> { Ok(Buffer::zeros(m * width)?) };
        let attention =
            (0..places.layers.len()).map(|layer| config.attention_layer(layer, &config.heads(layer))).collect::<Result<Vec<_>>>()?;
        let mut engines: Vec<Box<dyn Attention<f32> + Send>> = Vec::new();
        for layer in &attention {
            engines.push(match options.engine {
                Engine::Fused => Box::new(layer.fused_with(batch, time, FusedOptions::default().mode(options.mode).scratch(&scratch))?),
                Engine::Reference => Box::new(layer.naive::<f32>(batch, time)?),
            });
        }
        let signals = |layers: &[LayerPlaces]| -> Result<Vec<(Extra, Buffer)>> {
            let mut all: Vec<(Extra, Buffer)> = Vec::new();
            for signal in layers.iter().flat_map(|places| &places.signals) {
                if !all.iter().any(|(extra, _)| *extra == signal.extra) {
                    all.push((signal.extra, zeros(signal.outputs)?));
                }
            }
            Ok(all)
        };
        let layer = |places: &[LayerPlaces]| -> Result<Layer> {
            Ok(Layer {
                q: zeros(sizes.queries)?,
                k: zeros(sizes.keys)?,
                v: zeros(sizes.keys)?,
                y: zeros(sizes.queries)?,
                signals: signals(places)?,
                gate: zeros(sizes.i)?,
                up: zeros(sizes.i)?,
            })
        };
        let (layers, norms): (Vec<Layer>, usize) = match options.forward_only {
            true => (vec![layer(&places.layers)?], 2),
            false => (
                places.layers.iter().map(|places| layer(std::slice::from_ref(places))).collect::<Result<_>>()?,
                2 * places.layers.len() + 1,
            ),
        };
        let signal_gradients = signals(&places.layers)?;
        Ok(Session {
            sizes,
            places,
            saved: attention.iter().map(|_| None).collect(),
            attention,
            shape,
            engines,
            layers,
            keeps: !options.forward_only,
            residuals: (0..norms).map(|_| zeros(sizes.c)).collect::<Result<_>>()?,
            inverses: (0..norms).map(|_| zeros(1)).collect::<Result<_>>()?,
            h: zeros(sizes.c)?,
            product: zeros(sizes.i)?,
            gradients: Gradients {
                x: zeros(sizes.c)?,
                q: zeros(sizes.queries)?,
                k: zeros(sizes.keys)?,
                v: zeros(sizes.keys)?,
                y: zeros(sizes.queries)?,
                signals: signal_gradients,
                norm: Buffer::zeros(rmsnorm::scratch_len(m, sizes.c))?,
                groups: embedding::Groups::new(m, sizes.v),
            },
            head: Head::new(m, sizes.v)?,
            targets: vec![0; m],
            losses: vec![0.0; m],
            clock: Clock::new(),
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
        self.clock.start();
        self.forward(params, ids, lengths, watch)
    }

    /// Logits [rows, V] of the positions in `rows` (of B·T, row-major) after the last [`Session::run`].
    pub fn logits(&mut self, params: &Params, rows: std::ops::Range<usize>, logits: &mut [f32]) -> Result<()> {
        let Sizes { m, c, v, .. } = self.sizes;
        check_len("rows of logits", rows.end.clamp(rows.start, m) - rows.start, rows.len())?;
        check_len("logits", logits.len(), rows.len() * v)?;
        linear::forward(&self.h[rows.start * c..rows.end * c], &params.values()[self.places.head.clone()], None, logits, c);
        Ok(())
    }

    fn check(&self, params: &Params, ids: &[u32], lengths: Option<&[usize]>) -> Result<()> {
        let Sizes { b, t, m, v, parameters, .. } = self.sizes;
        check_len("parameters", params.values().len(), parameters)?;
        check_len("ids", ids.len(), m)?;
        check_lengths(lengths, b, t)?;
        check_ids(ids, t, v)
    }

    fn prepare(&mut self, params: &Params, batch: &Batch) -> Result<usize> {
        self.check(params, batch.ids, batch.lengths)?;
        let count = count_targets(batch, self.sizes.t, self.sizes.v, &mut self.targets)?;
        self.clock.start();
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
        let nonpositive = self.forward(params, batch.ids, batch.lengths, &mut |_| {})?;
        self.head.forward(&self.h, &params.values()[self.places.head.clone()], &self.targets, &mut self.losses);
        self.clock.forward(Stage::Head);
        Ok(self.sum_losses(count, nonpositive))
    }

    fn loss_and_grad(&mut self, params: &Params, batch: &Batch, grads: &mut Params) -> Result<Loss> {
        if self.residuals.len() <= 2 {
            return Err(Error::ForwardOnly);
        }
        let count = self.prepare(params, batch)?;
        check_len("gradients", grads.values().len(), self.sizes.parameters)?;
        let nonpositive = self.forward(params, batch.ids, batch.lengths, &mut |_| {})?;
        let scale = 1.0 / batch.tokens.unwrap_or(count).max(1) as f32;
        self.backward(params, batch.ids, batch.lengths, scale, grads)?;
        Ok(self.sum_losses(count, nonpositive))
    }
}
