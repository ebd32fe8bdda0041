//! The memory of one attention call, shared by all layers of a model.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Buffer;
use crate::fused::plan::Layout;
use crate::kernels::turns::Turns;

/// A handle to workspace memory. Clones share it: give the same one to all layers that run one after another.
#[derive(Clone, Default)]
pub struct Scratch(Arc<Mutex<Workspace>>);

impl Scratch {
    /// The workspace, once nobody else uses it. Its contents never outlive a call, so a panic elsewhere cannot spoil them.
    pub(super) fn lock(&self) -> MutexGuard<'_, Workspace> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.lock().buffers().iter().map(|buffer| buffer.bytes()).sum()
    }
}

/// Buffers by name. N stands for (b, h), K for a prepared kv head.
#[derive(Default)]
pub(super) struct Workspace {
    /// Prepared queries [N, Tp, dp], scaled.
    pub q: Buffer,
    /// Prepared keys [K, Tp, dp], and transposed by tile [K, tiles, d, pitch].
    pub k: Buffer,
    pub kt: Buffer,
    /// Prepared values [K, Tp, ep], and transposed by tile [K, tiles, e, pitch].
    pub v: Buffer,
    pub vt: Buffer,
    /// Angles [T, d/2].
    pub cos: Buffer,
    pub sin: Buffer,
    pub angles_of: Option<(Vec<f64>, usize)>,
    /// Filters of the short convolution with the channel last, [heads, w, dimension] for q, k and v.
    pub taps: [Buffer; 3],
    /// Gate factors [B, G, T] and [N, T].
    pub in_gate: Buffer,
    pub out_gate: Buffer,
    pub post_gate: Buffer,
    /// Weights of keys [N, Tp].
    pub key_weights: Buffer,
    /// c of the decay [N, Tp].
    pub decay: Vec<f64>,
    /// One signal of each head [N, T].
    pub signal: Buffer,
    /// Where a call continues from a state: angles of each batch row, inputs before the first position [B, heads, w − 1, dimension],
    /// c of the position before [N], positions before [B]; else 0 and empty.
    pub angle_stride: usize,
    pub tails: [Buffer; 3],
    pub before: Vec<f64>,
    pub offsets: Vec<usize>,
    /// The largest |score| of each tile of queries that sees a cache [N, tiles].
    pub largest: Buffer,
    /// States at the start of each span, or their gradients at its end [spans, B, units].
    pub states: Buffer,

    /// Gradients of the sums over keys, [N, T, ep] and [N, T].
    pub du: Buffer,
    pub dz: Buffer,
    /// Gradients of prepared tensors, shaped like them.
    pub dq: Buffer,
    pub dk: Buffer,
    pub dv: Buffer,
    /// Gradients of gate factors [N, T], key weights and c [N, Tp], and coefficients [tiles or spans, N, orders].
    pub dout: Buffer,
    pub dpost: Buffer,
    pub dkey_weights: Buffer,
    pub ddecay: Vec<f64>,
    pub dsignal: Buffer,
    pub dconst: Buffer,
    pub dlearned: Vec<f64>,
    /// Gradients of γ and β by head [N, 2, e], and of filters by batch row and head.
    pub dnorm: Buffer,
    pub dtaps: [Buffer; 3],
    /// Of the tasks that add to dq and dc [N, tiles].
    pub turns: Turns,
}

impl Workspace {
    fn buffers(&self) -> Vec<&Buffer> {
        let [tq, tk, tv] = &self.taps;
        let [dtq, dtk, dtv] = &self.dtaps;
        let [pq, pk, pv] = &self.tails;
        vec![
            &self.q,
            &self.k,
            &self.kt,
            &self.v,
            &self.vt,
            &self.cos,
            &self.sin,
            tq,
            tk,
            tv,
            &self.in_gate,
            &self.out_gate,
            &self.post_gate,
            &self.key_weights,
            &self.signal,
            &self.states,
            &self.largest,
            pq,
            pk,
            pv,
            &self.dsignal,
            &self.dconst,
            &self.du,
            &self.dz,
            &self.dq,
            &self.dk,
            &self.dv,
            &self.dout,
            &self.dpost,
            &self.dkey_weights,
            &self.dnorm,
            dtq,
            dtk,
            dtv,
        ]
    }

    /// Room for the forward pass of a call that continues nothing.
    pub fn ensure_forward(&mut self, l: &Layout) {
        let s = &l.shape;
        self.angle_stride = 0;
        self.tails.iter_mut().for_each(|tail| tail.ensure(0));
        self.before.clear();
        self.offsets.clear();
        let (n, kv, tp) = (l.head_count(), l.kv_count(), l.tp());
        self.kt.ensure(kv * l.tiles * s.d * l.pitch);
        self.v.ensure(kv * tp * l.ep);
        if l.classes.iter().any(|class| class.rope) {
            self.cos.ensure(s.time * (s.d / 2));
            self.sin.ensure(s.time * (s.d / 2));
        }
        for (buffer, channels) in self.taps.iter_mut().zip(l.channels()) {
            buffer.ensure(channels * l.taps);
        }
        let has = |f: fn(&crate::fused::plan::Head) -> bool| l.heads.iter().any(f);
        if has(|h| h.variant.in_gate.is_some()) {
            self.in_gate.ensure(s.batch * s.kv_heads * s.time);
        }
        if has(|h| h.variant.out_gate.is_some()) {
            self.out_gate.ensure(n * s.time);
        }
        if has(|h| h.variant.post_gate.is_some()) {
            self.post_gate.ensure(n * s.time);
        }
        if has(|h| h.weighs_keys) {
            self.key_weights.ensure(n * tp);
        }
        if has(|h| h.variant.decay.is_some()) {
            self.decay.resize(n * tp, 0.0);
        }
        if has(|h| h.has_signals()) {
            self.signal.ensure(n * s.time);
        }
        if l.spans > 1 {
            self.states.ensure(l.spans * s.batch * l.state_len);
        }
    }

    /// Room for the backward pass.
    pub fn ensure_backward(&mut self, l: &Layout) {
        let s = &l.shape;
        let (n, kv, tp) = (l.head_count(), l.kv_count(), l.tp());
        self.q.ensure(n * tp * l.dp);
        self.k.ensure(kv * tp * l.dp);
        self.vt.ensure(kv * l.tiles * s.e * l.pitch);
        self.du.ensure(n * s.time * l.ep);
        self.dz.ensure(n * s.time);
        self.dq.ensure(n * s.time * l.dp);
        self.dk.ensure(kv * tp * l.dp);
        self.dv.ensure(kv * tp * l.ep);
        let has = |f: fn(&crate::fused::plan::Head) -> bool| l.heads.iter().any(f);
        if has(|h| h.variant.out_gate.is_some()) {
            self.dout.ensure(n * s.time);
        }
        if has(|h| h.variant.post_gate.is_some()) {
            self.dpost.ensure(n * s.time);
        }
        if has(|h| h.weighs_keys) {
            self.dkey_weights.ensure(n * tp);
        }
        if has(|h| h.variant.decay.is_some()) {
            self.ddecay.resize(n * tp, 0.0);
        }
        if has(|h| h.has_signals()) {
            self.dsignal.ensure(n * s.time);
            self.dconst.ensure(n);
        }
        self.dlearned.resize(l.tiles.max(l.spans) * n * l.learned(), 0.0);
        self.dnorm.ensure(n * 2 * s.e);
        for (buffer, channels) in self.dtaps.iter_mut().zip(l.channels()) {
            buffer.ensure(s.batch * channels * l.taps);
        }
    }
}
